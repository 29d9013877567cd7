"""This machine's service manager: where it keeps the agent's file, what it says about the service, and its commands."""

import os
import pwd
import re
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from trainctl.node_agent.services.service_file import LABEL, UNIT, Scope, Service, content, own_command
from trainctl.protocol.errors import NotAuthorisedError, TrainctlError
from trainctl.protocol.files.durable_files import make_folder, write_file

SETTLE_SECONDS = 15.0
"""Seconds to wait for a started service before it is reported as not running."""
BOOTED = Path("/run/systemd/system")
"""Folder that exists where systemd runs the machine, according to sd_booted(3)."""
CALL_SECONDS = 3700.0
"""Limit of a command, which may wait until the agent has ended: the longest grace, and more than its margin."""
_LOOK_SECONDS = 0.25
Command = tuple[str, ...]


class NoManagerError(TrainctlError):
    """Neither systemd nor launchd runs this machine, or this user's can't be reached; nothing was done."""

    exit_code = 7


class ManagerError(TrainctlError):
    """systemctl or launchctl failed."""


@dataclass(frozen=True)
class State:
    """The service as its file and its manager have it."""

    loaded: bool = False  # the manager knows it
    enabled: bool = False  # it starts by itself
    running: bool = False
    pid: int | None = None
    detail: str = ""  # in the manager's words
    data: bytes | None = None  # of the file; None: there is none


class Manager:
    """systemd or launchd, for the whole machine or for this user. `root`: where the machine's files begin."""

    def __init__(self, scope: Scope, name: Literal["systemd", "launchd"], root: Path = Path("/")) -> None:
        self.scope, self.name, self._root = scope, name, root
        self.service = UNIT if name == "systemd" else LABEL
        self._domain = "system" if scope == "system" else f"gui/{os.getuid()}"  # launchd's: a session at the screen
        self._job = f"{self._domain}/{LABEL}"
        self._systemctl = ("systemctl", "--user") if scope == "user" else ("systemctl",)

    @property
    def file(self) -> Path:
        """The unit or property list."""
        if self.name == "systemd":
            user = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "systemd/user"
            return (self._root / "etc/systemd/system" if self.scope == "system" else user) / UNIT
        user = Path.home() / "Library/LaunchAgents"
        return (self._root / "Library/LaunchDaemons" if self.scope == "system" else user) / f"{LABEL}.plist"

    def look(self) -> State:
        """Return the service's state. Raises NotAuthorisedError, NoManagerError or ManagerError."""
        try:
            data = self.file.read_bytes()
        except FileNotFoundError:
            data = None
        except OSError as error:
            raise NotAuthorisedError(f"{self.file}: {error.strerror}") from None
        if self.name == "launchd":
            job = _run(("launchctl", "print", self._job))
            disabled = _run(("launchctl", "print-disabled", self._domain)).stdout
            return replace(launchd_state(None if job.returncode else job.stdout, disabled), data=data)
        properties = "--property=LoadState,ActiveState,SubState,MainPID,UnitFileState"
        try:
            return replace(systemd_state(call((*self._systemctl, "show", UNIT, properties))), data=data)
        except ManagerError as error:
            raise NoManagerError(str(error)) from None

    def install_steps(self, state: State, service: Service) -> list[Command]:
        """Return what has a service run as its new file says: commands, and those of `perform`."""
        write = ("write", str(self.file))
        if self.name == "systemd":
            words = ("daemon-reload",), ("enable", UNIT), ("restart", UNIT)
            # A user's services end at logout otherwise.
            linger = [("loginctl", "enable-linger", service.user)] if self.scope == "user" else []
            return [write, *((*self._systemctl, *command) for command in words), *linger]
        # launchd makes the boot log, but not its folder.
        create = [] if service.logs.is_dir() else [("create", str(service.logs))]
        end = [("launchctl", "bootout", self._job)] if state.loaded else []
        begin = [("launchctl", "enable", self._job), ("launchctl", "bootstrap", self._domain, str(self.file))]
        return [*create, write, *end, *begin]

    def uninstall_steps(self, state: State) -> list[Command]:
        """Return what ends the agent, not its trainers, and keeps it from starting; nothing if it isn't there."""
        remove = [("rm", "-f", str(self.file))] if state.data is not None else []
        if self.name == "launchd":
            return [*([("launchctl", "bootout", self._job)] if state.loaded else []), *remove]
        stop = [(*self._systemctl, "stop", UNIT)] if state.loaded else []
        disable = [(*self._systemctl, "disable", UNIT)] if remove else []
        return [*stop, *disable, *remove, *([(*self._systemctl, "daemon-reload")] if stop or remove else [])]

    def perform(self, step: Command, service: Service | None = None) -> None:
        """Run a command, or create the folder or write the file of `service`. Raises ManagerError."""
        try:
            match step, service:
                case ("create", _), Service():
                    _create(service.logs, service.user)
                case ("write", _), Service():
                    make_folder(self.file.parent)
                    write_file(self.file, content(service, self.name), 0o644)  # both managers want others to read it
                case _:
                    call(step)
        except OSError as error:
            raise ManagerError(f"{error.filename or self.file}: {error.strerror}") from None

    def settled(self) -> State:
        """Return the state once the service runs, or has not for too long."""
        due = time.monotonic() + SETTLE_SECONDS
        while not (state := self.look()).running and time.monotonic() < due:
            time.sleep(_LOOK_SECONDS)
        return state

    def check_allowed(self) -> None:
        """Raise NotAuthorisedError if this user can't install for the whole machine."""
        if self.scope == "system" and os.geteuid() != 0 and self._root == Path("/"):
            command = " ".join(own_command())
            raise NotAuthorisedError(f"a system service needs root: run sudo {command} ..., or use --user")


