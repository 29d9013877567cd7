"""`trainctl-agent`: with `run` and no service manager, a supervisor that starts the agent again whenever it is killed.

The supervisor is a process with no sockets and hardly an import, and little that could go wrong with it. Its child runs
`python -m trainctl.node_agent.cli` in a process group of its own, so that what a terminal sends to the group arrives
once: here, and from here at the agent.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from trainctl.protocol.errors import CRASH_STATUS
from trainctl.protocol.machine.process_title import set_title

PASSED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
STEADY_SECONDS = 5.0
"""An agent that has run for this long is started again at once."""
MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.5, 30.0


def has_service_manager(environment: Mapping[str, str], pid: int, parent: int) -> bool:
    """Return whether systemd, launchd or a container starts process `pid` again, and expects it to be the agent.

    A desktop's terminals inherit INVOCATION_ID from the service that they run in, and XPC_SERVICE_NAME in the same way.
    """
    if pid == 1 or "NOTIFY_SOCKET" in environment:
        return True
    if "INVOCATION_ID" in environment and environment.get("SYSTEMD_EXEC_PID", str(pid)) == str(pid):
        return True
    return environment.get("XPC_SERVICE_NAME", "0") != "0" and parent == 1


class Supervisor:
    """Runs one agent until it ends by itself or by a signal that was passed on to it."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """`arguments`: those of `trainctl-agent`, from `run` on."""
        self._arguments = [*arguments]
        self._agent: subprocess.Popen[bytes] | None = None
        self._is_ready = False  # whether it has said where it listens
        self._has_served = False  # whether one ever has: until then, an error is the answer to a person
        self._output = b""  # of the agent until it is ready
        self._is_ending = False  # whether a signal was passed on
        self._began = time.monotonic()
        self._pause_seconds = 0.0
        self._signals, self._wakeup = os.pipe()
        os.set_blocking(self._wakeup, False)

    def run(self) -> int:
        """Return the exit status of the last agent, 128 and the number of the signal for one that a signal ended."""
        signal.set_wakeup_fd(self._wakeup)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in PASSED_ON:
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
                signal.signal(number, lambda *_: None)
        while True:
            status = self._run_agent()
            if not self._starts_again(status):
                return status if status >= 0 else 128 - status
            self._wait_before_restart(status)
            if self._is_ending:
                return 0

    def _run_agent(self) -> int:
        self._began, self._is_ready, self._output = time.monotonic(), False, b""
        command = [sys.executable, "-P", "-m", "trainctl.node_agent.cli", *self._arguments]
        self._agent = subprocess.Popen(command, stdout=subprocess.PIPE, process_group=0)
        assert self._agent.stdout is not None
        with self._agent.stdout as output:
            watched = [output.fileno(), self._signals]
            while (status := self._agent.poll()) is None:
                if output.fileno() in select.select(watched, [], [])[0] and not self._pass_output_on(output.fileno()):
                    watched.remove(output.fileno())
                self._pass_signals_on()
            while select.select([output], [], [], 0)[0] and self._pass_output_on(output.fileno()):
                pass
        return status

    def _pass_output_on(self, output: int) -> bool:
        """Return False at the end of the agent's output. Its first line says where it listens: its successors have to
        listen there too."""
        data = os.read(output, 65536)
        _write(sys.stdout.fileno(), data)
        self._output += data if not self._is_ready else b""
        if not self._is_ready and self._output.startswith(b"{") and b"\n" in self._output:
            self._is_ready, bound = True, json.loads(self._output.partition(b"\n")[0])
            if not self._has_served:
                self._has_served = True
                self._arguments += ["--listen", bound["listen"], "--live", bound["live"]]
                set_title("agent supervisor", f"of {bound['name']}")
        return bool(data)

    def _pass_signals_on(self, seconds: float = 0.0) -> None:
        """Pass on what has arrived, or arrives within `seconds`, to the agent, if it lives."""
        if not select.select([self._signals], [], [], seconds)[0]:
            return
        for number in os.read(self._signals, 64):
            if number in PASSED_ON:
                self._is_ending = True
                if self._agent is not None:
                    self._agent.send_signal(number)  # nothing happens to one that has ended

    def _starts_again(self, status: int) -> bool:
        """Return whether the agent was killed, crashed or hung, or a successor could not start.

        An agent that returned any other status was asked to end, or had nothing left to do.
        """
        if self._is_ending or not self._has_served or -status in PASSED_ON:
            return False
        return status < 0 or status == CRASH_STATUS or not self._is_ready

    def _wait_before_restart(self, status: int) -> None:
        how = signal.Signals(-status).name if status < 0 else f"status {status}"
        if time.monotonic() - self._began >= STEADY_SECONDS:
            self._pause_seconds = 0.0
        pause = f" in {self._pause_seconds:g} s" if self._pause_seconds else ""
        text = f"trainctl-agent: the agent ended with {how}; starting it again{pause}\n"
        _write(sys.stderr.fileno(), text.encode())
        until = time.monotonic() + self._pause_seconds
        while (left := until - time.monotonic()) > 0 and not self._is_ending:
            self._pass_signals_on(left)
        self._pause_seconds = min(max(2 * self._pause_seconds, MIN_PAUSE_SECONDS), MAX_PAUSE_SECONDS)


def _write(descriptor: int, data: bytes) -> None:
    with contextlib.suppress(OSError):  # the reader may have gone
        os.write(descriptor, data)


def main() -> int:
    """Run the program, supervised if it is the agent and nothing else starts it again."""
    if (
        sys.argv[1:2] == ["run"]
        and "--detach" not in sys.argv
        and not has_service_manager(os.environ, os.getpid(), os.getppid())
    ):
        set_title("agent supervisor")
        return Supervisor(sys.argv[1:]).run()
    from trainctl.node_agent import cli

    return cli.leave(cli.main())


if __name__ == "__main__":
    sys.exit(main())
