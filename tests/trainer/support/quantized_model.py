"""Quantized copies of models for tests, made as `trainctl model quantize` makes them."""

from pathlib import Path

from trainctl.trainer.exports.quantize_model import quantize


def quantized_copy(model: Path, form: str, group_size: int | None = None) -> Path:
    """A directory beside `model`."""
    folder = model.with_name(f"{model.name}-{form}-{group_size or 'default'}")
    quantize(str(model), form, group_size, folder)
    return folder
