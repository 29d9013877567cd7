"""The agent as a service: the file that systemd or launchd reads, where it stands, and the commands that start and stop
the agent."""

import math
import os
import plistlib
import re
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal
from xml.parsers.expat import ExpatError

from trainctl.protocol.errors import NotAuthorisedError, TrainctlError

Scope = Literal["system", "user"]
ManagerName = Literal["systemd", "launchd"]
Command = tuple[str, ...]
UNIT = "trainctl-agent.service"
LABEL = "trainctl.agent"
BOOT_LOG = "boot.log"
"""File for what the agent prints under launchd before it has its own log, and for the error that ends it there."""
STOP_SECONDS = 120
"""Seconds, at least, that an agent may take to end before it is killed."""
GRACE_SECONDS = 15.0
"""Seconds within which a node leaves its run by default once its agent is terminated. What ends the agent, such as
Kubernetes, must wait longer."""
GRACE_MARGIN_SECONDS = 15
"""Seconds more than its grace that an agent which drains its node is given to end."""
OPEN_FILES = 65536
STALL_SECONDS = 30
"""Seconds after which a hung event loop ends the agent, by systemd or, under launchd, by itself."""
SETTLE_SECONDS = 15.0
"""Seconds to wait for a started service before it is reported as not running."""
CALL_SECONDS = 3700.0
"""Limit of a command, which may wait until the agent has ended: the longest grace, and more than its margin."""
BOOTED = Path("/run/systemd/system")
"""Folder that exists where systemd runs the machine, according to sd_booted(3)."""
_LOOK_SECONDS = 0.25
_NETWORK = "Wants=network-online.target\nAfter=network-online.target\n"
_BIN = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
_PLAIN = re.compile(r"[A-Za-z0-9_@+=:,./-]+")


class NoManagerError(TrainctlError):
    """Neither systemd nor launchd runs this machine, or this user's can't be reached; nothing was done."""

    exit_code = 7


class ManagerError(TrainctlError):
    """systemctl or launchctl failed."""


@dataclass(frozen=True)
class Service:
    """One agent that starts with the machine (`system`) or with a person's session (`user`)."""

    node: str
    command: tuple[str, ...]  # program and arguments, in the foreground
    scope: Scope
    user: str  # that it runs as
    logs: Path  # the node's folder of logs
    nice: int | None = None  # None: the manager's default
    environment: tuple[tuple[str, str], ...] = ()  # names and values

    @property
    def stop_seconds(self) -> int:
        """Seconds that the agent may take to end before it is killed: more than the grace of a node that drains."""
        if "--grace" not in self.command:
            return STOP_SECONDS
        grace_seconds = float(self.command[self.command.index("--grace") + 1])
        return max(STOP_SECONDS, math.ceil(grace_seconds) + GRACE_MARGIN_SECONDS)

    def variables(self, *folders: str) -> dict[str, str]:
        """Return the agent's environment. A manager sets a short PATH: the interpreter's folder and the usual ones are
        added to it, and `folders`, where tools such as macmon are installed."""
        path = ":".join((str(Path(self.command[0]).parent), *folders, _BIN))
        return {"PATH": path, **dict(self.environment)}


def own_command() -> tuple[str, str, str, str]:
    """Return how this program is called from anywhere, in a virtual environment too: its interpreter by the path that
    was called, because the file behind it knows nothing of the environment; -P keeps the current folder out of its
    imports."""
    return sys.executable, "-P", "-m", "trainctl.node_agent.cli"


def unit(service: Service) -> str:
    """Return the text of a systemd unit.

    An address of a network interface can be listened at only once it is there. Trainers live in the service's control
    group, and outlive a restart (KillMode); one that the kernel ends for lack of memory is the agent's business
    (OOMPolicy). systemd ignores the last section.
    """
    is_system = service.scope == "system"
    command = " ".join(_quoted(word).replace("$", "$$") for word in service.command)
    lines = [f"User={service.user}"] if is_system else []
    lines += [] if service.nice is None else [f"Nice={service.nice}"]
    lines += [f"Environment={_quoted(f'{name}={value}')}" for name, value in service.variables().items()]
    settings = "\n".join(lines)
    return f"""\
[Unit]
Description=trainctl node agent {service.node}
{_NETWORK if is_system else ""}StartLimitIntervalSec=0

[Service]
Type=notify
NotifyAccess=main
ExecStart={command}
Restart=always
RestartSec=1
TimeoutStopSec={service.stop_seconds}
WatchdogSec={STALL_SECONDS}
KillMode=process
OOMPolicy=continue
LimitNOFILE={OPEN_FILES}
UMask=0077
NoNewPrivileges=yes
{settings}

[Install]
WantedBy={"multi-user" if is_system else "default"}.target

[X-Trainctl]
Node={service.node}
Logs={service.logs}
"""


def _quoted(word: str) -> str:
    """Return a word as a unit has it: in quotes where it needs them, without specifiers."""
    for character, escape in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\t", "\\t"), ("%", "%%")):
        word = word.replace(character, escape)
    return word if _PLAIN.fullmatch(word) else f'"{word}"'


