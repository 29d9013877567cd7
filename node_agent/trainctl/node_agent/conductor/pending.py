"""Pending commands: accepted, and waiting for the step, the boundary or the mode that ends them."""

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Literal, get_args

from trainctl.node_agent.conductor.events import Commanded
from trainctl.node_agent.planning import edits
from trainctl.node_agent.planning.durable import Carried, Settings
from trainctl.node_agent.planning.share_edits import Facts
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import verbs

EXPIRED = "no step could apply the command in time"
SideKind = Literal["probe", "measure", "sync", "evaluate", "sample", "defragment", "profile", "checkpoint"]
SIDE_KINDS: tuple[SideKind, ...] = get_args(SideKind)
"""Plans beside training: they don't move the cursor. In the order in which one boundary runs them, so that what is
evaluated and written is the state that all ranks have been given."""


class Pending:
    """Queues of waiting commands. Pure: it holds and hands out, the conductor decides."""

    def __init__(self) -> None:
        self.staged: list[Commanded] = []  # edits that the next train plan takes up
        self.side: dict[str, list[Commanded]] = {kind: [] for kind in SIDE_KINDS}
        self.scheduled: set[str] = set()  # side plans that the run file wants at this boundary
        self.pausing: list[Commanded] = []
        self.stopping: list[Commanded] = []
        self.wants_pause = False  # a pause was asked for, and is or will be entered

    def next_side(self, held: Collection[str] = ()) -> SideKind | None:
        """The kind of side plan that is due first, if any; none that is `held` back."""
        if not self.scheduled and not any(self.side.values()):
            return None
        due = (kind for kind in SIDE_KINDS if kind in self.scheduled or self.side[kind])
        return next((kind for kind in due if kind not in held), None)

    def take_side(self, kind: SideKind) -> list[Commanded]:
        """The commands that a side plan answers; whatever wanted that plan is satisfied by it. Each command to sample
        or to profile has a plan of its own."""
        if kind in ("sample", "profile") and self.side[kind]:
            return [self.side[kind].pop(0)]
        taken, self.side[kind] = self.side[kind], []
        self.scheduled.discard(kind)
        return taken

    def take_staged(self) -> list[Commanded]:
        taken, self.staged = self.staged, []
        return taken

    def put_back(self, id: str, carried: Carried) -> None:
        """A side command whose plan a fence has undone waits again, and no longer expires."""
        args = verbs.check(carried.verb, {})
        self.side[carried.verb].append(Commanded(id, carried.verb, args, carried.by, carried.node, None, float("inf")))

    def wants_new_group(self, now: float) -> bool:
        """Whether a staged edit changes which ranks are live, so that the next step takes a new generation."""
        return any(isinstance(command.args, edits.MEMBERSHIP) for command in self.staged if command.expires > now)

    def folded(self, settings: Settings, step: int, config: RunFile, facts: Facts, now: float) -> Settings:
        """The settings as the edits staged so far will have made them."""
        for command in self.staged:
            if command.expires <= now:
                continue
            with contextlib.suppress(InvalidInputError):  # it stood on an edit that has expired
                settings = edits.apply(settings, command.args, command.node, step, config, facts).settings
        return settings

    def take_expired(self, now: float) -> Iterator[Commanded]:
        """Hand out and forget what no step could carry in time."""
        queues = [self.staged, *self.side.values(), self.pausing]
        yield from self._take(lambda command: command.expires <= now, queues)

    @property
    def waiting(self) -> list[Commanded]:
        """Everything that waits."""
        return [*self.staged, *(one for side in self.side.values() for one in side), *self.pausing, *self.stopping]

    def take_all(self) -> Iterator[Commanded]:
        """Hand out and forget everything."""
        yield from self._take(lambda _: True, [self.staged, *self.side.values(), self.pausing, self.stopping])

    @staticmethod
    def _take(unwanted: Callable[[Commanded], bool], queues: list[list[Commanded]]) -> Iterator[Commanded]:
        for queue in queues:
            for command in [command for command in queue if unwanted(command)]:
                queue.remove(command)
                yield command
