"""Ranks that leave and come back: those whose nodes shut down, and those whose trainers are started again."""

from collections.abc import Collection, Iterator, Mapping
from math import inf
from typing import Literal

import msgspec

from trainctl.node_agent.autopilot.policy import MemoryDeath
from trainctl.node_agent.conductor.events import Kill, Start, Tell
from trainctl.node_agent.conductor.proposals import Proposals
from trainctl.node_agent.conductor.state import CannotGoOnError, ConductorState
from trainctl.node_agent.planning import share_edits
from trainctl.protocol.messages import Leave
from trainctl.protocol.messages.events import RankChanged

REPEAT_SECONDS = 2.0
"""Seconds after which a rank that has not left is asked again."""


class Departures:
    """Ranks whose nodes shut down leave the group at one boundary, and rejoin when their nodes are back.

    The samples of a departing rank go to the others, which all hold the state of the last step. Its trainer is ended
    only once they have formed a group without it. The rank then counts as lost, but no trainer is started before its
    node is back. A rank outside the group holds nothing: its trainer is ended at once, also if a person had drained it.
    """

    def __init__(self, state: ConductorState) -> None:
        self._state = state
        self._wanted: Mapping[int, str] = {}  # why, by rank
        self._asked: dict[int, float] = {}  # when a departed rank was last asked to leave

    def want(self, wanted: Mapping[int, str]) -> None:
        """Have these ranks leave at the next boundary, each for a reason, and no others."""
        self._wanted = wanted
        self._asked = {rank: at for rank, at in self._asked.items() if rank in {*wanted, *self._state.durable.departed}}

    @property
    def due(self) -> dict[int, str]:
        """The ranks that leave at the next boundary, with the reasons; none if no other rank has the last state."""
        if not self._wanted:
            return {}
        live = self._state.settings.live
        due = {rank: why for rank, why in self._wanted.items() if rank in live}
        standing = self._state.members or live.keys()
        stays = any(not self._state.ranks[rank].ended for rank in live.keys() & standing - due.keys())
        return due if stays else {}

    def apply(self, step: int) -> None:
        """All that are due leave the group before `step`."""
        state = self._state
        for rank, why in self.due.items():
            edit = share_edits.lose(state.settings, rank)
            state.keep(settings=edit.settings, departed=(*state.durable.departed, rank))
            state.ranks[rank].forget()
            state.ranks[rank].why = why
            change = msgspec.structs.replace(edit.change, cause=why, node=state.node(rank))
            state.happen(change, "warning", step, verb="drain")

    def release(self) -> None:
        """End the trainers of ranks that have left, once the others have a group without them, or are paused; at once
        those of other ranks outside the group."""
        state, ranks, departed = self._state, self._state.settings.ranks, self._state.durable.departed
        if state.stage in ("leaving", "over"):
            return
        # Lost ranks of leaving nodes: they don't rejoin, and none is started, before their nodes are back.
        lost = [rank for rank in sorted(self._wanted) if ranks[rank].out == "lost" and rank not in departed]
        if lost:
            state.persist(departed=(*departed, *lost))
        if state.stage == "loading":
            return
        released = self._wanted.keys() - state.settings.live.keys() - state.members
        if state.stage == "formed" and (state.is_current or state.durable.mode == "paused"):
            released |= {*state.durable.departed}
        for rank in sorted(released):
            at = state.ranks[rank]
            if not at.ended and state.now >= self._asked.get(rank, -inf) + REPEAT_SECONDS:
                self._asked[rank] = state.now
                why = self._wanted.get(rank) or at.why or "its node left"
                state.decide(Tell(rank, Leave(run=state.run, reason=why)))

    def come_back(self, rank: int) -> bool:
        """Take note that a rank's node is there again; return whether it had left."""
        departed = self._state.durable.departed
        if rank not in departed:
            return False
        self._asked.pop(rank, None)
        self._state.persist(departed=tuple(other for other in departed if other != rank))
        return True


STARTS = 5
"""Starts after which a rank counts as failed that has not been steady since any of them."""
STEADY_STEPS, STEADY_SECONDS = 8, 60.0
"""A restarted rank is steady, so that its former starts no longer count, once it has taken part in so many steps, or in
two so far apart: it was worth its restart."""
START_SECONDS = 120.0
"""Seconds within which a restarted trainer must report."""
PROFILE_SECONDS = 120.0
"""Seconds that a rank may say nothing while it is profiled. At the end of a recording, torch's profiler holds the
interpreter lock for about 0.6 s per 100,000 operators, so the rank sends no heartbeat."""
SURVIVOR_SECONDS = 10.0
"""Seconds within which a trainer that outlived its agent finds the next one."""
RETURN_SECONDS = 1.0
"""Seconds until a trainer is started on a node that is back: its agent may still report the end of the former one,
which must not count for the new one."""
MIN_BACKOFF_SECONDS = 1.0


