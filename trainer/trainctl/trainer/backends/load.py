"""The choice between the backends, and the model in the chosen one."""

import importlib.util
import sys
from pathlib import Path

from trainctl.protocol.config.run_tables import NodeTable, RunFile
from trainctl.protocol.errors import InvalidInputError, installing
from trainctl.trainer.backends import document_mask
from trainctl.trainer.backends.base import Backend, BackendName
from trainctl.trainer.common.model_files import vocabulary_size

_MODULES: dict[BackendName, str] = {"torch": "torch", "mlx": "mlx_lm"}


def load(config: RunFile, node: NodeTable, where: str) -> Backend:
    """The model of `config` in the backend and on the device that `node` asks for. Raises InvalidInputError naming the
    field of the run file that is at fault."""
    name = choose(node.backend, where)
    if name == "mlx":
        from trainctl.trainer.backends.mlx_backend import load_mlx

        backend: Backend = load_mlx(config, node, where)
    else:
        from trainctl.trainer.backends.torch_backend import load_torch

        backend = load_torch(config, node, where)
    if config.data.packing != "none":
        document_mask.check(backend, vocabulary_size(Path(config.model.path)), where)
    return backend


def choose(wanted: str, where: str) -> BackendName:
    """The backend for "torch", "mlx" or "auto" (MLX on macOS, torch elsewhere, then whichever is installed)."""
    present = {name: importlib.util.find_spec(module) is not None for name, module in _MODULES.items()}
    order: tuple[BackendName, ...] = ("mlx", "torch") if sys.platform == "darwin" else ("torch", "mlx")
    for name in order:
        if present[name] and wanted in ("auto", name):
            return name
    if wanted == "auto":
        problem = f"neither torch nor mlx is installed here; {installing('torch', 'mlx')}"
    else:
        problem = f"{wanted!r} is not installed here; {installing(wanted)}"
    raise InvalidInputError(f"{where}: nodes.backend", problem)
