"""A rank's reports once its data and its model are loaded: that it is ready, and before that, the preflight.

The preflight of a run's first start has all that the group is judged by: digests, engines, and the probe. It comes
before a reference pass, which takes minutes, so that a run that can't start is refused at once.

The probe has the log-probabilities of the data's first tokens, and how far rounding moves them. The ranks'
log-probabilities differ by rounding, by an amount that depends on the model: 1.5e-7 nats for a fresh small one, 3e-5
for a trained one of 135 million parameters. A second pass over some of the tokens measures it. There, the input of each
linear layer is moved by one unit in its last place, up or down.
"""

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.errors import TrainctlError
from trainctl.protocol.machine.cgroups import core_pool, usable_cores
from trainctl.protocol.machine.file_digests import FileDigests
from trainctl.protocol.messages import Generation, Preflight, Probed, Ready, Report
from trainctl.trainer.backends.backend import Backend
from trainctl.trainer.backends.passes import Array
from trainctl.trainer.collective import engines
from trainctl.trainer.collective.shared_buffer import Layout, layout_digest
from trainctl.trainer.common.errors import DeviceMemoryError
from trainctl.trainer.common.model_files import model_family
from trainctl.trainer.data.batch import Batch
from trainctl.trainer.data.growing_dataset import TrainingData
from trainctl.trainer.step.rank import Identity

_BEFORE_THE_FIRST = Generation(0, 0)
NOISE_TARGETS = 64
"""Targets of a sample for which the noise is measured, and least targets of all samples."""
_REPORTED_TARGETS, _MOST_LAYERS = 64, 255
"""Most targets and layers whose values are reported: they fit into 64 KiB."""
_LOWEST_BIT, _LOWEST_BIT_OF_TF32 = 1 << 0, 1 << 13
"""Lowest mantissa bit of float32, and of what TF32 keeps of it."""
_MOST_NORMS = 4096


def ready(
    who: Identity, backend: Backend, data: TrainingData, model: FileDigests, *, last_step: int = 0, cursor: int = 0
) -> Ready:
    """Return the message that a rank has loaded `data` and the model with the digests `model`."""
    layout = Layout(backend.shapes, layout_digest(backend.shapes))
    return Ready(
        run=who.run,
        rank=who.rank,
        pid=os.getpid(),
        backend=backend.name,
        device=backend.device.name,
        parameters=layout.elements,
        samples=data.samples,
        held_out=data.held_out,
        mean_weight=data.mean_weight,
        layout_digest=layout.digest,
        model_digest=model.whole,
        data_digest=data.digest,
        last_step=last_step,
        cursor=cursor,
        memory_cap_bytes=backend.device.memory.read().cap_bytes,
        system=platform.system(),
        engines=engines.installed(),
        model_files=model.files,
        data_files=data.files,
        compute=backend.compute,
        machine=core_pool(),
        cores=usable_cores(),
    )


def preflight(
    who: Identity, config: RunFile, backend: Backend, data: TrainingData, model: FileDigests, check: Callable[[], None]
) -> Preflight:
    """Run the probe, and return what the group is judged by. Raises TrainctlError if memory doesn't suffice, and what
    `check` raises before each pass."""
    batch = data.probe_batch()
    log_probabilities, noise = probe(backend, batch, tf32=config.model.tf32, check=check)
    report = Report(
        run=who.run,
        rank=who.rank,
        generation=_BEFORE_THE_FIRST,
        seq=0,
        kind="probe",
        step=0,
        loss_sum=0.0,
        weight=0.0,
        own_weight=0.0,
        own_samples=0,
    )
    family = model_family(Path(config.model.path))
    judged = probed(report, backend, batch, family, log_probabilities, noise)
    return Preflight(ready(who, backend, data, model), judged)


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
