"""Three pods of the built image, each in network, process and mount namespaces of its own, train the demo's model.

They are as the StatefulSet of overlays/spot has them.
"""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import tomli_w
from tests.deploy.support.builds import Builds, mounts_under
from tests.deploy.support.containers import Containers, Image, Volume
from tests.deploy.support.manifests import Object, agent_of, containers, deployed, environment, rendered
from tests.integration.support.namespaces import INTERFACE, Network, leftovers
from tests.waiting import slowness, until

from trainctl.protocol import messages as m
from trainctl.protocol.messages import events as e
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader
from trainctl.trainer import demo_assets
from trainctl.tui.demo.folder import run_config

pytestmark = [
    pytest.mark.tier("soak"),
    pytest.mark.needs("buildah", "runc", "namespaces"),
    pytest.mark.timeout(3600),
]
PODS = ("trainctl-0", "trainctl-1", "trainctl-2")
WAIT_SECONDS = 2.0
"""Most seconds that the ranks which stay wait for a drain, beside a step, on a machine that isn't busy."""
DEMO = "/srv/demo"
STATUS = 'exec trainctl status --json --connect "$TRAINCTL_AGENT_LISTEN"'
ENDINGS = ("going back", "failed", "stopped")


class Group:
    """The pods of a StatefulSet by name, which know each other's names as the headless Service gives them."""

    def __init__(self, image: Image, network: Network, folder: Path, deployment: Path) -> None:
        holder, _ = agent_of(rendered("overlays/spot"))
        spec = holder["spec"]["template"]["spec"]
        self.setup, self.agent = containers(holder["spec"]["template"])
        self.grace: float = spec["terminationGracePeriodSeconds"]
        self._image, self._network, self._folder, self._deployment = image, network, folder, deployment
        self.containers = Containers(folder / "containers")
        self.slowness = slowness()

    def prepare(self) -> None:
        """Make the pods' volumes, the names' file, and the demo's model, text and run file."""
        names = "".join(f"{address} {name}.trainctl\n" for name, address in self._network.addresses.items())
        (self._folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}", "ascii")
        demo_assets.make_model(self._folder / "demo" / "model")
        demo_assets.make_text(self._folder / "demo" / "data")
        config = run_config(Path(DEMO), dict.fromkeys(PODS, "torch"), 100_000)
        for table in config["nodes"].values():
            table["interface"] = INTERFACE
        (self._folder / "demo" / "run.toml").write_text(tomli_w.dumps(config), "utf-8")
        self._own(self._folder / "demo")
        for name in PODS:
            self._volumes(self._folder / name)

    def _volumes(self, pod: Path) -> None:
        shutil.copytree(self._deployment / "keys" / "secret", pod / "secret")
        shutil.copytree(self._deployment / "base", pod / "cluster")
        for volume in ("keys", "state", "tmp"):
            (pod / volume).mkdir()
        self._own(pod)

    def _own(self, folder: Path) -> None:
        """Give a folder to the containers' user."""
        for path in (folder, *folder.rglob("*")):
            os.chown(path, *self._image.user)

    def run(self, name: str, container: Object) -> None:
        """Start one of the pod's containers."""
        mounted = [
            Volume(mount["mountPath"], self._folder / name / mount["name"], not mount.get("readOnly"))
            for mount in container["volumeMounts"]
        ]
        shared = [Volume("/etc/hosts", self._folder / "hosts"), Volume(DEMO, self._folder / "demo")]
        fields = {"metadata.name": name, "status.podIP": self._network.addresses[name]}
        env = environment(container, fields)
        if "TRAINCTL_AGENT_GRACE" in env:
            env["TRAINCTL_AGENT_GRACE"] = f"{float(env['TRAINCTL_AGENT_GRACE']) * self.slowness:.0f}"
        words = [*container["command"], *container.get("args", ())]
        network = Path("/run/netns") / self._network.on(name)[3]
        self.containers.start(name, self._image.configuration(words, env, [*mounted, *shared], network))

    def start(self, name: str) -> None:
        """The pod's containers, one after another, until its agent answers its startup probe."""
        if not [*(self._folder / name / "keys").iterdir()]:
            self.run(name, self.setup)
            assert self.containers.wait(name) == 0, self.containers.said(name)
        self.run(name, self.agent)
        probe = self.agent["startupProbe"]["exec"]["command"]
        until(lambda: self.containers.ask(name, *probe).returncode == 0, 120, name, lambda: self.containers.said(name))

    def said(self, name: str) -> dict[str, Any]:
        """Return what a pod's agent answers; empty if it doesn't."""
        done = self.containers.ask(name, "sh", "-c", STATUS)
        found: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {}
        return found

    def view(self, name: str) -> dict[str, Any]:
        """The run as a pod sees it; empty without one."""
        return self.said(name).get("run") or {}

    def in_touch(self) -> None:
        """Until every pod has reached every other one."""
        for name in PODS:

            def peers(name: str = name) -> list[str]:
                return [peer["state"] for peer in self.said(name).get("peers", ())]

            until(lambda peers=peers: {*peers()} == {"connected"}, 60, f"the peers of {name}", peers)

    def wait_for_step(self, name: str, more: int) -> None:
        """Until the run has committed so many steps more."""
        begun = int(self.view(name).get("step", 0))

        def step() -> int:
            return int(self.view(name).get("step", 0))

        until(lambda: step() >= begun + more, 120, f"step {begun + more}", step)

    def states(self, name: str) -> dict[str, str]:
        """Those of the ranks, by node."""
        return {rank["node"]: rank["state"] for rank in self.view(name).get("ranks", ())}

    def record(self, name: str) -> RecordReader:
        """Return the record of the newest run, in a pod that runs."""
        (run,) = (self._folder / name / "state" / "state" / name / "runs").iterdir()
        return RecordReader(RunPaths(run))

    def end(self, name: str) -> float:
        """Terminate a pod as the kubelet does; the seconds until its container had ended."""
        begun = time.monotonic()
        self.containers.terminate(name)
        assert self.containers.wait(name) == 0, self.containers.said(name)
        return time.monotonic() - begun


