"""Attention masks of transformers, without a device synchronization at every forward pass.

transformers searches the positions of a batch for several documents per row, and the host waits for the result.
Within `one_document_per_row` it skips that search, and within `documents_by_position` it doesn't wait for it.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Literal

_Rows = Literal["unknown", "one", "several"]
_rows: ContextVar[_Rows] = ContextVar("documents per row", default="unknown")


def one_document_per_row() -> AbstractContextManager[None]:
    """Models that are called within need not look."""
    return _with("one")


def documents_by_position() -> AbstractContextManager[None]:
    """In models that are called within, a document begins wherever a position doesn't follow the one before it."""
    return _with("several")


def has_several_documents() -> bool:
    """Whether the model is being called with packs."""
    return _rows.get() == "several"


@contextmanager
def _with(rows: _Rows) -> Iterator[None]:
    token = _rows.set(rows)
    try:
        yield
    finally:
        _rows.reset(token)


def install() -> None:
    """Have transformers ask here first; a version without that function stays as it is."""
    from transformers import masking_utils

    own: Any = masking_utils
    find: Callable[[Any], Any] | None = getattr(own, "find_packed_sequence_indices", None)
    if find is not None and find.__module__ != __name__:
        own.find_packed_sequence_indices = _asked_first(find)


def _asked_first(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def indices(positions: Any) -> Any:
        rows = _rows.get()
        if rows == "several":  # [B, L]: the number of each token's document in its row
            return (positions.diff(dim=-1, prepend=positions[:, :1] - 1) != 1).cumsum(-1)
        return None if rows == "one" else find(positions)

    return indices
