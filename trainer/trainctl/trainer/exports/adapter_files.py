"""Adapters as the directories that peft and mlx-lm open beside their base model."""

import shutil
from pathlib import Path

import numpy as np

from trainctl.protocol.config.hub_models import reference
from trainctl.protocol.config.model_facts import INDEX_FILE, weight_files
from trainctl.trainer.adapters.lora import Lora
from trainctl.trainer.adapters.mlx_lora import mlx_config, places
from trainctl.trainer.checkpoints.files import ADAPTER, CARRIED_FILES
from trainctl.trainer.common.model_files import link_or_copy
from trainctl.trainer.exports.result_files import copy_templates, float32_file, write_json
from trainctl.trainer.exports.trained_model import TrainedModel, copy_tokenizer
from trainctl.trainer.model import rope_config

OWN_BASE = "base"
"""Folder of the base with a config.json for mlx-lm."""
_MLX_ADAPTER = "adapters.safetensors"


def write_peft(trained: TrainedModel, lora: Lora, folder: Path) -> None:
    """peft's directory: as a checkpoint has it, with the base's id on the hub, or its path on this machine. Raises
    OSError."""
    shutil.copyfile(trained.weights, folder / ADAPTER)
    write_json(folder / "adapter_config.json", lora.peft_config(Path(trained.config.model.path)))
    copy_tokenizer(trained, folder)


def write_mlx(trained: TrainedModel, lora: Lora, folder: Path) -> None:
    """mlx-lm's directory, whose matrices are the transposes of peft's. If mlx-lm would misread
    the base, the folder `OWN_BASE` in it has a base that mlx-lm reads correctly. Raises OSError."""
    from safetensors.numpy import save_file

    stored, found = float32_file(trained.weights), places(lora)
    turned = {place.name: stored[name].T if place.transposed else stored[name] for name, place in found.items()}
    arrays = {name: np.ascontiguousarray(array) for name, array in turned.items()}
    save_file(arrays, folder / _MLX_ADAPTER, metadata={"format": "mlx"})
    write_json(
        folder / "adapter_config.json", mlx_config(lora) | {"model": reference(Path(trained.config.model.path)).name}
    )
    if not rope_config.mlx_reads(trained.model):
        (folder / OWN_BASE).mkdir()
        write_json(folder / OWN_BASE / "config.json", rope_config.read(trained.model))
        _link_base(trained.model, folder / OWN_BASE)


def _link_base(base: Path, folder: Path) -> None:
    """Links to the base's weights and tokenizer; copies where the file system has no links. Raises OSError."""
    names = [path.name for path in weight_files(base)]
    for name in (*names, INDEX_FILE, *CARRIED_FILES):
        if (base / name).is_file():
            link_or_copy(base / name, folder / name)
    copy_templates(base, folder)
