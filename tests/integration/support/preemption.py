"""Nodes that are preempted: agents of a run get SIGTERM at chosen moments, and come back."""

import contextlib
import random
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.asking import run_of
from tests.cluster.run_files import NODES
from tests.cluster.waits import wait_for_step
from tests.integration.support.clusters import Cluster
from tests.waiting import HANG_SECONDS, until

from trainctl.protocol import messages as m
from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.errors import InvalidInputError, TrainctlError
from trainctl.protocol.messages import events as e
from trainctl.protocol.record.reader import RecordReader
from trainctl.protocol.record.status_page import read_status

MOST_SPREAD_SECONDS = 1.5
"""The agents of one preemption are terminated within this many seconds."""
GRACE_SECONDS = 15.0


@dataclass(frozen=True)
class Preemption:
    """SIGTERM to these nodes' agents, each after a pause; the first one in a sum, if `in_sum`."""

    nodes: tuple[str, ...]
    pauses: tuple[float, ...]
    in_sum: bool


def schedule(seed: int, count: int) -> list[Preemption]:
    """`count` preemptions of one, two and all nodes each, in mixed order, every other one in a sum. The same for the
    same arguments."""
    chance = random.Random(seed)
    sizes = [size for size in range(1, len(NODES) + 1) for _ in range(count)]
    chance.shuffle(sizes)
    return [_one(chance, size, in_sum=at % 2 == 0) for at, size in enumerate(sizes)]


def _one(chance: random.Random, size: int, *, in_sum: bool) -> Preemption:
    spread = chance.choice((0.0, MOST_SPREAD_SECONDS))
    pauses = tuple(chance.uniform(0.0, spread / size) for _ in range(size))
    return Preemption(tuple(chance.sample(NODES, size)), pauses, in_sum)


class Preempted:
    """A run whose nodes are preempted again and again; its lead changes meanwhile."""

    def __init__(self, cluster: Cluster, run: str) -> None:
        self._cluster, self.run = cluster, run
        self.waits: list[float] = []  # seconds, of the ranks that stayed, at each new group
        self.exits: list[float] = []  # seconds from the last signal until the last agent had exited
        self.drained: set[str] = set()

    @property
    def lead(self) -> str:
        """The node that leads the run, as soon as one does."""
        found: str = until(lambda: next((node for node in NODES if self._leads(node)), ""), 60, "a lead")
        return found

    def _leads(self, node: str) -> bool:
        process = self._cluster[node].process
        if process is None or process.poll() is not None:
            return False
        with contextlib.suppress(TrainctlError), self._cluster.client(node, timeout_seconds=5) as client:
            view = run_of(client)
            return view is not None and view.lead == node and view.state in m.ACTIVE_RUN_STATES
        return False

    def strike(self, preemption: Preemption) -> None:
        """Terminate the agents, and wait until they have exited."""
        for node, pause in zip(preemption.nodes, preemption.pauses, strict=True):
            process = self._cluster[node].process
            assert process is not None
            time.sleep(pause)
            if preemption.in_sum and node == preemption.nodes[0]:
                self._meet_sum(node)
            process.send_signal(signal.SIGTERM)
        begun = time.monotonic()
        for node in preemption.nodes:
            process = self._cluster[node].process
            assert process is not None
            status, said = process.wait(HANG_SECONDS), process.stderr.read() if process.stderr else ""
            assert status == 0, (node, said)
        self.exits.append(time.monotonic() - begun)
        for node in preemption.nodes:
            assert self._cluster[node].trainer_pids() == [], node
            self._cluster[node].kill()
        self.drained |= {*preemption.nodes}

    def _meet_sum(self, node: str) -> None:
        page = self._cluster.run_paths(node, self.run).status_page(NODES.index(node))
        until(lambda: (now := read_status(page)) is not None and now.phase == "sync", 60, f"a sum on {node}")

    def start(self, nodes: Sequence[str]) -> None:
        """Start the agents again."""
        for node in nodes:
            self._cluster.start(node)

    def whole(self) -> m.RunView:
        """The run once every rank takes part, paused until all trainers have loaded."""
        with self._cluster.client(self.lead) as client:

            def view() -> m.RunView:
                run = run_of(client)
                assert run is not None
                return run

            def states() -> list[tuple[str, str]]:
                return [(rank.node, rank.state) for rank in view().ranks]

            client.send("pause", {})
            until(lambda: all(rank.backend for rank in view().ranks), 120, "the trainers", states)
            assert client.send("resume", {}).state == "applied"
            until(lambda: {rank.state for rank in view().ranks} == {"run"}, 60, "the whole group", states)
            return wait_for_step(client, view().step + 3).run or view()

    def resume(self, nodes: Sequence[str]) -> None:
        """Start the agents again, and the run from its checkpoint, on the node that led it last."""
        self.start(nodes)
        self._cluster.in_touch()
        said = [self._resumed_on(node) for node in NODES]
        assert any(reply.state == "applied" for reply in said), said

    def _resumed_on(self, node: str) -> m.CommandReply:
        with self._cluster.client(node) as client:
            return client.send("start-run", {"resume": self.run})

    @contextlib.contextmanager
    def client(self) -> Iterator[BlockingClient]:
        with self._cluster.client(self.lead) as client:
            yield client

    def events(self, node: str, after: int = 0) -> list[m.Event]:
        """Those of a node's record with an id above `after`."""
        found: list[m.Event] = []
        with RecordReader(self._cluster.run_paths(node, self.run)) as reader:
            more = True
            while more:
                page, more = reader.events(found[-1].id if found else after, 500)
                found += page
        return found

    def last_step(self) -> tuple[int, str]:
        """The newest committed step of all nodes' records, and a node that has it."""
        found = []
        for node in NODES:
            paths = self._cluster.run_paths(node, self.run)
            with contextlib.suppress(InvalidInputError), RecordReader(paths) as reader:
                step = reader.last_step()
                found.append((step.step if step is not None else 0, node))
        return max(found)

    def goes_on(self, step: int) -> None:
        """Until the run has committed `step` on the nodes that are left."""
        with self.client() as client:
            wait_for_step(client, step)

    def resumed_from(self) -> int:
        """The step that the run was last resumed from."""
        resumed = [event for event in self.events(self.lead) if isinstance(event.data, e.RunStateChanged)]
        return max(event.step or 0 for event in resumed if event.data.after == "resumed")

    def step_seconds(self, node: str) -> float:
        """The longest of the newest steps, by a node's record."""
        with RecordReader(self._cluster.run_paths(node, self.run)) as reader:
            last = reader.last_step()
            steps, _ = reader.steps(max(0, last.step - 50) if last is not None else 0, 50)
        return max((step.step_seconds for step in steps), default=0.0)
