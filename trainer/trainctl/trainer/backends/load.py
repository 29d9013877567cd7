"""The builder: chooses a backend, and puts it together from model, objective, adapter and optimizer."""

import importlib.util
import logging
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from trainctl.protocol.batch.memory_estimate import Chunking
from trainctl.protocol.config.families import TESTED, check_objective
from trainctl.protocol.config.run_file import needs_torch
from trainctl.protocol.config.run_tables import NodeTable, RunFile
from trainctl.protocol.errors import InvalidInputError, installing
from trainctl.protocol.machine.devices import resolve_alone
from trainctl.protocol.machine.large_imports import import_large
from trainctl.trainer.adapters.lora import read_lora
from trainctl.trainer.backends.backend import Backend, BackendName, TrainingRecipe
from trainctl.trainer.backends.memory import free_bytes
from trainctl.trainer.backends.passes import Array
from trainctl.trainer.common.errors import first_line
from trainctl.trainer.common.libraries import import_without_torch
from trainctl.trainer.common.model_files import model_config, vocabulary_size
from trainctl.trainer.data.batch import packed
from trainctl.trainer.data.permutation import mix, uniform
from trainctl.trainer.objectives.losses import objective_for

log = logging.getLogger(__name__)
_MODULES: dict[BackendName, str] = {"torch": "torch", "mlx": "mlx_lm"}
_STANDARD_DEVIATION = 0.02
"""Standard deviation of first matrices where config.json has none: transformers' default."""
_TARGETS = 12  # of each document
_MAX_LEAK: Final = 1e-6
"""Change of a token's log-probability that another document may cause; a masked one changes no bit."""
_MAX_MOVED: Final = 1e-3
"""Change that packing may cause by rounding in float32, in which the tokens are evaluated: in bfloat16 it is 0.2 for a
trained model of 135 million parameters."""
_MAX_MOVED_LOW: Final = 1.0
"""Change that packing may cause with a kernel that computes in 16 bits alone."""
_ODD: Final = (AttributeError, TypeError, ValueError, KeyError, IndexError, RuntimeError)
"""Errors of a model whose cache is unlike mlx-lm's, or whose attention can't be that which was asked for."""


def import_library(config: RunFile, node: str, where: str) -> None:
    """Import the library that `node` computes with; with MLX, torch is left out. Call it in a process that has one
    backend, before anything else imports transformers. A torch that has been imported, as for a reducer on gloo, costs
    nothing more. Raises InvalidInputError if the library isn't installed."""
    if backend_of(config, config.nodes.get(node, NodeTable()), where) == "mlx":
        import_without_torch("mlx_lm")


def load(config: RunFile, node: NodeTable, where: str, *, trains: bool = True) -> Backend:
    """Return the model of `config` in the backend and on the device that `node` asks for; if it doesn't train, without
    the optimizer's memory, its weights in the run's dtype. Raises InvalidInputError naming the field of the run file
    that is at fault."""
    if config.model.dtype == "auto":  # a process of its own: a run's file has what the group computes in
        resolved = resolve_alone(msgspec.structs.replace(config, nodes={"here": node}), "here", where)
        config = msgspec.structs.replace(config, model=resolved.model)
    model, objective = Path(config.model.path), objective_for(config)
    check_objective(model, objective.name, config.data.sequence_length, where)
    if config.model.tf32:
        os.environ.setdefault("MLX_ENABLE_TF32", "1")  # which MLX reads once, when it first needs it
    kind = _import_backend(backend_of(config, node, where))
    if (model / "adapter_config.json").is_file():
        log.warning("%s has an adapter_config.json beside whole weights: the adapter isn't read", model)
    limit_bytes = None if node.memory_limit_gb is None else int(node.memory_limit_gb * 1e9)
    optimizer = config.optimizer if trains else None
    recipe = TrainingRecipe(objective, optimizer, read_lora(config, where), limit_bytes)
    try:
        backend = kind.open(config, node, recipe, where)
        if recipe.adapter is not None:
            backend.copy_in("weights", recipe.adapter.first_values(config.run.seed))
        elif config.model.init == "random":
            backend.copy_in("weights", random_weights(backend.shapes, model_config(model), config.run.seed))
    except (RuntimeError, MemoryError) as error:
        if not kind.is_out_of_memory(error):
            raise
        problem = f"the model and its optimizer do not fit into memory: {first_line(error)}"
        raise InvalidInputError(f"{where}: model.path", problem) from None
    _take_stock(backend, config, where)
    if config.data.packing != "none":
        _check_positions(backend.name, model_config(model), config.data.sequence_length, where)
        check_documents(backend, vocabulary_size(model), where)
    return backend


