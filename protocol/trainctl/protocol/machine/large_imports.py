"""Imports of large modules, without garbage collections."""

import gc
import importlib
import sys


def import_large(name: str) -> None:
    """Import a module, unless it has been imported. No garbage is collected meanwhile, and later collections skip what
    exists by then: of torch's half a million objects, each would search for 0.4 s. Raises what the module raises."""
    if name in sys.modules:
        return
    enabled = gc.isenabled()
    gc.disable()
    try:
        importlib.import_module(name)
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
