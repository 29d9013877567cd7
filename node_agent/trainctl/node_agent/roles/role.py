"""Role of this agent for a run, as one value that only its transitions change; each refuses where it isn't defined."""

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable

from trainctl.node_agent.roles.followed_run import FollowedRank
from trainctl.node_agent.runs.session import Session
from trainctl.protocol.errors import InvalidInputError

HAND_OVER_PART = 0.5
"""Part of the grace within which a leaving lead tries to hand its run over."""
SUCCESSOR_SECONDS, SUCCESSORS = 2.0, 4
"""Seconds, at least, after which the next node is asked to lead, and how many are asked in a longer grace."""


@dataclasses.dataclass(frozen=True)
class Idle:
    """It takes part in no run."""


@dataclasses.dataclass(frozen=True)
class WaitingToRestart:
    """All ranks of the run that it led were lost: it is taken up from its newest checkpoint, not before `due`."""

    run: str
    due: float  # by time.monotonic


@dataclasses.dataclass(frozen=True)
class Starting:
    """A run is being opened on all its nodes."""

    run: str | None  # None: a new one, which has no id yet
    waiting: WaitingToRestart | None = None  # continues waiting if this one can't be started


@dataclasses.dataclass(frozen=True)
class Leading:
    """It leads a run."""

    session: Session


@dataclasses.dataclass(frozen=True)
class Closing:
    """The run that it led has ended; copies of its record are brought up to date."""

    session: Session
    waiting: WaitingToRestart | None = None  # what comes after; None: nothing


@dataclasses.dataclass(frozen=True)
class Following:
    """It hosts a rank of a run that another node's agent leads."""

    rank: FollowedRank


Role = Idle | Starting | Leading | Closing | WaitingToRestart | Following


class TransitionError(Exception):
    """A transition that its role doesn't have: a fault of the agent's own."""

    def __init__(self, what: str, role: Role) -> None:
        super().__init__(f"can't {what} while {type(role).__name__}")


@dataclasses.dataclass(frozen=True)
class OwnDrain:
    """This node's ranks must leave their run."""

    why: str
    since_monotonic: float
    grace_seconds: float  # the agent may be ended after this long

    def may_hand_over(self, now: float) -> bool:
        """Return whether there is still time to hand over a run that is led here; the rest is for a checkpoint."""
        return now < self.since_monotonic + HAND_OVER_PART * self.grace_seconds

    def turn(self, now: float) -> int:
        """Return how many nodes have had the time to take over a run that is led here."""
        seconds = max(SUCCESSOR_SECONDS, HAND_OVER_PART * self.grace_seconds / SUCCESSORS)
        return int((now - self.since_monotonic) / seconds)


