"""The manifests: valid, as the program takes them, closed to strangers, and as pods of a run need them."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import kubernetes_validate
import pytest
import yaml
from tests.conftest import ROOT
from tests.deploy.support.manifests import (
    FOLDER,
    FOLDERS,
    GROUPS,
    agent_of,
    calls,
    containers,
    environment,
    of_kind,
    parsed,
    pods,
    rendered,
    selects,
)
from tests.node_agent.support.processes import ENVIRONMENT
from tests.waiting import HANG_SECONDS

from trainctl.protocol import messages as m
from trainctl.protocol.config import addresses, cluster_file
from trainctl.protocol.config.addresses import parse_listen
from trainctl.protocol.config.env_policy import AGENT_OPTIONS
from trainctl.protocol.wire.sockets import DEFAULT_PORT

KUBERNETES = "1.34"
"""Its schemas count: the oldest version that was supported when the manifests were written."""
PORTS = {DEFAULT_PORT, DEFAULT_PORT + 1, 9474}
"""Ports that clients and Prometheus may reach; all others are the engines', whose sums aren't encrypted."""
LEAD_SECONDS = 30
"""Seconds in which a run's lead, which tries every second, has found a new pod's agent and starts its rank."""
MARGIN_SECONDS = 5
"""Seconds that a pod has left to end in, once its node's drain has ended or was given up."""


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_folder_is_valid_its_command_lines_too_and_its_pods_have_few_rights(folder: str) -> None:
    objects = rendered(folder)
    for item in objects:
        kubernetes_validate.validate(item, KUBERNETES, strict=True)
    assert not of_kind(objects, "Secret", "ClusterRole", "ClusterRoleBinding")
    lines: list[Any] = []
    for template in pods(objects):
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] == 1000
        assert "serviceAccountName" in spec or not spec["automountServiceAccountToken"]
        for container in containers(template):
            lines += calls(container)
            context, resources = container["securityContext"], container["resources"]
            assert not context["allowPrivilegeEscalation"] and context["readOnlyRootFilesystem"]
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert resources["requests"]["memory"] == resources["limits"]["memory"]
            assert all(amount == 1 for name, amount in resources["limits"].items() if "gpu" in name), "whole devices"
    assert lines or folder not in GROUPS


def test_the_role_may_only_scale_one_statefulset() -> None:
    ((rule,),) = (role["rules"] for role in of_kind(rendered("overlays/scale-to-zero"), "Role"))
    assert (rule["apiGroups"], rule["resources"], rule["resourceNames"]) == (
        ["apps"],
        ["statefulsets/scale"],
        ["trainctl"],
    )
    assert {*rule["verbs"]} <= {"get", "patch"}


@pytest.mark.parametrize("folder", GROUPS)
def test_only_the_groups_own_pods_reach_its_engines_and_keys(folder: str) -> None:
    objects = rendered(folder)
    holder, agent = agent_of(objects)
    labels = holder["spec"]["template"]["metadata"]["labels"]
    (policy,) = (item["spec"] for item in of_kind(objects, "NetworkPolicy"))
    assert selects(policy["podSelector"], labels) and "Ingress" in policy["policyTypes"]
    for rule in policy["ingress"]:
        if not rule.get("ports"):
            own = [peer["podSelector"]["matchLabels"] for peer in rule["from"]]
            assert own and all({*peer} == {"podSelector"} for peer in rule["from"])
            assert all(selects(each, labels) for each in own), "all ports are for its own pods"
        else:
            assert {port["port"] for port in rule["ports"]} <= PORTS
    volumes = {item["name"]: item for item in holder["spec"]["template"]["spec"]["volumes"]}
    secrets = {name for name, item in volumes.items() if "secret" in item}
    assert secrets and all(not volumes[name]["secret"]["defaultMode"] & 0o077 for name in secrets)
    assert not secrets & {mount["name"] for mount in agent["volumeMounts"]}, "it has copies of its own keys"


