"""The trainer as its agent sees it: a process at the other end of a socket file."""

import contextlib
import signal
from pathlib import Path

import psutil
import pytest
from tests.trainer.support.process_agent import FIRST, SECOND, THIRD, G
from tests.waiting import HANG_SECONDS, until

from trainctl.protocol import messages as m
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.record import checkpoints, log_format
from trainctl.protocol.record.schema import open_for_reading
from trainctl.protocol.record.status_page import read_status
from trainctl.protocol.wire import codec


@pytest.mark.tier("all")
def test_two_lives(agent, dead_pid):
    leftover = agent.paths.checkpoints / f".step-1.{dead_pid}.part"
    leftover.mkdir(parents=True)
    process = agent.start()
    ready = agent.hear(m.Ready)
    assert not leftover.exists(), "what a dead writer left is gone at the start"
    caches = agent.paths.directory.parents[2] / "caches"
    assert [path.name[:7] for path in caches.iterdir()] == ["tokens-"] and not agent.paths.node_data.exists()
    assert (ready.rank, ready.pid, ready.backend, ready.device) == (0, process.pid, "torch", "cpu")
    assert (ready.last_step, ready.cursor, ready.mean_weight) == (0, 0, 20.0)
    assert {"python", "torch", "transformers", "numpy"} <= dict(ready.compute.versions).keys()
    assert (ready.parameters, ready.samples > 500) == (29_088, True)
    alive = agent.hear(m.Alive, lambda message: message.ready is not None)
    assert (alive.ready, alive.generation) == (ready, None)

    agent.form(FIRST)
    agent.plan(1, 1)
    assert agent.hear(m.Soon).seq == 1
    first = agent.hear(m.Report)
    assert (first.step, first.weight, first.own_weight, first.own_samples) == (1, 240.0, 240.0, G)
    assert 5 < first.loss_sum / first.weight < 6
    assert first.micro_batch == 5
    assert min(first.phases.forward, first.phases.backward, first.phases.optimizer) > 0
    assert first.values["memory_bytes"]
    assert 0 < first.values["tflops"] == pytest.approx(first.values["run_tflops"])
    page = read_status(agent.paths.status_page(0))
    assert (page.pid, page.step, page.term, page.n) == (process.pid, 1, 1, 1)

    agent.plan(1, 1)  # a repeated plan is done once
    agent.plan(2, 2, generation=THIRD)  # another generation's plan is not done
    evaluated = agent.step(3, 1, kind="evaluate", work=(m.RankWork(0, (m.Range(0, ready.held_out),), 4),), cursor=G)
    assert (evaluated.kind, evaluated.own_samples) == ("evaluate", ready.held_out)
    assert agent.step(4, 1, kind="checkpoint", writers=(0,)).checkpoint is None, "it is written in the background"
    done = agent.hear(m.Checkpointed)
    assert (done.generation, done.seq, done.problem) == (FIRST, 4, "")
    assert agent.hear(m.Checkpointed) == done, "a heartbeat repeats it"
    written = done.checkpoint
    assert written.kept == (1,)
    assert (written.step, written.path) == (1, str(agent.paths.checkpoint(1)))
    assert checkpoints.verify(Path(written.path)).size_bytes == written.size_bytes
    expected = [agent.step(seq, seq - 3).loss_sum for seq in (5, 6)]
    alive = agent.hear(m.Alive)
    assert (alive.generation, alive.ready and alive.ready.last_step) == (FIRST, 3)
    agent.leave(process)

    connection = open_for_reading(agent.paths.rank_record(0))
    assert connection.execute("SELECT step, micro_batch FROM rank_steps").fetchall() == [(1, 5), (2, 5), (3, 5)]
    connection.close()

    process = agent.start("--resume-from", written.path)
    assert agent.hear(m.Ready, lambda message: message.pid == process.pid).last_step == 1
    agent.form(SECOND)
    again = [agent.step(seq, seq - 3, SECOND) for seq in (5, 6)]
    assert [report.loss_sum for report in again] == expected, "to the bit, in another process"
    fenced_then_orphaned(agent, process, again)


