"""Attention masks of transformers, without a device synchronization at every forward pass.

transformers searches the positions of a batch for several documents per row, and the host waits for the result.
Within `one_document_per_row`, it skips that search.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_one_per_row: ContextVar[bool] = ContextVar("one document per row", default=False)


@contextmanager
def one_document_per_row() -> Iterator[None]:
    """Models that are called within need not look."""
    token = _one_per_row.set(True)
    try:
        yield
    finally:
        _one_per_row.reset(token)


def install() -> None:
    """Have transformers ask here first; a version without that function stays as it is."""
    from transformers import masking_utils

    own: Any = masking_utils
    find: Callable[[Any], Any] | None = getattr(own, "find_packed_sequence_indices", None)
    if find is not None and find.__module__ != __name__:
        own.find_packed_sequence_indices = _asked_first(find)


def _asked_first(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def indices(positions: Any) -> Any:
        return None if _one_per_row.get() else find(positions)

    return indices
