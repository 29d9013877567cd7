"""The agent as a launchd job: its property list, what launchctl says, and the steps that install and remove it."""

import plistlib
import re
from pathlib import Path
from typing import Any
from xml.parsers.expat import ExpatError

from trainctl.node_agent.services import model

LABEL = "trainctl.agent"
FILE_NAME = f"{LABEL}.plist"
BOOT_LOG = "boot.log"
"""File for what the agent prints before it has its own log, and for the error that ends it there."""
LACKS = (
    "a LaunchAgent starts at login and stops at logout, and macOS asks for Local Network permission for it: until you "
    'grant it, connections to other nodes may fail with "No route to host"; without --user, a LaunchDaemon is '
    "installed and has neither limit"
)
_GONE_SECONDS = 10.0
"""Seconds more than a job's own limit until it must have ended."""


def plist(service: model.Service, label: str = LABEL) -> bytes:
    """The property list; `label`: what launchd calls the job."""
    boot_log = str(service.logs / BOOT_LOG)
    job: dict[str, Any] = {
        "Label": label,
        "ProgramArguments": list(service.command),
        "EnvironmentVariables": model.variables(service, "launchd"),
        "RunAtLoad": True,
        "KeepAlive": True,
        "ThrottleInterval": 10,  # seconds between two starts
        "ExitTimeOut": service.stop_seconds,
        "ProcessType": "Interactive",  # any other throttles processor and disk; Background means efficiency cores
        "AbandonProcessGroup": True,  # trainers outlive a restart
        "LegacyTimers": True,  # no timer is put off to save power
        "Umask": "0077",  # text, which is read as octal; a number would be decimal
        "SoftResourceLimits": {"NumberOfFiles": model.OPEN_FILES},
        "StandardOutPath": boot_log,
        "StandardErrorPath": boot_log,
    }
    if service.nice is not None:
        job["Nice"] = service.nice
    if service.scope == "system":
        job["UserName"] = service.user
    return plistlib.dumps(job)


def parsed(data: bytes) -> dict[str, Any]:
    """A property list as launchd takes it. Raises ValueError for one that is none, or lacks what a job needs."""
    try:
        job = plistlib.loads(data)
    except (plistlib.InvalidFileException, ExpatError, ValueError, OverflowError) as error:
        raise ValueError(f"not a property list: {error}") from None
    if not (isinstance(job, dict) and isinstance(job.get("Label"), str) and job.get("ProgramArguments")):
        raise ValueError("not a launchd job: it needs Label and ProgramArguments")
    return job


def installed(data: bytes) -> model.Installed | None:
    """What a property list of ours says of itself; None for another's."""
    try:
        job = parsed(data)
        words = job["ProgramArguments"]
        return model.Installed(words[words.index("--name") + 1], Path(job["StandardErrorPath"]).parent)
    except (ValueError, KeyError, IndexError, TypeError):
        return None


def domain(scope: model.Scope, uid: int) -> str:
    """Where launchd keeps jobs of a scope: a LaunchAgent's is of the user's session at the screen."""
    return "system" if scope == "system" else f"gui/{uid}"


def target(scope: model.Scope, uid: int) -> str:
    return f"{domain(scope, uid)}/{LABEL}"


def question(scope: model.Scope, uid: int) -> tuple[str, ...]:
    """The command whose output `state` reads; it fails if the job isn't loaded."""
    return "launchctl", "print", target(scope, uid)


def disabled_question(scope: model.Scope, uid: int) -> tuple[str, ...]:
    return "launchctl", "print-disabled", domain(scope, uid)


def state(text: str | None, disabled: str) -> model.State:
    """What `launchctl print` and `print-disabled` say, None for a job that isn't loaded."""
    enabled = re.search(rf'"{re.escape(LABEL)}" => (disabled|true)\b', disabled) is None
    if text is None:
        return model.State(enabled=enabled, detail="not loaded")
    # The first of each is the job's own; those of its endpoints are further in.
    said = re.search(r"^\s*state = (.+?)\s*$", text, re.MULTILINE)
    pid = re.search(r"^\s*pid = (\d+)\s*$", text, re.MULTILINE)
    detail = said[1] if said else "loaded"
    return model.State(True, enabled, pid is not None and detail == "running", int(pid[1]) if pid else None, detail)


def install_steps(
    service: model.Service, file: Path, before: bytes | None, now: model.State, uid: int
) -> tuple[model.Step, ...]:
    """From how things are to a job that runs as the property list says; none where all is so already."""
    data = plist(service)
    parsed(data)
    changed, at = data != before, target(service.scope, uid)
    steps: list[model.Step] = []
    if changed:
        steps += [
            *_out(service.scope, uid, now, before),
            model.Folder(service.logs, service.user),
            model.Write(file, data),
        ]
    if not now.enabled:
        steps.append(model.Call(("launchctl", "enable", at)))
    if changed or not now.loaded:
        steps.append(model.Call(("launchctl", "bootstrap", domain(service.scope, uid), str(file))))
    elif not now.running:
        steps.append(model.Call(("launchctl", "kickstart", at)))
    return tuple(steps)


def uninstall_steps(
    scope: model.Scope, file: Path, before: bytes | None, now: model.State, uid: int
) -> tuple[model.Step, ...]:
    """Ends the agent, not its trainers, and forgets the job; none where there is nothing of it."""
    return (*_out(scope, uid, now, before), *([model.Remove(file)] if before is not None else []))


def _out(scope: model.Scope, uid: int, now: model.State, before: bytes | None) -> list[model.Step]:
    """`bootout` returns before the job has ended, and until then it can't be loaded again. `before`: its list."""
    if not now.loaded:
        return []
    at, seconds = target(scope, uid), _limit_seconds(before) + _GONE_SECONDS
    return [model.Call(("launchctl", "bootout", at)), model.UntilFails(("launchctl", "print", at), seconds)]


def _limit_seconds(data: bytes | None) -> float:
    """How long an installed job may take to end."""
    try:
        limit = parsed(data or b"").get("ExitTimeOut")
    except ValueError:
        limit = None
    return float(limit) if isinstance(limit, int) else float(model.STOP_SECONDS)