def property_list(service: Service, label: str = LABEL) -> bytes:
    """Return a launchd property list; launchd calls the job `label`."""
    boot_log = str(service.logs / BOOT_LOG)
    job = {
        "Label": label,
        "ProgramArguments": list(service.command),
        "EnvironmentVariables": service.variables("/opt/homebrew/bin"),
        "RunAtLoad": True,
        "KeepAlive": True,
        "ThrottleInterval": 10,  # seconds between two starts
        "ExitTimeOut": service.stop_seconds,
        "ProcessType": "Interactive",  # any other throttles processor and disk; Background means efficiency cores
        "AbandonProcessGroup": True,  # trainers outlive a restart
        "LegacyTimers": True,  # no timer is put off to save power
        "Umask": "0077",  # text, which is read as octal; a number would be decimal
        "SoftResourceLimits": {"NumberOfFiles": OPEN_FILES},
        "StandardOutPath": boot_log,
        "StandardErrorPath": boot_log,
        "Nice": service.nice,
        "UserName": service.user if service.scope == "system" else None,
    }
    return plistlib.dumps({name: value for name, value in job.items() if value is not None})


def installed_node(data: bytes) -> tuple[str, Path] | None:
    """Return the node and its folder of logs from such a file; None from another program's."""
    section = data.decode(errors="replace").partition("[X-Trainctl]\n")[2]
    values = dict(line.partition("=")[::2] for line in section.splitlines())
    if {"Node", "Logs"} <= values.keys():
        return values["Node"], Path(values["Logs"])
    try:
        job = plistlib.loads(data)
        words = job["ProgramArguments"]
        return words[words.index("--name") + 1], Path(job["StandardErrorPath"]).parent
    except (ValueError, LookupError, TypeError, OverflowError, ExpatError):
        return None


# ---------------------------------------------------------------- the service manager


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

    def __init__(self, scope: Scope, name: ManagerName, root: Path = Path("/")) -> None:
        self.scope, self.name, self._root = scope, name, root
        is_system, home = scope == "system", Path.home()
        if name == "systemd":
            user_folder = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config") / "systemd/user"
            self.service, folder = UNIT, root / "etc/systemd/system" if is_system else user_folder
        else:
            self.service, folder = LABEL, root / "Library/LaunchDaemons" if is_system else home / "Library/LaunchAgents"
        self.file = folder / (UNIT if name == "systemd" else f"{LABEL}.plist")
        self._systemctl = ("systemctl",) if is_system else ("systemctl", "--user")
        self._domain = "system" if is_system else f"gui/{os.getuid()}"  # launchd's: a session at the screen
        self._job = f"{self._domain}/{LABEL}"

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
            return replace(launchd_state(None if job.returncode else job.stdout), enabled=data is not None, data=data)
        properties = "--property=LoadState,ActiveState,SubState,MainPID,UnitFileState"
        try:
            return replace(systemd_state(call((*self._systemctl, "show", UNIT, properties))), data=data)
        except ManagerError as error:
            raise NoManagerError(str(error)) from None

    def start_commands(self, state: State, user: str) -> list[Command]:
        """Return the commands that have the service run, and start by itself, as its new file says. loginctl's may
        fail: without it a user's services end at logout."""
        if self.name == "systemd":
            linger = [("loginctl", "enable-linger", user)] if self.scope == "user" else []
            return [*self._systemd("daemon-reload", "enable", "restart"), *linger]
        begin = ("launchctl", "enable", self._job), ("launchctl", "bootstrap", self._domain, str(self.file))
        return [*self._bootout(state), *begin]

    def stop_commands(self, state: State) -> list[Command]:
        """Return the commands that end the agent, not its trainers, and remove the file; none if nothing is there."""
        remove = [("rm", "-f", str(self.file))] if state.data is not None else []
        if self.name == "launchd":
            return [*self._bootout(state), *remove]
        verbs = ["stop"] * state.loaded + ["disable"] * len(remove)
        return [*self._systemd(*verbs), *remove, *self._systemd("daemon-reload")] if verbs else []

    def _systemd(self, *verbs: str) -> list[Command]:
        return [(*self._systemctl, verb, *([UNIT] if verb != "daemon-reload" else [])) for verb in verbs]

    def _bootout(self, state: State) -> list[Command]:
        return [("launchctl", "bootout", self._job)] if state.loaded else []

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


def manager_here() -> ManagerName:
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


def launchd_state(job: str | None) -> State:
    """Return what `launchctl print` says; `job`: None for one that isn't loaded."""
    if job is None:
        return State(detail="not loaded")
    # The first of each is the job's own; those of its endpoints are further in.
    words = re.search(r"^\s*state = (.+?)\s*$", job, re.MULTILINE)
    pid = re.search(r"^\s*pid = (\d+)\s*$", job, re.MULTILINE)
    detail = words[1] if words else "loaded"
    return State(True, True, pid is not None and detail == "running", int(pid[1]) if pid else None, detail)


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
