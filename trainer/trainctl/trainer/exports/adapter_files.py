"""Adapters as the directories that peft and mlx-lm open beside their base model."""

import shutil
from pathlib import Path

import numpy as np

from trainctl.protocol.config.hub_models import reference
from trainctl.trainer.adapters.lora import Lora
from trainctl.trainer.adapters.mlx_lora import mlx_config, places
from trainctl.trainer.checkpoints.files import ADAPTER
from trainctl.trainer.common.model_files import model_config
from trainctl.trainer.exports.result_files import copy_carried, float32_file, write_json
from trainctl.trainer.exports.trained_model import TrainedModel

_MLX_ADAPTER = "adapters.safetensors"


def write_peft(trained: TrainedModel, lora: Lora, folder: Path) -> None:
    """peft's directory: as a checkpoint has it, with the base's id on the hub, or its path on this machine. Raises
    OSError."""
    shutil.copyfile(trained.weights, folder / ADAPTER)
    write_json(folder / "adapter_config.json", lora.peft_config(Path(trained.config.model.path)))
    copy_carried(trained.checkpoint, folder)


def write_mlx(trained: TrainedModel, lora: Lora, folder: Path) -> None:
    """mlx-lm's directory, whose matrices are the transposes of peft's. Raises OSError."""
    from safetensors.numpy import save_file

    stored, found = float32_file(trained.weights), places(lora)
    turned = {place.name: stored[name].T if place.transposed else stored[name] for name, place in found.items()}
    arrays = {name: np.ascontiguousarray(array) for name, array in turned.items()}
    save_file(arrays, folder / _MLX_ADAPTER, metadata={"format": "mlx"})
    write_json(
        folder / "adapter_config.json", mlx_config(lora) | {"model": reference(Path(trained.config.model.path)).name}
    )


def mlx_reads_rope(base: Path) -> bool:
    """Whether the base states its rotary embeddings where mlx-lm looks for them: in most families not in
    `rope_parameters` alone, which is all that transformers 5 writes."""
    config = model_config(base)
    config = config.get("text_config", config)
    return "rope_parameters" not in config or "rope_theta" in config
