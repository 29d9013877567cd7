"""What advice is computed from: the run, its nodes and the links between them, as plain values."""

import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import msgspec

from trainctl.protocol.batch.eta import Schedule
from trainctl.protocol.batch.flops import StepFlops
from trainctl.protocol.batch.memory_model import MemoryModel
from trainctl.protocol.calibration.profile import DeviceProfile, LinkRate

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
        """Raises KeyError."""
        return {node.name: node for node in self.nodes}[name]
