"""Keeps the program's memory where it is after its first minutes, for it is left open for weeks."""

import contextlib
import ctypes
import functools
import gc
from collections.abc import Callable
from typing import Any

from trainctl.tui.terminal import guard

_METHOD = "get_inner_outer"


def let_closed_screens_go() -> None:
    """Textual's styles cache keeps two colours by the cache that asked for them, and so keeps alive, of the last
    thousand widgets, every line they showed after their screen was closed (textual#6665). Here they are kept by the
    colours alone. A Textual that does so itself is left as it is."""
    if not guard.allows("styles cache"):
        return
    from textual._styles_cache import StylesCache

    kept: Any = StylesCache.__dict__.get(_METHOD)
    if hasattr(kept, "cache_info"):
        shared = functools.partial(kept.__wrapped__, StylesCache)
        setattr(StylesCache, _METHOD, staticmethod(functools.lru_cache(1024)(shared)))


def give_back() -> None:
    """Drops what is left in cycles, and hands free pages back to the system: after a burst the allocator would keep
    most of them."""
    gc.collect()
    trim = _trim()
    if trim is not None:
        trim(0)


@functools.cache
def _trim() -> Callable[[int], Any] | None:
    """The C library's `malloc_trim`, where there is one: in glibc."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        found = ctypes.CDLL(None).malloc_trim
        found.argtypes, found.restype = [ctypes.c_size_t], ctypes.c_int
        made: Callable[[int], Any] = found
        return made
    return None
