"""Input of a simulation: a cluster file and a run file put together, with the model's size where it can be read."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path

import msgspec

from trainctl.node_agent.planning.rank_models import GRADIENT_BYTES, STATE_BYTES
from trainctl.node_agent.runs import preflight
from trainctl.node_agent.simulate.models import DeviceSpec, LossModel, SimulatedLinks
from trainctl.protocol.advice.advice_facts import described_memory, described_profile
from trainctl.protocol.batch import memory_estimate
from trainctl.protocol.batch.device_table import USED_PART, Device, device_named, no_such_device
from trainctl.protocol.batch.flops import step_flops
from trainctl.protocol.batch.memory_estimate import MemoryModel, estimate_memory, estimated_line
from trainctl.protocol.batch.pass_curve import PassCurve, curve_of, step_factor
from trainctl.protocol.calibration.profile import DeviceProfile, LinkRate, read_profile, summary
from trainctl.protocol.config import cluster_file, run_file
from trainctl.protocol.config.cluster_file import Cluster, SimulatedNode
from trainctl.protocol.config.model_facts import ModelFacts, read_facts
from trainctl.protocol.config.run_tables import NodeTable, RunFile
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.machine.devices import devices_named, resolve

LINK_BYTES_PER_SECOND, LATENCY_SECONDS = 125e6, 2e-4
"""Rate and latency of a link that isn't described: 1 Gbit/s and the round trip of a local network."""
PASS_OVERHEAD_SECONDS = 0.002
"""Seconds that a pass takes on a known device whatever its size."""


@dataclasses.dataclass(frozen=True)
class Scenario:
    """Ready to be played. Ranks are numbered in the order of the run file's nodes."""

    config: RunFile
    cluster: Cluster
    nodes: Mapping[int, SimulatedNode]  # by rank
    devices: Mapping[int, DeviceSpec]
    links: SimulatedLinks
    loss: LossModel
    parameters: int  # trained
    seed: int


def read(cluster_path: Path, run_path: Path, *, seed: int, steps: int | None, parameters: int | None) -> Scenario:
    """Raises InvalidInputError by file and field."""
    cluster = cluster_file.read(cluster_path, simulated=True)
    config = run_file.read(run_path)
    if steps is not None:
        config = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, steps=steps, epochs=0.0))
    if not config.run.steps:
        raise InvalidInputError(f"{run_path}: run.epochs", "a simulated run reads no data: give --steps")
    if config.data.growing:
        raise InvalidInputError(f"{run_path}: data.growing", "a simulated run has no data that grow: leave it out")
    config = preflight.with_nodes(config, "", tuple(cluster.nodes))
    nodes = {rank: _simulated(cluster, name, cluster_path) for rank, name in enumerate(config.nodes)}
    config = _resolved(config, nodes, run_path)
    facts = _facts(config, run_path)
    trained = parameters if parameters is not None else _trained(config, facts, run_path)
    maker = _Maker(config, facts, cluster_path)
    profiles = {rank: maker.profile(name, nodes[rank]) for rank, name in enumerate(config.nodes)}
    devices = {rank: maker.device(name, nodes[rank], profiles[rank]) for rank, name in enumerate(config.nodes)}
    of = {rank: _link(node, profiles[rank]) for rank, node in nodes.items()}
    links = SimulatedLinks(of, GRADIENT_BYTES * trained, STATE_BYTES * trained)
    loss = LossModel.of(seed, config.batch.global_, facts.vocabulary if facts is not None else None)
    return Scenario(config, cluster, nodes, devices, links, loss, trained, seed)


def _resolved(config: RunFile, nodes: Mapping[int, SimulatedNode], path: Path) -> RunFile:
    """Return the run file with the data type that agents would choose for "auto", if all nodes name their devices."""
    named = {name: device_named(nodes[rank].device) for rank, name in enumerate(config.nodes)}
    devices = {name: devices_named(device.title) for name, device in named.items() if device is not None}
    try:
        return resolve(config, devices, str(path))[0]
    except InvalidInputError:
        return config


def _simulated(cluster: Cluster, name: str, path: Path) -> SimulatedNode:
    node = cluster.nodes[name].simulated
    if node is None:
        problem = "missing: say how fast the simulated node is, with a profile, a device, passes or samples_per_second"
        raise InvalidInputError(f"{path}: nodes.{name}.simulated", problem)
    return node


def _facts(config: RunFile, path: Path) -> ModelFacts | None:
    """The model's size, if it is on this machine."""
    for name in config.nodes:
        model = Path(run_file.on_this_machine(config, name).model.path)
        if (model / "config.json").is_file():
            return read_facts(model, f"{path}: model.path")
    return None


def _trained(config: RunFile, facts: ModelFacts | None, path: Path) -> int:
    if facts is None:
        problem = f"no config.json with the model's size in {config.model.path}; give --parameters"
        raise InvalidInputError(f"{path}: model.path", problem)
    return estimate_memory(config, facts, NodeTable(), "torch", str(path)).trained


