"""The parent of a trainer: outlives the agent, and keeps in a file who the trainer is and how it ended.

`python -m trainctl.protocol.machine.shim --record FILE --log FILE [--nice N] -- CMD...`. Standard library only (but
for its title), so that it stays small. It also keeps LOG from growing without end. FILE is written before CMD begins,
so no trainer ever runs unknown: {"pid", "start_time", "boot_id", "command", "started_at", "keeper_pid",
"stacks_signal"}, and at its end also {"exit_status" (negative: the signal), "ended_at"}. Times are Unix seconds;
`start_time` is the system's own mark of a process, for comparing only.
"""

import argparse
import contextlib
import errno
import functools
import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from trainctl.protocol.files.durable_files import write_file

NOT_FOR_US = (signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
STACKS_SIGNAL = signal.SIGUSR2
"""On it a trainer writes the stacks of all its threads to its log, also while it hangs."""
CANNOT_EXECUTE = 127
"""Exit status of a command that could not be started, the same as a shell's."""
LOG_LIMIT_BYTES = 16 * 1024 * 1024
"""Bytes above which a log starts again; its last part is kept beside it as LOG.1."""
LOG_LOOK_SECONDS = 2.0
_PIECE_BYTES = 1024 * 1024
_PROCESS_FACTS = struct.Struct("=120xQQ")
"""The end of macOS's `proc_bsdinfo`: seconds and microseconds at which a process began."""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="shim", description="Run a command and record how it ended.")
    parser.add_argument("--record", type=Path, required=True, help="file that records the process and how it ended")
    parser.add_argument("--log", type=Path, required=True, help="log file to append the command's output to")
    parser.add_argument("--log-limit", type=int, default=LOG_LIMIT_BYTES, metavar="BYTES", help="maximum log size")
    parser.add_argument("--nice", type=int, metavar="N", help="nice value of the command and its children")
    parser.add_argument("command", nargs="+", help="command to run, after --")
    options = parser.parse_args(argv)
    _leave_session()
    # Handlers, not SIG_IGN: an ignored signal would stay ignored in the command.
    for number in NOT_FOR_US:
        signal.signal(number, _stay)
    try:
        if options.nice is not None:
            be_nice(options.nice)
        keep(options.command, options.record, options.log, options.log_limit)
    except OSError as error:
        print(f"shim: {error}", file=sys.stderr)
        return 1
    return 0


