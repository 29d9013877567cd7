"""The shim and its title: who runs is on disk before it runs, how it ended after, whatever signals come its way."""

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.conftest import MARK
from tests.node_agent.support.processes import ENVIRONMENT, wait_for
from tests.waiting import HANG_SECONDS

from trainctl.protocol.machine import shim
from trainctl.protocol.machine.process_title import role_of

PR_CAPBSET_DROP, CAP_SYS_NICE = 24, 23


class Kept:
    """A shim at work in a folder."""

    def __init__(self, folder: Path, *command: str, options: tuple[str, ...] = (), **popen: Any) -> None:
        self.record, self.log = folder / "rank-0.process.json", folder / "rank-0.log"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trainctl.protocol.machine.shim", "--record", str(self.record),
             "--log", str(self.log), *options, "--", *command],
            env=ENVIRONMENT, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **popen,
        )  # fmt: skip

    def known(self) -> dict[str, Any]:
        return json.loads(self.record.read_text()) if self.record.exists() else {}

    def running(self) -> dict[str, Any]:
        return wait_for(self.known)

    def ended(self) -> dict[str, Any]:
        _, self.errors = self.process.communicate(timeout=HANG_SECONDS)
        return self.known()


@pytest.fixture
def keep(tmp_path: Path) -> Iterator[Callable[..., Kept]]:
    made: list[Kept] = []

    def start(*command: str, **options: Any) -> Kept:
        made.append(Kept(tmp_path, *command, **options))
        return made[-1]

    yield start
    for kept in made:
        pid = kept.known().get("pid")
        if pid and kept.process.poll() is None and psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)
        kept.process.kill() if kept.process.poll() is None else None
        kept.process.communicate(timeout=HANG_SECONDS)


def test_who_runs_and_how_it_ended(keep: Callable[..., Kept], tmp_path: Path) -> None:
    (tmp_path / "rank-0.log").write_text("from before\n")
    began_at = time.time()
    code = "import json; print(json.load(open('rank-0.process.json'))['pid']); import sys; sys.exit(3)"
    known = keep("/bin/sh", "-c", f'cd {tmp_path} && exec {sys.executable} -c "{code}"').ended()
    assert known["exit_status"] == 3 and known["command"][0] == "/bin/sh"
    assert known["boot_id"] == shim.boot_id() != ""
    assert began_at <= known["started_at"] <= known["ended_at"] <= time.time()
    # The command itself read its own pid in the record: it was written before the command began.
    assert (tmp_path / "rank-0.log").read_text() == f"from before\n{known['pid']}\n"


def test_while_it_runs_the_record_names_it_and_signals_for_the_agent_end_neither(keep: Callable[..., Kept]) -> None:
    kept = keep("sleep", "60")
    known = kept.running()
    assert "exit_status" not in known and "ended_at" not in known
    assert known["keeper_pid"] == kept.process.pid
    assert shim.start_time(known["pid"]) == known["start_time"] is not None
    assert os.getsid(known["pid"]) == kept.process.pid != os.getsid(0)
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
        kept.process.send_signal(number)
    # The same signal still ends the command: the shim doesn't hand down its own deafness.
    wait_for(lambda: psutil.Process(known["pid"]).cmdline() == ["sleep", "60"])
    assert kept.process.poll() is None
    os.kill(known["pid"], signal.SIGTERM)
    assert kept.ended() == {**known, "exit_status": -signal.SIGTERM, "ended_at": kept.known()["ended_at"]}
    assert kept.process.returncode == 0


def test_a_signal_that_comes_before_the_command_has_begun_still_ends_it(keep: Callable[..., Kept]) -> None:
    for _ in range(12):
        kept = keep("sleep", "60")
        while not kept.record.exists():  # no pause: the first moment at which the pid is known
            assert kept.process.poll() is None
        os.kill(kept.known()["pid"], signal.SIGTERM)
        assert kept.ended()["exit_status"] == -signal.SIGTERM
        kept.record.unlink()


def test_the_command_reads_nothing_and_ignores_only_the_signal_for_stacks(keep: Callable[..., Kept]) -> None:
    kept = keep("/bin/sh", "-c", "wc -c; grep SigIgn /proc/self/status || echo 'SigIgn: 0'")
    assert kept.ended()["exit_status"] == 0
    count, ignored = kept.log.read_text().splitlines()
    assert count.strip() == "0"
    stacks = 1 << (shim.STACKS_SIGNAL - 1) if sys.platform == "linux" else 0
    assert int(ignored.split()[-1], 16) & 0x7FFFFFFF == stacks  # 32 and up are the C library's own


def test_a_command_that_is_not_there_and_a_record_that_cannot_be_written(
    keep: Callable[..., Kept], tmp_path: Path
) -> None:
    kept = keep("/no/such/program")
    assert kept.ended()["exit_status"] == shim.CANNOT_EXECUTE
    assert kept.log.read_text() == "shim: /no/such/program: No such file or directory\n"
    tmp_path = tmp_path / "other"
    (tmp_path / "rank-0.process.json").mkdir(parents=True)  # cannot be replaced by a file
    kept = Kept(tmp_path, "/bin/sh", "-c", f"touch {tmp_path}/began")
    _, errors = kept.process.communicate(timeout=HANG_SECONDS)
    assert kept.process.returncode == 1 and errors.startswith("shim: ") and errors.count("\n") == 1
    assert not (tmp_path / "began").exists()


