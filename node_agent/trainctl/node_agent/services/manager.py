"""This machine's service manager: what it is, what it says, and how steps are carried out on it."""

import contextlib
import os
import pwd
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import psutil

from trainctl.node_agent.services import launchd, model, systemd
from trainctl.protocol.errors import NotAuthorisedError, TrainctlError
from trainctl.protocol.files.durable_files import make_folder, write_file

SETTLE_SECONDS = 15.0
"""Seconds to wait for a started service before it is reported as not running."""
BOOTED = Path("/run/systemd/system")
"""Folder that exists where systemd runs the machine, according to sd_booted(3)."""
_CALL_SECONDS = 180.0
_LOOK_SECONDS = 0.25


class NoManagerError(TrainctlError):
    """Neither systemd nor launchd runs this machine, or this user's can't be reached; nothing was done."""

    exit_code = 7


class ManagerError(TrainctlError):
    """systemctl or launchctl failed."""


class Found(NamedTuple):
    """What there is of the service."""

    file: Path
    data: bytes | None  # of the file; None: there is none
    state: model.State
    since: float | None  # Unix seconds at which the agent's process began

    def own(self, manager: model.Manager) -> model.Installed | None:
        """What the file says of itself."""
        if self.data is None:
            return None
        return systemd.installed(self.data) if manager == "systemd" else launchd.installed(self.data)


class Machine:
    """A machine as its manager and one scope see it. `root`: where its files begin."""

    def __init__(self, scope: model.Scope, manager: model.Manager | None = None, root: Path = Path("/")) -> None:
        """`manager`: None finds it. Raises NoManagerError."""
        self.scope, self.manager, self._root = scope, manager or manager_here(), root

    @property
    def service(self) -> str:
        """What the manager calls it."""
        return systemd.NAME if self.manager == "systemd" else launchd.LABEL

    @property
    def file(self) -> Path:
        """Where the unit or property list belongs."""
        if self.manager == "systemd":
            if self.scope == "system":
                return self._root / "etc/systemd/system" / systemd.NAME
            config = os.environ.get("XDG_CONFIG_HOME")
            return (Path(config) if config else Path.home() / ".config") / "systemd/user" / systemd.NAME
        if self.scope == "system":
            return self._root / "Library/LaunchDaemons" / launchd.FILE_NAME
        return Path.home() / "Library/LaunchAgents" / launchd.FILE_NAME

    def look(self) -> Found:
        """What there is now. Raises NotAuthorisedError, NoManagerError or ManagerError."""
        try:
            data = self.file.read_bytes()
        except FileNotFoundError:
            data = None
        except OSError as error:
            raise NotAuthorisedError(f"{self.file}: {error.strerror}") from None
        state = self._state()
        since = None
        if state.pid is not None:
            with contextlib.suppress(psutil.Error):
                since = psutil.Process(state.pid).create_time()
        return Found(self.file, data, state, since)

    def _state(self) -> model.State:
        if self.manager == "systemd":
            done = _run(systemd.question(self.scope))
            if done.returncode:
                raise NoManagerError(_failure(systemd.question(self.scope), done))
            return systemd.state(done.stdout)
        done = _run(launchd.question(self.scope, os.getuid()))
        disabled = _run(launchd.disabled_question(self.scope, os.getuid())).stdout
        return launchd.state(done.stdout if done.returncode == 0 else None, disabled)

    def install_steps(self, service: model.Service, found: Found) -> tuple[model.Step, ...]:
        """What is to be done for `service` to run here."""
        if self.manager == "systemd":
            lingering = self.scope == "system" or systemd.lingers(answer(systemd.linger_question(service.user)))
            return systemd.install_steps(service, found.file, found.data, found.state, lingering=lingering)
        return launchd.install_steps(service, found.file, found.data, found.state, os.getuid())

    def uninstall_steps(self, found: Found) -> tuple[model.Step, ...]:
        """What is to be done for nothing of the service to be here but what it has made."""
        if self.manager == "systemd":
            return systemd.uninstall_steps(self.scope, found.file, found.data, found.state)
        return launchd.uninstall_steps(self.scope, found.file, found.data, found.state, os.getuid())

    def settled(self, seconds: float = SETTLE_SECONDS) -> Found:
        """What there is once the service runs, or else after so long."""
        due = time.monotonic() + seconds
        while not (found := self.look()).state.running and time.monotonic() < due:
            time.sleep(_LOOK_SECONDS)
        return found

    def check_allowed(self) -> None:
        """Raises NotAuthorisedError if this user can't install for the whole machine."""
        if self.scope == "system" and os.geteuid() != 0 and self._root == Path("/"):
            raise NotAuthorisedError(
                f"a system service needs root: run sudo {' '.join(own_command())} ..., or use --user"
            )


