"""The group of ranks: how a generation is left, how the next one is formed, and who gives the state to whom."""

from collections.abc import Collection, Iterable, Mapping
from typing import Literal

from trainctl.node_agent.conductor.events import Kill, Tell
from trainctl.node_agent.conductor.pipeline import Pipeline
from trainctl.node_agent.conductor.restarts import Restarts
from trainctl.node_agent.conductor.stages import FENCE_SECONDS, GRACE_SECONDS, JOIN_SECONDS, OFFER_SECONDS, Rank, Stage
from trainctl.node_agent.conductor.state import CannotGoOnError, ConductorState, NobodyLeftError
from trainctl.node_agent.planning import compatibility, plans
from trainctl.node_agent.planning.compatibility import differences, setup_of
from trainctl.node_agent.planning.rank_models import level_seconds
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import (
    BUSY_PHASES,
    Fence,
    Fenced,
    Form,
    Formed,
    Generation,
    GroupFailed,
    Offer,
    Offered,
    Preflight,
    Probed,
    Ready,
)
from trainctl.protocol.messages.events import GenerationFormed, GenerationLeft, Notice, SetupChanged

UPDATE_SECONDS, HEARTBEATS_SECONDS = 120.0, 3.0
"""Seconds more that a rank in an update may take as long as its heartbeats are at most this many seconds old."""
LENGTHY_PHASES = ("checkpoint", *BUSY_PHASES, "evaluate", "probe", "sample", "profile")
FAILURES = 8
"""Formations in a row without a step between them after which the run fails."""


