"""What a rank says of the probe batch: by it the lead's agent sees whether all ranks hold the same model."""

import hashlib

import msgspec
import numpy as np

from trainctl.protocol import messages as m
from trainctl.trainer.backends.base import Array, Backend
from trainctl.trainer.data.batch import Batch

_MOST_NORMS = 4096


def probed(report: m.Report, backend: Backend, batch: Batch, log_probabilities: Array, family: str) -> m.Probed:
    """The report with the figures added; `log_probabilities` are those of the batch's targets, sample after sample."""
    return m.Probed(
        **msgspec.structs.asdict(report), family=family, tf32=backend.tf32,
        tokens_digest=hashlib.sha256(batch.inputs.tobytes() + batch.targets.tobytes()).hexdigest(),
        lengths=tuple(int(length) for length in batch.counted.sum(axis=1)),
        log_probabilities=_packed(log_probabilities), weight_norms=_packed(backend.weight_norms()[:_MOST_NORMS]),
    )  # fmt: skip


def _packed(values: Array) -> bytes:
    return values.astype(np.dtype("<f4")).tobytes()
