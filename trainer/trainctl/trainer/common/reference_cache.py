"""Reference log-probabilities on disk: computed once for each content of model and data, then memory-mapped.

A cache is a folder: values.bin, a little-endian float32 for each counted token of all usable samples, in their order,
and reference.json, which describes it. It has the same values for every run with the same tokens and the same model.
"""

import hashlib
import json
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from trainctl.protocol.config.run_tables import ModelTable
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.record.checkpoints import digest_of
from trainctl.protocol.record.paths import NOTES_NAME, VALUES_NAME
from trainctl.trainer.common.errors import first_line

Values = NDArray[np.float32]
DTYPE: Final = np.dtype("<f4")
_FORMAT: Final = 1


@dataclass(frozen=True)
class ReferenceKey:
    """The model, data and computation that reference log-probabilities depend on."""

    samples: str  # digest of the usable samples' tokens, and of which of them count
    model: str  # digest of the base model's files
    compute: str  # as `compute_of` says
    counted: int  # values: counted tokens of the usable samples

    @property
    def name(self) -> str:
        """The name of the cache's folder."""
        return f"reference-{hashlib.sha256(json.dumps([_FORMAT, *astuple(self)]).encode()).hexdigest()[:32]}"

    @property
    def size_bytes(self) -> int:
        """The size of the values."""
        return self.counted * DTYPE.itemsize


def compute_of(model: ModelTable) -> str:
    """Return how a model computes beyond what its files say: its type, and how weights are packed as they are
    loaded."""
    if model.base != "nf4":
        return model.computed
    return " ".join([model.computed, "nf4", *(["double"] * model.double_quantization), model.compute_dtype]).strip()


def read_values(folder: Path, key: ReferenceKey) -> Values:
    """Return the nats, [counted]. Reads all of them once, to compare their digest with the one in the notes. Raises
    InvalidInputError naming the folder if it doesn't hold them."""
    again = "delete the folder to have the reference computed again"
    path = folder / VALUES_NAME
    try:
        notes = json.loads((folder / NOTES_NAME).read_text(encoding="utf-8"))
        size, expected = path.stat().st_size, key.size_bytes
        if not isinstance(notes, dict) or notes.get("key") != [*astuple(key)] or size != expected:
            problem = f"has {size:,} bytes of values for {expected:,}, or is of other data; {again}"
            raise InvalidInputError(str(folder), problem)
        if notes.get("digest") != digest_of(path):
            raise InvalidInputError(str(folder), f"holds values that have changed since they were computed; {again}")
        return np.asarray(np.memmap(path, DTYPE, mode="r")) if key.counted else np.empty(0, DTYPE)
    except OSError as error:
        raise InvalidInputError(str(folder), f"cannot be read: {error.strerror}; {again}") from None
    except ValueError as error:
        raise InvalidInputError(str(folder), f"cannot be read: {first_line(error)}; {again}") from None


def write_notes(work: Path, key: ReferenceKey) -> None:
    """Describe the values in a folder."""
    notes: dict[str, Any] = {"key": astuple(key), "digest": digest_of(work / VALUES_NAME)}
    (work / NOTES_NAME).write_text(json.dumps(notes), encoding="utf-8")


class AlignedValues:
    """Values by sequence, those of a sequence's counted tokens."""

    def __init__(self, values: Values, counts: NDArray[np.int64]) -> None:
        """`counts`: counted tokens of each sequence of the token cache, 0 for those that aren't used."""
        self._values, self._counts = values, counts
        self._starts = np.cumsum(counts) - counts

    def of(self, sequences: NDArray[np.int64], counted: NDArray[np.float32]) -> Values:
        """Return [B, L] for B sequences, of which `counted` [B, L] are the counted targets; 0 elsewhere."""
        aligned = np.zeros(counted.shape, np.float32)
        aligned[counted > 0] = self._values[spans(self._starts[sequences], self._counts[sequences])]
        return aligned


def spans(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the numbers from each start on, so many of each, one span after the other."""
    before = np.cumsum(counts) - counts
    places: NDArray[np.int64] = np.arange(int(counts.sum())) + np.repeat(starts - before, counts)
    return places
