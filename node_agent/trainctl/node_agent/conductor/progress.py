"""How long the main threads of ranks have stalled, by a number in their heartbeats that grows when they make progress.

Only time in which a rank was heard from counts, so that a machine that slept, a link
that was down or an agent that was stopped makes no one hang.
"""

import dataclasses

from trainctl.node_agent.planning import estimates
from trainctl.protocol import messages as m

WORKING_PHASES = (*m.BUSY_PHASES, "optimizer", "commit", "evaluate", "checkpoint", "probe", "sample", "profile")
"""Phases in which a rank works by itself; in all others it waits or loads."""
FIRST_TIMES = 5.0
"""Factor by which the first time that a process does something may take longer: it may compile."""
LONGEST_TIMES = 10.0
"""Factor of the longest stall that ended by itself, or of the usual step, up to which a stall is no hang."""
WRITE_TIMES, LOAD_TIMES = 30.0, 10.0
"""Factor of the time a slow disk should take to write a whole state, and to read it."""
GAP_SECONDS = 3.0
"""Most seconds that count between two heartbeats, which come each second."""


@dataclasses.dataclass
class _Stall:
    mark: tuple[int, str, int]  # progress, phase, step
    heard: float
    seconds: float = 0.0


class StallDetector:
    """Is given each heartbeat and each plan that a rank has done."""

    def __init__(self, least_seconds: float, load_seconds: float) -> None:
        """No stall that is shorter is a hang: `least_seconds`, and while it loads `load_seconds`."""
        self._least_seconds, self._load_seconds = least_seconds, load_seconds
        self._of: dict[int, _Stall] = {}
        self._done: set[tuple[int, str]] = set()  # (rank, kind of plan) since the process was started
        self._longest_seconds = 0.0

    def heard(self, alive: m.Alive, now: float) -> None:
        """A heartbeat has come. Of one without the number nothing is known."""
        known = self._of.get(alive.rank)
        if alive.progress is None:
            self._of.pop(alive.rank, None)
            return
        mark = (alive.progress, alive.phase, alive.step)
        if known is not None and known.mark == mark:
            known.seconds += min(now - known.heard, GAP_SECONDS)
            known.heard = now
            return
        if known is not None and known.mark[1] in WORKING_PHASES:
            self._longest_seconds = max(self._longest_seconds, known.seconds)
        self._of[alive.rank] = _Stall(mark, now)

    def done(self, rank: int, kind: str) -> None:
        """A rank has done a plan of this kind."""
        self._done.add((rank, kind))

    def is_first(self, rank: int, kind: str) -> bool:
        """Return whether its process has done no plan of this kind yet."""
        return (rank, kind) not in self._done

    def forget(self, rank: int) -> None:
        """Its process is to be another one."""
        self._of.pop(rank, None)
        self._done = {known for known in self._done if known[0] != rank}

    def seconds(self, rank: int) -> float:
        """How long it has not made progress, as far as it was heard from."""
        return self._of[rank].seconds if rank in self._of else 0.0

    def is_at_work(self, rank: int) -> bool:
        """Whether it was last heard from at something of its own."""
        return rank in self._of and self._of[rank].mark[1] in WORKING_PHASES

    def limit_seconds(self, rank: int, kind: str, usual_seconds: float, parameters: int) -> float:
        """From when on a stall at a plan of this kind is a hang. `usual_seconds`: of a step, 0 if not known."""
        least_seconds = self._least_seconds * (FIRST_TIMES if self.is_first(rank, kind) else 1.0)
        write_seconds = WRITE_TIMES * estimates.write_seconds(parameters) if kind == "checkpoint" else 0.0
        return max(least_seconds, LONGEST_TIMES * max(usual_seconds, self._longest_seconds), write_seconds)

    def load_limit_seconds(self, parameters: int) -> float:
        """From when on a stall while it loads is a hang."""
        return max(self._load_seconds, LOAD_TIMES * estimates.write_seconds(parameters))

    def kind(self, rank: int) -> str:
        """The kind of plan that its phase belongs to."""
        phase = self._of[rank].mark[1] if rank in self._of else ""
        return phase if phase in ("evaluate", "checkpoint", "probe", "sample", "profile") else "train"
