"""What `trainctl-agent install`, `uninstall` and `status` say: to a person as lines, to a script as one JSON object."""

import datetime
import shlex
from collections.abc import Iterable
from typing import Any

from trainctl.node_agent.services.manager import Found, Machine
from trainctl.node_agent.services.model import Call, Folder, Remove, Service, Step, UntilFails, Write

AGENT_LOG = "agent.log"


def step_line(step: Step) -> str:
    """A step as a person would type it, or in words."""
    match step:
        case Write():
            return f"write {step.path}"
        case Folder():
            return f"create {step.path}, owned by {step.user}"
        case Remove():
            return f"remove {step.path}"
        case Call():
            return shlex.join(step.words)
        case UntilFails():
            return f"wait until this fails, at most {step.seconds:g} s: {shlex.join(step.words)}"


def plan_text(steps: Iterable[Step]) -> str:
    """What a dry run shows: every step, and the file as it will be."""
    lines = []
    for step in steps:
        lines.append(f"would {step_line(step)}" if not isinstance(step, Call) else f"would run {step_line(step)}")
        if isinstance(step, Write):
            lines += [f"    {line}".rstrip() for line in step.data.decode().splitlines()]
    return "\n".join(lines)


def plan_fields(steps: tuple[Step, ...]) -> dict[str, Any]:
    """The same for a script."""
    written = next((step.data.decode() for step in steps if isinstance(step, Write)), None)
    return {"steps": [step_line(step) for step in steps], "content": written}


def status_fields(machine: Machine, found: Found) -> dict[str, Any]:
    """Everything that is known of the service."""
    own, state = found.own(machine.manager), found.state
    return {
        "installed": found.data is not None, "enabled": found.data is not None and state.enabled,
        "running": state.running, "pid": state.pid, "since": found.since, "detail": state.detail,
        "manager": machine.manager, "scope": machine.scope, "service": machine.service, "file": str(found.file),
        "node": own.node if own else None, "log": str(own.logs / AGENT_LOG) if own else None,
    }  # fmt: skip


def status_text(fields: dict[str, Any]) -> str:
    """`status_fields` as lines."""
    where = f"{fields['manager']}, {fields['scope']}"
    if not fields["installed"]:
        loose = f"; but it is {fields['detail']}" if fields["running"] else ""
        return f"not installed: no {fields['file']} ({where}){loose}"
    running = fields["detail"] or "not running"
    if fields["running"]:
        running = f"yes, pid {fields['pid']}"
        if fields["since"] is not None:
            since = datetime.datetime.fromtimestamp(fields["since"], datetime.UTC).astimezone()
            running += f", since {since:%Y-%m-%d %H:%M:%S}"
    rows = {
        "service": f"{fields['service']} ({where})",
        "node": fields["node"] or "unknown: another program's file",
        "running": running if fields["running"] else f"no: {running}",
        "enabled": "yes" if fields["enabled"] else "no: it won't start automatically",
        "file": fields["file"],
        "log": fields["log"] or "unknown",
    }
    return "\n".join(f"{name:<9} {value}" for name, value in rows.items())


def remarks(service: Service, machine: Machine, lacks: str) -> list[str]:
    """What a person should know of a service that is to be installed."""
    said = []
    if service.scope == "system" and service.user == "root":
        said.append("the agent and its trainers run as root; to change the user, add --run-as")
    if machine.manager == "launchd" and service.scope == "user":
        said.append(lacks)
    return said