@pytest.fixture
def group(builds: Builds, programs: dict[str, str], tmp_path: Path) -> Iterator[Group]:
    """Yield pods whose containers, hosts and mounts are gone afterwards, whatever happens."""
    deployment = deployed(tmp_path, programs, len(PODS))
    with contextlib.ExitStack() as stack:
        image = stack.enter_context(Image.mounted(builds["torch"].name, **builds.env))
        network = stack.enter_context(contextlib.closing(Network(PODS)))
        made = Group(image, network, tmp_path / "pods", deployment)
        stack.callback(made.containers.close)
        made.prepare()
        yield made
    assert made.containers.left() == [] and mounts_under(image.root) == [] and mounts_under(tmp_path) == []
    assert not [place for place in leftovers() if place.name in {network.on(name)[3] for name in PODS}]


def test_a_pod_that_is_terminated_costs_the_others_no_step_and_its_container_ends_in_time(group: Group) -> None:
    for name in PODS:
        group.start(name)
    group.in_touch()
    begun = ("trainctl", "run", f"{DEMO}/run.toml")
    said = group.containers.ask("trainctl-0", *begun)
    assert said.returncode == 0, said.stderr
    whole = dict.fromkeys(PODS, "run")
    until(lambda: group.states("trainctl-0") == whole, 300, "the group", lambda: group.states("trainctl-0"))
    group.wait_for_step("trainctl-0", 5)
    spaces = {name: _space(group.containers.init(name)) for name in PODS}
    assert len({*spaces.values()}) == len(PODS)
    _check_container(group, "trainctl-1")
    _check_reaped(group, "trainctl-1")
    seconds, waits, step = _preempted(group, "trainctl-1")
    print(f"\nended after {seconds:.1f} s, the others waited {waits} s, steps of {step:.2f} s, load {slowness():.1f}")
    assert seconds < group.grace * max(group.slowness, slowness())
    assert waits, "the others didn't form a group without it"
    assert max(waits) < WAIT_SECONDS * max(group.slowness, slowness()) + step
    group.start("trainctl-1")  # the StatefulSet has it back
    until(lambda: group.states("trainctl-0") == whole, 300, "its return", lambda: group.states("trainctl-0"))
    assert group.containers.ask("trainctl-0", "trainctl", "send", "stop").returncode == 0
    until(lambda: group.view("trainctl-0").get("state") not in m.ACTIVE_RUN_STATES, 120, "the run's end")
    for name in PODS:
        group.end(name)
    assert not [pid for pid in psutil.pids() if _space(pid) in spaces.values()]


def _space(pid: int) -> str:
    """The namespace of processes that a process is in; empty if it has ended."""
    with contextlib.suppress(OSError):
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    return ""


def _check_container(group: Group, name: str) -> None:
    """Its user, its rights, its init, and its root, which can't be written."""

    def said(script: str) -> str:
        done = group.containers.ask(name, "sh", "-c", script)
        return f"{done.stdout}{done.stderr}".strip()

    assert said("cat /proc/1/comm; id -u; id -g").split() == ["tini", "1000", "1000"]
    assert {line.split()[1] for line in said("grep Cap /proc/1/status").splitlines()} == {"0" * 16}
    for place in ("/opt/trainctl/x", "/x", "/etc/trainctl/x", "/run/trainctl/keys/x", f"{DEMO}/x"):
        assert "Read-only file system" in said(f"touch {place}"), place
    assert said("touch /tmp/x /var/lib/trainctl/x && rm /tmp/x /var/lib/trainctl/x") == ""


def _check_reaped(group: Group, name: str) -> None:
    """A process that outlives its parent becomes the init's child, and leaves no zombie."""
    init = psutil.Process(group.containers.init(name))
    assert group.containers.ask(name, "sh", "-c", "sleep 5000 >/dev/null 2>&1 &").returncode == 0
    (orphan,) = until(lambda: [child for child in init.children() if child.name() == "sleep"], 30, "the orphan")
    orphan.kill()
    until(lambda: not psutil.pid_exists(orphan.pid), 30, "the init to reap it")


def _preempted(group: Group, name: str) -> tuple[float, list[float], float]:
    """Terminate a pod. Seconds until it has ended; those that the others waited, at each new group; and of a step."""
    stays = next(pod for pod in PODS if pod != name)
    with group.record(stays) as record:
        last, _ = record.events(0, 5000)
        seconds = group.end(name)
        group.wait_for_step(stays, 3)
        found = [event.data for event in record.events(last[-1].id, 500)[0]]
        newest = record.last_step()
        assert newest is not None
        steps, _ = record.steps(max(0, newest.step - 50), 50)
    changes = [data for data in found if isinstance(data, e.SharesChanged)]
    assert name in {data.node for data in changes} and not [data for data in changes if data.lost], found
    assert not [data for data in found if isinstance(data, e.StepRetracted)], found
    assert not [data for data in found if isinstance(data, e.RunStateChanged) and data.after in ENDINGS], found
    waits = [wait for data in found if isinstance(data, e.GenerationFormed) and (wait := data.waited_seconds)]
    return seconds, waits, max(step.step_seconds for step in steps)
