"""The model of a checkpoint in a backend, without data or optimizer state."""

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from trainctl.protocol.config import run_file
from trainctl.protocol.config.run_tables import NodeTable, RunFile
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.record.checkpoints import verify
from trainctl.trainer.adapters.lora import read_lora
from trainctl.trainer.backends.base import Backend
from trainctl.trainer.backends.load import load
from trainctl.trainer.checkpoints.files import ADAPTER, is_base, read_loop
from trainctl.trainer.common.errors import first_line
from trainctl.trainer.common.model_files import longest_context


class CheckpointModel(NamedTuple):
    """A loaded model."""

    backend: Backend
    config: RunFile  # as it is on this node
    directory: Path  # that has the model's configuration and tokenizer
    longest: int | None  # tokens that the model allows; None: it doesn't say


def load_checkpoint(checkpoint: Path, config: RunFile, node: str, where: str) -> CheckpointModel:
    """Raises InvalidInputError if the checkpoint is damaged, or its adapters' base is missing here or another one."""
    verify(checkpoint)
    config = run_file.on_this_machine(config, node)
    directory = Path(config.model.path) if config.adapter.kind != "full" else checkpoint
    if not (directory / "config.json").is_file():
        raise InvalidInputError(f"{where}: model.path", f"the adapters' base model is missing on {node}: {directory}")
    model = msgspec.structs.replace(config.model, path=str(directory), init="pretrained")
    config = msgspec.structs.replace(config, model=model)
    if config.adapter.kind != "full":
        wanted = read_loop(checkpoint).base_digest
        if not is_base(directory, read_lora(config, where), wanted):
            problem = f"{directory} on {node} is not the model that the adapters were trained on: its files differ"
            raise InvalidInputError(f"{where}: model.path", problem)
    backend = load(config, config.nodes.get(node, NodeTable()), where, trains=False)
    if config.adapter.kind != "full":
        backend.copy_in("weights", _arrays(checkpoint / ADAPTER))
    return CheckpointModel(backend, config, directory, longest_context(directory))


def _arrays(path: Path) -> dict[str, Any]:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        loaded: dict[str, Any] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise InvalidInputError(str(path), f"not readable weights: {first_line(error)}") from None
    return loaded
