"""Files that several forms have: JSON, the tokenizer's, and arrays of float32."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainctl.trainer.checkpoints.files import CARRIED_FILES

TEMPLATES = "additional_chat_templates"
"""Folder of a tokenizer's named chat templates; a checkpoint, whose files are in one folder, doesn't have it."""


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")


def copy_carried(source: Path, folder: Path) -> None:
    """The files of the tokenizer, the chat template and generation."""
    for name in CARRIED_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    copy_templates(source, folder)


def copy_templates(source: Path, folder: Path) -> None:
    """The named chat templates beside the default one."""
    if (source / TEMPLATES).is_dir():
        shutil.copytree(source / TEMPLATES, folder / TEMPLATES, dirs_exist_ok=True)


def float32_file(path: Path) -> dict[str, NDArray[np.float32]]:
    """The arrays of a file of adapters."""
    from safetensors.numpy import load_file

    arrays: dict[str, NDArray[np.float32]] = load_file(path)
    return arrays
