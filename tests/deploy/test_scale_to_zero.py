"""The job that scales to zero: the script that waits for a run's end, with planted answers of agents."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from tests.deploy.support.manifests import FOLDER, containers, of_kind, parsed, rendered, selects
from tests.node_agent.support.processes import ENVIRONMENT
from tests.waiting import HANG_SECONDS

SCRIPT = FOLDER / "overlays" / "scale-to-zero" / "wait_for_end.py"
DOWN, NONE, ENDED, FAILED, ACTIVE, PAUSED = "down", "null", "finished", "failed", "running", "paused"
FAKE = """#!/bin/sh
echo "$*" >> calls
file=${4#tcp://}
state=$(sed -n 1p "$file") && sed -i 1d "$file"
case $state in
  down) echo "trainctl: no answer" >&2; exit 4 ;;
  null) echo '{"run": null}' ;;
  *) echo "{\\"run\\": {\\"state\\": \\"$state\\"}}" ;;
esac
"""
"""A `trainctl` that gives the planted answers of an agent, one after another."""


def polls(folder: Path, answers: Mapping[str, Sequence[str]]) -> int:
    """Return how often each agent was asked until the script ended."""
    nodes = "".join(f'[nodes.{name}]\naddress = "tcp://{name}:7474"\n' for name in answers)
    (folder / "cluster.toml").write_text(nodes, "utf-8")
    (folder / "trainctl").write_text(FAKE, "utf-8")
    (folder / "trainctl").chmod(0o755)
    for name, states in answers.items():
        (folder / f"{name}:7474").write_text("".join(f"{state}\n" for state in states), "utf-8")
    own = {"PATH": f"{folder}:{os.environ['PATH']}", "TRAINCTL_CLUSTER": str(folder / "cluster.toml")}
    done = subprocess.run(
        [sys.executable, SCRIPT, "0"], cwd=folder, env={**os.environ, **ENVIRONMENT, **own}, text=True,
        capture_output=True, timeout=HANG_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    calls = (folder / "calls").read_text("utf-8").splitlines()
    assert {*calls} == {f"status --json --connect tcp://{name}:7474" for name in answers}
    parsed(["trainctl", *calls[0].split()])
    return len(calls) // len(answers)


CASES: list[tuple[str, dict[str, list[str]], int]] = [
    ("a run that has ended", {"a": [ENDED] * 3, "b": [ENDED] * 3}, 3),
    ("a node without a run", {"a": [FAILED] * 3, "b": [NONE] * 3}, 3),
    ("no run yet", {"a": [NONE, NONE, NONE, *[ENDED] * 3], "b": [NONE] * 6}, 6),
    ("an active run", {"a": [ACTIVE, PAUSED, ACTIVE, *[ENDED] * 3], "b": [ENDED] * 6}, 6),
    ("a lead that doesn't answer", {"a": [DOWN] * 4 + [ENDED] * 3, "b": [ENDED] * 7}, 7),
    ("an answer that misleads twice", {"a": [ENDED] * 2 + [ACTIVE] + [ENDED] * 3, "b": [ENDED] * 6}, 6),
    ("a next run", {"a": [ENDED, ACTIVE, *[ENDED] * 3], "b": [ENDED] * 5}, 5),
]


@pytest.mark.parametrize(("answers", "asked"), [row[1:] for row in CASES], ids=[row[0] for row in CASES])
def test_a_run_has_ended_when_all_agents_say_so_three_times_in_a_row(
    tmp_path: Path, answers: dict[str, list[str]], asked: int
) -> None:
    assert polls(tmp_path, answers) == asked


def test_the_job_runs_the_script_with_all_agents_and_then_scales() -> None:
    objects = rendered("overlays/scale-to-zero")
    (job,) = of_kind(objects, "Job")
    _, wait, scale = containers(job["spec"]["template"])
    python, script, seconds = wait["command"]
    assert python == "python3" and float(seconds) > 0
    (mount,) = (each for each in wait["volumeMounts"] if script == f"{each['mountPath']}/{SCRIPT.name}")
    volumes = {each["name"]: each for each in job["spec"]["template"]["spec"]["volumes"]}
    (config,) = of_kind(objects, "ConfigMap")
    assert volumes[mount["name"]]["configMap"]["name"] == config["metadata"]["name"]
    assert config["data"] == {SCRIPT.name: SCRIPT.read_text("utf-8")}
    (holder,) = of_kind(rendered("base"), "StatefulSet")
    assert scale["command"][1:4] == ["patch", "statefulset", holder["metadata"]["name"]]
    assert json.loads(scale["command"][-1]) == {"spec": {"replicas": 0}}
    (policy,) = of_kind(rendered("base"), "NetworkPolicy")
    clients = policy["spec"]["ingress"][1]["from"][0]["podSelector"]
    assert selects(clients, job["spec"]["template"]["metadata"]["labels"])