def manager_here() -> Literal["systemd", "launchd"]:
    """Return the manager that runs this machine's services. Raises NoManagerError."""
    if sys.platform == "darwin":
        return "launchd"
    if BOOTED.is_dir():
        return "systemd"
    raise NoManagerError(
        "this machine has neither systemd nor launchd; start `trainctl-agent run` with your own service manager "
        "(install --dry-run --manager systemd, or launchd, prints a service file to adapt)"
    )


def systemd_state(text: str) -> State:
    """Return what `systemctl show` says."""
    values = dict(line.partition("=")[::2] for line in text.splitlines())
    active, pid = values.get("ActiveState", ""), int(values.get("MainPID") or 0)
    detail = f"{active} ({values.get('SubState', '')})" if active else ""
    enabled = values.get("UnitFileState") == "enabled"
    return State(values.get("LoadState") == "loaded", enabled, active == "active", pid or None, detail)


def launchd_state(job: str | None, disabled: str) -> State:
    """Return what `launchctl print` and `print-disabled` say; `job`: None for one that isn't loaded."""
    enabled = re.search(rf'"{re.escape(LABEL)}" => (disabled|true)\b', disabled) is None
    if job is None:
        return State(enabled=enabled, detail="not loaded")
    # The first of each is the job's own; those of its endpoints are further in.
    words = re.search(r"^\s*state = (.+?)\s*$", job, re.MULTILINE)
    pid = re.search(r"^\s*pid = (\d+)\s*$", job, re.MULTILINE)
    detail = words[1] if words else "loaded"
    return State(True, enabled, pid is not None and detail == "running", int(pid[1]) if pid else None, detail)


def call(command: Command) -> str:
    """Run a command and return its output. Raises ManagerError with what it said."""
    done = _run(command)
    if done.returncode:
        lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise ManagerError(f"{' '.join(command)}: {lines[0] if lines else f'exit status {done.returncode}'}")
    if "bootout" in command:  # it returns before the job has ended, and until then the job can't be loaded again
        due = time.monotonic() + CALL_SECONDS
        while _run(("launchctl", "print", command[-1])).returncode == 0:
            if time.monotonic() > due:
                raise ManagerError(f"{' '.join(command)}: still there after {CALL_SECONDS:g} s")
            time.sleep(_LOOK_SECONDS)
    return done.stdout


def _run(command: Command) -> "subprocess.CompletedProcess[str]":
    runtime = Path(f"/run/user/{os.getuid()}")  # where `systemctl --user` finds its manager
    environment = ({"XDG_RUNTIME_DIR": str(runtime)} if runtime.is_dir() else {}) | os.environ
    try:
        return subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=CALL_SECONDS,
            check=False,
        )
    except FileNotFoundError:
        raise ManagerError(f"{command[0]} is not on PATH") from None
    except subprocess.TimeoutExpired:
        raise ManagerError(f"{' '.join(command)}: did not finish within {CALL_SECONDS:g} s") from None


def _create(folder: Path, user: str) -> None:
    """Make a folder, and what of its path is missing, for this user alone."""
    for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        missing.mkdir(mode=0o700)
        if os.geteuid() == 0:
            entry = pwd.getpwnam(user)
            os.chown(missing, entry.pw_uid, entry.pw_gid)
