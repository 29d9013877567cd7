"""The facts that advice is computed from: the run, its nodes and the links between them, as plain values."""

import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import Final, Literal

import msgspec

from trainctl.protocol.batch.device_table import device_named, device_of, no_such_device
from trainctl.protocol.batch.eta import Schedule
from trainctl.protocol.batch.flops import StepFlops
from trainctl.protocol.batch.memory_estimate import MemoryModel
from trainctl.protocol.calibration.profile import DeviceProfile, LinkRate, Pass, ProfileKey
from trainctl.protocol.config.cluster_file import SimulatedNode

Source = Literal["measured", "estimated", "unknown"]


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One node, as far as it is known."""

    name: str
    profiles: tuple[DeviceProfile, ...] = ()  # of this run's model and settings, newest first
    other_profile: DeviceProfile | None = None  # newest one of any model and settings: for its device's rates alone
    device: str = ""  # as its driver reports it
    machine: str = ""  # equal for nodes of one machine; empty: not known
    cores: int | None = None  # of its machine
    cpu_quota: float | None = None  # cores that control groups leave to its agent and rank; None: all
    threads: int = 0  # CPU threads of its rank; 0: all
    system: str = ""  # Linux or Darwin
    backend: str = ""  # torch or mlx
    cap_bytes: int | None = None  # memory that its rank may take
    shared_bytes: int | None = None  # memory that all ranks of its machine share; None: it has its own, or not known
    micro: int | Literal["auto"] = "auto"  # as the run file sets it
    share: int | None = None  # samples that the run file gives it
    memory: MemoryModel | None = None  # by the model's sizes, without the sum's buffer; None: the model isn't known
    price_per_hour: float | None = None
    watts: float | None = None  # while it trains
    compile_lacks: tuple[str, ...] | None = None  # what compiling for its device needs and isn't there; None: not known
    problem: str = ""  # why nothing is known from its agent
    described: str = ""  # by what it is only described; empty: it is a real machine

    @property
    def profile(self) -> DeviceProfile | None:
        """The newest one that was measured alone, or else beside others."""
        return self.profile_beside(())

    def profile_beside(self, others: Collection[str]) -> DeviceProfile | None:
        """The newest one that was measured beside these nodes of its machine; without it the one beside those that
        differ least from them."""
        wanted = set(others)
        return min(self.profiles, key=lambda one: len(wanted ^ set(one.beside)), default=None)


class PlannedRun(msgspec.Struct, frozen=True, kw_only=True):
    """The run."""

    file: str
    steps: int
    global_batch: int
    unit: str = "samples"
    tokens_per_sample: float  # mean, with all its sequences
    sequences: int = 1  # of a sample
    dtype: str = "float32"
    auto_dtype: bool = False  # each node's devices choose it
    parameters: int | None = None
    trained: int | None = None
    gradient_bytes: int | None = None  # that a step sums; None: the model isn't known
    adapter_gradient_bytes: int | None = None  # the same with LoRA; None: it has adapters already, or can't have any
    flops: StepFlops | None = None
    schedules: Mapping[str, Schedule] = {}  # evaluations and checkpoints, without their seconds
    checkpoint_bytes: int = 0
    background_checkpoints: bool = True  # training continues while they are written
    held_out: int = 0  # samples of an evaluation; 0: not known
    currency: str = "USD"
    lead: str = ""  # node to which the links were measured
    overrides: Mapping[str, str] = {}  # of the file's settings, with which the advice was asked for

    def command(self, *settings: str, nodes: Sequence[str] = ()) -> str:
        """Return what starts it with other settings, `KEY=VALUE`. `nodes`: all that take part; empty: as it says."""
        named = {"nodes": ",".join(nodes)} if nodes else {}
        chosen = {**self.overrides, **named, **dict(setting.split("=", 1) for setting in settings)}
        words = (word for key, value in chosen.items() for word in ("--set", f"{key}={value}"))
        return shlex.join(["trainctl", "run", self.file, *words])

    @property
    def sample_flops(self) -> float | None:
        """Operations for forward and backward of one sample."""
        return None if self.flops is None else self.flops.of(self.tokens_per_sample, self.sequences)


class AdviceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """All of it."""

    run: PlannedRun
    nodes: tuple[NodeFacts, ...]
    links: Mapping[str, LinkRate] = {}  # by the node that the lead's is linked with

    def node(self, name: str) -> NodeFacts:
        """Raise KeyError."""
        return {node.name: node for node in self.nodes}[name]


SIZES: Final = (1, 2, 4, 8, 16, 32, 64)
"""Micro-batches for which a described rate is written out."""
LINK_BYTES, LATENCY_SECONDS = 125e6, 2e-4
"""Link that isn't described: 1 Gbit/s and the round trip of a local network, as `trainctl simulate` takes it."""
DESCRIBED: Final = "as described for trainctl simulate"