class AgentRole:
    """Owner of an agent's role: everything else asks it, and changes it by a transition."""

    def __init__(self) -> None:
        self._now: Role = Idle()
        self.work = self.worker = ""  # IDs of separate work: that this agent leads, and that it has a worker for
        self.is_calibrating = False
        self.own_drain: OwnDrain | None = None  # None: this node stays
        self._changed = asyncio.Event()

    @property
    def now(self) -> Role:
        return self._now

    # ------------------------------------------------------------ transitions

    def _turn(self, role: Role) -> None:
        self._now = role
        self._changed.set()

    def start(self, run: str | None = None) -> None:
        """An operator starts a run, a new one or (`run`) an old one again."""
        if not isinstance(self._now, Idle | WaitingToRestart):
            raise TransitionError("start", self._now)
        self._turn(Starting(run, self.waiting))

    def restart(self) -> None:
        """The time of the run that waited has come."""
        if not isinstance(self._now, WaitingToRestart):
            raise TransitionError("restart", self._now)
        self._turn(Starting(self._now.run))

    def name(self, run: str) -> None:
        """The run that is being started has its id."""
        if not isinstance(self._now, Starting):
            raise TransitionError("name", self._now)
        self._turn(Starting(run, self._now.waiting))

    def finish(self) -> None:
        """The run could not be started, or its record is closed after its end; one that waits comes next."""
        if not isinstance(self._now, Starting | Closing):
            raise TransitionError("finish", self._now)
        self._turn(self._now.waiting or Idle())

    def put_off(self, waiting: WaitingToRestart) -> None:
        """The run whose time had come could not be restarted, and is tried again."""
        if self._now != Starting(waiting.run):
            raise TransitionError("put off", self._now)
        self._turn(waiting)

    def lead(self, session: Session) -> None:
        """A run is open: one that was started, or one that continues here, whose trainers live."""
        if not isinstance(self._now, Idle | Starting):
            raise TransitionError("lead", self._now)
        self._turn(Leading(session))

    def close(self, waiting: WaitingToRestart | None) -> None:
        """The last rank of the run is gone; `waiting`: it goes back to its newest checkpoint."""
        if not isinstance(self._now, Leading):
            raise TransitionError("close", self._now)
        self._turn(Closing(self._now.session, waiting))

    def follow(self, rank: FollowedRank) -> None:
        """This node hosts a rank for another node's agent from here on."""
        if not isinstance(self._now, Idle):
            raise TransitionError("follow", self._now)
        self._turn(Following(rank))

    def let_go(self) -> None:
        """Another node's agent has the run from here on, or it has ended without this one."""
        if isinstance(self._now, Idle | Starting):
            raise TransitionError("let go", self._now)
        self._turn(Idle())

    # ------------------------------------------------------------ questions

    async def wait_while(self, is_so: Callable[[], bool], seconds: float) -> None:
        """Until the role has changed so far that it isn't so any more, or so many seconds have passed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while is_so():
                    self._changed.clear()
                    await self._changed.wait()

    @property
    def session(self) -> Session | None:
        """The run that is led, until its record is closed."""
        return self._now.session if isinstance(self._now, Leading | Closing) else None

    @property
    def followed(self) -> FollowedRank | None:
        """The rank that is hosted for another node's agent."""
        return self._now.rank if isinstance(self._now, Following) else None

    @property
    def waiting(self) -> WaitingToRestart | None:
        """The run that waits to be resumed, also while an operator starts one."""
        if isinstance(self._now, Starting):
            return self._now.waiting
        return self._now if isinstance(self._now, WaitingToRestart) else None

    @property
    def is_starting(self) -> bool:
        return isinstance(self._now, Starting)

    @property
    def is_idle(self) -> bool:
        """Return whether it takes part in no run."""
        return isinstance(self._now, Idle)

    def check_no_work(self) -> None:
        """Raises InvalidInputError during separate work or a calibration, which need the machine, and while this node
        leaves."""
        if self.own_drain is not None:
            raise InvalidInputError("run", f"this node takes no rank: {self.own_drain.why}")
        if self.is_calibrating:
            raise InvalidInputError("run", "a calibration is in progress; wait about a minute until it ends")
        if work := self.work or self.worker:
            raise InvalidInputError(
                "run",
                f"separate work {work} is in progress; wait until it ends, or cancel it: Ctrl-C in the "
                f"command that waits for it, or in that command repeated with --resume {work}",
            )

    @property
    def leaving(self) -> str:
        """Return why this node's rank must leave its run; empty if it needn't."""
        return self.own_drain.why if self.own_drain is not None else ""

    @property
    def is_busy(self) -> bool:
        """Return whether a run is led, or waits to be resumed."""
        return not isinstance(self._now, Idle | Following)

    @property
    def active_run(self) -> str | None:
        """The run that this node takes part in."""
        return self._now.rank.run if isinstance(self._now, Following) else self.run

    @property
    def run(self) -> str | None:
        """The run that is led, or about to be."""
        match self._now:
            case Leading(session) | Closing(session):
                return session.run
            case Starting(run, waiting):
                return run or (waiting.run if waiting is not None else None)
            case WaitingToRestart(run):
                return run
            case Idle() | Following():
                return None
