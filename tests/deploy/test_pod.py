"""Two pods' lives on this machine: keys by make-keys.sh, then the containers' own commands, variables and probes."""

import contextlib
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.deploy.support.manifests import agent_of, containers, deployed, environment, rendered
from tests.integration.support.namespaces import Network
from tests.waiting import HANG_SECONDS

from trainctl.protocol.config import cluster_file
from trainctl.protocol.security.keys import KeyFolder

PLACES = ("/run/secrets/trainctl", "/run/trainctl/keys", "/etc/trainctl", "/var/lib/trainctl")
"""Where a pod has its volumes, which are folders of the test here."""


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory, programs: dict[str, str]) -> Path:
    return deployed(tmp_path_factory.mktemp("deployment"), programs, 2)


def test_keys_are_private_named_in_the_cluster_file_and_kept_when_pods_are_added(
    deployment: Path, programs: dict[str, str], tmp_path: Path
) -> None:
    nodes = cluster_file.read(deployment / "base" / "cluster.toml").nodes
    assert {name: entry.address for name, entry in nodes.items()} == {
        name: f"tcp://{name}.trainctl:7474" for name in ("trainctl-0", "trainctl-1")
    }
    secret = deployment / "keys" / "secret"
    assert {path.name for path in secret.iterdir()} == {
        "user.toml", "authorized.toml", "trainctl-0.toml", "trainctl-1.toml"
    }  # fmt: skip
    assert {path.stat().st_mode & 0o777 for path in secret.iterdir()} == {0o600}
    assert nodes["trainctl-1"].key == KeyFolder(deployment / "keys" / "trainctl-1").agent().public
    assert "keys/" in (deployment / ".gitignore").read_text("utf-8").split()
    grown = shutil.copytree(deployment, tmp_path / "grown")
    subprocess.run([grown / "make-keys.sh", "3", "10.0.0.0/8"], env=programs, timeout=HANG_SECONDS, check=True)
    more = cluster_file.read(grown / "base" / "cluster.toml")
    assert [*more.nodes] == ["trainctl-0", "trainctl-1", "trainctl-2"] and more.trusted_networks == ("10.0.0.0/8",)
    assert more.nodes["trainctl-1"].key == nodes["trainctl-1"].key


class Pods:
    """Hosts in whose place the StatefulSet's pods run, each with volumes of its own, and the Service's names."""

    def __init__(self, network: Network, folder: Path, programs: dict[str, str]) -> None:
        holder, _ = agent_of(rendered("base"))
        self.setup, self.agent = containers(holder["spec"]["template"])
        self._network, self._folder, self._programs = network, folder, programs

    def mount(self, name: str, deployment: Path) -> Path:
        """Make a pod's volumes, as its Secret and ConfigMap have them; the folder with its own keys."""
        secret, keys, config, _ = (Path(self._mapped(name, place)) for place in PLACES)
        shutil.copytree(deployment / "keys" / "secret", secret)
        shutil.copytree(deployment / "base", config)
        keys.mkdir(parents=True)
        return keys

    def ask(self, name: str, container: Mapping[str, Any], words: list[str], **more: str) -> tuple[int, str]:
        """The exit status of a command in a container, and what it said."""
        command, variables = self._call(name, container, words, more)
        done = self._network.run(name, *command, **variables)
        return done.returncode, done.stdout + done.stderr

    @contextlib.contextmanager
    def agent_of(self, name: str) -> Iterator[None]:
        """Its container runs, and ends by SIGTERM with status 0."""
        assert self.agent["command"][:2] == ["tini", "--"]
        command, variables = self._call(name, self.agent, self.agent["command"][2:], {})
        with self._network.start(name, *command, **variables) as process:
            try:
                assert process.stdout is not None and process.stderr is not None
                assert f'"{name}"' in (process.stdout.readline() or process.stderr.read())
                yield
            finally:
                process.send_signal(signal.SIGTERM)
            assert process.wait(HANG_SECONDS) == 0

    def _call(
        self, name: str, container: Mapping[str, Any], words: list[str], more: Mapping[str, str]
    ) -> tuple[list[str], dict[str, str]]:
        fields = {"metadata.name": name, "status.podIP": self._network.addresses[name]}
        own = environment(container, fields)
        variables = self._programs | {key: self._mapped(name, value) for key, value in own.items()} | more
        return [self._mapped(name, word) for word in words], variables

    def _mapped(self, name: str, text: str) -> str:
        for place in PLACES:
            text = text.replace(place, f"{self._folder}/{name}{place}")
        return text


@pytest.fixture
def network() -> Iterator[Network]:
    """Two hosts by the names of pods, which they know as a headless Service gives them."""
    with contextlib.closing(Network(["trainctl-0", "trainctl-1"])) as made:
        own = [Path("/etc/netns") / made.on(name)[3] for name in made.addresses]
        for folder in own:
            folder.mkdir(parents=True)
            lines = [f"{address} {name}.trainctl\n" for name, address in made.addresses.items()]
            (folder / "hosts").write_text("".join(lines), "ascii")
        yield made
        for folder in own:
            shutil.rmtree(folder)


@pytest.mark.needs("namespaces")
def test_the_containers_commands_start_agents_that_their_probes_and_each_other_find(
    network: Network, deployment: Path, programs: dict[str, str], tmp_path: Path
) -> None:
    pods = Pods(network, tmp_path, programs)
    for name in network.addresses:
        keys = pods.mount(name, deployment)
        status, said = pods.ask(name, pods.setup, [*pods.setup["command"], *pods.setup["args"]])
        assert status == 0, said
        assert {path.name: path.stat().st_mode & 0o777 for path in keys.iterdir()} == dict.fromkeys(
            ("agent.toml", "user.toml", "authorized.toml"), 0o400
        )
    probes = {kind: pods.agent[kind]["exec"]["command"] for kind in pods.agent if kind.endswith("Probe")}
    with pods.agent_of("trainctl-0"), pods.agent_of("trainctl-1"):
        assert {kind: pods.ask("trainctl-0", pods.agent, words)[0] for kind, words in probes.items()} == {
            "startupProbe": 0, "livenessProbe": 0, "readinessProbe": 0
        }  # fmt: skip
        other = ["trainctl", "status", "--connect", "tcp://trainctl-1.trainctl:7474"]
        status, said = pods.ask("trainctl-0", pods.agent, other)
        assert status == 0 and "no run on trainctl-1 yet" in said, said
        stranger = {"TRAINCTL_KEYS": str(tmp_path / "none")}
        assert pods.ask("trainctl-0", pods.agent, probes["readinessProbe"], **stranger)[0] != 0
