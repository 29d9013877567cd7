"""What the manifests of examples/deploy/kubernetes must keep beyond Kubernetes' schemas, as functions of objects."""

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Object = Mapping[str, Any]
Rule = Callable[[Sequence[Object]], list[str]]
MARGIN_SECONDS = 5
"""Seconds that a pod has left to end in, once its node's drain has ended or was given up."""
LEAD_SECONDS = 30
"""Seconds in which a run's lead, which tries every second, has found a new pod's agent and starts its rank."""
OUTSIDE_KEYS = ("trainctl-keys",)
"""Secrets that make-keys.sh makes, so that no manifest has them."""
RUN_PORTS = {7474, 7475, 9474}
"""What clients and Prometheus may reach; all others are the engines'."""


def of_kind(objects: Sequence[Object], *kinds: str) -> list[Object]:
    return [one for one in objects if one["kind"] in kinds]


def title(one: Object) -> str:
    return f"{one['kind']} {one['metadata']['name']}"


def pods(objects: Sequence[Object]) -> Iterator[tuple[str, Object]]:
    """The title of each object that makes pods, and their template."""
    for one in of_kind(objects, "StatefulSet", "Job"):
        yield title(one), one["spec"]["template"]


def containers(template: Object) -> list[Object]:
    return [*template["spec"].get("initContainers", ()), *template["spec"]["containers"]]


def agents(objects: Sequence[Object]) -> Iterator[tuple[Object, Object]]:
    """Each StatefulSet and its container with an agent."""
    for one in of_kind(objects, "StatefulSet"):
        yield one, next(each for each in one["spec"]["template"]["spec"]["containers"] if each["name"] == "agent")


def selects(selector: Object, labels: Object) -> bool:
    """Whether a selector of labels alone takes a pod; an empty one takes all."""
    return all(labels.get(name) == value for name, value in selector.get("matchLabels", selector).items())


def labels_of(one: Object) -> Object:
    labels: Object = one["spec"]["template"]["metadata"]["labels"]
    return labels


# ---------------------------------------------------------------- resources


def whole_gpus(objects: Sequence[Object]) -> list[str]:
    """Kubernetes takes whole devices only."""
    return [
        f"{where}: {container['name']}: {name}: {amount!r} is no whole number of GPUs"
        for where, template in pods(objects)
        for container in containers(template)
        for kind in ("requests", "limits")
        for name, amount in container.get("resources", {}).get(kind, {}).items()
        if "gpu" in name and not (str(amount).isdecimal() and int(amount) >= 1)
    ]


def bounded(objects: Sequence[Object]) -> list[str]:
    """Each container says what memory it needs, and takes no more."""
    found = []
    for where, template in pods(objects):
        for container in containers(template):
            sizes = [container.get("resources", {}).get(kind, {}).get("memory") for kind in ("requests", "limits")]
            if sizes[0] is None or sizes[0] != sizes[1]:
                found.append(
                    f"{where}: {container['name']}: requests {sizes[0]} of memory and is limited to {sizes[1]}"
                )
    return found


def scaling(objects: Sequence[Object]) -> list[str]:
    """An autoscaler can't go to zero by a Resource metric: without pods there is none to read."""
    return [
        f"{title(one)}: scales to zero by the Resource metric {metric['resource']['name']}"
        for one in of_kind(objects, "HorizontalPodAutoscaler")
        for metric in one["spec"].get("metrics", ())
        if metric["type"] == "Resource" and one["spec"].get("minReplicas", 1) == 0
    ]


def least_rights(objects: Sequence[Object]) -> list[str]:
    """A role may read and set how many pods one StatefulSet has."""
    allowed = {"apiGroups": ["apps"], "resources": ["statefulsets/scale"], "resourceNames": ["trainctl"]}
    found = [f"{title(one)}: is for all namespaces" for one in of_kind(objects, "ClusterRole", "ClusterRoleBinding")]
    for one in of_kind(objects, "Role"):
        for rule in one["rules"]:
            if {**rule, "verbs": ()} != {**allowed, "verbs": ()} or not {*rule["verbs"]} <= {"get", "patch"}:
                found.append(f"{title(one)}: allows more than scaling one StatefulSet: {rule}")
    return found


