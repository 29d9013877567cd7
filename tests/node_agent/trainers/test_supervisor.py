"""The trainer host: real processes, found again by another host, ended by identity only, never mistaken for others."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.node_agent.support.processes import ENVIRONMENT, alive, wait_for
from tests.waiting import HANG_SECONDS

from trainctl.node_agent.trainers.supervisor import HostedTrainer, TrainerSupervisor
from trainctl.protocol.errors import RefusedError
from trainctl.protocol.machine import shim
from trainctl.protocol.record.paths import RunPaths

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(3600)"
)


@pytest.fixture
def paths(tmp_path: Path) -> Iterator[RunPaths]:
    (tmp_path / "run-1").mkdir()
    made = RunPaths(tmp_path / "run-1")
    yield made
    host = TrainerSupervisor()
    for rank in range(3):
        wait_for(lambda: not host.kill(made, rank, grace_seconds=0.0) or host.force_overdue())  # noqa: B023


def record(paths: RunPaths, rank: int, pid: int, **changes: object) -> None:
    known = {
        "pid": pid, "start_time": shim.start_time(pid), "boot_id": shim.boot_id(), "command": ["x"],
        "started_at": 1000.0, "keeper_pid": 1, **changes,
    }  # fmt: skip
    paths.process(rank).write_text(json.dumps(known))


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "3600"])
    yield process
    process.kill()
    process.wait(HANG_SECONDS)


def test_from_start_to_exit_it_is_never_taken_for_dead(paths: RunPaths) -> None:
    host = TrainerSupervisor()
    assert host.find(paths, 0) is None and host.exit_status(paths, 0) is None and not host.kill(paths, 0)
    for status in (0, 5):  # the second time over the files of the first
        go = paths.directory / f"go-{status}"  # it lives until it has been seen
        wait = f"while [ ! -e {go} ]; do sleep 0.05; done"
        command = ["/bin/sh", "-c", f"echo one; echo $WORD$HOME >&2; {wait}; exit {status}"]
        host.start(paths, 0, command, {"WORD": "two", "PATH": "/usr/bin:/bin"})  # which is its whole environment
        found = alive(host, paths)
        assert found.command[0] == "/bin/sh" and found.started_at is not None
        go.touch()
        wait_for(lambda: host.force_overdue() or (host.find(paths, 0) is None and not host.is_ending(paths, 0)))
        assert host.exit_status(paths, 0) == status
    assert host.log_tail(paths, 0, 3) == ("two", "one", "two")
    assert host.log_tail(paths, 1, 3) == () and host.log_tail(paths, 0, 0) == ()


def test_an_end_is_noticed_without_a_look_at_every_trainer(paths: RunPaths) -> None:
    host = TrainerSupervisor()
    assert host.may_have_ended(), "none is held, so nothing is known"
    for rank in (0, 1):
        host.start(paths, rank, ["sleep", "3600"], ENVIRONMENT)
    first, _ = alive(host, paths, 0), alive(host, paths, 1)
    if hasattr(os, "pidfd_open"):
        assert not host.may_have_ended()
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    wait_for(host.may_have_ended)
    wait_for(lambda: host.find(paths, 0) is None)
    assert host.kill(paths, 1) and host.may_have_ended(), "one that is told to end may end at any time"


def test_nothing_is_left_of_trainers_that_ended(paths: RunPaths) -> None:
    host, others = TrainerSupervisor(), psutil.Process().children()
    host.start(paths, 0, ["true"])
    wait_for(lambda: host.exit_status(paths, 0) == 0)
    wait_for(
        lambda: (
            host.force_overdue() or (host.find(paths, 0) is None and set(psutil.Process().children()) <= set(others))
        )
    )
    assert sorted(path.name for path in paths.directory.iterdir()) == ["logs", "rank-0.process.json"]


def test_ranks_are_apart_and_a_running_one_is_not_started_again(paths: RunPaths) -> None:
    host = TrainerSupervisor()
    host.start(paths, 0, ["sleep", "3600"])
    with pytest.raises(RefusedError, match="rank 0 of run-1 is already running"):
        host.start(paths, 0, ["sleep", "3600"])
    host.start(paths, 1, ["sleep", "3600"])
    assert alive(host, paths, 0).pid != alive(host, paths, 1).pid
    with pytest.raises(RefusedError, match="rank 1 of run-1 is already running, pid"):
        TrainerSupervisor().start(paths, 1, ["sleep", "3600"])


def test_a_trainer_outlives_a_killed_agent_and_the_next_one_finds_it(paths: RunPaths) -> None:
    agent_code = (
        "import sys; from pathlib import Path; from trainctl.node_agent.trainers.supervisor import TrainerSupervisor;"
        "from trainctl.protocol.record.paths import RunPaths;"
        "paths = RunPaths(Path(sys.argv[1])); host = TrainerSupervisor();"
        "host.start(paths, 0, ['sleep', '3600'])\n"
        "while host.find(paths, 0).pid is None: pass\n"
        "print(host.find(paths, 0).pid, flush=True); sys.stdin.read()"
    )
    agent = subprocess.Popen(
        [sys.executable, "-c", agent_code, str(paths.directory)],
        env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert agent.stdout is not None
    pid = int(agent.stdout.readline())
    os.killpg(agent.pid, signal.SIGKILL)
    agent.communicate(timeout=HANG_SECONDS)
    host = TrainerSupervisor()
    found = host.find(paths, 0)
    assert found is not None and found.pid == pid and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    assert host.kill(paths, 0)
    wait_for(lambda: host.force_overdue() or host.find(paths, 0) is None)
    assert wait_for(lambda: host.exit_status(paths, 0)) == -signal.SIGTERM


def test_one_that_does_not_listen_is_forced_after_its_time(paths: RunPaths) -> None:
    now = [0.0]
    host = TrainerSupervisor(clock=lambda: now[0])
    host.start(paths, 0, [sys.executable, "-c", STUBBORN])
    wait_for(lambda: host.log_tail(paths, 0, 1) == ("deaf",))
    pid = alive(host, paths).pid
    assert host.kill(paths, 0, grace_seconds=10.0)
    now[0] = 9.0
    host.kill(paths, 0, grace_seconds=10.0)  # asking again does not restart its time
    found = host.find(paths, 0)
    assert found is not None and found.pid == pid
    now[0] = 10.0
    wait_for(lambda: host.force_overdue() or (host.find(paths, 0) is None and not host.is_ending(paths, 0)))
    assert host.exit_status(paths, 0) == -signal.SIGKILL


def test_one_that_has_only_begun_to_start_is_ended_too(paths: RunPaths) -> None:
    host = TrainerSupervisor()
    host.start(paths, 0, ["sleep", "3600"])
    assert host.kill(paths, 0)
    wait_for(lambda: host.force_overdue() or (host.find(paths, 0) is None and not host.is_ending(paths, 0)))
    assert host.exit_status(paths, 0) in (-signal.SIGKILL, -signal.SIGTERM)
    host.start(paths, 0, ["sleep", "3600"])  # and the next one is not
    assert alive(host, paths).pid is not None
    assert host.find(paths, 0) is not None


def test_a_pid_that_has_changed_hands_is_dead_and_left_alone(paths, bystander):
    host = TrainerSupervisor()
    record(paths, 0, bystander.pid)
    assert host.find(paths, 0) == HostedTrainer(bystander.pid, 1000.0, ("x",), 1)
    for changes in ({"start_time": 1.0}, {"start_time": None}, {"boot_id": "another"}, {"exit_status": 0}):
        record(paths, 0, bystander.pid, **changes)
        assert host.find(paths, 0) is None, changes
        assert not host.kill(paths, 0, grace_seconds=0.0), changes
    assert host.find(paths, 0) is None
    assert bystander.poll() is None


def test_a_torn_process_record_is_nobody(paths: RunPaths, bystander: subprocess.Popen[bytes]) -> None:
    record(paths, 0, bystander.pid)
    whole, host = paths.process(0).read_bytes(), TrainerSupervisor()
    for text in (*(whole[:cut] for cut in range(len(whole))), b"null", b'{"pid": "1"}', b"\0\0\0", b"\xff"):
        paths.process(0).write_bytes(text)
        assert host.find(paths, 0) is None and host.exit_status(paths, 0) is None and not host.kill(paths, 0)


STUCK = """
import sys, threading, time
from trainctl.trainer.common import logs
logs.write_stacks_on_signal()

def wait_for_ever():
    with lock:
        pass

lock = threading.Lock()
lock.acquire()
threading.Thread(target=wait_for_ever, daemon=True).start()
print("stuck", flush=True)
wait_for_ever()
"""


def test_a_hung_trainer_writes_its_stacks_before_it_is_killed(paths: RunPaths) -> None:
    now = 0.0
    host = TrainerSupervisor(clock=lambda: now)
    host.start(paths, 0, [sys.executable, "-c", STUCK], ENVIRONMENT)
    alive(host, paths)
    wait_for(lambda: host.log_tail(paths, 0, 1) == ("stuck",))
    assert host.kill_hung(paths, 0)
    wait_for(lambda: any("<module>" in line for line in host.log_tail(paths, 0, 20)))
    assert host.find(paths, 0) is not None  # it has a while for that
    now = 60.0
    wait_for(lambda: host.force_overdue() or (host.find(paths, 0) is None and not host.is_ending(paths, 0)))
    assert host.exit_status(paths, 0) == -signal.SIGKILL
    written = host.log_tail(paths, 0, 30)
    assert sum("in wait_for_ever" in line for line in written) == 2
    assert any("the agent ends this trainer" in line for line in written)
    assert not host.kill_hung(paths, 0)
