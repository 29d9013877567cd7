"""`python -m trainctl.node_agent.services.service_trial --folder DIR --runtime DIR`: tries an agent as a service.

It is a service of this user with a name of its own. Its files are in the two folders, and for systemd in a folder that
the system empties at shutdown. The service is started, killed, seen to be restarted, and removed, even if this process
is asked to end or its standard input ends. Standard output is one line, a `CheckOutcome`. Exit status 0 if the trial
was made, whatever it found.
"""

import argparse
import contextlib
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

from trainctl.node_agent.services import launchd, manager, model, systemd
from trainctl.protocol.client import local_agents
from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.client.local_agents import LocalAgent
from trainctl.protocol.errors import TrainctlError
from trainctl.protocol.machine.check_outcome import CheckOutcome, absent, failed, judged
from trainctl.protocol.machine.process_title import set_title

NODE: Final = "selftest"
WAIT_SECONDS: Final = 40.0
"""Time for the agent to start, and to start again: launchd waits 10 s between two starts."""
_CARRIED: Final = ("HOME", "PYTHONUSERBASE", "TMPDIR", "TRAINCTL_STATE", "TRAINCTL_KEYS", "TRAINCTL_CLUSTER")
"""Variables that the agent gets from this process, which keep it in the temporary home."""
_LOOK_SECONDS: Final = 0.2
_MOST_CHARACTERS: Final = 20_000


class ServiceTrial:
    """A service of this user with a name that nothing else has."""

    def __init__(self, folder: Path, runtime: Path, machine: model.Manager) -> None:
        """`runtime`: the folder of the agent's sockets."""
        self.machine, self._folder, self._runtime = machine, folder, runtime
        mark = f"{os.getpid()}-{secrets.token_hex(4)}"
        if machine == "systemd":
            self.name = f"trainctl-selftest-{mark}.service"
            own = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
            self.file = Path(own) / "systemd/user" / self.name
        else:
            self.name = f"trainctl.selftest.{mark}"
            self.file = folder / f"{self.name}.plist"

    def service(self) -> model.Service:
        """An agent in the trial's folder."""
        words: tuple[str, ...] = ("--name", NODE, "--state", str(self._folder / "state"))
        variables = {name: os.environ[name] for name in _CARRIED if name in os.environ}
        variables["XDG_RUNTIME_DIR"] = str(self._runtime)
        return model.Service(
            node=NODE, command=(*manager.own_command(), "run", *words), scope="user", user="",
            logs=self._folder / "logs", environment=tuple(sorted(variables.items())),
        )  # fmt: skip

    def install_steps(self) -> tuple[model.Step, ...]:
        """Steps that start it, without enabling it."""
        if self.machine == "systemd":
            write = model.Write(self.file, systemd.unit(self.service()).encode())
            start = [
                model.Call(systemd.systemctl("user", *words)) for words in (("daemon-reload",), ("start", self.name))
            ]
            return write, *start
        plist = launchd.plist(self.service(), self.name)
        domain = launchd.domain("user", os.getuid())
        return model.Write(self.file, plist), model.Call(("launchctl", "bootstrap", domain, str(self.file)))

    def removal_steps(self) -> tuple[model.Step, ...]:
        """Steps that leave nothing of it; one that finds nothing to do may fail."""
        if self.machine == "systemd":
            # The agent has nothing to save, and a hung one would delay `stop` by TimeoutStopSec.
            kill, stop, forget, reload = (
                model.Call(systemd.systemctl("user", *words), "there was nothing to remove")
                for words in (
                    ("kill", "-s", "KILL", self.name), ("stop", self.name), ("reset-failed", self.name),
                    ("daemon-reload",),
                )
            )  # fmt: skip
            return kill, stop, forget, model.Remove(self.file), reload
        target = f"{launchd.domain('user', os.getuid())}/{self.name}"
        gone = model.UntilFails(("launchctl", "print", target), WAIT_SECONDS)
        return model.Call(("launchctl", "bootout", target), "nothing is loaded"), gone, model.Remove(self.file)

    def question(self) -> tuple[str, ...]:
        """The command that prints the manager's state of it."""
        if self.machine == "systemd":
            return systemd.systemctl("user", "show", self.name)
        return "launchctl", "print", f"{launchd.domain('user', os.getuid())}/{self.name}"

    def state(self, text: str) -> model.State:
        """What the question's output says."""
        return systemd.state(text) if self.machine == "systemd" else launchd.state(text or None, "")