@pytest.mark.parametrize("folder", GROUPS)
def test_pods_start_together_find_each_other_keep_their_state_and_are_drained_one_at_a_time(folder: str) -> None:
    objects = rendered(folder)
    holder, agent = agent_of(objects)
    spec, template = holder["spec"], holder["spec"]["template"]
    labels = template["metadata"]["labels"]
    services = {item["metadata"]["name"]: item["spec"] for item in of_kind(objects, "Service")}
    service = services[spec["serviceName"]]
    assert spec["podManagementPolicy"] == "Parallel"
    assert service["clusterIP"] == "None" and service["publishNotReadyAddresses"]
    assert selects(service["selector"], labels) and selects(spec["selector"], labels)
    (budget,) = (item["spec"] for item in of_kind(objects, "PodDisruptionBudget"))
    assert budget["maxUnavailable"] == 1 and selects(budget["selector"], labels)
    assert budget.get("unhealthyPodEvictionPolicy", "IfHealthyBudget") == "IfHealthyBudget"
    assert all("exec" in agent[kind] for kind in ("startupProbe", "livenessProbe", "readinessProbe"))
    assert agent["readinessProbe"]["initialDelaySeconds"] >= LEAD_SECONDS
    claims = {claim["metadata"]["name"] for claim in spec["volumeClaimTemplates"]}
    places = [mount["mountPath"] for mount in agent["volumeMounts"] if mount["name"] in claims]
    assert any(environment(agent)["TRAINCTL_STATE"].startswith(f"{place}/") for place in places)
    volumes = {item["name"] for item in template["spec"]["volumes"]}
    mounts = {mount["name"] for each in containers(template) for mount in each.get("volumeMounts", ())}
    assert mounts <= volumes | claims
    (call,) = (each for each in calls(agent) if each.command.name == "run")
    assert call.params["drain_on_term"]
    assert template["spec"]["terminationGracePeriodSeconds"] >= call.params["grace"] + MARGIN_SECONDS
    with patch.dict(os.environ, clear=True):
        known = {AGENT_OPTIONS + option.name.upper() for option in parsed(["trainctl-agent", "run"]).command.params}
    own = {name for name in environment(agent) if name.startswith("TRAINCTL_")}
    assert own <= known | {"TRAINCTL_CLUSTER", "TRAINCTL_STATE", "TRAINCTL_KEYS"}


@pytest.mark.parametrize("folder", GROUPS)
def test_the_cluster_file_and_the_ports_are_the_programs(folder: str, tmp_path: Path) -> None:
    objects = rendered(folder)
    (config,) = of_kind(objects, "ConfigMap")
    (file := tmp_path / "cluster.toml").write_text(config["data"]["cluster.toml"], "utf-8")
    holder, agent = agent_of(objects)
    name, service = holder["metadata"]["name"], holder["spec"]["serviceName"]
    assert {node: entry.address for node, entry in cluster_file.read(file).nodes.items()} == {
        f"{name}-{number}": f"tcp://{name}-{number}.{service}:{DEFAULT_PORT}"
        for number in range(holder["spec"]["replicas"])
    }
    variables = environment(agent)
    assert variables["TRAINCTL_AGENT_NAME"] in cluster_file.read(file).nodes
    assert variables["TRAINCTL_AGENT_LISTEN"].endswith(f":{DEFAULT_PORT}")
    assert int(variables["TRAINCTL_AGENT_METRICS"].rpartition(":")[2]) in PORTS
    assert {port["containerPort"] for port in agent["ports"]} == PORTS
    assert {port["port"] for item in of_kind(objects, "Service") for port in item["spec"]["ports"]} == PORTS