def be_nice(value: int) -> None:
    """Run at this nice value from here on. Raises OSError if it is below this process's own and not permitted."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, value)
    except OSError as error:
        raise OSError(f"priority {value} is not permitted: {error.strerror}") from None


def keep(command: list[str], record: Path, log: Path, log_limit: int = LOG_LIMIT_BYTES) -> None:
    """Run `command` to its end. Raises OSError if the log or the record cannot be written."""
    go_read, go_write = os.pipe()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    # Held back over the fork, or one that comes before the command begins would meet the shim's handler and be lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, NOT_FOR_US)
    pid = os.fork()
    if pid == 0:
        os.close(go_write)
        _become(command, go_read, output)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NOT_FOR_US)
    os.close(go_read)
    os.close(output)
    known: dict[str, Any] = {
        "pid": pid,
        "start_time": start_time(pid),
        "boot_id": boot_id(),
        "command": command,
        "started_at": time.time(),
        "keeper_pid": os.getpid(),
        "stacks_signal": int(STACKS_SIGNAL),
    }
    threading.Thread(target=_watch_log, args=(log, log_limit), name="log", daemon=True).start()
    try:
        write_record(record, known)
        with contextlib.suppress(BrokenPipeError):  # ended by someone who read the record before it could begin
            os.write(go_write, b"g")
        _show_title(record)
        keep_awake(pid)
    finally:
        os.close(go_write)  # without a record the child reads the end of the pipe, and ends
        _, status = os.waitpid(pid, 0)
    write_record(record, {**known, "exit_status": os.waitstatus_to_exitcode(status), "ended_at": time.time()})


def _become(command: list[str], go: int, output: int) -> None:
    """In the child: wait for the word, then be the command."""
    try:
        # Python ignores the last two, and so would the command.
        for number in (*NOT_FOR_US, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, NOT_FOR_US)
        if os.read(go, 1):
            nothing = os.open(os.devnull, os.O_RDONLY)
            signal.signal(STACKS_SIGNAL, signal.SIG_IGN)  # until the trainer has set its handler
            for ours, its in ((nothing, 0), (output, 1), (output, 2)):
                os.dup2(ours, its)
            os.execvp(command[0], command)  # noqa: S606  no shell is what we want
    except OSError as error:
        os.write(output, f"shim: {command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(CANNOT_EXECUTE)


def _show_title(record: Path) -> None:
    """After the fork: before it a title isn't safe on macOS. Whatever fails here, the trainer's end is written down."""
    with contextlib.suppress(Exception):
        from trainctl.protocol.machine.process_title import set_title

        rank = record.name.partition(".")[0].replace("-", " ")
        set_title("trainer parent", f"{rank} of {record.absolute().parent.name}")


def keep_awake(pid: int, platform: str = sys.platform) -> None:
    """Keep an idle Mac from sleep as long as a process lives; on other systems, do nothing."""
    if platform == "darwin":
        words, nothing = ["caffeinate", "-i", "-w", str(pid)], subprocess.DEVNULL
        with contextlib.suppress(OSError):
            subprocess.Popen(words, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True)


def _watch_log(log: Path, limit: int) -> None:
    while True:
        time.sleep(LOG_LOOK_SECONDS)
        bound_log(log, limit)


def bound_log(log: Path, limit: int) -> None:
    """Keep the end of a log that is over `limit` bytes as LOG.1, and begin it again while others add to it: they opened
    it to append. A line written in the very moment between the two is lost."""
    kept = log.with_name(f"{log.name}.1")
    fresh = kept.with_name(f"{kept.name}.new")
    with contextlib.suppress(OSError):
        size = log.stat().st_size
        if size <= limit:
            return
        try:
            _copy_end(log, fresh, size - limit)
        finally:  # on a full disk too
            os.truncate(log, 0)
        fresh.replace(kept)
        return
    with contextlib.suppress(OSError):
        fresh.unlink(missing_ok=True)


def _copy_end(source: Path, target: Path, begin: int) -> None:
    """From the first line that begins past `begin` on."""
    with source.open("rb") as reading, target.open("wb") as writing:
        reading.seek(begin)
        reading.readline(_PIECE_BYTES)
        while piece := reading.read(_PIECE_BYTES):
            writing.write(piece)


def _leave_session() -> None:
    try:
        os.setsid()
    except PermissionError:
        return  # already the leader of its own


def _stay(_number: int, _frame: object) -> None:
    """A signal meant for the agent's group."""


def write_record(path: Path, known: dict[str, Any]) -> None:
    """Replace the file at once, so that a reader sees the old or the new one whole. Raises OSError."""
    write_file(path, json.dumps(known).encode())


def start_time(pid: int) -> float | None:
    """Return when a live process began, in this system's own unit; None if there is none, or it is dead but not yet
    reaped.

    Raises OSError if this process has too many files open to tell.
    """
    if not sys.platform.startswith("linux"):
        return _start_time_on_macos(pid)
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        if error.errno in NO_DESCRIPTORS:
            raise
        return None
    # Field 2, the name, may hold spaces and parentheses; field 3 is the state and field 22 the start in clock ticks.
    fields = stat[stat.rfind(")") + 1 :].split()
    return None if len(fields) < 20 or fields[0] in "ZXx" else float(fields[19])


def _start_time_on_macos(pid: int) -> float | None:
    import ctypes

    buffer = ctypes.create_string_buffer(_PROCESS_FACTS.size)
    # Flavor 3 is PROC_PIDTBSDINFO. It finds no zombie, and no process of another user.
    size = ctypes.CDLL(None).proc_pidinfo(pid, 3, ctypes.c_uint64(0), buffer, _PROCESS_FACTS.size)
    if size != _PROCESS_FACTS.size:
        return None
    seconds, microseconds = _PROCESS_FACTS.unpack(buffer.raw)
    return float(seconds + microseconds / 1e6)


@functools.cache
def boot_id() -> str:
    """Return what distinguishes this boot of the machine from any other: a pid means nothing in the next one."""
    global _boot_id  # it is asked for several times a second, and stays the same as long as this process lives
    _boot_id = _boot_id or _read_boot_id()
    return _boot_id


_boot_id = ""


def _read_boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        pass
    for name in ("kern.bootsessionuuid", "kern.boottime"):
        asked = subprocess.run(["/usr/sbin/sysctl", "-n", name], capture_output=True, text=True, check=False)
        if asked.returncode == 0 and asked.stdout.strip():
            return asked.stdout.strip()
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