def backoff_seconds(tries: int) -> float:
    """Exponential backoff: seconds to wait after so many tries in a row, 1, 2, 4, 8 and 16; who waits gives up after
    STARTS."""
    return MIN_BACKOFF_SECONDS * 2.0**tries


class Restarts:
    """The conductor tells it of deaths and of time; what becomes of the generation is the conductor's."""

    def __init__(self, state: ConductorState, proposals: Proposals) -> None:
        self._state, self._proposals = state, proposals
        self._starts: dict[int, int] = {}  # of each rank since it was last steady
        self._steps: dict[int, tuple[int, float]] = {}  # since a rank's last start: their count, when it made the first
        self._hung_first: set[int] = set()  # those that have been ended so, of the ranks that the run begins with
        self._computing: set[int] = set()  # of these ranks, those that compute the reference, or have begun to
        self._due: dict[int, float] = {}  # when a rank's trainer is started again

    def can_spare(self, rank: int, *, without: Collection[int] = ()) -> bool:
        """Return whether another rank, not in `without`, has the last step's state, so that the run can continue."""
        ranks = self._state.ranks
        others = self._state.settings.live.keys() & self._state.members - {rank, *without}
        return any(not ranks[other].ended for other in others)

    def lose(self, rank: int, why: str, out: Literal["lost", "failed"] = "lost") -> None:
        """Take a rank out: its samples go to the others, and its reports of this generation don't count. "failed": its
        probe refused it, and it does not come back by itself."""
        state, label = self._state, self._state.settings.label(rank)
        edit = share_edits.lose(state.settings, rank)
        settings = share_edits.give_up(edit.settings, rank) if out == "failed" else edit.settings
        members = tuple(other for other in state.durable.members if other != rank)
        probed = None if state.durable.probed is None else tuple(at for at in state.durable.probed if at != rank)
        state.persist(settings=settings, members=members, probed=probed)
        state.ranks[rank].forget()
        state.ranks[rank].why = why
        change = msgspec.structs.replace(edit.change, cause=why, lost=label, refused=out == "failed")
        state.happen(change, "error", verb="rebalance")

    def ran_out_of_memory(self, rank: int, memory: str) -> None:
        """It died of that, and may come back with a smaller micro-batch: then its former starts no longer count.
        `memory`: what says so."""
        state, before = self._state, self._state.settings
        if share_edits.halve(state.settings, rank).settings is state.settings:
            state.happen(RankChanged((state.settings.label(rank),), "out-of-memory", memory), "error")
        died_with = share_edits.last_micro_batch(state.settings.ranks[rank])
        self._proposals.ask(MemoryDeath(rank, memory, died_with))
        if state.settings is not before:
            self._starts.pop(rank, None)

    def ended(self, rank: int, why: str) -> None:
        """The process of a rank is gone that is lost, or hung as the run was to begin: start another in a while, or
        give it up. Raises CannotGoOnError if the run can't begin without it."""
        state, at, starts = self._state, self._state.ranks[rank], self._starts.get(rank, 0)
        again, did = self.starts_again_in_first_load(rank), "hung" if rank in self._hung_first else "ended"
        self._hung_first.discard(rank)
        at.forget()
        out, label = state.settings.ranks[rank].out, state.settings.label(rank)
        at.ended = True
        at.why = at.why if out == "failed" and at.why else why
        if rank in state.durable.departed or (out != "lost" and not again):
            return
        if starts < STARTS:
            self._due[rank] = state.now + backoff_seconds(starts)
            return
        if again:
            text = f"{label}: its trainer was started {STARTS} times and {did} each time while loading"
            raise CannotGoOnError(f"{text}; the last time it {why}")
        state.persist(settings=share_edits.give_up(state.settings, rank))
        text = f"started {STARTS} times without taking part in {STEADY_STEPS} steps; the last time it {why}"
        state.happen(RankChanged((label,), "failed", text), "error")

    def start_returned(self, rank: int) -> None:
        """Start the trainer of a lost rank whose node is back, unless it lives."""
        self._starts.pop(rank, None)
        if self._state.ranks[rank].ended:
            self._due[rank] = self._state.now + RETURN_SECONDS

    def start_due(self) -> Iterator[int]:
        """Start the trainers whose time has come; none for a run that is to stop. What their ranks' former processes
        said and did is forgotten."""
        state = self._state
        if state.durable.mode == "stopping":
            return
        for rank in [rank for rank, due in self._due.items() if due <= state.now]:
            del self._due[rank]
            lost = state.settings.ranks[rank].out == "lost" and rank not in state.durable.departed
            if not lost and not self._is_first(rank):
                continue
            self._starts[rank] = self._starts.get(rank, 0) + 1
            self._steps.pop(rank, None)
            state.ranks[rank].forget()
            state.ranks[rank].ended = False
            state.ranks[rank].heard = state.now  # it is listened for from now on
            text = f"{self._starts[rank]} of {STARTS}"
            state.happen(RankChanged((state.settings.label(rank),), "restarted", text))
            state.decide(Start(rank))
            yield rank

    def try_again(self, node: str | None) -> str:
        """Start the trainers of a node that had been given up, or that ended while it was drained, as an operator
        wishes; what that makes of it, empty if there are none."""
        state, was_restarted = self._state, False
        for rank, setting in state.settings.ranks.items():
            if setting.node == node and setting.out in ("failed", "drained") and state.ranks[rank].ended:
                was_restarted = True
                self._starts.pop(rank, None)
                self._due[rank] = state.now
                state.persist(settings=share_edits.expect(state.settings, rank))
        return "restarted; it will rejoin when its model is loaded" if was_restarted else ""

    def is_loading(self, rank: int) -> bool:
        """Return whether a rank that is lost, or that the run begins with, has a process that has not loaded yet."""
        at = self._state.ranks[rank]
        is_due = self._state.settings.ranks[rank].out == "lost" or self._is_first(rank)
        return is_due and not at.ended and at.ready is None

    def loads_first(self, rank: int) -> bool:
        """Return whether the run can't begin before this rank has loaded."""
        return self._is_first(rank) and self.is_loading(rank)

    def _is_first(self, rank: int) -> bool:
        at_beginning = self._state.stage == "loading" and not self._state.adopts
        return at_beginning and not self._state.settings.ranks[rank].out

    def silence_limit_seconds(self, rank: int, *, in_touch: bool = True) -> float:
        """Return how long a trainer may say nothing; the longest while it loads for the first time. `in_touch`: whether
        its node is reachable."""
        state = self._state
        if state.ranks[rank].ready is not None:
            is_profiled = in_touch and state.durable.is_profiled(state.progress.step, rank)
            return PROFILE_SECONDS if is_profiled else share_edits.AWAY_SECONDS
        if self.loads_first(rank):
            return min(state.config.run.load_seconds, state.config.group.unreachable_seconds)
        if self.is_loading(rank):
            return START_SECONDS
        return SURVIVOR_SECONDS if state.stage == "loading" and state.adopts else inf

    def computes(self, rank: int) -> None:
        """It computes the reference, before it has loaded."""
        if rank in self._state.ranks and self._is_first(rank):
            self._computing.add(rank)
            self._starts.setdefault(rank, 1)

    def starts_again_in_first_load(self, rank: int) -> bool:
        """Return whether another is to be started for a rank that the run begins with: it hung and was ended, or it
        computed the reference, which may take hours."""
        return rank in self._hung_first | self._computing and self._is_first(rank)

    def end_hung(self, rank: int, why: str) -> None:
        """Have a trainer that hangs while it loads ended; another is started when it has."""
        self._state.happen(RankChanged((self._state.settings.label(rank),), "hung", why), "warning")
        if self._is_first(rank):
            self._hung_first.add(rank)
            self._starts.setdefault(rank, 1)
        self._state.decide(Kill(rank))
        self._state.ranks[rank].heard = self._state.now  # should that not reach it, it is ended again

    def is_starting(self, rank: int) -> bool:
        """Return whether another process has been asked for, and has neither made a step nor ended."""
        return rank in self._starts and rank not in self._steps and not self._state.ranks[rank].ended

    def stepped(self, ranks: Collection[int]) -> None:
        """They took part in a step. One that dies again soon isn't steady: its starts still count."""
        for rank in self._starts.keys() & {*ranks}:
            steps, first_at = self._steps.get(rank, (0, self._state.now))
            self._steps[rank] = (steps + 1, first_at)
            if steps + 1 >= STEADY_STEPS or self._state.now - first_at >= STEADY_SECONDS:
                del self._starts[rank], self._steps[rank]
