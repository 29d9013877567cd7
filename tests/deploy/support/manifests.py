"""The manifests as kubectl renders them, and their command lines as the programs read them."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import typer
import yaml
from tests.conftest import ROOT
from tests.integration.support.namespaces import LAN
from tests.waiting import HANG_SECONDS

from trainctl.node_agent.cli import app as agent_app
from trainctl.tui.cli.main import app

Object = Mapping[str, Any]
FOLDER = ROOT / "examples" / "deploy" / "kubernetes"
GROUPS = ("base", "overlays/gpu", "overlays/spot", "overlays/time-sliced")
"""Each is a whole group of pods."""
FOLDERS = (*GROUPS, "overlays/scale-to-zero")
POD = {"metadata.name": "trainctl-0", "status.podIP": "10.244.0.7"}
"""The fields of a pod."""
_LINE = re.compile(r"(?<![\w/.:-])trainctl(?:-agent)? [^|;\n]*")


@cache
def rendered(folder: str | Path) -> list[Object]:
    """Return the objects of a folder with a kustomization; a name is one of the manifests' own."""
    kubectl = Path(sys.executable).with_name("kubectl")
    done = subprocess.run(
        [kubectl, "kustomize", FOLDER / folder], capture_output=True, text=True, timeout=HANG_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    return [*yaml.safe_load_all(done.stdout)]


def deployed(folder: Path, programs: dict[str, str], pods: int) -> Path:
    """Return a copy of the manifests in which make-keys.sh was run. `programs`: an environment with trainctl."""
    copied = Path(shutil.copytree(FOLDER, folder / "kubernetes"))
    words = [str(copied / "make-keys.sh"), str(pods), f"{LAN}.0/24"]
    done = subprocess.run(words, env=programs, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert done.returncode == 0 and "kubectl create secret" in done.stdout, done.stderr
    return copied


def of_kind(objects: Sequence[Object], *kinds: str) -> list[Object]:
    return [item for item in objects if item["kind"] in kinds]


def pods(objects: Sequence[Object]) -> list[Object]:
    """Return the template of each object that makes pods."""
    return [item["spec"]["template"] for item in of_kind(objects, "StatefulSet", "Job")]


def containers(template: Object) -> list[Object]:
    return [*template["spec"].get("initContainers", ()), *template["spec"]["containers"]]


def agent_of(objects: Sequence[Object]) -> tuple[Object, Object]:
    """Return the StatefulSet and its container with an agent."""
    (holder,) = of_kind(objects, "StatefulSet")
    (agent,) = (item for item in holder["spec"]["template"]["spec"]["containers"] if item["name"] == "agent")
    return holder, agent


def selects(selector: Object, labels: Object) -> bool:
    """Return whether a selector of labels alone takes a pod; an empty one takes all."""
    return all(labels.get(name) == value for name, value in selector.get("matchLabels", selector).items())


def parsed(words: Sequence[str]) -> Any:
    """Return the context of the command that the words call. Raises TyperException for what the program refuses."""
    command: Any = typer.main.get_command({"trainctl": app, "trainctl-agent": agent_app}[words[0]])
    context, rest = None, [*words[1:]]
    while True:
        context = command.make_context(command.name, rest, parent=context)
        rest = [*getattr(context, "_protected_args", ()), *context.args]
        if not hasattr(command, "resolve_command") or not rest:
            return context
        _, command, rest = command.resolve_command(context, rest)


def environment(container: Object, pod: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return a container's variables as the kubelet sets them. `pod`: the pod's fields by path."""
    fields, values = pod or POD, dict[str, str]()
    for item in container.get("env", ()):
        value = item["value"] if "value" in item else fields[item["valueFrom"]["fieldRef"]["fieldPath"]]
        values[item["name"]] = re.sub(r"\$\((\w+)\)", lambda name: values.get(name[1], name[0]), value)
    return values


def calls(container: Object) -> Iterator[Any]:
    """Yield the context of each call of our programs: the container's own, and those in its scripts and probes.

    Raises TyperException for a command, option or value that the program doesn't take.
    """
    commands = [[*container.get("command", ()), *container.get("args", ())]]
    commands += [
        probe["exec"]["command"] for name, probe in container.items() if name.endswith("Probe") and "exec" in probe
    ]
    with patch.dict(os.environ, environment(container), clear=True):
        for words in commands:
            if words[:1] == ["sh"]:
                yield from (parsed(shlex.split(line)) for line in _LINE.findall(words[-1]))
            elif words[:2] == ["tini", "--"]:
                yield parsed(words[2:])
