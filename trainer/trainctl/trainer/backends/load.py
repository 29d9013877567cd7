"""The builder: chooses a backend, and puts it together from model, objective, adapter and optimizer."""

import importlib.util
import logging
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from trainctl.protocol.config.families import TESTED, check_objective
from trainctl.protocol.config.run_file import needs_torch
from trainctl.protocol.config.run_tables import NodeTable, RunFile
from trainctl.protocol.errors import InvalidInputError, installing
from trainctl.protocol.machine.devices import resolve_alone
from trainctl.protocol.machine.large_imports import import_large
from trainctl.trainer.adapters.lora import read_lora
from trainctl.trainer.backends import document_mask
from trainctl.trainer.backends.base import Backend, BackendName, Parts
from trainctl.trainer.common.errors import first_line
from trainctl.trainer.common.libraries import import_without_torch
from trainctl.trainer.common.model_files import model_config, vocabulary_size
from trainctl.trainer.data.permutation import mix, uniform
from trainctl.trainer.objectives.registry import objective_for

log = logging.getLogger(__name__)
_MODULES: dict[BackendName, str] = {"torch": "torch", "mlx": "mlx_lm"}


def import_library(config: RunFile, node: str, where: str) -> None:
    """Import the library that `node` computes with; with MLX, torch is left out. Call it in a process that has one
    backend, before anything else imports transformers. A torch that has been imported, as for a reducer on gloo, costs
    nothing more. Raises InvalidInputError if the library isn't installed."""
    if backend_of(config, config.nodes.get(node, NodeTable()), where) == "mlx":
        import_without_torch("mlx_lm")


def load(config: RunFile, node: NodeTable, where: str, *, trains: bool = True) -> Backend:
    """The model of `config` in the backend and on the device that `node` asks for; if it doesn't train, without the
    optimizer's memory, its weights in the run's dtype. Raises InvalidInputError naming the
    field of the run file that is at fault."""
    if config.model.dtype == "auto":  # a process of its own: a run's file has what the group computes in
        config = _resolved(config, node, where)
    model, objective = Path(config.model.path), objective_for(config)
    check_objective(model, objective.name, config.data.sequence_length, where)
    if config.model.tf32:
        os.environ.setdefault("MLX_ENABLE_TF32", "1")  # which MLX reads once, when it first needs it
    kind = _backend(backend_of(config, node, where))
    if (model / "adapter_config.json").is_file():
        log.warning("%s has an adapter_config.json beside whole weights: the adapter isn't read", model)
    limit_bytes = None if node.memory_limit_gb is None else int(node.memory_limit_gb * 1e9)
    optimizer = config.optimizer if trains else None
    parts = Parts(objective, optimizer, read_lora(config, where), limit_bytes)
    try:
        backend = kind.open(config, node, parts, where)
        if parts.adapter is not None:
            backend.copy_in("weights", parts.adapter.first_values(config.run.seed))
        elif config.model.init == "random":
            backend.copy_in("weights", random_weights(backend.shapes, model_config(model), config.run.seed))
    except (RuntimeError, MemoryError) as error:
        if not kind.is_out_of_memory(error):
            raise
        problem = f"the model and its optimizer do not fit into memory: {first_line(error)}"
        raise InvalidInputError(f"{where}: model.path", problem) from None
    backend.note_loaded()
    backend.chunk_losses(config, where)
    if config.data.packing != "none":
        document_mask.check_positions(backend.name, model_config(model), config.data.sequence_length, where)
        document_mask.check(backend, vocabulary_size(model), where)
    return backend


def _resolved(config: RunFile, node: NodeTable, where: str) -> RunFile:
    alone = msgspec.structs.replace(config, nodes={"here": node})
    model = resolve_alone(alone, "here", where).model
    return msgspec.structs.replace(config, model=model)


def _backend(name: BackendName) -> type[Backend]:
    import_large(_MODULES[name])
    if name == "mlx":
        from trainctl.trainer.backends.mlx_backend import MlxBackend

        return MlxBackend
    from trainctl.trainer.backends.torch_backend import TorchBackend

    return TorchBackend


def backend_of(config: RunFile, node: NodeTable, where: str) -> BackendName:
    """The backend that `node` has in a run of `config`. Raises InvalidInputError if it isn't installed."""
    return choose("torch" if node.backend == "auto" and needs_torch(config) else node.backend, where)


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


_STANDARD_DEVIATION = 0.02
"""Standard deviation of first matrices where config.json has none: transformers' default."""


def random_weights(
    shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], seed: int
) -> dict[str, NDArray[np.float32]]:
    """Values for each of `shapes`. `config`: the model's config.json, of a tested family."""
    bound = config.get("initializer_range", _STANDARD_DEVIATION) * math.sqrt(3)  # uniform in +-b: deviation b / sqrt 3
    norm = TESTED[config["model_type"]].neutral_norm
    key = int(mix(np.array([seed], np.uint64))[0])
    values = {}
    for place, (name, shape) in enumerate(sorted(shapes.items())):
        if len(shape) >= 2:
            values[name] = uniform(shape, key + place, bound)
        else:
            values[name] = np.full(shape, 0.0 if name.endswith(".bias") else norm, np.float32)
    return values