class Group:
    """The ranks and their newest generation. Every method that forms one raises CannotGoOnError if that can't be."""

    def __init__(self, state: ConductorState, pipeline: Pipeline, restarts: Restarts) -> None:
        self._state, self._pipeline, self._restarts = state, pipeline, restarts
        self._left_behind = state.adopts  # the ranks may stand in a generation of another conductor
        self._judged: frozenset[int] = frozenset()  # ranks whose preflights were compared
        self._source: int | None = None
        self._behind: tuple[int, ...] = ()  # those that are given the state in the newest generation
        self._left: float | None = None  # when the last generation was left

    # ------------------------------------------------------------ loading

    def meet(self, rank: int, ready: Ready, generation: Generation | None) -> bool:
        """A rank has loaded; `generation`: the one it was left in. True if it was the last live one waited for."""
        state, at = self._state, self._state.ranks.get(rank)
        if at is None or at.ready is not None or (state.stage != "loading" and rank in state.live):
            return False
        at.ready = ready
        if generation is not None and state.stage == "loading":
            self._left_behind = True
            state.keep(generation=max(generation, state.durable.generation))
        return self._all_loaded

    @property
    def _all_loaded(self) -> bool:
        return self._state.stage == "loading" and not self._state.awaited

    def take_preflight(self, rank: int, preflight: Preflight) -> dict[int, Probed]:
        """Compare the files of the ranks that have loaded. Return the probes once all live ranks have one, unless these
        were returned before. Raises CannotGoOnError."""
        live = self._state.live
        at = live.get(rank)
        if at is None or self._state.stage != "loading":
            return {}
        at.preflight = preflight
        preflights = {rank: at.preflight for rank, at in live.items() if at.preflight is not None}
        if preflights.keys() == self._judged:
            return {}
        self._check_agreement({**self._state.ready, **{rank: each.ready for rank, each in preflights.items()}})
        if preflights.keys() != live.keys():
            return {}
        self._judged = frozenset(preflights)
        self._choose_engine({rank: each.ready for rank, each in preflights.items()})
        return {rank: each.probe for rank, each in preflights.items()}

    def begin(self) -> None:
        """All live ranks are there: form, or if they are in some generation, leave it first."""
        state, step = self._state, self._state.progress.step
        self._pipeline.abandon()
        self._check_agreement(state.ready)
        if self._left_behind:
            text = f"after step {step:,} the ranks waited for an agent to plan the next one, and go on now"
            state.happen(Notice(text, "agent"), "warning")
            self._fence()
            return
        state.keep(members=tuple(state.live))
        self.form({rank for rank, at in state.live.items() if at.ready is not None and at.ready.last_step == step})

    def _check_agreement(self, ready: Mapping[int, Ready]) -> None:
        difference = compatibility.disagreement(self._by_label(ready))
        if difference is not None:
            raise CannotGoOnError(difference)

    def _by_label(self, ready: Mapping[int, Ready]) -> dict[str, Ready]:
        settings = self._state.settings
        return {settings.label(rank): ready[rank] for rank in settings.live if rank in ready}

    # ------------------------------------------------------------ leaving

    def on_group_failed(self, failed: GroupFailed) -> None:
        """A sum failed, or a group could not be joined."""
        state = self._state
        is_current = failed.generation == state.durable.generation and failed.rank in state.live
        if is_current and state.stage in ("offering", "forming", "formed"):
            self.fail_generation(f"{state.settings.label(failed.rank)}: {failed.reason}")

    def fail_generation(self, why: str) -> None:
        """A generation could not be joined, or continued. In a group that fails for the second time, the rank that was
        to be given the state may be the cause. Raises CannotGoOnError after FAILURES in a row."""
        state = self._state
        self._pipeline.abandon()
        if state.failed_formations and state.is_forming:
            for rank in [rank for rank in self._behind if rank in state.live]:
                if self._restarts.can_spare(rank):
                    self._restarts.lose(rank, f"could not join: {why}")
                    state.decide(Kill(rank))
        awaited = state.awaited if state.is_forming else ()
        if not any(state.ranks[rank].doing.startswith(LENGTHY_PHASES) for rank in awaited):  # it finishes that first
            state.failed_formations += 1
        if state.failed_formations >= FAILURES:
            raise CannotGoOnError(f"{FAILURES} formations failed in a row; the last one: {why}")
        state.happen(GenerationLeft(state.durable.generation, why), "warning")
        self._fence()

    def without(self, rank: int, why: str, out: Literal["lost", "failed"] = "lost") -> None:
        """Go on without a rank: nothing of this generation counts any more."""
        self._restarts.lose(rank, why, out)
        self._pipeline.deadlines.stalls.forget(rank)
        if self._state.stage not in ("loading", "fencing"):
            self.form_again()
        elif self._all_loaded:
            self.begin()
        else:
            self._recover()

    def form_again(self) -> None:
        """Have everybody leave this generation, for another one."""
        self._pipeline.abandon()
        self._fence()

    def _fence(self) -> None:
        state = self._state
        self._note_leaving()
        state.persist(generation=state.durable.generation.next())
        state.enter("fencing", FENCE_SECONDS)
        fence = Fence(run=state.run, generation=state.durable.generation)
        for rank in state.ready:
            state.ranks[rank].fenced = None
            state.decide(Tell(rank, fence))

    def _note_leaving(self) -> None:
        """From here on until the next generation is formed the ranks wait."""
        if self._state.stage == "formed":
            self._left = self._state.now

    def unanswered(self) -> list[int]:
        """The live ranks that should have answered a fence by now; one that is heard from may be in a long update."""
        state = self._state
        if state.stage != "fencing" or state.now < state.due:
            return []
        silent_seconds, is_patient = state.silent_seconds(), state.now < state.due + UPDATE_SECONDS
        return [rank for rank in state.awaited if not is_patient or silent_seconds.get(rank, 0.0) > HEARTBEATS_SECONDS]

    def on_fenced(self, fenced: Fenced) -> None:
        at = self._asked(fenced, "fencing")
        if at is not None:
            at.fenced = fenced
            self._recover()

    def _recover(self) -> None:
        """Form again once all live ranks have left the generation."""
        if self._state.stage == "fencing" and not self._state.awaited:
            self.form(self._pipeline.recover(self._state.answers))

    # ------------------------------------------------------------ forming

    def form(self, standing: Collection[int]) -> None:
        """The next generation, of the live ranks. Those `standing` have the state of the last committed step; the
        lowest of them gives it to the others."""
        state = self._state
        self._note_leaving()
        able = [rank for rank in state.live if rank in standing]
        if not able:
            raise NobodyLeftError(f"no node has the state of step {state.progress.step} any more")
        self._behind = tuple(rank for rank in state.live if rank not in able)
        self._source = able[0] if self._behind else None
        # A rank that is being given a state may be left with parts of two.
        state.keep(members=tuple(rank for rank in state.durable.members if rank not in self._behind))
        divisor = plans.divisor(state.settings.global_batch, state.any_ready.mean_weight)
        state.engine = self._choose_engine(state.ready)
        state.persist(generation=state.durable.generation.next(), divisor=divisor)
        for at in state.ranks.values():
            at.fenced = at.endpoints = None
            at.formed = False
        if state.engine == "none":
            self._tell_form()
            return
        state.enter("offering", OFFER_SECONDS)
        offer = Offer(run=state.run, generation=state.durable.generation, engine=state.engine)
        for rank in state.live:
            state.decide(Tell(rank, offer))

    def _choose_engine(self, ready: Mapping[int, Ready]) -> Literal["none", "gloo", "ring"]:
        if len(self._state.settings.live) == 1:
            return "none"
        try:
            return compatibility.choose(self._state.config.group, self._by_label(ready))
        except InvalidInputError as error:
            raise CannotGoOnError(str(error)) from None

    def on_offered(self, offered: Offered) -> None:
        at = self._asked(offered, "offering")
        if at is not None:
            at.endpoints = offered.endpoints
            if not self._state.awaited:
                self._tell_form()

    def _tell_form(self) -> None:
        """The message goes to drained ranks too: they find themselves not in it, and idle."""
        state, ready = self._state, self._state.any_ready
        deadline_seconds = JOIN_SECONDS + (level_seconds(ready.parameters) if self._behind else 0.0)
        form = Form(
            run=state.run,
            generation=state.durable.generation,
            engine=state.engine,
            ranks=tuple(state.live),
            endpoints=tuple(at.endpoints for at in state.live.values() if at.endpoints is not None),
            layout_digest=ready.layout_digest,
            step=state.progress.step,
            cursor=state.progress.cursor,
            source=self._source,
            behind=self._behind,
            deadline_seconds=deadline_seconds,
        )
        state.enter("forming", deadline_seconds + GRACE_SECONDS)
        for rank in state.ready:
            state.decide(Tell(rank, form))

    def on_formed(self, formed: Formed) -> bool:
        """True if all live ranks have joined by it."""
        state, at = self._state, self._asked(formed, "forming")
        if at is None:
            return False
        at.formed = True
        if state.awaited:
            return False
        state.enter("formed")
        durable, members = state.durable, tuple(state.live)
        probed = members if len(members) == 1 else tuple(rank for rank in durable.probed or () if rank in members)
        if (members, probed) != (durable.members, durable.probed):
            state.persist(members=members, probed=probed)
        joined = GenerationFormed(
            durable.generation,
            len(members),
            members,
            state.engine,
            behind=tuple(dict.fromkeys(state.node(rank) for rank in self._behind)),
            source="" if self._source is None else state.node(self._source),
            waited_seconds=None if self._left is None else state.now - self._left,
        )
        self._left = None
        state.happen(joined)
        self._keep_setups(members)
        return True

    def _keep_setups(self, members: Iterable[int]) -> None:
        """Keep what the members compute with; after a resume, say how that differs from the checkpoint's step."""
        state, durable, ready = self._state, self._state.durable, self._state.ready
        setups = {rank: setup_of(state.node(rank), ready[rank]) for rank in members if rank in ready}
        if durable.resumed is not None:
            changes = differences(durable.resumed.ranks, setups)
            if changes:
                state.happen(SetupChanged(durable.resumed.step, changes), "warning", durable.resumed.step)
        together = {**durable.setups, **setups}
        if durable.resumed is not None or together != durable.setups:
            state.persist(setups=together, resumed=None)

    def overdue(self) -> str:
        """Return which nodes have not answered an offer or a form in time; empty if none."""
        state = self._state
        if state.now < state.due or not state.is_forming:
            return ""
        what = "open endpoints" if state.stage == "offering" else "join"
        return f"{state.nodes(state.awaited)} did not {what} in time"

    def _asked(self, answer: Fenced | Offered | Formed, stage: Stage) -> Rank | None:
        """The live rank that answers what was asked in this stage and generation."""
        is_due = self._state.stage == stage and answer.generation == self._state.durable.generation
        return self._state.live.get(answer.rank) if is_due else None
