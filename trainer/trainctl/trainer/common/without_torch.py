"""Imports in processes that have no use for torch.

transformers, which reads tokenizers, imports torch wherever it is installed. That takes half of such a process's start.
"""

import os
import sys

from trainctl.protocol.machine.large_imports import import_large


def import_without_torch(name: str) -> None:
    """Import a module as where torch isn't installed. A process in which torch or transformers has been imported
    imports it as usual: transformers looks for torch only once."""
    if "torch" in sys.modules or "transformers" in sys.modules:
        import_large(name)
        return
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is fetched
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would warn that there is no torch
    sys.modules["torch"] = None  # type: ignore[assignment]  # what importlib takes for a module that can't be found
    try:
        import_large(name)
    finally:
        del sys.modules["torch"]
