"""Any training loop on the screen and under control: attach it, call `step()` once a step, and close it.

    from trainctl import guest

    run = guest.attach("ppo", optimizer=opt, checkpoint=save)
    for batch in data:
        ...
        if run.step(loss=loss, kl=kl):
            break  # a stop was ordered
    run.close()

This package imports the standard library only, on Python 3.10 or newer. It never raises into the loop and never waits
for an agent.
"""

from __future__ import annotations

import importlib
import sys

from trainctl.guest.run import Run, attach

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["Run", "attach", "register"]
_ADAPTERS = {"hf": "transformers", "lightning": "", "accelerate": "accelerate", "mlx_lm": "mlx_lm"}
"""Modules that are loaded when they are used, each with the library that knows our name once it is registered."""


def register() -> None:
    """Have `trainctl` known where a framework chooses loggers by name: `report_to` of transformers and mlx-lm,
    `log_with` of accelerate. Those that are loaded are meant, or all that are installed if none is."""
    from importlib.util import find_spec

    libraries = {adapter: library for adapter, library in _ADAPTERS.items() if library}
    loaded = [adapter for adapter, library in libraries.items() if library in sys.modules]
    for adapter in loaded or [adapter for adapter, library in libraries.items() if find_spec(library)]:
        __getattr__(adapter).register()


def __getattr__(name: str) -> Any:
    if name in _ADAPTERS:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
