"""A rank's memory: a line through measured peaks, or an estimate by part from the run file and the model's sizes.

With t trained parameters, w bytes of a weight and T tokens in a micro-batch, in bytes:

    weights      4 t, in 16 bits also 2 t of what the model computes with; w each for frozen ones. Packed
                 ones as they are stored; on torch also the largest of them unpacked, as it is when it is used,
                 but of MLX's formats at most 2^25 values
    optimizer    8 t: two moments; 2 t and 8 t / 256 if they are of 8 bits. Paged ones count, though they need not fit
    gradients    4 t accumulated; w t more of one micro-batch, if that exceeds activations and logits, which are gone
    activations  w T (10 width + 4 intermediate) per layer on torch, w T (8 width + 4 intermediate) and the attention's
                 probabilities on MLX; one more layer's that backward works on. With adapters on torch on a CPU also
                 6 T outputs of the adapted layers, which the allocator keeps between what is held, or 10 T with
                 nf4. There, if layers are computed again, the one that backward works on counts 3.6 times
                 A decoder layer of an encoder-decoder model counts 1.5 times, for its cross-attention
    logits       12 T vocabulary: the logits, their logarithms and the gradient; of a chunk if the loss is chunked
    sum          4 t: the buffer in which a group sums gradients
    copy         12 t: the copy of weights and moments that a checkpoint is written from, kept from the first one on
                 unless checkpoint.background is false. With CUDA it is in the host's memory and doesn't count
    overhead     10 % and 50 MB, on MLX 40 MB: the allocator's, and the libraries' working memory

A layer with gradient checkpointing keeps its input alone.
"""

import math
import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec

from trainctl.protocol.config.adapted_layers import adapted_layers
from trainctl.protocol.config.model_facts import ModelFacts
from trainctl.protocol.config.objectives import objective_of
from trainctl.protocol.config.quantization import UNPACKED_VALUES
from trainctl.protocol.config.run_tables import (
    ChunkedLoss,
    GradientCheckpointing,
    NodeTable,
    RunFile,
    micro_of,
    micro_tokens_of,
)

LEAST_SPREAD = 0.5
"""Relative difference of the largest micro-batch from the smallest below which peaks don't tell a sample's part."""

Peak = tuple[int, float]
"""A micro-batch in samples, and the most bytes that a step of it held."""


class MemoryModel(NamedTuple):
    """A line through the peaks of one data type and sequence length: peak bytes = base + slope * micro-batch. Measured
    with torch and MLX, a line is as good as more terms: what activations, logits and gradients take grows with the
    samples of a pass."""

    base_bytes: float  # weights, optimizer state, gradients and libraries
    sample_bytes: float  # activations and logits of a sample

    def peak(self, micro: int) -> float:
        """Bytes at the peak of a step with so many samples in a pass."""
        return self.base_bytes + self.sample_bytes * micro

    def most(self, limit_bytes: float, largest: int) -> int:
        """The largest micro-batch whose peak is within `limit_bytes`, at most `largest`; 0 if there is none."""
        if self.peak(1) > limit_bytes:
            return 0
        room = limit_bytes - self.base_bytes
        return largest if room >= self.sample_bytes * largest else int(room / self.sample_bytes)

    def through(self, micro: int, peak_bytes: float) -> "MemoryModel":
        """Return a model of this slope through a peak measured later: another process holds other libraries and
        buffers."""
        return MemoryModel(peak_bytes - self.sample_bytes * micro, self.sample_bytes)


def fit(peaks: Collection[Peak]) -> MemoryModel | None:
    """The line through measured peaks that is robust to odd ones; None if their micro-batches differ too little, or
    the peaks don't grow with them.

    The slope is the median of those between all pairs, each counted by the distance of its micro-batches (Theil and
    Sen, weighted), because the allocator's pages blur the difference of neighbours.
    """
    sizes = [micro for micro, _ in peaks]
    if not sizes or max(sizes) < (1 + LEAST_SPREAD) * min(sizes):
        return None
    ordered = sorted(peaks)
    pairs = [
        (late[0] - early[0], (late[1] - early[1]) / (late[0] - early[0]))
        for place, early in enumerate(ordered)
        for late in ordered[place + 1 :]
        if late[0] > early[0]
    ]
    slope = _weighted_median([(of_pair, distance) for distance, of_pair in pairs])
    if slope <= 0:
        return None
    return MemoryModel(statistics.median(peak - slope * micro for micro, peak in ordered), slope)


