"""torch.compile of a model's decoder layers (`[model] compile`), on CUDA also of its loss, and what it needs of the
machine.

Each layer is compiled in place, so names, adapters, gradient checkpointing and chunked losses stay as they are, and one
compilation serves all layers of a kind. Where lengths vary, they are symbolic from the first micro-batch on. Blocks of
text are compiled for their own shape, and a second one makes its dimensions symbolic. So any lengths take a few
compilations. torch's `recompile_limit` ends any others: layers are then computed without one.

Modes that record CUDA graphs keep one for each shape. For these, rows are padded to one of `MOST_LENGTHS` lengths.

Only `forward` and `backward` are compiled. Evaluations, references and answers are not, so each kind of pass has one
form.
"""

import logging
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from trainctl.protocol.config.run_tables import Compile, DataTable
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.machine.facts import lacking
from trainctl.trainer.backends.backend import CompileMeter
from trainctl.trainer.backends.torch_loss import cross_entropy
from trainctl.trainer.data.batch import Batch

log = logging.getLogger(__name__)
MOST_LENGTHS: Final = 8
"""Lengths to which rows are padded where CUDA graphs are recorded: the longest, and each a root of 2 shorter."""
_LOSS_DEVICES = ("cuda",)
"""Kinds of devices on which losses are compiled too."""
_GRAPH_MODES: Final = ("reduce-overhead", "max-autotune")
_THREADS: Final = "TORCHINDUCTOR_COMPILE_THREADS"
"""One where the environment has none: more are processes, which would outlive a trainer that is killed."""
_CACHE: Final = "TORCHINDUCTOR_CACHE_DIR"
_INSTEAD: Final = 'or set compile = "off" in [nodes.NAME] of this machine'


class CompiledLayers:
    """The decoder layers of one model, compiled by a mode; `meter` counts seconds and graphs."""

    def __init__(
        self, model: torch.nn.Module, mode: Compile, device: torch.device, data: DataTable, where: str
    ) -> None:
        """Raise InvalidInputError if the machine has no compiler or no place for its code, or the model no layers."""
        check_compiler(device, where)
        layers = _layers(model, where)
        self.mode, self._lengths = mode, lengths_up_to(data.sequence_length)
        self.keeps_graphs = device.type == "cuda" and mode in _GRAPH_MODES  # results are overwritten by the next pass
        _configure(where)
        self.is_active, self._passes, self._graphs_of_losses, self._graphs_before = True, 0, 0, _graphs()
        self.meter, dynamic = _meter(self._count), None if data.kind == "text" else True
        for layer in layers:
            layer.compile(mode=mode, dynamic=dynamic)
        self._cross_entropy: Any = None
        if device.type in _LOSS_DEVICES:  # in no mode that records: the logits are in memory of their own
            self._cross_entropy = torch.compile(cross_entropy, dynamic=dynamic)

    def prepared(self, batch: Batch) -> Batch:
        """Return the batch as a pass takes it; a pass begins. Warn once if the first pass compiled nothing."""
        self._passes += 1
        if self._passes == 2 and not self._graphs():
            log.warning("%s", _no_effect())
        if not self.keeps_graphs:
            return batch
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        longest = batch.inputs.shape[1]
        return padded(batch, next((length for length in self._lengths if length >= longest), longest))

    @property
    def compiles_losses(self) -> bool:
        """True if `compiled_cross_entropy` can be used now."""
        return self.is_active and self._cross_entropy is not None

    def compiled_cross_entropy(self, logits: torch.Tensor, targets: torch.Tensor, reduction: str) -> torch.Tensor:
        """Return what `torch_loss.cross_entropy` does, compiled: without a float32 copy of the logits."""
        assert self._cross_entropy is not None, "see compiles_losses"
        before = _graphs()
        losses: torch.Tensor = self._cross_entropy(logits, targets, reduction)
        self._graphs_of_losses += _graphs() - before
        self._count()
        return losses

    def _graphs(self) -> int:
        """Graphs of the model's layers compiled so far."""
        return _graphs() - self._graphs_of_losses - self._graphs_before

    def _count(self) -> None:
        self.meter.graphs = self._graphs()


@contextmanager
def uncompiled(layers: CompiledLayers | None) -> Iterator[None]:
    """Within, layers and losses are computed as if they had not been compiled."""
    if layers is None:
        yield
        return
    stance: Any = torch.compiler.set_stance
    was, layers.is_active = layers.is_active, False
    try:
        with stance("force_eager"):
            yield
    finally:
        layers.is_active = was


def check_compiler(device: torch.device, where: str) -> None:
    """Raise InvalidInputError if this machine lacks what compiles for the device."""
    if names := lacking(device.type):
        problem = f"this machine has no {' and no '.join(names)}: install what is missing, {_INSTEAD}"
        raise InvalidInputError(f"{where}: model.compile", problem)