def fenced_then_orphaned(agent, process, done):
    """After steps 2 and 3 in SECOND: fenced while it computes, then finishing the batch, then orphaned, with a
    checkpoint."""
    big, cursor = 4000, 3 * G
    work = (m.RankWork(0, (m.Range(cursor, big),), 3),)
    agent.plan(7, 4, SECOND, global_batch=big, work=work)
    until(lambda: read_status(agent.paths.status_page(0)).step == 4)
    begun = agent.hear(m.Alive)
    later = agent.hear(m.Alive)  # heartbeats go on while it computes: one more second into the step
    assert (later.progress or 0) > (begun.progress or 0), "each micro-batch is a sign of life"
    agent.tell(m.Fence(run="r", generation=THIRD))
    fenced = agent.hear(m.Fenced)
    assert (fenced.generation, fenced.last_step, fenced.held_from) == (THIRD, 3, SECOND)
    (held,) = fenced.held
    assert held.start == cursor and 0 < held.count < big and held.count % 3 == 0
    assert fenced.reports == tuple(done)

    agent.form(THIRD.next())
    rest = (m.RankWork(0, (m.Range(held.stop, 30),), 7),)
    finished = agent.step(8, 4, THIRD.next(), finishes=SECOND, global_batch=big, work=rest)
    assert (finished.own_samples, finished.weight) == (held.count + 30, (held.count + 30) * 20.0)

    agent.vanish()
    _, errors = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 0, errors
    assert "the agent has been gone for 1 s" in errors
    assert checkpoints.newest_complete(agent.paths.checkpoints) == agent.paths.checkpoint(4)


def test_a_trainer_outlives_its_agent_and_is_taken_up_by_the_next(agent, run_file):
    run_file(run__orphan_seconds=600.0, nodes__here={"backend": "mlx", "device": "cpu"})
    process = agent.start()
    agent.hear(m.Ready)
    agent.form(FIRST)
    agent.step(1, 1)
    agent.plan(2, 2)
    agent.vanish()
    agent.listen()
    alive = agent.hear(m.Alive, lambda message: message.ready is not None)
    assert alive.generation == FIRST
    assert alive.ready.pid == process.pid
    agent.tell(m.Fence(run="r", generation=SECOND))
    fenced = agent.hear(m.Fenced)
    done = fenced.last_step
    assert [report.step for report in fenced.reports] == list(range(1, done + 1))
    agent.form(THIRD)
    assert agent.step(3, done + 1, THIRD).step == done + 1

    agent.tell(m.Form(run="r", generation=THIRD.next(), engine="gloo", ranks=(0, 1)))
    failed = agent.hear(m.GroupFailed)
    assert failed.reason == "rank 0 has no endpoints open for g1.4", "no reason to end"
    agent.leave(process)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"data__path": "/nowhere"}, "data.path: no such file or folder: /nowhere"),
        ({"batch__micro": 0}, "batch.micro: must be a whole number of at least 1"),
    ],
)
def test_bad_input_is_one_line_to_both(agent, run_file, changes, names):
    with contextlib.suppress(InvalidInputError):  # the fixture reads what it wrote
        run_file(**changes)
    process = agent.start()
    failed = agent.hear(m.TrainerFailed)
    _, errors = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 1
    assert names in failed.reason
    assert failed.reason.startswith(("run file: ", f"{agent.paths.run_file}: "))
    line = log_format.read(errors.removesuffix("\n"))
    assert (line.level, line.text) == ("ERROR", f"rank 0: {failed.reason}")


def test_an_mlx_rank_drops_garbage_trains_and_ends_at_a_term_signal(agent, run_file):
    run_file(nodes__here={"backend": "mlx", "device": "cpu"})
    process = agent.start()
    assert agent.hear(m.Ready).backend == "mlx"
    for frames in ([b"\xc1"], [b""], [codec.encode(m.Leave(run="another", reason=""))], [b"a", b"b"], [b"\x80" * 90]):
        agent.socket.send_multipart([agent.trainer, *frames])
    agent.form(FIRST)
    assert agent.step(1, 1).skipped is None
    agent.step(2, 1, kind="checkpoint", writers=(0,))
    written = agent.hear(m.Checkpointed).checkpoint
    checkpoints.verify(Path(written.path))
    agent.step(3, 2)
    agent.plan(4, 3, global_batch=100_000, work=(m.RankWork(0, (m.Range(2 * G, 100_000),), 1),))
    agent.hear(m.Alive, lambda said: said.phase in ("forward", "backward"))
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    saved = agent.hear(m.Checkpointed, lambda said: said.seq is None)
    assert saved.checkpoint is not None, "it trained alone"
    assert checkpoints.verify(Path(saved.checkpoint.path)).step == saved.step == 2
    _, errors = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 143
    lines = [log_format.read(line) for line in errors.splitlines()]
    assert all(line.level for line in lines), errors
    told = [line.text.split(":")[0] for line in lines if line.level != "INFO"]
    assert told == ["dropped a message from the agent"] * 4, errors
    assert lines[-1].text.startswith("leaving"), errors
    assert not [child for child in children if child.is_running()]
