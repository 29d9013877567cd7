"""The import of a process's array library: with MLX, torch is left out.

mlx-lm reads tokenizers by transformers, which imports torch wherever it is installed. A process that computes on MLX
has no use for it, and half the processor time of its start went to it.
"""

import importlib
import os
import sys

from trainctl.protocol.config.run_tables import NodeTable, RunFile
from trainctl.trainer.backends.load import backend_of


def import_library(config: RunFile, node: str, where: str) -> None:
    """Import what `node` computes with. Call it in a process that has one backend, before anything else imports
    transformers, which looks for torch only once. Raises InvalidInputError if the library isn't installed."""
    if backend_of(config, config.nodes.get(node, NodeTable()), where) == "mlx":
        _import_without_torch("mlx_lm")


def _import_without_torch(name: str) -> None:
    """As where torch isn't installed. A torch that has been imported, as for a reducer on gloo, costs nothing more."""
    if "torch" in sys.modules or "transformers" in sys.modules:
        return
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would warn that there is no torch
    sys.modules["torch"] = None  # type: ignore[assignment]  # what importlib takes for a module that can't be found
    try:
        importlib.import_module(name)
    finally:
        del sys.modules["torch"]