def _take_stock(backend: Backend, config: RunFile, where: str) -> None:
    """Note what the process holds beside weights and moments: from here on it is the libraries'. What is free decides
    how many tokens' losses are computed at a time."""
    held, memory = backend.memory_by_part, backend.device.memory.read()
    backend.memory_by_part = replace(held, libraries=max(0, (memory.used_bytes or 0) - held.weights - held.moments))
    free = free_bytes(memory, of_host=not backend.device.has_own_memory)
    vocabulary = vocabulary_size(Path(config.model.path)) or 1
    backend.passes.chunk_losses(Chunking(config.model.chunked_loss, vocabulary, free), where)


def _import_backend(name: BackendName) -> type[Backend]:
    import_large(_MODULES[name])
    if name == "mlx":
        from trainctl.trainer.backends.mlx_backend import MlxBackend

        return MlxBackend
    from trainctl.trainer.backends.torch_backend import TorchBackend

    return TorchBackend


def backend_of(config: RunFile, node: NodeTable, where: str) -> BackendName:
    """Return the backend that `node` has in a run of `config`. Raises InvalidInputError if it isn't installed."""
    return choose("torch" if node.backend == "auto" and needs_torch(config) else node.backend, where)


def choose(wanted: str, where: str) -> BackendName:
    """Return the backend for "torch", "mlx" or "auto" (MLX on macOS, torch elsewhere, then whichever is installed)."""
    order: tuple[BackendName, ...] = ("mlx", "torch") if sys.platform == "darwin" else ("torch", "mlx")
    for name in order:
        if wanted in ("auto", name) and importlib.util.find_spec(_MODULES[name]) is not None:
            return name
    if wanted == "auto":
        problem = f"neither torch nor mlx is installed here; {installing('torch', 'mlx')}"
    else:
        problem = f"{wanted!r} is not installed here; {installing(wanted)}"
    raise InvalidInputError(f"{where}: nodes.backend", problem)


def random_weights(
    shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], seed: int
) -> dict[str, NDArray[np.float32]]:
    """Return values for each of `shapes`. `config`: the model's config.json, of a tested family."""
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


def check_documents(backend: Backend, vocabulary: int | None, where: str) -> None:
    """Raise InvalidInputError if the loaded model can't keep the documents of a pack apart, tried on two short ones."""
    first, other, second = np.random.default_rng(0).integers(0, min(vocabulary or 64, 64), (3, _TARGETS + 1))
    by_kernel, reason = backend.compute.attention == "varlen", ""
    try:
        alone, after_first, after_other = (
            _log_probabilities(backend, *documents) for documents in ((second,), (first, second), (other, second))
        )
        leak, moved = np.abs(after_first - after_other).max(), np.abs(after_first - alone).max()
        if leak <= _MAX_LEAK and moved <= (_MAX_MOVED_LOW if by_kernel else _MAX_MOVED):
            return
    except _ODD as error:
        reason = f" ({first_line(error)})"
    if by_kernel:
        problem = f'"varlen" can\'t keep packed samples apart in this model{reason}; set attention = "auto"'
        raise InvalidInputError(f"{where}: model.attention", problem)
    problem = f"on {backend.name}, this model's attention crosses the borders of packed samples"
    raise InvalidInputError(f"{where}: data.packing", f'{problem}; set data.packing = "none"')


def _check_positions(backend: BackendName, config: Mapping[str, Any], length: int, where: str) -> None:
    """Raise InvalidInputError for a model whose queries are scaled by their position in the row where it should be that
    in their document, as Ministral 3's are on MLX from `original_max_position_embeddings` on."""
    table = config.get("rope_parameters") or {}
    unscaled = table.get("original_max_position_embeddings", length)
    if backend == "mlx" and table.get("llama_4_scaling_beta") and length > unscaled:
        raise InvalidInputError(
            f"{where}: data.packing",
            f"on mlx, this model can't train packed samples of more than {unscaled} tokens; "
            f'set data.packing = "none", or data.sequence_length to at most {unscaled}',
        )


def _log_probabilities(backend: Backend, *documents: Array) -> Array:
    """Return those of the last document's tokens, the documents in one pack beside a pack with other borders."""
    beside = [documents[-1][: _TARGETS // 2], documents[-1]]
    parts = [*documents, *beside]
    sizes = np.array([len(part) for part in parts])
    rows = np.repeat([0, 1], [len(documents), len(beside)])
    tokens = np.concatenate(parts)
    packs = packed(tokens, np.ones(len(tokens), np.uint8), np.cumsum(sizes) - sizes, sizes - 1, rows)
    last = (len(documents) - 1) * _TARGETS
    if backend.compute.attention == "varlen":
        return backend.token_log_probabilities(packs)[0, last : last + _TARGETS]
    return backend.probe(packs, 0).log_probabilities[last : last + _TARGETS]
