"""The probe of one rank: log-probabilities of the data's first tokens, and how far rounding moves them.

The ranks' log-probabilities differ by rounding, by an amount that depends on the model: 1.5e-7 nats for a fresh small
one, 3e-5 for a trained one of 135 million parameters. A second pass over some of the tokens measures it. There, the
input of each linear layer is moved by one unit in its last place, up or down.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from trainctl.protocol.errors import TrainctlError
from trainctl.protocol.messages import Probed, Report
from trainctl.trainer.backends.base import Array, Backend
from trainctl.trainer.common.errors import DeviceMemoryError
from trainctl.trainer.data.batch import Batch

NOISE_TARGETS = 64
"""Targets of a sample for which the noise is measured, and least targets of all samples."""
_REPORTED_TARGETS, _MOST_LAYERS = 64, 255
"""Most targets and layers whose values are reported: they fit into 64 KiB."""
_LOWEST_BIT, _LOWEST_BIT_OF_TF32 = 1 << 0, 1 << 13
"""Lowest mantissa bit of float32, and of what TF32 keeps of it."""
_MOST_NORMS = 4096


@dataclass(frozen=True)
class Noise:
    """The differences between two passes that differ by rounding alone."""

    log_probability: float  # largest of one token, nats
    layers: Array  # [layers, targets], values of the pass without flips
    layer_noise: Array  # [layers], the largest difference of one target


def probe(backend: Backend, batch: Batch, *, tf32: bool, check: Callable[[], None]) -> tuple[Array, Noise]:
    """Return the log-probability of each target of `batch`, in nats, and the noise. `tf32`: whether the run allows it.
    Raises TrainctlError if memory doesn't suffice for one sample, and what `check` raises before each pass."""
    log_probabilities, _ = _pass(backend, batch, 0, check)
    first = _first_targets(batch)
    before, layers = _pass(backend, first, 0, check)
    after, moved = _pass(backend, first, _LOWEST_BIT_OF_TF32 if tf32 else _LOWEST_BIT, check)
    noise = float(np.abs(before - after).max())
    return log_probabilities, Noise(noise, layers, np.abs(layers - moved).max(axis=1, initial=0.0))


def _first_targets(batch: Batch) -> Batch:
    """Return samples of at most `NOISE_TARGETS` targets each, as many as have that many together."""
    lengths = np.minimum(batch.lengths, NOISE_TARGETS)
    rows = int(np.searchsorted(np.cumsum(lengths), NOISE_TARGETS)) + 1
    some, width = batch.rows(np.arange(min(rows, len(batch)))), int(lengths.max())
    counted = some.counted[:, :width]
    return replace(
        some,
        inputs=some.inputs[:, :width],
        targets=some.targets[:, :width],
        counted=counted,
        lengths=lengths[: len(some)],
        weight=float(counted.sum()),
    )


def _pass(backend: Backend, batch: Batch, flips: int, check: Callable[[], None]) -> tuple[Array, Array]:
    """Return log-probabilities [targets] and layers' values [layers, targets]; in halves where memory wants it."""
    log_probabilities, layers = list[Array](), list[Array]()
    done, size = 0, len(batch)
    while done < len(batch):
        part = batch.rows(np.arange(done, min(done + size, len(batch))))
        check()
        try:
            passed = backend.probe(part, flips)
        except DeviceMemoryError as error:
            if len(part) == 1:
                raise TrainctlError(f"out of memory with one sample of the probe: {error}") from None
            size = len(part) // 2
            continue
        log_probabilities.append(passed.log_probabilities)
        layers.append(passed.layers)
        done += len(part)
    return np.concatenate(log_probabilities), np.concatenate(layers, axis=1)


def probed(
    report: Report, backend: Backend, batch: Batch, family: str, log_probabilities: Array, noise: Noise
) -> Probed:
    """Return the report of a probe, with what the ranks are compared by."""
    return Probed(
        **msgspec.structs.asdict(report),
        family=family,
        tf32=bool(backend.compute.tf32),
        tokens_digest=batch.digest,
        lengths=tuple(int(length) for length in batch.counted.sum(axis=1)),
        log_probabilities=_packed(log_probabilities),
        weight_norms=_packed(backend.weight_norms()[:_MOST_NORMS]),
        noise=noise.log_probability,
        layers=_packed(noise.layers[:_MOST_LAYERS, :_REPORTED_TARGETS]),
        layer_noise=_packed(noise.layer_noise[:_MOST_LAYERS]),
    )


def _packed(values: Array) -> bytes:
    return values.astype(np.dtype("<f4")).tobytes()
