"""The command lines of manifests, read by the programs themselves: an unknown command, option or value is an error."""

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import typer
from tests.deploy.manifest_rules import MARGIN_SECONDS, Object, agents, containers, pods, title

from trainctl.node_agent.cli import app as agent_app
from trainctl.tui.cli.main import app

PROGRAMS = {"trainctl": app, "trainctl-agent": agent_app}
_LINE = re.compile(r"(?<![\w/.:-])trainctl(?:-agent)? [^|;\n]*")
POD = {"metadata.name": "trainctl-0", "status.podIP": "10.244.0.7"}
"""What a pod's fields are here."""


def parsed(words: Sequence[str]) -> Any:
    """The context of the command that the words call. Raises TyperException for what the program doesn't take."""
    command: Any = typer.main.get_command(PROGRAMS[words[0]])
    context, rest = None, [*words[1:]]
    while True:
        context = command.make_context(command.name, rest, parent=context)
        rest = [*getattr(context, "_protected_args", ()), *context.args]
        if not hasattr(command, "resolve_command") or not rest:
            return context
        _, command, rest = command.resolve_command(context, rest)


def environment(container: Object, pod: Mapping[str, str] | None = None) -> dict[str, str]:
    """Its variables as the kubelet sets them. `pod`: the pod's fields by path."""
    fields, found = pod or POD, dict[str, str]()
    for one in container.get("env", ()):
        value = one["value"] if "value" in one else fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
        found[one["name"]] = re.sub(r"\$\((\w+)\)", lambda name: found.get(name[1], name[0]), value)
    return found


def lines(container: Object) -> Iterator[list[str]]:
    """Each call of ours: the container's own one, those in its scripts and its probes."""
    commands = [[*container.get("command", ()), *container.get("args", ())]]
    commands += [
        probe["exec"]["command"] for name, probe in container.items() if name.endswith("Probe") and "exec" in probe
    ]
    for words in commands:
        if words[:1] == ["sh"]:
            yield from (shlex.split(found) for found in _LINE.findall(words[-1]))
        elif words[:2] == ["tini", "--"]:
            yield words[2:]


def problems(objects: Sequence[Object]) -> list[str]:
    """What the programs don't take of command lines and variables; if nothing, drains that a pod has no time for."""
    found = []
    for where, template in pods(objects):
        for container in containers(template):
            variables = environment(container)
            known = {"TRAINCTL_CLUSTER", "TRAINCTL_STATE", "TRAINCTL_KEYS", *_options()}
            found += [
                f"{where}: no variable {name}" for name in variables if name[:9] == "TRAINCTL_" and name not in known
            ]
            found += [f"{where}: {error}" for error in _errors(container, variables)]
    return found or [problem for holder, agent in agents(objects) for problem in _short_grace(holder, agent)]


def _options() -> set[str]:
    with patch.dict(os.environ, clear=True):
        return {option.envvar for option in parsed(["trainctl-agent", "run"]).command.params if option.envvar}


def _errors(container: Object, variables: Mapping[str, str]) -> Iterator[str]:
    with patch.dict(os.environ, variables, clear=True):
        for words in lines(container):
            try:
                parsed(words)
            except typer.TyperException as error:
                yield f"{' '.join(words)}: {error.format_message()}"


def _short_grace(holder: Object, agent: Object) -> Iterator[str]:
    with patch.dict(os.environ, environment(agent), clear=True):
        given = parsed(next(lines(agent))).params
    seconds = holder["spec"]["template"]["spec"].get("terminationGracePeriodSeconds", 30)
    if not given["drain_on_term"]:
        yield f"{title(holder)}: a pod that ends drains no node"
    elif seconds < given["grace"] + MARGIN_SECONDS:
        yield f"{title(holder)}: pods are killed after {seconds} s, and may drain for {given['grace']:g} s"
