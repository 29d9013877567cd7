"""From one generation to the next: left and made anew for whoever is there. Pure, as all of the conductor."""

from typing import Literal

from trainctl.node_agent.conductor import events as d
from trainctl.node_agent.conductor.pipeline import Course
from trainctl.node_agent.conductor.rendezvous import Formation
from trainctl.node_agent.conductor.restarts import Attendance
from trainctl.node_agent.conductor.state import Book
from trainctl.protocol import messages as m


class Regroup:
    """Told by the conductor of what a generation ends by; what it was at is taken up in the next one."""

    def __init__(self, book: Book, formation: Formation, course: Course, attendance: Attendance) -> None:
        self._book, self._formation, self._course, self._attendance = book, formation, course, attendance

    def begin(self, now: float) -> None:
        """All live ranks have loaded. Raises CannotGoOnError."""
        self._course.abandon()
        self._formation.begin(now)

    def on_fenced(self, fenced: m.Fenced, now: float) -> None:
        """A rank has left the generation. Raises CannotGoOnError."""
        if self._formation.on_fenced(fenced):
            self._recover(now)

    def _recover(self, now: float) -> None:
        self._formation.form(self._course.recover(self._formation.answers()), now)

    def on_group_failed(self, failed: m.GroupFailed, now: float) -> None:
        """A sum failed, or a group could not be joined. Raises CannotGoOnError if that happens again and again."""
        is_current = failed.generation == self._book.durable.generation
        concerns = self._book.stage in ("offering", "forming", "formed") and is_current
        if concerns and failed.rank in self._formation.live:
            self.leave(f"{self._book.settings.label(failed.rank)}: {failed.reason}", now)

    def leave(self, why: str, now: float) -> None:
        """Whoever was to be given the state, in a group that fails for the second time, may be what it fails by."""
        self._course.abandon()
        for rank in self._formation.newcomers if self._formation.failures else ():
            if self._attendance.can_spare(rank):
                self._attendance.lose(rank, f"could not join: {why}")
                self._book.decide(d.Kill(rank))
        self._formation.fail(why, now)

    def without(self, rank: int, why: str, now: float, out: Literal["lost", "failed"] = "lost") -> None:
        """Go on without a rank: nothing of this generation counts any more."""
        self._attendance.lose(rank, why, out)
        self._course.waits.standstills.forget(rank)
        match self._book.stage:
            case "loading":
                if self._formation.all_loaded:
                    self.begin(now)
            case "fencing":
                if self._formation.all_fenced:
                    self._recover(now)
            case _:
                self.anew(now)

    def anew(self, now: float) -> None:
        """Have everybody leave this generation, for another one."""
        self._course.abandon()
        self._formation.fence(now)