def check_graphs(mode: Compile, device: torch.device, where: str) -> None:
    """Raise InvalidInputError for a mode that records CUDA graphs. Training with adapters crashed with them, in the
    first backward passes (torch 2.11, an H200)."""
    if device.type == "cuda" and mode in _GRAPH_MODES:
        raise InvalidInputError(
            f"{where}: model.compile", f'"{mode}" records CUDA graphs, and adapters crash with them; set "default"'
        )


def lengths_up_to(longest: int) -> tuple[int, ...]:
    """Return lengths to pad to, ascending."""
    return tuple(sorted({max(1, round(longest * 2 ** (-number / 2))) for number in range(MOST_LENGTHS)}))


def padded(batch: Batch, width: int) -> Batch:
    """Return the batch with rows of `width`, whose further targets don't count."""
    further = width - batch.inputs.shape[1]

    def wide(array: Any) -> Any:
        return None if array is None else np.pad(array, ((0, 0), (0, further)))

    return replace(
        batch,
        inputs=wide(batch.inputs),
        targets=wide(batch.targets),
        counted=wide(batch.counted),
        positions=wide(batch.positions),
        keys=wide(batch.keys),
        reference=wide(batch.reference),
    )


def _layers(model: torch.nn.Module, where: str) -> list[Any]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise InvalidInputError(f"{where}: model.compile", 'this model has no layers that can be compiled; use "off"')
    return layers


def _configure(where: str) -> None:
    """Choose what the environment hasn't. torch, once imported, may have set its own folder, which all users share."""
    threads = _threads(where)  # before torch reads it
    import torch._inductor.config as settings
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    settings.compile_threads = threads
    if os.environ.get(_CACHE) in (None, default_cache_dir()):
        os.environ[_CACHE] = str(_own_cache(where))


def _threads(where: str) -> int:
    threads = os.environ.setdefault(_THREADS, "1")
    if not threads.isdecimal() or int(threads) < 1:
        reason = f"{_THREADS} is {threads!r} in the environment; set it to a whole number from 1 on"
        raise InvalidInputError(f"{where}: model.compile", reason)
    return int(threads)


def _own_cache(where: str) -> Path:
    """Return the folder of compiled code. Raises InvalidInputError if the folder isn't this user's own."""
    try:
        return code_cache("torchinductor")
    except OSError as error:
        reason = f"{error}; set {_CACHE} to a folder of your own, {_INSTEAD}"
        raise InvalidInputError(f"{where}: model.compile", reason) from None


def _graphs() -> int:
    """Return how many graphs this process has compiled. Layers of one kind share theirs, even those of several
    models."""
    return int(_counters()["stats"]["unique_graphs"])


def _no_effect() -> str:
    counts = _counters()
    reasons = [*counts["graph_break"], *counts["unimplemented"]]
    why = "TORCH_COMPILE_DISABLE or TORCHDYNAMO_DISABLE may be set in the environment"
    if reasons:
        why = f"its reason: {reasons[0].splitlines()[0]}; set TORCH_LOGS=graph_breaks in the environment for the place"
    return f"[model] compile has no effect: torch.compile made no graph of this model's layers ({why})"


def _counters() -> Any:
    from torch._dynamo.utils import counters

    return counters


def _meter(count: Callable[[], None]) -> CompileMeter:
    """Return a meter that counts the seconds of all compilations, those within another one as part of it; `count`
    follows each."""
    from torch._dynamo.callback import callback_handler

    meter, begun = CompileMeter(), [0.0]

    def start(_: Any) -> None:
        begun[0] = time.perf_counter()

    def end(_: Any) -> None:
        meter.seconds += time.perf_counter() - begun[0]
        count()

    callback_handler.register_start_callback(start)
    callback_handler.register_end_callback(end)
    return meter


def code_cache(name: str) -> Path:
    """Return a folder for one compiler's code, made where it isn't there. Raises OSError, with a text that names the
    folder and what is wrong."""
    default = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    folder = Path(os.environ.get("XDG_CACHE_HOME") or default) / "trainctl" / name
    for each in (folder.parent, folder):
        if fault := _fault(each):
            raise OSError(f"{each}, where compiled code is kept, {fault}")
    return folder


def _fault(folder: Path) -> str | None:
    """Return why code from a folder can't be run."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        link, target = folder.lstat(), folder.stat()
    except OSError as error:
        return f"can't be made: {error.strerror}"
    if {link.st_uid, target.st_uid} != {os.geteuid()}:
        return "belongs to another user"
    if target.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "can be written to by other users (chmod go-w)"
    return None if os.access(folder, os.W_OK | os.X_OK) else "can't be written to"