def test_start_time_of_the_living_the_dead_and_the_undead_whatever_their_name(tmp_path: Path) -> None:
    odd = tmp_path / "a) R 1 (b"
    odd.symlink_to("/bin/sleep")
    child = subprocess.Popen([str(odd), "60"])
    began = wait_for(lambda: shim.start_time(child.pid))
    assert began == pytest.approx(shim.start_time(os.getpid()), abs=360_000)  # within the hour, in ticks
    child.kill()
    # A killed child that nobody has waited for is a zombie: its pid exists, and it is dead.
    wait_for(lambda: shim.start_time(child.pid) is None)
    assert psutil.pid_exists(child.pid)
    child.wait(HANG_SECONDS)
    assert shim.start_time(child.pid) is None


def test_a_priority_is_the_shims_and_of_all_that_is_started(keep: Callable[..., Kept]) -> None:
    wanted = min(os.getpriority(os.PRIO_PROCESS, 0) + 3, 19)
    kept = keep("/bin/sh", "-c", "nice; exec sleep 60", options=("--nice", str(wanted)))
    pid = kept.running()["pid"]
    assert wait_for(kept.log.read_text).split() == [str(wanted)]
    assert psutil.Process(kept.process.pid).nice() == psutil.Process(pid).nice() == wanted
    os.kill(pid, signal.SIGKILL)
    kept.ended()


def may_not_be_hasty() -> None:
    """In a child, take away root's right to any priority. Another user has none to lose."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_SYS_NICE, 0, 0, 0)
        resource.setrlimit(resource.RLIMIT_NICE, (0, 0))


def test_a_priority_that_is_not_permitted_begins_nothing_and_says_so(keep: Callable[..., Kept], tmp_path: Path) -> None:
    kept = keep("/bin/sh", "-c", f"touch {tmp_path}/began", options=("--nice", "-20"), preexec_fn=may_not_be_hasty)
    assert kept.ended() == {} and kept.process.returncode == 1
    assert kept.errors == "shim: priority -20 is not permitted: Permission denied\n"
    assert not (tmp_path / "began").exists()


def test_a_node_refuses_a_priority_that_it_may_not_have() -> None:
    code = """if True:
        from trainctl.node_agent.runs.preflight import check_priority
        check_priority(19, "nodes.box.priority")
        check_priority(-20, "nodes.box.priority")
    """
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, preexec_fn=may_not_be_hasty)
    assert "InvalidInputError: nodes.box.priority: -20 is not permitted here; use " in done.stderr


def test_a_log_does_not_grow_without_end_while_the_command_writes_on(keep: Callable[..., Kept]) -> None:
    code = """if True:
        import itertools, time
        for number in itertools.count():
            print(f"{number:09} " + "x" * 990, flush=True)
            time.sleep(0.0005)
    """
    limit = 200_000
    kept = keep(sys.executable, "-c", code, options=("--log-limit", str(limit)))
    older = kept.log.with_name("rank-0.log.1")
    pid = kept.running()["pid"]
    first = wait_for(lambda: older.exists() and older.read_bytes())
    begun_again = kept.log.stat().st_size
    wait_for(lambda: older.read_bytes() != first)  # and again, in the same file and with the same writer
    os.kill(pid, signal.SIGKILL)
    kept.ended()
    again = older.read_bytes()
    assert begun_again < limit * 20 and len(first) <= len(again) + limit
    for text in (first, again):
        numbers = [int(line[:9]) for line in text.splitlines()]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))  # whole lines, none missing
        assert text.endswith(b"x\n")


def test_only_the_end_of_a_log_far_over_its_limit_is_kept(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text("".join(f"{number:07}\n" for number in range(1000)))
    shim.bound_log(log, 8000)
    assert log.stat().st_size == 8000  # at its limit: nothing is done
    shim.bound_log(log, 79)
    kept = log.with_name("rank-0.log.1").read_text().splitlines()
    assert kept == [f"{number:07}" for number in range(991, 1000)] and log.read_text() == ""
    shim.bound_log(tmp_path / "none.log", 10)  # not there: nothing to bound
    log.write_text("x" * 100)
    log.with_name("rank-0.log.1.new").mkdir()  # as good as a disk without room
    shim.bound_log(log, 10)
    assert log.read_text() == "", "it is bounded though its end can't be kept"


class ProcBsdInfo(ctypes.Structure):
    """As <sys/proc_info.h> of macOS declares it."""

    _fields_ = (
        ("numbers", ctypes.c_uint32 * 12), ("names", ctypes.c_char * 48), ("more_numbers", ctypes.c_uint32 * 6),
        ("start_seconds", ctypes.c_uint64), ("start_microseconds", ctypes.c_uint64),
    )  # fmt: skip


def test_the_start_time_stands_where_macos_puts_it() -> None:
    info = ProcBsdInfo(start_seconds=1_800_000_000, start_microseconds=250_000)
    assert shim._PROCESS_FACTS.unpack(bytes(info)) == (1_800_000_000, 250_000)


LONG = "x" * 200
"""Room for a title: a command line is as long as it was."""


def run(script: str, *words: str) -> Any:
    """Run a script, and return the JSON that it prints."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", textwrap.dedent(script), *words]
    return json.loads(subprocess.check_output(command, env=environment, timeout=HANG_SECONDS))