def own_command() -> tuple[str, str, str, str]:
    """How this program is called from anywhere, in a virtual environment too: its interpreter by the path that was
    called, for the file behind it knows nothing of the environment; -P keeps the current folder out of its imports."""
    return sys.executable, "-P", "-m", "trainctl.node_agent.cli"


def carry_out(steps: Iterable[model.Step]) -> tuple[model.Step, ...]:
    """All steps in turn; gives those that failed and may. Raises ManagerError for another."""
    failed = []
    for step in steps:
        try:
            if not _carry_out(step):
                failed.append(step)
        except OSError as error:
            raise ManagerError(f"{error.filename or step}: {error.strerror}") from None
    return tuple(failed)


def _carry_out(step: model.Step) -> bool:
    match step:
        case model.Write():
            _write(step.path, step.data)
        case model.Folder():
            _make_folder(step.path, step.user)
        case model.Remove():
            step.path.unlink(missing_ok=True)
        case model.Call():
            done = _run(step.words)
            if done.returncode:
                if not step.else_say:
                    raise ManagerError(_failure(step.words, done))
                return False
        case model.UntilFails():
            _until_fails(step)
    return True


def _write(path: Path, data: bytes) -> None:
    make_folder(path.parent)
    write_file(path, data, 0o644)  # both managers want to read it as others


def _make_folder(path: Path, user: str) -> None:
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=0o700)
        if os.geteuid() == 0:
            known = pwd.getpwnam(user)
            os.chown(folder, known.pw_uid, known.pw_gid)


def _until_fails(step: model.UntilFails) -> None:
    due = time.monotonic() + step.seconds
    while _run(step.words).returncode == 0:
        if time.monotonic() > due:
            raise ManagerError(f"{' '.join(step.words)}: still there after {step.seconds:g} s")
        time.sleep(_LOOK_SECONDS)


def _run(words: tuple[str, ...]) -> "subprocess.CompletedProcess[str]":
    env = dict(os.environ)
    runtime = Path(f"/run/user/{os.getuid()}")
    if "XDG_RUNTIME_DIR" not in env and runtime.is_dir():  # where `systemctl --user` finds its manager
        env["XDG_RUNTIME_DIR"] = str(runtime)
    try:
        return subprocess.run(
            words, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=_CALL_SECONDS, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        raise ManagerError(f"{words[0]} is not on PATH") from None
    except subprocess.TimeoutExpired:
        raise ManagerError(f"{' '.join(words)}: did not finish within {_CALL_SECONDS:g} s") from None


def answer(words: tuple[str, ...]) -> str:
    """What a question that may fail says; nothing then."""
    with contextlib.suppress(ManagerError):
        return _run(words).stdout
    return ""


def _failure(words: tuple[str, ...], done: "subprocess.CompletedProcess[str]") -> str:
    said = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    return f"{' '.join(words)}: {said[0] if said else f'exit status {done.returncode}'}"


def manager_here() -> model.Manager:
    """What runs this machine's services. Raises NoManagerError."""
    if sys.platform == "darwin":
        return "launchd"
    if BOOTED.is_dir():
        return "systemd"
    raise NoManagerError(
        "this machine has neither systemd nor launchd; start `trainctl-agent run` with your own service manager "
        "(install --dry-run --manager systemd, or launchd, prints a service file to adapt)"
    )
