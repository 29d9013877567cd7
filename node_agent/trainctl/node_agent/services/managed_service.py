"""The agent as a service of systemd or launchd: its file, and the commands that start and stop it."""

import html
import os
import plistlib
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainctl.protocol.errors import NotAuthorisedError, TrainctlError

Scope = Literal["system", "user"]
ManagerName = Literal["systemd", "launchd"]
Command = tuple[str, ...]
UNIT = "trainctl-agent.service"
LABEL = "trainctl.agent"
BOOT_LOG = "boot.log"
"""File for what the agent prints under launchd before it has its own log, and for the error that ends it there."""
STOP_SECONDS = 120
"""Seconds that an agent may take to end before it is killed, unless its grace is longer."""
GRACE_SECONDS = 15.0
"""Seconds within which a node leaves its run by default once its agent is terminated. What ends the agent, such as
Kubernetes, must wait longer."""
OPEN_FILES = 65536
STALL_SECONDS = 30
"""Seconds after which a hung event loop ends the agent, by systemd or, under launchd, by itself."""
SETTLE_SECONDS = 15.0
"""Seconds to wait for a started service before it is reported as not running."""
BOOTED = Path("/run/systemd/system")
"""Folder that exists where systemd runs the machine, according to sd_booted(3)."""
_LOOK_SECONDS = 0.25
_BIN = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"


class NoManagerError(TrainctlError):
    """Neither systemd nor launchd runs this machine, or this user's can't be reached; nothing was done."""

    exit_code = 7


class ManagerError(TrainctlError):
    """systemctl or launchctl failed."""


@dataclass(frozen=True)
class Service:
    """One agent that starts with the machine (`system`) or with a person's session (`user`)."""

    command: tuple[str, ...]  # program and arguments, in the foreground
    scope: Scope
    user: str  # that it runs as
    logs: Path  # <state>/<node>/logs
    nice: int | None = None  # None: the manager's default
    environment: tuple[tuple[str, str], ...] = ()  # names and values
    stop_seconds: int = STOP_SECONDS  # that it may take to end before it is killed

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


def unit(service: Service) -> bytes:
    """Return a systemd unit.

    An address of a network interface can be listened at only once it is there. Trainers live in the service's control
    group, and outlive a restart (KillMode); one that the kernel ends for lack of memory is the agent's business
    (OOMPolicy). systemd ignores the last section.
    """
    is_system = service.scope == "system"
    network = ["Wants=network-online.target", "After=network-online.target"] if is_system else []
    newline = "\n"
    settings = [f"Environment={_quoted(f'{name}={value}')}" for name, value in service.variables().items()]
    settings += [] if service.nice is None else [f"Nice={service.nice}"]
    settings += [f"User={service.user}"] if is_system else []
    text = f"""\
[Unit]
Description=trainctl node agent {service.logs.parent.name}
{newline.join([*network, "StartLimitIntervalSec=0"])}

[Service]
Type=notify
NotifyAccess=main
ExecStart={" ".join(_quoted(word).replace("$", "$$") for word in service.command)}
Restart=always
RestartSec=1
TimeoutStopSec={service.stop_seconds}
WatchdogSec={STALL_SECONDS}
KillMode=process
OOMPolicy=continue
LimitNOFILE={OPEN_FILES}
UMask=0077
NoNewPrivileges=yes
{newline.join(settings)}

[Install]
WantedBy={"multi-user" if is_system else "default"}.target

[X-Trainctl]
Logs={service.logs}
"""
    return text.encode()


def _quoted(word: str) -> str:
    """Return a word as a unit has it: in quotes where it needs them, without specifiers."""
    for character, escape in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\t", "\\t"), ("%", "%%")):
        word = word.replace(character, escape)
    return word if re.fullmatch(r"[A-Za-z0-9_@+=:,./-]+", word) else f'"{word}"'


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


def logs_named(data: bytes) -> Path | None:
    """Return the folder of logs, `<state>/<node>/logs`, from a unit or a property list; None from another program's."""
    found = re.search(rf"^Logs=(.+)$|<string>(.+)/{BOOT_LOG}</string>", data.decode(errors="replace"), re.MULTILINE)
    return Path(found[1] or html.unescape(found[2])) if found else None


# ---------------------------------------------------------------- the service manager


@dataclass(frozen=True)
class State:
    """The service as its manager has it."""

    loaded: bool = False  # the manager knows it
    enabled: bool = False  # it starts by itself
    running: bool = False
    pid: int | None = None
    detail: str = ""  # in the manager's words


