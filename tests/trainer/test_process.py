"""The trainer as its agent sees it: a process at the other end of a socket file."""

import contextlib
import signal
from pathlib import Path

import psutil
import pytest
from tests.trainer.support.process_agent import FIRST, SECOND, THIRD, G
from tests.waiting import HANG_SECONDS

from trainctl.protocol import messages as m
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.record import checkpoints, log_format
from trainctl.protocol.wire import codec


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
