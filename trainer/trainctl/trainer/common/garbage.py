"""Garbage collections while libraries and models load: none, and afterwards none among what was loaded."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """None within: what libraries make as they are imported stays, and to search it again and again takes a fifth of
    the time that torch and transformers need to load."""
    gc.disable()
    try:
        yield
    finally:
        keep_what_is_loaded()


def keep_what_is_loaded() -> None:
    """Collect garbage from here on, but not among what was loaded: a full collection among torch's half a million
    objects takes 0.3 s, in the middle of a step, and 1 s at the end."""
    gc.collect()
    gc.freeze()
    gc.enable()