def _weighted_median(values: Iterable[tuple[float, float]]) -> float:
    """The value up to which half of the weights come."""
    ordered: Sequence[tuple[float, float]] = sorted(values)
    half, passed = sum(weight for _, weight in ordered) / 2, 0.0
    for value, weight in ordered:
        passed += weight
        if passed >= half:
            return value
    raise ValueError("no values")


CHUNK_LOGITS = 2**25
"""Logits computed at a time: 128 MiB in float32."""
_FLOAT32_BYTES = 4
_FREE_PART = 0.1
"""Fraction of the free memory that the logits may take before "auto" chunks them."""


class Chunking(NamedTuple):
    """The setting, and what it depends on."""

    mode: ChunkedLoss
    vocabulary: int
    free_bytes: int  # as the model was loaded
    logits: int = CHUNK_LOGITS  # at a time

    def chunk_tokens(self, tokens: int) -> int | None:
        """Return how many tokens a chunk of a micro-batch of `tokens` has; None: don't chunk it."""
        too_large = tokens * self.vocabulary * _FLOAT32_BYTES > self.free_bytes * _FREE_PART
        if self.mode == "off" or (self.mode == "auto" and not too_large):
            return None
        return max(1, self.logits // self.vocabulary)


_WEIGHT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_TRAINED_BYTES = {"float32": 4, "bfloat16": 6, "float16": 6}
"""Bytes of a trained parameter with its master, by what the model computes in."""
_COPIED_BYTES = 12
"""Bytes of a trained parameter in a checkpoint's copy: it and two moments, each in float32."""
_EIGHT_BIT_MOMENTS = 2 + 8 / 256
"""Bytes of a parameter's two moments if each is a byte, with a float32 per 256 of them."""
_WIDTHS = {"torch": 10, "mlx": 8}
"""Values of the width of hidden states that a layer keeps of a token."""
_OVERHEAD_PART = 0.1
_OVERHEAD_BYTES = {"torch": 50_000_000, "mlx": 40_000_000}
_KEPT_OUTPUT_BYTES = 6
"""For each output of an adapted layer whose activations are held: glibc's allocator leaves gaps between aligned
arrays, and adapters compute in float32."""
_COPIED_OUTPUT_BYTES = 4
"""Further ones with nf4: peft copies what the packed layer gave."""
_COMPUTED_AGAIN = 3.6
"""Layers whose size the allocator keeps to compute one again, measured with and without adapters."""
_CROSSING = 0.5
"""Values that a decoder's cross-attention adds, as a part of a layer's values."""
_CHECKPOINTED = {"none": 0.0, "alternate": 0.5, "all": 1.0}


@dataclass(frozen=True)
class MemoryEstimate:
    """The estimated memory of one rank."""

    trained: int  # parameters
    parameters: int  # of the model
    gradient_bytes: int  # that a step sums over the ranks
    parts: dict[str, int]  # bytes at the peak of a step

    @property
    def total(self) -> int:
        """Bytes at the peak of a step."""
        return sum(self.parts.values())


def estimate_memory(
    config: RunFile, facts: ModelFacts, node: NodeTable, backend: Literal["torch", "mlx"], where: str
) -> MemoryEstimate:
    """Return the estimate of a rank of `config`, which is as its node has it. Raises InvalidInputError for adapters of
    layers that the model doesn't have."""
    model = sum(map(math.prod, facts.shapes.values()))
    width, trained = _WEIGHT_BYTES[config.model.computed], _trained(config, facts, where)
    held = _TRAINED_BYTES[config.model.computed] if config.adapter.kind == "full" else 4
    copied = _frozen_bytes(config, facts, backend) if config.adapter.kind != "full" else 0
    tokens = _pass_tokens(config, node)
    moments = _EIGHT_BIT_MOMENTS if config.optimizer.kind.endswith("-8bit") else 8
    fixed = {"weights": held * trained + copied, "optimizer": int(moments * trained)}
    limit = math.inf if node.memory_limit_gb is None else node.memory_limit_gb * 1e9
    free = max(0.0, limit - sum(fixed.values()))
    chunking = Chunking(config.model.chunked_loss, facts.vocabulary, int(min(free, 2**60)))
    once = min(tokens, chunking.chunk_tokens(tokens) or tokens)
    passing = {
        "activations": _activations(facts, tokens, config, backend, where, on_cpu=node.device == "cpu"),
        "logits": 12 * once * facts.vocabulary,
    }
    in_flight = (width if config.adapter.kind == "full" else 4) * trained
    gradients = 4 * trained + max(0, in_flight - sum(passing.values()))
    parts = {**fixed, "gradients": gradients, **passing}
    if len(config.nodes) > 1:
        parts["sum"] = 4 * trained
    if copied := copied_bytes(config, backend, node.device, trained):
        parts["copy"] = copied
    parts["overhead"] = _OVERHEAD_BYTES[backend] + int(_OVERHEAD_PART * sum(parts.values()))
    return MemoryEstimate(trained, model, 4 * trained, parts)


def estimated_line(
    config: RunFile, facts: ModelFacts, node: NodeTable, backend: Literal["torch", "mlx"], where: str
) -> MemoryModel:
    """Return what such a rank holds by its micro-batch: the line through the estimates of a pass of one sample and of
    its own micro-batch. Raises InvalidInputError as `estimate_memory` does."""
    larger = max(micro_of(config, node), 2)
    least, most = (
        estimate_memory(config, facts, msgspec.structs.replace(node, micro=micro), backend, where).total
        for micro in (1, larger)
    )
    sample = (most - least) / (larger - 1)
    return MemoryModel(least - sample, sample)


def copied_bytes(config: RunFile, backend: str, device: str, trained: int) -> int:
    """Bytes of a checkpoint's copy of so many trained parameters, in the device's memory: 0 if that isn't the host's,
    as that of a CPU and of Apple's GPUs is. `device`: as in a run file, or as a rank says it."""
    has_own_memory = backend == "torch" and not device.startswith(("cpu", "mps"))
    return _COPIED_BYTES * trained if config.checkpoint.background and not has_own_memory else 0


def _frozen_bytes(config: RunFile, facts: ModelFacts, backend: str) -> int:
    """Return the bytes of the weights that compute uses."""
    width, packed = _WEIGHT_BYTES[config.model.computed], facts.quantized
    if config.model.base == "nf4":
        layers = [name for name, shape in facts.shapes.items() if len(shape) == 2 and ".layers." in name]
        packed = {name: _nf4_bytes(facts.shapes[name], config.model.double_quantization) for name in layers}
    whole = sum(math.prod(shape) for name, shape in facts.shapes.items() if name not in packed)
    unpacked = max((math.prod(facts.shapes[name]) for name in packed), default=0)
    unpacked = unpacked if config.model.base == "nf4" else min(unpacked, UNPACKED_VALUES)
    return width * whole + sum(packed.values()) + (width * unpacked if backend == "torch" else 0)


def _nf4_bytes(shape: tuple[int, ...], double_quantization: bool) -> int:
    """Half a byte per value, and a scale per 64 values: in float32, or in a byte with a float32 per 256 of them."""
    values = math.prod(shape)
    return values // 2 + values // 64 * 4 if not double_quantization else values // 2 + values // 64 + values // 4096


def _pass_tokens(config: RunFile, node: NodeTable) -> int:
    """The most of a micro-batch: its samples' at full length, or the limit of a pass, but one sample at least."""
    sequences = objective_of(config.objective, config.data.kind).sequences
    length = config.data.sequence_length * sequences
    limit = micro_tokens_of(config, node)
    tokens = micro_of(config, node) * length
    return min(tokens, max(limit, length)) if limit else tokens


def _trained(config: RunFile, facts: ModelFacts, where: str) -> int:
    if config.adapter.kind == "full":
        return sum(map(math.prod, facts.shapes.values()))
    found = adapted_layers(config.adapter, facts.shapes, where)
    return config.adapter.rank * sum(rows + columns for rows, columns in found.shapes.values())


def _activations(facts: ModelFacts, tokens: int, config: RunFile, backend: str, where: str, *, on_cpu: bool) -> int:
    """Bytes that are held as the backward pass begins, and those of the layer that it works on."""
    width, is_torch_on_cpu = _WEIGHT_BYTES[config.model.computed], on_cpu and backend == "torch"
    layer = float(width * (_WIDTHS[backend] * facts.width + 4 * facts.intermediate))
    layer *= 1 + _CROSSING * facts.crossing / facts.layers
    layer += width * facts.heads * config.data.sequence_length if backend == "mlx" else 0
    if is_torch_on_cpu and config.adapter.kind != "full":
        outputs = sum(rows for rows, _ in adapted_layers(config.adapter, facts.shapes, where).shapes.values())
        copied = _COPIED_OUTPUT_BYTES if config.model.base == "nf4" else 0
        layer += (_KEPT_OUTPUT_BYTES + copied) * outputs / facts.layers
    mode: GradientCheckpointing = config.model.gradient_checkpointing
    saving = round(_CHECKPOINTED[mode] * facts.layers)
    worked_on = min(_COMPUTED_AGAIN, saving + 1) if is_torch_on_cpu else 1
    return round(tokens * (width * saving * facts.width + (facts.layers - saving + worked_on) * layer))