class Manager:
    """systemd or launchd, for the whole machine or for this user. `root`: where the machine's files begin."""

    def __init__(self, scope: Scope, name: ManagerName, root: Path = Path("/")) -> None:
        self.scope, self.name, self._root = scope, name, root
        is_system, home = scope == "system", Path.home()
        if name == "systemd":
            user_folder = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config") / "systemd/user"
            self.service = UNIT
            self.file = (root / "etc/systemd/system" if is_system else user_folder) / UNIT
        else:
            folder = root / "Library/LaunchDaemons" if is_system else home / "Library/LaunchAgents"
            self.service = LABEL
            self.file = folder / f"{LABEL}.plist"
        self._systemctl = ("systemctl",) if is_system else ("systemctl", "--user")
        self._domain = "system" if is_system else f"gui/{os.getuid()}"  # launchd's: a session at the screen
        self._job = f"{self._domain}/{LABEL}"

    def file_of(self, service: Service) -> bytes:
        """Return the file that installs a service."""
        return unit(service) if self.name == "systemd" else property_list(service)

    def log_of(self, service: Service) -> str:
        """Return where to look for why a service doesn't start."""
        if self.name == "launchd":
            return str(service.logs / BOOT_LOG)
        return f"{service.logs / 'agent.log'}, or journalctl {'--user ' if self.scope == 'user' else ''}-u {UNIT}"

    def installed(self) -> bytes | None:
        """Return the installed file; None if there is none. Raises NotAuthorisedError."""
        try:
            return self.file.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise NotAuthorisedError(f"{self.file}: {error.strerror}") from None

    def look(self) -> State:
        """Return the service's state. Raises NoManagerError or ManagerError."""
        if self.name == "launchd":
            job = _run(("launchctl", "print", self._job))
            return launchd_state(None if job.returncode else job.stdout)
        properties = "--property=LoadState,ActiveState,SubState,MainPID,UnitFileState"
        try:
            return systemd_state(call((*self._systemctl, "show", UNIT, properties)))
        except ManagerError as error:
            raise NoManagerError(str(error)) from None

    def settled(self) -> State:
        """Return the state once the service runs, or has not for too long."""
        due = time.monotonic() + SETTLE_SECONDS
        while not (state := self.look()).running and time.monotonic() < due:
            time.sleep(_LOOK_SECONDS)
        return state

    def start_commands(self, state: State, user: str) -> list[Command]:
        """Return the commands that have the service run, and start by itself, as its new file says. loginctl's may
        fail: without it a user's services end at logout."""
        if self.name == "systemd":
            linger = [("loginctl", "enable-linger", user)] if self.scope == "user" else []
            verbs = ("daemon-reload",), ("enable", UNIT), ("restart", UNIT)
            return [*((*self._systemctl, *words) for words in verbs), *linger]
        begin = ("launchctl", "enable", self._job), ("launchctl", "bootstrap", self._domain, str(self.file))
        return [*self._bootout(state), *begin]

    def stop_commands(self, state: State, *, installed: bool) -> list[Command]:
        """Return the commands that end the agent, not its trainers, and remove the file; none if nothing is there."""
        remove = [("rm", "-f", str(self.file))] if installed else []
        if self.name == "launchd":
            return [*self._bootout(state), *remove]
        end = [("disable", "--now")] if installed else [("stop",)] if state.loaded else []
        reload = [(*self._systemctl, "daemon-reload")] if end else []
        return [*((*self._systemctl, *words, UNIT) for words in end), *remove, *reload]

    def _bootout(self, state: State) -> list[Command]:
        return [("launchctl", "bootout", self._job)] if state.loaded else []

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
    active, enabled = values.get("ActiveState", ""), values.get("UnitFileState") == "enabled"
    detail, pid = f"{active} ({values.get('SubState', '')})" if active else "", int(values.get("MainPID") or 0) or None
    return State(values.get("LoadState") == "loaded", enabled, active == "active", pid, detail)


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
        said = (done.stderr or done.stdout).strip().partition("\n")[0]
        raise ManagerError(f"{' '.join(command)}: {said or f'exit status {done.returncode}'}")
    # bootout returns before the job has ended, and until then the job can't be loaded again.
    while "bootout" in command and _run(("launchctl", "print", command[-1])).returncode == 0:
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
            check=False,
        )
    except FileNotFoundError:
        raise ManagerError(f"{command[0]} is not on PATH") from None
