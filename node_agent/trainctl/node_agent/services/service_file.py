"""The agent as a service: the unit that systemd reads, and the property list that launchd reads."""

import math
import plistlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from xml.parsers.expat import ExpatError

Scope = Literal["system", "user"]
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
WATCHDOG_SECONDS = 30
"""Seconds after which a hung event loop ends the agent, by systemd or, under launchd, by itself."""
_BIN = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
_PLAIN = re.compile(r"[A-Za-z0-9_@+=:,./-]+")
# An address of a network interface can be listened at only once it is there.
_NETWORK = "Wants=network-online.target\nAfter=network-online.target\n"
# KillMode and OOMPolicy: trainers live in the service's control group, and outlive a restart; one that the kernel ends
# for lack of memory is the agent's business, and no reason to stop it. systemd ignores the last section.
_UNIT_TEXT = """\
[Unit]
Description=trainctl node agent {node}
{network}StartLimitIntervalSec=0

[Service]
Type=notify
NotifyAccess=main
ExecStart={command}
{user}Restart=always
RestartSec=1
TimeoutStopSec={stop_seconds}
WatchdogSec={watchdog_seconds}
KillMode=process
OOMPolicy=continue
LimitNOFILE={open_files}
UMask=0077
NoNewPrivileges=yes
{nice}{environment}
[Install]
WantedBy={target}.target

[X-Trainctl]
Node={node}
Logs={logs}
"""


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


def content(service: Service, manager: str) -> bytes:
    """Return the file that systemd or launchd reads."""
    return unit(service).encode() if manager == "systemd" else property_list(service)


def unit(service: Service) -> str:
    """Return the text of a systemd unit."""
    is_system = service.scope == "system"
    variables = (_quoted(f"{name}={value}") for name, value in service.variables().items())
    return _UNIT_TEXT.format(
        node=service.node,
        network=_NETWORK if is_system else "",
        command=" ".join(_quoted(word).replace("$", "$$") for word in service.command),
        user=f"User={service.user}\n" if is_system else "",
        stop_seconds=service.stop_seconds,
        watchdog_seconds=WATCHDOG_SECONDS,
        open_files=OPEN_FILES,
        nice="" if service.nice is None else f"Nice={service.nice}\n",
        environment="".join(f"Environment={variable}\n" for variable in variables),
        target="multi-user" if is_system else "default",
        logs=service.logs,
    )


def _quoted(word: str) -> str:
    """Return a word as a unit has it: in quotes where it needs them, without specifiers."""
    for character, escape in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\t", "\\t"), ("%", "%%")):
        word = word.replace(character, escape)
    return word if _PLAIN.fullmatch(word) else f'"{word}"'


def property_list(service: Service, label: str = LABEL) -> bytes:
    """Return a launchd property list; launchd calls the job `label`."""
    boot_log = str(service.logs / BOOT_LOG)
    job: dict[str, Any] = {
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
    }
    if service.nice is not None:
        job["Nice"] = service.nice
    if service.scope == "system":
        job["UserName"] = service.user
    return plistlib.dumps(job)


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