def _link(node: SimulatedNode, profile: DeviceProfile | None) -> LinkRate:
    """Return what a node's settings say, else the slowest link of its profile, else a usual one."""
    links = profile.links if profile is not None else ()
    measured = min((min(link.sent_bytes_per_second, link.received_bytes_per_second) for link in links), default=None)
    delays = [link.latency_seconds for link in links if link.latency_seconds is not None]
    rate = node.link_gbit * 125e6 if node.link_gbit is not None else measured or LINK_BYTES_PER_SECOND
    latency = node.latency_ms / 1e3 if node.latency_ms is not None else max(delays, default=LATENCY_SECONDS)
    return LinkRate("simulated", rate, rate, latency or None)


class _Maker:
    """Makes the devices of one run."""

    def __init__(self, config: RunFile, facts: ModelFacts | None, path: Path) -> None:
        self._config, self._facts, self._path = config, facts, path

    def profile(self, name: str, node: SimulatedNode) -> DeviceProfile | None:
        if not node.profile:
            return None
        file = self._path.parent / Path(node.profile).expanduser()
        if not file.is_file():
            raise InvalidInputError(f"{self._where(name)}.profile", f"no such file: {file}")
        return read_profile(file)

    def device(self, name: str, node: SimulatedNode, profile: DeviceProfile | None) -> DeviceSpec:
        table = self._config.nodes[name]
        device = self._known(name, node) if node.device else None
        memory = self._memory(node, profile, table)
        cap = self._cap(node, device, profile, table)
        title, step = device.title if device is not None else "device", 0.0
        if profile is not None:
            title, step = profile.key.device, profile.optimizer_seconds or 0.0
        step = node.step_seconds if node.step_seconds is not None else step
        reported = profile if profile is not None else described_profile(node, memory)
        said = None if reported is None else summary(reported)
        return DeviceSpec(f"simulated {title}", self._curve(name, node, profile), step, memory, cap, said)

    def _curve(self, name: str, node: SimulatedNode, profile: DeviceProfile | None) -> PassCurve:
        if profile is not None:
            curve = curve_of(profile.passes)
            factor = step_factor(profile, curve)
            return PassCurve(tuple((size, factor * seconds) for size, seconds in curve.points))
        if node.passes:
            return PassCurve(node.passes)
        if node.samples_per_second is not None:
            return PassCurve.line(node.pass_seconds, 1 / node.samples_per_second)
        return PassCurve.line(PASS_OVERHEAD_SECONDS, self._sample_seconds(name, node))

    def _sample_seconds(self, name: str, node: SimulatedNode) -> float:
        """An estimate from the datasheet, for a sample at full length."""
        where, device = f"{self._where(name)}.device", self._known(name, node)
        flops = step_flops(self._config.adapter, self._facts, where)
        if flops is None:
            raise InvalidInputError(where, "the model's size isn't known here, so its speed neither; give passes")
        model = self._config.model
        peak = device.peak("auto" if model.dtype == "auto" else model.computed)
        if peak is None:
            raise InvalidInputError(where, f"{device.known_for}; give passes")
        return flops.of(self._config.data.sequence_length, 1) / (USED_PART * peak)

    def _known(self, name: str, node: SimulatedNode) -> Device:
        device = device_named(node.device)
        if device is None:
            raise InvalidInputError(f"{self._where(name)}.device", no_such_device(node.device))
        return device

    def _memory(self, node: SimulatedNode, profile: DeviceProfile | None, table: NodeTable) -> MemoryModel | None:
        """Return what the settings say, else the profile's peaks, else an estimate."""
        model = None
        if profile is not None:
            model = memory_estimate.fit([(each.micro, each.peak_bytes) for each in profile.passes if each.peak_bytes])
        elif self._facts is not None:
            placed = msgspec.structs.replace(table, device="cuda:0")
            model = estimated_line(self._config, self._facts, placed, node.backend, str(self._path))
        return described_memory(node, model)

    def _cap(
        self, node: SimulatedNode, device: Device | None, profile: DeviceProfile | None, table: NodeTable
    ) -> float | None:
        """The smallest of the limits that are given."""
        own: float | None = profile.memory_cap_bytes if profile is not None else None
        own = device.memory_bytes if device is not None else own
        own = node.memory_gb * 1e9 if node.memory_gb is not None else own
        limit = table.memory_limit_gb * 1e9 if table.memory_limit_gb is not None else None
        return min((cap for cap in (own, limit) if cap is not None), default=None)

    def _where(self, name: str) -> str:
        return f"{self._path}: nodes.{name}.simulated"


def held_out_of(config: RunFile, samples: int) -> int:
    """Held-out samples of a run with so many."""
    return math.ceil(samples * config.data.held_out_fraction) or (samples // 100 if config.data.held_out_path else 0)
