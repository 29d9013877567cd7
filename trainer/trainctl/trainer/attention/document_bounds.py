"""Where the documents of packs begin and end, as kernels for sequences of different lengths take it. Pure."""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

VARLEN: Final = "varlen"
"""The kernel that takes them, in run files and in transformers."""


class DocumentBounds(NamedTuple):
    """The documents of a batch whose rows are laid end to end."""

    starts: NDArray[np.int32]  # [documents + 1], ascending from 0: where each begins, and the end of the last
    longest: int  # tokens of the longest document


def document_bounds(positions: NDArray[np.int32], lengths: NDArray[np.int64]) -> DocumentBounds:
    """The documents of packs, from each token's position in its document, [B, L], and each row's tokens without
    padding, [B]. A document begins at each row's first token and wherever a position doesn't follow the one before.
    The padding of a row is one document."""
    columns = np.arange(positions.shape[1])
    begins = np.ones(positions.shape, np.bool_)
    begins[:, 1:] = np.diff(positions, axis=1) != 1
    begins = np.where(columns < lengths[:, None], begins, columns == lengths[:, None])
    starts = np.append(np.flatnonzero(begins), begins.size).astype(np.int32)
    return DocumentBounds(starts, int(np.diff(starts).max()))
