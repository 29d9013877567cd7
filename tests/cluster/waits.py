"""Waits for the progress of a run, through a client, and readings of it."""

from collections.abc import Callable
from typing import Any, Protocol

from tests.asking import events_of, run_of
from tests.waiting import HANG_SECONDS, until

from trainctl.protocol import messages as m
from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.client.client import Client
from trainctl.protocol.messages.events import CheckpointWritten
from trainctl.protocol.record import checkpoints
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader
from trainctl.protocol.record.schema import open_for_reading
from trainctl.protocol.wire.codec import decode_order

STEP_SECONDS_LIMIT = 60.0


class Nodes(Protocol):
    """A cluster, of processes or in this one, as far as its nodes' records go."""

    def run_paths(self, node: str, run: str) -> RunPaths: ...


class PatientAsyncClient(Client):
    """Waits for outcomes for as long as a busy machine may take."""

    async def send(self, verb: str, args: dict[str, Any], **options: Any) -> m.CommandReply:
        return await super().send(verb, args, **{"timeout_seconds": HANG_SECONDS, **options})


class PatientClient(BlockingClient):
    """Wait as above, without an event loop."""

    def send(self, verb: str, args: dict[str, Any], **options: Any) -> m.CommandReply:
        return super().send(verb, args, **{"timeout_seconds": HANG_SECONDS, **options})


def wait_for_step(client: BlockingClient, step: int, seconds: float = STEP_SECONDS_LIMIT) -> m.Snapshot:
    """A snapshot in which the run has committed `step`, or has ended."""
    return _wait_for_run(client, lambda run: run.step >= step, seconds, f"step {step}")


def wait_for_checkpoint(client: BlockingClient, run: str) -> int:
    """The step of the run's first checkpoint, once that is complete."""

    def written() -> list[int]:
        events = events_of(client, run)
        return [event.data.step for event in events if isinstance(event.data, CheckpointWritten)]

    found: list[int] = until(written, what="a checkpoint", progress=lambda: run_of(client))
    return found[0]


def wait_for_end(client: BlockingClient, seconds: float = 120.0) -> m.RunView:
    """The run's last view."""
    run = _wait_for_run(client, lambda run: False, seconds, "the run's end").run
    assert run is not None
    return run


def _wait_for_run(client: BlockingClient, holds: Callable[[m.RunView], bool], seconds: float, what: str) -> m.Snapshot:
    """A snapshot in which something holds of the run, or it has ended; each step of the run starts the time again."""
    seen: list[Any] = [None]

    def look() -> m.Snapshot | None:
        snapshot = client.ask(m.SnapshotRequest, 0)
        run = snapshot.run
        seen[0] = run and (run.state, run.step, run.generation)
        return snapshot if run and (holds(run) or run.state not in m.ACTIVE_RUN_STATES) else None

    found: m.Snapshot = until(look, seconds, what, lambda: seen[0])
    return found


def all_steps(client: BlockingClient, run: str | None = None) -> list[m.StepCommitted]:
    steps: list[m.StepCommitted] = []
    while True:
        page = client.ask(m.StepsRequest, run, steps[-1].step if steps else 0)
        steps += page.steps
        if not page.more:
            return steps


def plans_of(paths: RunPaths) -> list[m.StepPlan]:
    """A journal of plans, in the order of their numbers."""
    record = open_for_reading(paths.record)
    try:
        bodies = [body for (body,) in record.execute("SELECT body FROM plans ORDER BY term, n, seq")]
    finally:
        record.close()
    return [plan for plan in map(decode_order, bodies) if isinstance(plan, m.StepPlan)]


def promote(cluster: Any, node: str, through: str, *, off: bool = False) -> m.CommandReply:
    """Have a node lead the run, asked of another one's agent."""
    with cluster.client(through) as client:
        reply: m.CommandReply = client.send("promote", {"old_lead_is_off": off}, node=node)
    return reply


def newest_step(cluster: Any, node: str, run: str) -> int:
    folder = checkpoints.newest_complete(cluster.run_paths(node, run).checkpoints)
    return checkpoints.read_manifest(folder).step if folder is not None else 0


def resumed(cluster: Any, run: str, at: int) -> None:
    """Take the run up again through its lead; it must go on from step `at` with nothing retracted before it. It is left
    running."""
    with cluster.client("alpha") as client:
        again = client.send("start-run", {"resume": run})
        assert (again.state, again.step) == ("applied", at + 1), again
        wait_for_step(client, at + 3)
        assert [step.step for step in all_steps(client, run)][: at + 3] == list(range(1, at + 4))
    with RecordReader(cluster.run_paths("alpha", run)) as reader:
        (kept,), _ = reader.steps(at - 1, 1)
        assert kept.generation.n < reader.steps(at, 1)[0][0].generation.n