def test_gpu_pods_ask_for_what_their_overlay_provides() -> None:
    names = []
    for folder in GROUPS:
        _, agent = agent_of(rendered(folder))
        gpus = [name for name in agent["resources"]["limits"] if "gpu" in name]
        assert agent["image"] == ("trainctl:cuda" if gpus else "trainctl:torch")
        names.append(gpus)
    assert names == [[], ["nvidia.com/gpu"], ["nvidia.com/gpu"], ["nvidia.com/gpu.shared"]]
    plugin = yaml.safe_load((FOLDER / "overlays" / "time-sliced" / "device-plugin.yaml").read_text("utf-8"))
    kubernetes_validate.validate(plugin, KUBERNETES, strict=True)
    slicing = yaml.safe_load(plugin["data"]["config.yaml"])["sharing"]["timeSlicing"]
    (resource,) = slicing["resources"]
    assert slicing["renameByDefault"] and resource["name"] == "nvidia.com/gpu" and resource["replicas"] > 1
    holder, _ = agent_of(rendered("overlays/spot"))
    tolerated = {each["key"] for each in holder["spec"]["template"]["spec"]["tolerations"]}
    assert {"cloud.google.com/gke-spot", "nvidia.com/gpu"} <= tolerated


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_registrys_name_in_the_folder_that_is_applied_is_that_of_each_container(folder: str, tmp_path: Path) -> None:
    """As docs/deploy.md says in its first step."""
    shutil.copytree(FOLDER, tmp_path / "kubernetes")
    file = tmp_path / "kubernetes" / folder / "kustomization.yaml"
    settings = yaml.safe_load(file.read_text("utf-8"))
    (image,) = settings["images"]
    image |= {"newName": "registry.example:5000/team/trainctl", "newTag": f"{image['newTag']}-7"}
    file.write_text(yaml.safe_dump(settings), "utf-8")
    before, after = (
        [container["image"] for template in pods(rendered(place)) for container in containers(template)]
        for place in (folder, file.parent)
    )
    assert after != before
    assert after == [re.sub(r"^trainctl:(\w+)$", r"registry.example:5000/team/trainctl:\1-7", name) for name in before]


def test_a_pod_is_ready_but_while_its_own_rank_is_away() -> None:
    _, agent = agent_of(rendered("base"))
    script = agent["readinessProbe"]["exec"]["command"][-1]
    (code,) = re.findall(r"trainctl status --json[^|]* \| python3 -c '(.*?)'", script, re.DOTALL)

    def status(run: dict[str, Any] | None) -> int:
        done = subprocess.run(
            [sys.executable, "-c", code],
            input=json.dumps({"run": run}),
            text=True,
            capture_output=True,
            check=False,
            env={**ENVIRONMENT, "TRAINCTL_AGENT_NAME": "trainctl-1"},
            timeout=HANG_SECONDS,
        )
        assert done.stderr == ""
        return done.returncode

    (away,) = re.findall(r"own & \{(.*?)\}", code)
    assert {*json.loads(f"[{away}]")} <= {*get_args(m.RankState)}
    ranks = [{"node": "trainctl-0", "state": "lost"}, {"node": "trainctl-1", "state": "run"}]
    back = [{"node": "trainctl-0", "state": "run"}, {"node": "trainctl-1", "state": "rejoining"}]
    assert status(None) == 0
    assert status({"state": "running", "ranks": ranks}) == 0
    assert status({"state": "running", "ranks": back}) == 1
    assert status({"state": "failed", "ranks": back}) == 0


def test_with_ipv6_the_comments_values_are_addresses_that_the_program_takes() -> None:
    text = (FOLDER / "base" / "statefulset.yaml").read_text("utf-8")
    comments = dict(re.findall(r"- name: (TRAINCTL_\w+) # with IPv6: (\S+)", text))
    values = {name: value.replace("$(POD_IP)", "fd00::7") for name, value in comments.items()}
    parts = addresses.split(values["TRAINCTL_AGENT_LISTEN"])
    assert (parts.hostname, parts.port) == ("fd00::7", DEFAULT_PORT)
    assert parse_listen(values["TRAINCTL_AGENT_METRICS"], "here") == ("fd00::7", 9474)


def test_the_programs_take_every_command_line_of_the_page() -> None:
    page = (ROOT / "docs" / "deploy.md").read_text("utf-8")
    texts = re.findall(r"(?:-- |`)(trainctl(?:-agent)?(?: [^`#\n]*)?)", page)
    lines = [shlex.split(text) for text in texts if " " in text]
    assert len([parsed(words) for words in lines]) > 3
    (created, *_) = (line.strip() for line in page.splitlines() if "kubectl create secret" in line)
    assert created in (FOLDER / "make-keys.sh").read_text("utf-8")
