"""The manifests: valid, as the program takes them, and each planted error is found."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import kubernetes_validate
import pytest
import yaml
from tests.deploy import command_lines, manifest_rules
from tests.deploy.manifest_rules import agents, of_kind
from tests.deploy.rendering import FOLDER, FOLDERS, GROUPS, put, render, rendered
from tests.node_agent.support.processes import ENVIRONMENT
from tests.waiting import HANG_SECONDS

from trainctl.node_agent.exporter import listen_address
from trainctl.protocol import messages as m
from trainctl.protocol.config import addresses, cluster_file
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.wire.sockets import DEFAULT_PORT

VERSION = "1.34"
"""Of Kubernetes, whose schemas count: the oldest that was supported when the manifests were written."""
POD = "spec|template|spec"
AGENT = f"{POD}|containers|0"
SCALER = {
    "apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": {"name": "trainctl"},
    "spec": {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "trainctl"}, "minReplicas": 0,
        "maxReplicas": 3,
        "metrics": [{"type": "Resource", "resource": {
            "name": "nvidia.com/gpu", "target": {"type": "Utilization", "averageUtilization": 10}}}],
    },
}  # fmt: skip


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_folder_is_valid_and_keeps_every_rule(folder: str) -> None:
    objects = rendered(folder)
    for one in objects:
        kubernetes_validate.validate(one, VERSION, strict=True)
    assert manifest_rules.problems(objects) == []
    assert command_lines.problems(objects) == []


def test_the_device_plugins_configuration_is_valid_and_gives_what_pods_ask_for() -> None:
    one = yaml.safe_load((FOLDER / "overlays" / "time-sliced" / "device-plugin.yaml").read_text("utf-8"))
    kubernetes_validate.validate(one, VERSION, strict=True)
    config = yaml.safe_load(one["data"]["config.yaml"])
    patch = yaml.safe_load((FOLDER / "overlays" / "time-sliced" / "shared-gpu.yaml").read_text("utf-8"))
    (container,) = patch["spec"]["template"]["spec"]["containers"]
    asked = {name: amount for name, amount in container["resources"]["limits"].items() if amount is not None}
    assert {*asked} == {*manifest_rules.time_slices(config)} and {*asked.values()} == {1}
    config["sharing"]["timeSlicing"]["resources"][0]["replicas"] = 0.5
    with pytest.raises(ValueError, match=r"0\.5 replicas"):
        manifest_rules.time_slices(config)


PLANTED: list[tuple[str, str, str, Any, str]] = [
    ("a fraction of a GPU", "StatefulSet", f"{AGENT}|resources|limits|nvidia.com/gpu", "0.25", "no whole number"),
    ("a fraction in thousandths", "StatefulSet", f"{AGENT}|resources|limits|nvidia.com/gpu", "500m", "no whole number"),
    ("no limit of memory", "StatefulSet", f"{AGENT}|resources|limits|memory", None, "is limited to None"),
    ("a policy for other pods", "NetworkPolicy", "spec|podSelector|matchLabels", {"app": "x"}, "no NetworkPolicy"),
    ("a policy for what leaves", "NetworkPolicy", "spec|policyTypes", ["Egress"], "no NetworkPolicy restricts"),
    ("all ports for everyone", "NetworkPolicy", "spec|ingress|0|from", None, "opens ports {'all'}"),
    ("all ports for all pods", "NetworkPolicy", "spec|ingress|0|from|0|podSelector", {}, "opens ports {'all'}"),
    ("all ports for clients", "NetworkPolicy", "spec|ingress|1|ports", None, "opens ports {'all'}"),
    ("a port of engines", "NetworkPolicy", "spec|ingress|2|ports|0|port", 29500, "opens ports {29500}"),
    ("keys for all", "StatefulSet", f"{POD}|volumes|0|secret|defaultMode", 0o644, "others can read it (mode 0644)"),
    ("keys for all by default", "StatefulSet", f"{POD}|volumes|0|secret|defaultMode", None, "(mode 0644)"),
    ("keys beside the agent", "StatefulSet", f"{AGENT}|volumeMounts|2|name", "secret", "mounts all nodes' keys"),
    ("root", "StatefulSet", f"{POD}|securityContext|runAsNonRoot", None, "may run as root"),
    ("capabilities", "StatefulSet", f"{AGENT}|securityContext|capabilities", None, "isn't restricted"),
    ("a writable root", "StatefulSet", f"{AGENT}|securityContext|readOnlyRootFilesystem", False, "isn't restricted"),
    ("a token", "StatefulSet", f"{POD}|automountServiceAccountToken", None, "has the token of the default account"),
    ("pods in order", "StatefulSet", "spec|podManagementPolicy", "OrderedReady", "one after another"),
    ("one address for all", "Service", "spec|clusterIP", None, "no headless Service"),
    ("names for ready pods only", "Service", "spec|publishNotReadyAddresses", None, "no headless Service"),
    ("a Service of other pods", "Service", "spec|selector", {"app": "x"}, "selects other pods"),
    ("two evictions at once", "PodDisruptionBudget", "spec|maxUnavailable", 2, "several of its pods may be evicted"),
    ("evictions of unready pods", "PodDisruptionBudget", "spec|unhealthyPodEvictionPolicy", "AlwaysAllow",
     "several of its pods may be evicted"),
    ("a pod that is ready at once", "StatefulSet", f"{AGENT}|readinessProbe|initialDelaySeconds", None,
     "ready before the run's lead comes"),
    ("a probe by TCP", "StatefulSet", f"{AGENT}|livenessProbe", {"tcpSocket": {"port": 7474}}, "runs no command"),
    ("state in the container", "StatefulSet", "spec|volumeClaimTemplates|0|metadata|name", "x", "on no volume"),
    ("another name of the Secret", "StatefulSet", f"{POD}|volumes|0|secret|secretName", "keys", "no keys"),
    ("a volume that isn't there", "StatefulSet", f"{AGENT}|volumeMounts|1|name", "temp", "mounts no volume temp"),
    ("a pod too many", "StatefulSet", "spec|replicas", 4, "the pods are"),
    ("another Service", "StatefulSet", "spec|serviceName", "agents", "no headless Service"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "path", "value", "says"), [row[1:] for row in PLANTED], ids=[row[0] for row in PLANTED]
)
def test_a_planted_error_is_found(kind: str, path: str, value: Any, says: str) -> None:
    objects = rendered("overlays/gpu")
    put(objects, kind, path, value)
    assert any(says in problem for problem in manifest_rules.problems(objects)), manifest_rules.problems(objects)


def test_a_lack_of_a_policy_and_scaling_to_zero_by_a_resource_are_found() -> None:
    objects = [one for one in rendered("base") if one["kind"] != "NetworkPolicy"]
    assert ["no NetworkPolicy" in problem for problem in manifest_rules.problems(objects)] == [True]
    kubernetes_validate.validate(SCALER, VERSION, strict=True)
    assert ["scales to zero" in problem for problem in manifest_rules.problems([*rendered("base"), SCALER])] == [True]


PLANTED_COMMANDS: list[tuple[str, str, Any, str]] = [
    ("a grace shorter than the drain", f"{POD}|terminationGracePeriodSeconds", 60, "and may drain for 60 s"),
    ("the default grace", f"{POD}|terminationGracePeriodSeconds", None, "are killed after 30 s"),
    ("an unknown option", f"{AGENT}|command", ["tini", "--", "trainctl-agent", "run", "--x"], "No such option: --x"),
    ("an unknown command", f"{AGENT}|livenessProbe|exec|command|2", "exec trainctl healthy", "No such command"),
    ("an unknown variable", f"{AGENT}|env|1|name", "TRAINCTL_AGENT_NODE", "no variable TRAINCTL_AGENT_NODE"),
    ("a bad value", f"{AGENT}|env|6|value", "soon", "TRAINCTL_AGENT_GRACE: 'soon' is not a valid float"),
    ("no drain", f"{AGENT}|env|5|value", "false", "drains no node"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "value", "says"), [row[1:] for row in PLANTED_COMMANDS], ids=[row[0] for row in PLANTED_COMMANDS]
)
def test_a_planted_command_is_found(path: str, value: Any, says: str) -> None:
    objects = rendered("base")
    put(objects, "StatefulSet", path, value)
    assert any(says in problem for problem in command_lines.problems(objects)), command_lines.problems(objects)


def test_a_right_too_many_is_found() -> None:
    for path, value in (("verbs", ["*"]), ("resources", ["statefulsets"]), ("resourceNames", None)):
        objects = rendered("overlays/scale-to-zero")
        put(objects, "Role", f"rules|0|{path}", value)
        assert ["allows more" in problem for problem in manifest_rules.problems(objects)] == [True]


@pytest.mark.parametrize("folder", GROUPS)
def test_the_cluster_file_and_the_ports_are_the_programs(folder: str, tmp_path: Path) -> None:
    objects = rendered(folder)
    (config,) = of_kind(objects, "ConfigMap")
    (file := tmp_path / "cluster.toml").write_text(config["data"]["cluster.toml"], "utf-8")
    ((_, agent),) = agents(objects)
    variables = command_lines.environment(agent)
    assert variables["TRAINCTL_AGENT_NAME"] in cluster_file.read(file).nodes
    listen, metrics = variables["TRAINCTL_AGENT_LISTEN"], variables["TRAINCTL_AGENT_METRICS"]
    ports = {DEFAULT_PORT, DEFAULT_PORT + 1, int(metrics.rpartition(":")[2])}
    assert listen.endswith(f":{DEFAULT_PORT}") and ports == manifest_rules.RUN_PORTS
    assert {port["containerPort"] for port in agent["ports"]} == ports
    assert {port["port"] for one in of_kind(objects, "Service") for port in one["spec"]["ports"]} == ports


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_registrys_name_in_the_folder_that_is_applied_is_that_of_each_container(folder: str, tmp_path: Path) -> None:
    """As docs/deploy.md says in its first step."""
    shutil.copytree(FOLDER, tmp_path / "kubernetes")
    file = tmp_path / "kubernetes" / folder / "kustomization.yaml"
    settings = yaml.safe_load(file.read_text("utf-8"))
    (image,) = settings["images"]
    image |= {"newName": "registry.example:5000/team/trainctl", "newTag": f"{image['newTag']}-7"}
    file.write_text(yaml.safe_dump(settings), "utf-8")
    found = [images_of(objects) for objects in (rendered(folder), render(file.parent))]
    assert found[1] == [
        re.sub(r"^trainctl:(\w+)$", r"registry.example:5000/team/trainctl:\1-7", one) for one in found[0]
    ]
    assert found[1] != found[0]


def images_of(objects: list[dict[str, Any]]) -> list[str]:
    """Of all containers, in order."""
    return [one["image"] for _, pod in manifest_rules.pods(objects) for one in manifest_rules.containers(pod)]


def test_what_each_overlay_changes() -> None:
    gpus, images, seconds = {}, {}, {}
    for folder in GROUPS:
        ((holder, agent),) = agents(rendered(folder))
        limits = agent["resources"]["limits"]
        gpus[folder] = {name: amount for name, amount in limits.items() if "gpu" in name}
        images[folder] = agent["image"]
        seconds[folder] = holder["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    whole, shared = {"nvidia.com/gpu": 1}, {"nvidia.com/gpu.shared": 1}
    assert [*gpus.values()] == [{}, whole, whole, shared]
    assert [*images.values()] == ["trainctl:torch", *["trainctl:cuda"] * 3]
    assert [*seconds.values()] == [75, 75, 15, 75]
    ((holder, agent),) = agents(rendered("overlays/spot"))
    tolerated = {each["key"] for each in holder["spec"]["template"]["spec"]["tolerations"]}
    chosen = holder["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    assert "cloud.google.com/gke-spot" in tolerated and "nvidia.com/gpu" in tolerated
    assert len(chosen["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]) == 3
    assert "--drain-on-term" in agent["command"]


def script_in(text: str) -> str:
    """The Python code that a shell script gives `trainctl status --json`."""
    (code,) = re.findall(r"trainctl status --json[^|]* \| python3 -c '(.*?)'", text, re.DOTALL)
    return str(code)


def status_of(code: str, run: dict[str, Any] | None) -> int:
    """The exit status of the code on trainctl-1 for what the agent says about a run."""
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps({"run": run}), text=True, capture_output=True, check=False,
        env={**ENVIRONMENT, "TRAINCTL_AGENT_NAME": "trainctl-1"}, timeout=HANG_SECONDS,
    )  # fmt: skip
    assert done.stderr == ""
    return done.returncode


def test_a_pod_is_ready_but_while_its_own_rank_is_away() -> None:
    ((_, agent),) = agents(rendered("base"))
    code = script_in(agent["readinessProbe"]["exec"]["command"][-1])
    (away,) = re.findall(r"own & \{(.*?)\}", code)
    assert {*json.loads(f"[{away}]")} <= {*get_args(m.RankState)}
    ranks = [{"node": "trainctl-0", "state": "lost"}, {"node": "trainctl-1", "state": "run"}]
    back = [{"node": "trainctl-0", "state": "run"}, {"node": "trainctl-1", "state": "rejoining"}]
    assert status_of(code, None) == 0
    assert status_of(code, {"state": "running", "ranks": ranks}) == 0
    assert status_of(code, {"state": "running", "ranks": back}) == 1
    assert status_of(code, {"state": "failed", "ranks": back}) == 0


def test_with_ipv6_the_comments_values_are_addresses_that_the_program_takes() -> None:
    text = (FOLDER / "base" / "statefulset.yaml").read_text("utf-8")
    found = dict(re.findall(r"- name: (TRAINCTL_\w+) # with IPv6: (\S+)", text))
    values = {name: value.replace("$(POD_IP)", "fd00::7") for name, value in found.items()}
    assert [*values] == ["TRAINCTL_AGENT_LISTEN", "TRAINCTL_AGENT_METRICS"]
    parts = addresses.split(values["TRAINCTL_AGENT_LISTEN"])
    assert (parts.hostname, parts.port) == ("fd00::7", DEFAULT_PORT)
    assert listen_address.parse(values["TRAINCTL_AGENT_METRICS"], "here") == ("fd00::7", 9474)
    for name in ("trainctl-0:9474", "fd00::7"):
        with pytest.raises(InvalidInputError, match="is not IP-ADDRESS:PORT"):
            listen_address.parse(name, "here")


def test_the_services_page_gives_metrics_addresses_that_the_program_takes() -> None:
    (row,) = re.findall(
        r"^\| `--metrics` .*$", (FOLDER.parents[2] / "docs" / "services.md").read_text("utf-8"), re.MULTILINE
    )
    assert "IP-ADDRESS:PORT" in row
    given = re.findall(r"`(\S+:\d+)`", row)
    assert [str(listen_address.parse(one, "here")) for one in given] == given and len(given) == 2
