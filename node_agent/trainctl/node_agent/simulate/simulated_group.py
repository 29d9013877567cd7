"""One generation's reducers: a sum comes out for all once the last rank has arrived, or fails for those that wait."""

from collections.abc import Callable, Hashable, Iterable
from functools import partial

from trainctl.node_agent.simulate.event_queue import Clock
from trainctl.node_agent.simulate.link_model import NOTICE_SECONDS, SimulatedLinks
from trainctl.protocol import messages as m

Done = Callable[[], None]


class SimulatedGroup:
    """Of the ranks of one `form` order."""

    def __init__(self, form: m.Form, links: SimulatedLinks, queue: Clock) -> None:
        self.form, self.sum_seconds = form, links.sum_seconds(form.ranks)
        self._queue, self._is_broken = queue, False
        self._waiting: dict[Hashable, dict[int, tuple[Done, Done]]] = {}

    def arrive(self, what: Hashable, rank: int, seconds: float, done: Done, failed: Done) -> None:
        """A rank waits for the others in `what`, which takes so many seconds from the last one's arrival."""
        waiting = self._waiting.setdefault(what, {})
        waiting[rank] = done, failed
        if self._is_broken:
            self._fail()
        elif len(waiting) == len(self.form.ranks):
            del self._waiting[what]
            self._queue.after(seconds, partial(_finish, [done for done, _ in waiting.values()]))

    def break_up(self) -> None:
        """A rank has left or died: those that wait notice it."""
        self._is_broken = True
        self._fail()

    def _fail(self) -> None:
        for waiting in self._waiting.values():
            for _, failed in waiting.values():
                self._queue.after(NOTICE_SECONDS, failed)
        self._waiting.clear()


class SimulatedGroups:
    """The groups of a run: all ranks of one `form` order share one."""

    def __init__(self, links: SimulatedLinks, queue: Clock) -> None:
        self._links, self._queue = links, queue
        self._newest: SimulatedGroup | None = None

    def of(self, form: m.Form) -> SimulatedGroup:
        """Return the group of an order."""
        if self._newest is None or self._newest.form.generation != form.generation:
            self._newest = SimulatedGroup(form, self._links, self._queue)
        return self._newest


def _finish(each: Iterable[Done]) -> None:
    for done in each:
        done()
