"""The rendezvous of a generation: loaded ranks, fences and answers, offers, forming, and state transfer.

It knows nothing of plans: the conductor says when a generation is to be left or made
and acts when all have answered.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

from trainctl.node_agent.conductor.events import Tell
from trainctl.node_agent.conductor.state import CannotGoOnError, ConductorState, NobodyLeftError, Stage
from trainctl.node_agent.planning import compatibility, ranges
from trainctl.node_agent.planning.compatibility import differences, setup_of
from trainctl.node_agent.planning.throughput import level_seconds
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import (
    BUSY_PHASES,
    Fence,
    Fenced,
    Form,
    Formed,
    Generation,
    Offer,
    Offered,
    Preflight,
    Probed,
    Ready,
    Sealed,
)
from trainctl.protocol.messages.events import GenerationFormed, GenerationLeft, Notice, SetupChanged

FENCE_SECONDS = 10.0
"""Seconds for answering a fence, which a rank does at once unless it is in an update."""
UPDATE_SECONDS, HEARTBEATS_SECONDS = 120.0, 3.0
"""Seconds more that a rank in an update may take as long as its heartbeats are at most this many seconds old."""
STAGES_OF_FORMING = ("offering", "forming")
OFFER_SECONDS = 20.0
"""Seconds for opening endpoints, which a rank does at once."""
JOIN_SECONDS = 30.0
"""Seconds for joining, before any state is sent; a rank keeps this deadline itself."""
GRACE_SECONDS = 10.0
"""Seconds beyond a deadline that the ranks keep themselves, for the answer to arrive."""
LENGTHY_PHASES = ("checkpoint", *BUSY_PHASES, "evaluate", "probe", "sample", "profile")
FAILURES = 8
"""Formations in a row without a step between them after which the run fails."""


@dataclasses.dataclass
class Rank:
    """What a rank has said in this life of the conductor."""

    ready: Ready | None = None
    formed: bool = False
    fenced: Fenced | None = None
    endpoints: tuple[str, ...] | None = None
    ended: bool = False
    why: str = ""  # of its end
    heard: float | None = None  # when it last said something
    doing: str = ""  # what it was at then
    loading: str = ""  # how far that has come, while it loads
    sealed: Sealed | None = None  # what it has of a growing file
    preflight: Preflight | None = None  # of its first start

    def forget(self) -> None:
        """It is lost: what it said counts no more."""
        self.ready, self.formed, self.fenced, self.endpoints, self.sealed = None, False, None, None, None
        self.preflight = None

    def owes(self, stage: Stage) -> bool:
        """Whether the answer to what a stage asks is still to come."""
        if stage == "forming":
            return not self.formed
        return {"loading": self.ready, "fencing": self.fenced, "offering": self.endpoints}.get(stage, ()) is None


class Rendezvous:
    """The ranks and their newest generation."""

    def __init__(self, state: ConductorState, adopts: bool) -> None:
        """`adopts`: the trainers outlived another conductor, and stand in a generation of its."""
        self._state = state
        self.ranks = {rank: Rank() for rank in state.settings.ranks}
        self.engine: Literal["none", "gloo", "ring"] = "none"
        self.failures = 0  # since the last step
        self.adopts = self._left_behind = adopts
        self._judged: frozenset[int] = frozenset()  # ranks whose preflights were compared
        self._source: int | None = None
        self._behind: tuple[int, ...] = ()
        self._due = float("inf")
        self._left: float | None = None  # when the last generation was left

    # ------------------------------------------------------------ who is there

    @property
    def live(self) -> dict[int, Rank]:
        """The ranks that take part, ascending."""
        return {rank: self.ranks[rank] for rank in self._state.settings.live}

    @property
    def members(self) -> frozenset[int]:
        """The ranks of the newest generation that was formed: they have the state of the last step."""
        return frozenset(self._state.durable.members)

    @property
    def is_current(self) -> bool:
        """Whether the generation is one of the live ranks, no more and no less."""
        return self.members == self._state.settings.live.keys()

    @property
    def awaited(self) -> list[int]:
        """The live ranks that have not answered what this stage asks of them, ascending."""
        return [rank for rank, at in self.live.items() if at.owes(self._state.stage)]

    @property
    def has_deadline(self) -> bool:
        """Whether the answers waited for are overdue at some time."""
        return self._state.stage in ("offering", "forming")

    def silent_seconds(self, now: float) -> dict[int, float]:
        """Since when nothing was heard from each rank that has ever said something."""
        return {rank: now - at.heard for rank, at in self.ranks.items() if at.heard is not None}

    @property
    def ready(self) -> dict[int, Ready]:
        """What the ranks that live, drained ones included, said when they had loaded."""
        return {rank: at.ready for rank, at in self.ranks.items() if at.ready is not None and not at.ended}

    def any_ready(self) -> Ready:
        """Of a live rank; what all have in common is in it."""
        live = self._state.settings.live
        return next(ready for rank in live if (ready := self.ranks[rank].ready) is not None)

    def meet(self, rank: int, ready: Ready, generation: Generation | None) -> bool:
        """A rank has loaded; `generation`: the one it was left in. True if it was the last live one waited for."""
        at = self.ranks.get(rank)
        if at is None or at.ready is not None or (self._state.stage != "loading" and rank in self.live):
            return False
        at.ready = ready
        if generation is not None and self._state.stage == "loading":
            self._left_behind = True
            self._state.keep(generation=max(generation, self._state.durable.generation))
        return self.all_loaded

    @property
    def all_loaded(self) -> bool:
        """Whether no live rank is waited for any more."""
        return self._state.stage == "loading" and all(other.ready for other in self.live.values())

    @property
    def all_fenced(self) -> bool:
        """Whether all live ranks have answered a fence."""
        return self._state.stage == "fencing" and all(other.fenced for other in self.live.values())

    @property
    def returning(self) -> list[int]:
        """Lost ranks that are there again, ascending."""
        settings = self._state.settings
        if len(settings.live) == len(settings.ranks):
            return []
        away = settings.ranks.keys() - settings.live.keys() - {*self._state.durable.departed}
        lost = (rank for rank in sorted(away) if settings.ranks[rank].out == "lost")
        return [rank for rank in lost if (at := self.ranks[rank]).ready is not None and not at.ended]

    def take_preflight(self, rank: int, preflight: Preflight) -> dict[int, Probed]:
        """Compare the files of the ranks that have loaded. Return the probes once all live ranks have one, unless these
        were returned before. Raises CannotGoOnError."""
        at = self.live.get(rank)
        if at is None or self._state.stage != "loading":
            return {}
        at.preflight = preflight
        preflights = {rank: at.preflight for rank, at in self.live.items() if at.preflight is not None}
        if preflights.keys() == self._judged:
            return {}
        self._check_agreement({**self.ready, **{rank: each.ready for rank, each in preflights.items()}})
        if preflights.keys() != self.live.keys():
            return {}
        self._judged = frozenset(preflights)
        self._choose_engine({rank: each.ready for rank, each in preflights.items()})
        return {rank: each.probe for rank, each in preflights.items()}

    def begin(self, now: float) -> None:
        """All live ranks are there: form, or if they are in some generation, leave it first. Raises CannotGoOnError."""
        self._check_agreement(self.ready)
        if self._left_behind:
            step = self._state.progress.step
            text = f"after step {step:,} the ranks waited for an agent to plan the next one, and go on now"
            self._state.happen(Notice(text, "agent"), "warning")
            self.fence(now)
            return
        self._state.keep(members=tuple(self.live))
        step = self._state.progress.step
        self.form({rank for rank, at in self.live.items() if at.ready is not None and at.ready.last_step == step}, now)

    def _check_agreement(self, ready: Mapping[int, Ready]) -> None:
        settings = self._state.settings
        loaded = {settings.label(rank): ready[rank] for rank in self.live if rank in ready}
        difference = compatibility.disagreement(loaded)
        if difference is not None:
            raise CannotGoOnError(difference)

    # ------------------------------------------------------------ leaving

    def fence(self, now: float) -> None:
        """Have every rank leave the generation it is in."""
        self._note_leaving(now)
        self._state.persist(generation=self._state.durable.generation.next())
        self._state.stage, self._due = "fencing", now + FENCE_SECONDS
        fence = Fence(run=self._state.run, generation=self._state.durable.generation)
        for rank in self.ready:
            self.ranks[rank].fenced = None
            self._state.decide(Tell(rank, fence))

    def _note_leaving(self, now: float) -> None:
        """From here on until the next generation is formed the ranks wait."""
        if self._state.stage == "formed":
            self._left = now

    def unanswered(self, now: float, silent_seconds: Mapping[int, float]) -> list[int]:
        """The live ranks that should have answered a fence by now; one that is heard from may be in a long update."""
        if self._state.stage != "fencing" or now < self._due:
            return []
        patient = now < self._due + UPDATE_SECONDS
        return [rank for rank in self.awaited if not patient or silent_seconds.get(rank, 0.0) > HEARTBEATS_SECONDS]

    @property
    def newcomers(self) -> list[int]:
        """The live ranks that are to be given the state in the generation that is being formed."""
        return [rank for rank in self._behind if rank in self.live] if self._state.stage in STAGES_OF_FORMING else []

    @property
    def _is_busy(self) -> bool:
        """Whether one that is waited for is at something that it finishes first, as a checkpoint."""
        return self.has_deadline and any(self.ranks[rank].doing.startswith(LENGTHY_PHASES) for rank in self.awaited)

    def fail(self, reason: str, now: float) -> None:
        """A generation could not be joined, or continued. Raises CannotGoOnError after FAILURES in a row."""
        self.failures += not self._is_busy
        if self.failures >= FAILURES:
            raise CannotGoOnError(f"{FAILURES} formations failed in a row; the last one: {reason}")
        self._state.happen(GenerationLeft(self._state.durable.generation, reason), "warning")
        self.fence(now)

    def on_fenced(self, fenced: Fenced) -> bool:
        """True if all live ranks have answered by it."""
        at = self._asked(fenced, "fencing")
        if at is None:
            return False
        at.fenced = fenced
        return self.all_fenced

    def answers(self) -> list[Fenced]:
        return [at.fenced for at in self.live.values() if at.fenced is not None]

    # ------------------------------------------------------------ forming

    def form(self, standing: Collection[int], now: float) -> None:
        """The next generation, of the live ranks. Those `standing` have the state of the last committed step; the
        lowest of them gives it to the others. Raises CannotGoOnError."""
        self._note_leaving(now)
        able = [rank for rank in self.live if rank in standing]
        if not able:
            raise NobodyLeftError(f"no node has the state of step {self._state.progress.step} any more")
        self._behind = tuple(rank for rank in self.live if rank not in able)
        self._source = able[0] if self._behind else None
        # A rank that is being given a state may be left with parts of two.
        self._state.keep(members=tuple(rank for rank in self._state.durable.members if rank not in self._behind))
        divisor = ranges.divisor(self._state.settings.global_batch, self.any_ready().mean_weight)
        self.engine = self._choose_engine(self.ready)
        self._state.persist(generation=self._state.durable.generation.next(), divisor=divisor)
        for at in self.ranks.values():
            at.fenced, at.endpoints, at.formed = None, None, False
        if self.engine == "none":
            self._tell_form(now)
            return
        self._state.stage, self._due = "offering", now + OFFER_SECONDS
        offer = Offer(run=self._state.run, generation=self._state.durable.generation, engine=self.engine)
        for rank in self.live:
            self._state.decide(Tell(rank, offer))

    def _choose_engine(self, ready: Mapping[int, Ready]) -> Literal["none", "gloo", "ring"]:
        if len(self.live) == 1:
            return "none"
        settings = self._state.settings
        try:
            return compatibility.choose(
                self._state.config.group, {settings.label(rank): ready[rank] for rank in self.live if rank in ready}
            )
        except InvalidInputError as error:
            raise CannotGoOnError(str(error)) from None

    def on_offered(self, offered: Offered, now: float) -> None:
        at = self._asked(offered, "offering")
        if at is None:
            return
        at.endpoints = offered.endpoints
        if all(other.endpoints is not None for other in self.live.values()):
            self._tell_form(now)

    def _tell_form(self, now: float) -> None:
        """The message goes to drained ranks too: they find themselves not in it, and idle."""
        durable, progress = self._state.durable, self._state.progress
        deadline_seconds = JOIN_SECONDS + (level_seconds(self.any_ready().parameters) if self._behind else 0.0)
        endpoints = tuple(at.endpoints for at in self.live.values() if at.endpoints is not None)
        form = Form(
            run=self._state.run, generation=durable.generation, engine=self.engine, ranks=tuple(self.live),
            endpoints=endpoints, layout_digest=self.any_ready().layout_digest, step=progress.step,
            cursor=progress.cursor, source=self._source, behind=self._behind, deadline_seconds=deadline_seconds,
        )  # fmt: skip
        self._state.stage, self._due = "forming", now + deadline_seconds + GRACE_SECONDS
        for rank in self.ready:
            self._state.decide(Tell(rank, form))

    def on_formed(self, formed: Formed, now: float) -> bool:
        """True if all live ranks have joined by it."""
        at = self._asked(formed, "forming")
        if at is None:
            return False
        at.formed = True
        if not all(other.formed for other in self.live.values()):
            return False
        self._state.stage, self._due = "formed", float("inf")
        members = tuple(self.live)
        durable = self._state.durable
        probed = members if len(members) == 1 else tuple(rank for rank in durable.probed or () if rank in members)
        if (members, probed) != (durable.members, durable.probed):
            self._state.persist(members=members, probed=probed)
        self._state.happen(self._described(members, now))
        self._keep_setups(members)
        return True

    def _keep_setups(self, members: Iterable[int]) -> None:
        """What the members compute with, and after a resume what differs from when the checkpoint's step was made."""
        durable, ready = self._state.durable, self.ready
        now = {rank: setup_of(self._state.node(rank), ready[rank]) for rank in members if rank in ready}
        if durable.resumed is not None:
            changes = differences(durable.resumed.ranks, now)
            if changes:
                self._state.happen(SetupChanged(durable.resumed.step, changes), "warning", durable.resumed.step)
        together = {**durable.setups, **now}
        if durable.resumed is not None or together != durable.setups:
            self._state.persist(setups=together, resumed=None)

    def _described(self, members: tuple[int, ...], now: float) -> GenerationFormed:
        waited_seconds, self._left = None if self._left is None else now - self._left, None
        given: dict[str, Any] = {}
        if self._source is not None:
            behind = dict.fromkeys(self._state.node(rank) for rank in self._behind)
            given = {"behind": tuple(behind), "source": self._state.node(self._source)}
        return GenerationFormed(
            self._state.durable.generation, len(members), members, self.engine, waited_seconds=waited_seconds, **given
        )

    def overdue(self, now: float) -> str:
        """Which nodes have not answered an offer or a form in time; empty if none."""
        if now < self._due or not self.has_deadline:
            return ""
        what = "open endpoints" if self._state.stage == "offering" else "join"
        return f"{self._state.nodes(self.awaited)} did not {what} in time"

    def _asked(self, answer: Fenced | Offered | Formed, stage: str) -> Rank | None:
        """The live rank that answers what was asked in this stage and generation."""
        due = self._state.stage == stage and answer.generation == self._state.durable.generation
        return self.live.get(answer.rank) if due else None