@contextlib.contextmanager
def _installed(trial: ServiceTrial) -> Iterator[None]:
    """Within, the service is loaded; after it, nothing of it is left. Raises ManagerError."""
    try:
        manager.carry_out(trial.install_steps())
        yield
    finally:
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            manager.carry_out(trial.removal_steps())
        finally:
            signal.signal(signal.SIGTERM, before)


def tried(folder: Path, runtime: Path, machine: model.Manager | None = None) -> CheckOutcome:
    """Make the trial. Not here where no manager runs this user's services. `machine`: None finds it."""
    try:
        trial = ServiceTrial(folder, runtime, machine or manager.manager_here())
    except TrainctlError as error:
        return absent(str(error))
    said = manager.answer(systemd.systemctl("user", "is-system-running")) if trial.machine == "systemd" else "yes"
    if not said.strip() or "offline" in said:
        return absent("systemd runs this machine, but no service manager of this user answers")
    figures: dict[str, Any] = {"manager": trial.machine}
    try:
        with _installed(trial):
            faults = _restarted(trial, figures)
    except TrainctlError as error:
        return failed(str(error), **figures)
    ended = _until(lambda: not _agents())
    faults += [] if ended else ["the agent still runs after its service was removed"]
    return judged(faults, f"{trial.machine}: started, answered, killed, restarted and removed", **figures)


def _restarted(trial: ServiceTrial, figures: dict[str, Any]) -> list[str]:
    """Faults of the service's life: it answers, and another process does after it was killed."""
    begun = time.monotonic()
    if not _until(lambda: _answers(_agents())):
        return [f"the agent didn't answer within {WAIT_SECONDS:g} s; {trial.machine} said: {_state(trial).detail}"]
    figures["start_seconds"] = round(time.monotonic() - begun, 2)
    first = _agents()[0].pid
    figures["question"] = manager.answer(trial.question())[:_MOST_CHARACTERS]
    state = _state(trial)
    faults = [] if state.pid == first else [f"{trial.machine} names process {state.pid}, but the agent is {first}"]
    psutil.Process(first).kill()
    begun = time.monotonic()
    if not _until(lambda: [one for one in _agents() if one.pid != first and _answers([one])]):
        return [*faults, f"the killed agent wasn't restarted within {WAIT_SECONDS:g} s: {_state(trial).detail}"]
    figures["restart_seconds"] = round(time.monotonic() - begun, 2)
    return faults


def _state(trial: ServiceTrial) -> model.State:
    return trial.state(manager.answer(trial.question()))


def _agents() -> list[LocalAgent]:
    """The trial's agents that run: those that registered in the trial's own state folder."""
    return [agent for cluster in local_agents.running() for agent in cluster if agent.node == NODE]


def _answers(agents: list[LocalAgent]) -> bool:
    for agent in agents:
        with contextlib.suppress(TrainctlError), BlockingClient(agent.address, by="selftest") as client:
            return client.facts().node == NODE
    return False


def _until(condition: Callable[[], Any]) -> bool:
    """Whether it became true in time."""
    due = time.monotonic() + WAIT_SECONDS
    while not condition():
        if time.monotonic() > due:
            return False
        time.sleep(_LOOK_SECONDS)
    return True


def _end_with_input() -> None:
    while sys.stdin.buffer.read(4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _ended(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(128 + signal.SIGTERM)


def main() -> int:
    """Make the trial and print its result; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m trainctl.node_agent.services.service_trial")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--runtime", type=Path, required=True)
    given = parser.parse_args()
    folder: Path = given.folder
    folder.mkdir(parents=True, exist_ok=True)
    set_title("self-test", "service")
    os.environ["TRAINCTL_STATE"] = str(folder / "state")
    signal.signal(signal.SIGTERM, _ended)
    threading.Thread(target=_end_with_input, daemon=True).start()
    print(msgspec.json.encode(tried(folder, given.runtime)).decode(), flush=True)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