# ---------------------------------------------------------------- security


def isolated(objects: Sequence[Object]) -> list[str]:
    """Only the group's own pods reach the ports of its engines, whose sums aren't encrypted."""
    found = []
    policies = of_kind(objects, "NetworkPolicy")
    for one, _ in agents(objects):
        own = [policy for policy in policies if selects(policy["spec"]["podSelector"], labels_of(one))]
        if not any("Ingress" in policy["spec"].get("policyTypes", ()) for policy in own):
            found.append(f"{title(one)}: no NetworkPolicy restricts who connects")
        found += [problem for policy in own for problem in _open_ports(policy, labels_of(one))]
    return found


def _open_ports(policy: Object, labels: Object) -> list[str]:
    found = []
    for rule in policy["spec"].get("ingress", ()):
        open_ports = {port.get("port") for port in rule.get("ports", ())} or {"all"}
        peers = rule.get("from", ())
        is_own = bool(peers) and all(
            set(peer) == {"podSelector"}
            and peer["podSelector"].get("matchLabels")
            and selects(peer["podSelector"], labels)
            for peer in peers
        )
        if not is_own and not open_ports <= RUN_PORTS:
            found.append(f"{title(policy)}: opens ports {open_ports} to other pods: {list(peers) or 'everyone'}")
    return found


def private_keys(objects: Sequence[Object]) -> list[str]:
    """A Secret's files aren't readable by all, the agent's container has copies instead, and none is committed."""
    found = [f"{title(one)}: has keys in it" for one in of_kind(objects, "Secret")]
    for where, template in pods(objects):
        volumes = {each["name"]: each["secret"] for each in template["spec"].get("volumes", ()) if "secret" in each}
        for name, secret in volumes.items():
            modes = [
                secret.get("defaultMode", 0o644),
                *(item["mode"] for item in secret.get("items", ()) if "mode" in item),
            ]
            found += [f"{where}: {name}: others can read it (mode {mode:04o})" for mode in modes if mode & 0o077]
        found += [
            f"{where}: {container['name']}: mounts all nodes' keys"
            for container in template["spec"]["containers"]
            for mount in container.get("volumeMounts", ())
            if mount["name"] in volumes
        ]
    return found