def described_node(node: NodeFacts, settings: SimulatedNode, given: DeviceProfile | None) -> NodeFacts:
    """A node of the run file with its description. `given`: the profile that the description names."""
    memory = described_memory(settings, node.memory)
    profile = given if given is not None else described_profile(settings, memory)
    named = device_named(settings.device) if settings.device else None
    device = given.key.device if given is not None else named.title if named is not None else ""
    known = device_of(device)
    problem = no_such_device(settings.device) if settings.device else ""
    cap = None if settings.memory_gb is None else int(settings.memory_gb * 1e9)
    return msgspec.structs.replace(
        node,
        profiles=() if profile is None else (profile,),
        other_profile=given,
        device=device,
        cores=None,
        machine=f"simulated {node.name}",
        backend=settings.backend,
        cap_bytes=node.cap_bytes if cap is None else cap,
        memory=memory,
        watts=known.watts if known is not None else None,
        described=DESCRIBED,
        problem=problem if profile is None and known is None else "",
    )


def described_link(settings: SimulatedNode, given: DeviceProfile | None, lead: str) -> LinkRate:
    """Return the link to the lead's node: what the description says, else the slowest link of its profile, else a usual
    one."""
    links = given.links if given is not None else ()
    measured = min((min(one.sent_bytes_per_second, one.received_bytes_per_second) for one in links), default=None)
    rate = settings.link_gbit * 125e6 if settings.link_gbit is not None else measured or LINK_BYTES
    latency = LATENCY_SECONDS if settings.latency_ms is None else settings.latency_ms / 1e3
    return LinkRate(lead, rate, rate, latency or None)


def described_memory(settings: SimulatedNode, estimate: MemoryModel | None) -> MemoryModel | None:
    """Return what a described rank holds by its micro-batch: what the description says, and the estimate or the
    profile's line for the rest. None if neither says anything."""
    if settings.model_gb is None and settings.sample_gb is None:
        return estimate
    base, sample = estimate or MemoryModel(0.0, 0.0)
    return MemoryModel(
        base if settings.model_gb is None else settings.model_gb * 1e9,
        sample if settings.sample_gb is None else settings.sample_gb * 1e9,
    )


def described_profile(settings: SimulatedNode, memory: MemoryModel | None) -> DeviceProfile | None:
    """Return the profile that a calibration would make of described passes or of a described rate; None for a device
    that is only named."""
    passes = settings.passes or _at(settings)
    if not passes:
        return None
    key = ProfileKey(
        device="simulated",
        model_digest="none",
        sequence_length=1,
        dtype="none",
        backend=settings.backend,
        backend_version="none",
        trainctl_version="none",
    )
    peaks = {micro: None if memory is None else int(memory.peak(micro)) for micro, _ in passes}
    measured = tuple(Pass(micro, seconds, peaks[micro]) for micro, seconds in passes)
    return DeviceProfile(key=key, created_at=0.0, passes=measured, optimizer_seconds=settings.step_seconds or None)


def _at(settings: SimulatedNode) -> tuple[tuple[int, float], ...]:
    rate = settings.samples_per_second
    return () if rate is None else tuple((size, settings.pass_seconds + size / rate) for size in SIZES)
