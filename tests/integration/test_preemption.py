"""Agents that are terminated and drain their nodes: no step is lost, and the run stays on the undisturbed curve.

One, two and all of three agents are terminated. `--schedule-seed` replays a schedule that failed."""

import contextlib
import random
import shlex
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.asking import run_of
from tests.cluster.run_files import FOREVER, NODES, on
from tests.cluster.waits import all_steps, wait_for_end, wait_for_step
from tests.integration.support.clusters import Cluster
from tests.integration.support.exactness import check_ledger, worst_deviation
from tests.integration.support.faults import naming
from tests.integration.support.reference import one_rank_curve
from tests.tiers import scale, schedule_seed
from tests.waiting import HANG_SECONDS, slowness, until

from trainctl.protocol import messages as m
from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.errors import InvalidInputError, TrainctlError
from trainctl.protocol.messages import events as e
from trainctl.protocol.record.checkpoints import newest_complete, read_manifest
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


COUNT = scale("preemptions")
SEED = schedule_seed(5)
WAIT_SECONDS = 2.0
"""Most seconds that the ranks which stay wait for a drain, beside a step, on a machine that isn't busy."""
ENDINGS = ("going back", "failed", "stopped")
TOLERANCE = 1e-5
RATE = 1e-4 / COUNT
"""So low that what rounding makes of other shares stays small over all steps: at 5e-4, weights that differ by 3e-8 of
themselves lead to losses that differ by 7e-5 after 370 steps."""


@pytest.fixture
def spot_nodes(tmp_path) -> Iterator[Cluster]:
    """Three agents that drain their nodes when they are terminated, with more time than a busy machine takes."""
    notices = {node: {"NOTICE": str(tmp_path / f"notice-{node}")} for node in NODES}
    spot = ("--spot-notice-command", shlex.join(["sh", "-c", 'test -e "$NOTICE"']))
    made = Cluster(tmp_path, environment=notices, options=("--drain-on-term", "--grace", "120", *spot))
    made.in_touch()
    yield made
    made.stop()


@pytest.mark.timeout(900 * COUNT)
def test_nodes_that_are_terminated_leave_without_a_lost_step_and_come_back(spot_nodes, run_config, tmp_path):
    """One, two and all of three; the lead among them, and in sums. Alone, a node leaves a checkpoint of the last
    step."""
    rate = {"optimizer__schedule": "constant", "optimizer__learning_rate": RATE, "batch__micro": 1}
    even = {"first_shares": "even"}
    config = run_config(run__steps=FOREVER, nodes=on(*NODES), group=even, data__sequence_length=64, **rate)
    with spot_nodes.client("alpha") as client:
        begun = client.send("start-run", {"config": config})
        assert begun.state == "applied", begun.reason
    preempted = Preempted(spot_nodes, begun.run)
    preempted.goes_on(3)
    planned = schedule(SEED, COUNT)
    assert {preemption.in_sum for preemption in planned} == {True, False}
    for preemption in planned:
        with naming(f"--schedule-seed {SEED}, {preemption}"):
            preempted.whole()
            _preempt(preempted, preemption)
    preempted.goes_on(preempted.last_step()[0] + 2)
    lead = preempted.lead
    with spot_nodes.client(lead) as client:
        client.send("stop", {})
        view = wait_for_end(client)
        steps = all_steps(client, begun.run)
    check_ledger(spot_nodes, begun.run, view.step, was_lost=(), lead=lead, others=NODES)
    alone = config | {"nodes": on("alpha", alpha={"micro": 6})}
    worst = worst_deviation(steps, one_rank_curve(alone, view.step))
    waits, exits = preempted.waits, preempted.exits
    print(f"{len(exits)} preemptions in {view.step} steps, worst relative deviation {worst:.1e}, load {slowness():.1f}")
    print(f"waits (s): {sorted(round(wait, 3) for wait in waits)}", f"exits (s): {sorted(round(x, 1) for x in exits)}")
    assert worst <= TOLERANCE
    _resume_beside_a_spot_notice(preempted, spot_nodes, lead, tmp_path)


def _newest_checkpoint(cluster: Cluster, node: str, run: str) -> int:
    folder = newest_complete(cluster.run_paths(node, run).checkpoints)
    return read_manifest(folder).step if folder is not None else 0


def _resume_beside_a_spot_notice(preempted: Preempted, cluster: Cluster, lead: str, notices: Path) -> None:
    """The run begins again with the nodes that stay. The one that leaves isn't needed for the newest checkpoint."""
    newest = {node: _newest_checkpoint(cluster, node, preempted.run) for node in NODES}
    holders = {node for node, step in newest.items() if step == max(newest.values())}
    leaving = next(node for node in NODES if node != lead and holders - {node})
    (notices / f"notice-{leaving}").touch()
    with cluster.client(leaving) as client:
        nothing: dict[str, dict[str, object]] = {"config": {}}
        until(lambda: "a spot notice" in client.send("start-run", nothing).reason, 60, "the notice")
    with cluster.client(lead) as client:
        last = max((event.id for event in preempted.events(lead)), default=0)
        resume = {"resume": preempted.run}
        until(lambda: client.send("start-run", resume).state == "applied", 60, "the run without that node")
        wait_for_step(client, preempted.resumed_from() + 3)
        out = _nodes_out(client)
        client.send("stop", {"checkpoint": False})
        wait_for_end(client)
    assert out == {leaving: "drained"}
    said = [event.text for event in preempted.events(lead, last)]
    assert f"{leaving} is leaving: a spot notice" in said


def _nodes_out(client: BlockingClient) -> dict[str, str]:
    """The states of ranks that take no part in the run, by node."""
    run = run_of(client)
    assert run is not None
    return {rank.node: rank.state for rank in run.ranks if rank.state in ("lost", "drained", "failed", "rejoining")}


def _preempt(preempted: Preempted, preemption: Preemption) -> None:
    if len(preemption.nodes) == len(NODES):
        preempted.strike(preemption)
        last, _ = preempted.last_step()
        assert preempted.exits[-1] < GRACE_SECONDS * slowness()
        preempted.resume(preemption.nodes)
        assert preempted.resumed_from() == last
        return
    stays = next(node for node in NODES if node not in preemption.nodes)
    newest = max((event.id for event in preempted.events(stays)), default=0)
    preempted.strike(preemption)
    before, _ = preempted.last_step()
    preempted.goes_on(before + 2)
    _check_drained(preempted, preemption, stays, newest)
    preempted.start(preemption.nodes)


def _check_drained(preempted: Preempted, preemption: Preemption, stays: str, after: int) -> None:
    """By the record of a node that stayed: each node was drained, none was lost, and the others hardly waited."""

    def said() -> list[e.AnyEvent]:
        return [event.data for event in preempted.events(stays, after)]

    def left() -> set[str]:
        return {data.node for data in said() if isinstance(data, e.SharesChanged) and data.node}

    until(lambda: left() == {*preemption.nodes}, 30, f"the drain on {stays}'s record", said)
    found = said()
    assert not [data for data in found if isinstance(data, e.SharesChanged) and data.lost], found
    assert not [data for data in found if isinstance(data, e.RunStateChanged) and data.after in ENDINGS], found
    assert not [data for data in found if isinstance(data, e.StepRetracted)], found
    waits = [wait for data in found if isinstance(data, e.GenerationFormed) and (wait := data.waited_seconds)]
    assert max(waits, default=0.0) < (WAIT_SECONDS + preempted.step_seconds(stays)) * slowness(), waits
    preempted.waits += waits