def restricted(objects: Sequence[Object]) -> list[str]:
    """No root, no capabilities, a read-only root, and no token but where a role is used."""
    found = []
    for where, template in pods(objects):
        spec = template["spec"]
        if not spec.get("securityContext", {}).get("runAsNonRoot"):
            found.append(f"{where}: may run as root")
        if spec.get("automountServiceAccountToken", True) and "serviceAccountName" not in spec:
            found.append(f"{where}: has the token of the default account")
        for container in containers(template):
            context = container.get("securityContext", {})
            wanted = {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            if {name: context.get(name) for name in wanted} != wanted:
                found.append(f"{where}: {container['name']}: isn't restricted: {context}")
    return found


# ---------------------------------------------------------------- life


def parallel(objects: Sequence[Object]) -> list[str]:
    """Pods start together and find each other by name before they are ready."""
    services = {one["metadata"]["name"]: one["spec"] for one in of_kind(objects, "Service")}
    found = []
    for one, _ in agents(objects):
        spec, service = one["spec"], services.get(one["spec"]["serviceName"], {})
        if spec.get("podManagementPolicy") != "Parallel":
            found.append(f"{title(one)}: starts its pods one after another")
        if service.get("clusterIP") != "None" or not service.get("publishNotReadyAddresses"):
            found.append(f"{title(one)}: has no headless Service with addresses of pods that aren't ready")
        elif not selects(service["selector"], labels_of(one)) or not selects(spec["selector"], labels_of(one)):
            found.append(f"{title(one)}: its Service, or it itself, selects other pods")
    return found


def disruptions(objects: Sequence[Object]) -> list[str]:
    """One pod at a time is evicted, ready or not: while the run's lead is away, no pod may be ready."""
    return [
        f"{title(one)}: several of its pods may be evicted at once, or none"
        for one, _ in agents(objects)
        if not any(
            budget["spec"].get("maxUnavailable") == 1
            and budget["spec"].get("unhealthyPodEvictionPolicy", "IfHealthyBudget") == "IfHealthyBudget"
            and selects(budget["spec"]["selector"], labels_of(one))
            for budget in of_kind(objects, "PodDisruptionBudget")
        )
    ]


def probed(objects: Sequence[Object]) -> list[str]:
    """Each probe asks the agent with a key: a bare connection is audited as a client that leaves without one."""
    return [
        f"{title(one)}: {kind} runs no command in the pod"
        for one, agent in agents(objects)
        for kind in ("startupProbe", "livenessProbe", "readinessProbe")
        if "exec" not in agent.get(kind, {})
    ] + [
        f"{title(one)}: a new pod is ready before the run's lead comes for its rank"
        for one, agent in agents(objects)
        if agent.get("readinessProbe", {}).get("initialDelaySeconds", 0) < LEAD_SECONDS
    ]


def kept_state(objects: Sequence[Object]) -> list[str]:
    """What is mounted exists, and the agent's state folder is on a volume of its pod."""
    known = {one["metadata"]["name"] for one in of_kind(objects, "ConfigMap")} | {*OUTSIDE_KEYS}
    found = []
    for one in of_kind(objects, "StatefulSet"):
        claims = {claim["metadata"]["name"] for claim in one["spec"].get("volumeClaimTemplates", ())}
        agent = next(each for holder, each in agents([one]) if holder is one)
        places = [mount["mountPath"] for mount in agent["volumeMounts"] if mount["name"] in claims]
        state = next((each["value"] for each in agent["env"] if each["name"] == "TRAINCTL_STATE"), "")
        if not any(state.startswith(f"{place}/") for place in places):
            found.append(f"{title(one)}: keeps its state at {state or 'the default place'}, on no volume of its own")
        volumes = {each["name"]: each for each in one["spec"]["template"]["spec"]["volumes"]}
        names = [
            each.get("secret", {}).get("secretName") or each.get("configMap", {}).get("name")
            for each in volumes.values()
        ]
        found += [f"{title(one)}: no {name}" for name in names if name is not None and name not in known]
        for container in containers(one["spec"]["template"]):
            mounted = {mount["name"] for mount in container.get("volumeMounts", ())}
            found += [
                f"{title(one)}: {container['name']} mounts no volume {name}" for name in mounted - {*volumes} - claims
            ]
    return found


def named_pods(objects: Sequence[Object]) -> list[str]:
    """cluster.toml names exactly the pods, by the addresses that their Service gives them."""
    files = [one["data"]["cluster.toml"] for one in of_kind(objects, "ConfigMap") if "cluster.toml" in one["data"]]
    found = []
    for one, _ in agents(objects):
        name, service = one["metadata"]["name"], one["spec"]["serviceName"]
        wanted = {
            f"{name}-{number}": f"tcp://{name}-{number}.{service}:7474" for number in range(one["spec"]["replicas"])
        }
        for text in files:
            nodes = {node: entry["address"] for node, entry in tomllib.loads(text)["nodes"].items()}
            if nodes != wanted:
                found.append(f"{title(one)}: cluster.toml has {nodes}, the pods are {wanted}")
    return found


RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        whole_gpus, bounded, scaling, least_rights, isolated, private_keys, restricted, parallel, disruptions, probed,
        kept_state, named_pods,
    )
}  # fmt: skip


def problems(objects: Sequence[Object]) -> list[str]:
    """What any rule has against the objects."""
    return [f"{name}: {problem}" for name, rule in RULES.items() for problem in rule(objects)]


def time_slices(config: Object) -> dict[str, int]:
    """What pods may ask for by a configuration of NVIDIA's device plugin, and how many of it each GPU is. Raises
    ValueError for a number of replicas that shares nothing."""
    slicing = config["sharing"]["timeSlicing"]
    ending = ".shared" if slicing.get("renameByDefault") else ""
    found = {f"{each['name']}{ending}": each["replicas"] for each in slicing["resources"]}
    for name, replicas in found.items():
        if not isinstance(replicas, int) or replicas < 2:
            raise ValueError(f"{name}: {replicas!r} replicas share no GPU")
    return found