@pytest.mark.needs("ps")
def test_a_title_is_what_ps_shows_and_a_fork_keeps_whose_it_is() -> None:
    said = run(
        """
        import json, os, psutil, subprocess, sys
        from trainctl.protocol.machine.process_title import set_title
        def shown():
            ps = ["ps", "-o", "args=", "-p", str(os.getpid())]
            mark = psutil.Process().environ().get(sys.argv[1])
            return subprocess.run(ps, capture_output=True, text=True).stdout.strip(), mark
        set_title("trainer", "rank 1 of r-1")
        first, (reading, writing) = shown(), os.pipe()
        if os.fork() == 0:
            set_title("standby reducer")
            before = shown()
            set_title("reducer", more="g1.3")
            os.write(writing, json.dumps([before, shown()]).encode())
            os._exit(0)
        os.wait()
        print(json.dumps([first, *json.loads(os.read(reading, 4096)), shown()]))
        """,
        MARK,
        LONG,
    )
    trainer = "trainctl: trainer rank 1 of r-1"
    titles = [trainer, "trainctl: standby reducer rank 1 of r-1", "trainctl: reducer rank 1 of r-1 g1.3", trainer]
    assert said == [[title, os.environ[MARK]] for title in titles]


def test_a_long_title_is_cut_and_the_environment_stays_whole_here_and_in_processes_started() -> None:
    before, after, title, mark, length = run(
        """
        import json, os, psutil, subprocess, sys
        from trainctl.protocol.machine.process_title import set_title
        def of_a_child():
            code = "import json, os; print(json.dumps(dict(os.environ)))"
            return json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True).stdout)
        before, process = of_a_child(), psutil.Process()
        set_title("trainer", "y" * 5000)
        title, mark = " ".join(process.cmdline()).strip(), process.environ().get(sys.argv[1])
        length = sum(len(os.fsencode(word)) + 1 for word in sys.orig_argv)
        print(json.dumps([before, of_a_child(), title, mark, length]))
        """,
        MARK,
    )
    assert title.startswith("trainctl: trainer yyy")
    assert length - 4 <= len(title) < length
    assert mark == os.environ[MARK]
    assert after == before


@pytest.mark.needs("linux")  # it reads this process's memory as Linux shows it
@pytest.mark.parametrize("whose", ["rank 1 of r", "z" * 5000])
def test_on_macos_as_many_zero_bytes_are_left_before_the_environment_as_there_were_arguments(whose: str) -> None:
    """The system finds an environment there."""
    zeros, words, begins = run(
        """
        import json, sys
        from pathlib import Path
        import logging, setproctitle
        from trainctl.protocol.machine.process_title import set_title
        sys.platform = "darwin"
        set_title("trainer", sys.argv[1][:5000])
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        first, end = int(fields[45]), int(fields[46])
        with open("/proc/self/mem", "rb") as memory:
            memory.seek(first)
            arguments = memory.read(end - first)
        print(json.dumps([arguments.count(0), len(sys.orig_argv), arguments.decode()[:17]]))
        """,
        whose,
        LONG,
    )
    assert zeros == words
    assert begins == "trainctl: trainer"


def test_a_role_is_read_from_a_title_only() -> None:
    assert role_of(["trainctl: fork server rank 0 of r", "", ""]) == "fork server"
    assert role_of(["trainctl:", "standby", "reducer", "rank", "0", "of", "r"]) == "standby reducer"
    assert role_of(["python", "-m", "trainctl.trainer.collective.reducer", "--whose", "rank 0 of r"]) == ""
    assert role_of([]) == ""
    # The library is loaded by those that are shown only.
    loaded = "import json, sys, trainctl.protocol.machine.process_title, trainctl.tui.cli.main; "
    assert run(loaded + "print(json.dumps('setproctitle' in sys.modules))") is False


def test_an_idle_mac_stays_awake_as_long_as_the_process_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, notes = tmp_path / "bin" / "caffeinate", tmp_path / "notes"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" $$ >> {notes}\nexec tail -f /dev/null --pid="$3"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    with subprocess.Popen(["sleep", "60"]) as trainer:
        try:
            shim.keep_awake(trainer.pid, "linux")
            shim.keep_awake(trainer.pid, "darwin")
            wait_for(lambda: notes.exists() and notes.read_text().endswith("\n"))
            *words, pid = notes.read_text().split()
            assert words == ["-i", "-w", str(trainer.pid)]
            assert os.getsid(int(pid)) == int(pid) != os.getsid(0)  # what ends the shim's group doesn't end it
        finally:
            trainer.kill()
    wait_for(lambda: shim.start_time(int(pid)) is None)
