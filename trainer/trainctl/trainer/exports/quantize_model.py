"""`python -m trainctl.trainer.exports.quantize_model MODEL --to FORMAT`: a model in MLX's format, by mlx-lm.

Ranks with torch and with MLX train adapters on the same directory. One JSON line on standard output says what was made,
or what is wrong, with the exit status that fits. The folder appears under its name only when whole.
"""

import argparse
import functools
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec

from trainctl.protocol.config.model_facts import (
    check_cached,
    is_hub_id,
    model_folder,
    reference,
    stored_tensors,
    weight_files,
)
from trainctl.protocol.config.quantization import DEFAULTS, FORMATS, Quantization, format_of, is_quantized, whole_shapes
from trainctl.protocol.errors import InvalidInputError, check_installed
from trainctl.protocol.machine.file_digests import files_digests
from trainctl.trainer.common.atomic_folder import make_folder
from trainctl.trainer.common.errors import answer, first_line, opened_by
from trainctl.trainer.common.model_files import model_config, only_the_model, stored_shapes, write_object
from trainctl.trainer.exports.trained_model import copy_carried
from trainctl.trainer.model import rope_config

GROUP_SIZES = (32, 64, 128)
"""Group sizes of the affine formats for which MLX has kernels."""
ORIGIN_FILE = "quantized_from.json"
"""File beside a quantized model's weights that names the whole model; other programs ignore it. Nodes compare
config.json and the weights, so it may differ between them."""


class Origin(msgspec.Struct, frozen=True):
    """The model that a quantized one was made from."""

    model: str  # id on the hub, or a path on the machine that quantized it
    revision: str | None  # commit on the hub
    weights: str  # digest of the weights' files


def main(argv: list[str] | None = None) -> int:
    """Quantize once; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m trainctl.trainer.exports.quantize_model")
    parser.add_argument("model")
    parser.add_argument("--to", required=True, choices=FORMATS)
    parser.add_argument("--group-size", type=int)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args(argv)
    make = functools.partial(quantize, arguments.model, arguments.to, arguments.group_size, arguments.output)
    return answer(arguments.model, make)


def quantize(named: str, form: str, group_size: int | None, output: Path | None) -> dict[str, Any]:
    """Make the folder `output`, or MODEL-FORMAT in the current one; return the facts of it. Raises
    TrainctlError and what libraries raise; then there is none."""
    check_installed("mlx-lm", "mlx", "--to", form)
    how = DEFAULTS[form]
    if group_size is not None and group_size != how.group_size:
        if how.mode != "affine":
            raise InvalidInputError("--group-size", f"{form} always has groups of {how.group_size}: leave it out")
        if group_size not in GROUP_SIZES:
            raise InvalidInputError("--group-size", f"{group_size} isn't one of {', '.join(map(str, GROUP_SIZES))}")
        how = how._replace(group_size=group_size)
    check_cached(named, "MODEL")
    model = model_folder(named)
    if not (model / "config.json").is_file():
        raise InvalidInputError("MODEL", f"no Hugging Face model (config.json and *.safetensors) in {model}")
    if (already := format_of(model_config(model))) is not None:
        raise InvalidInputError("MODEL", f"{model} is quantized already ({already}); give the whole model")
    shapes = stored_shapes(model)
    if not shapes:
        raise InvalidInputError("MODEL", f"no *.safetensors weights in {model}")
    folder = (output or Path(f"{Path(reference(model).name).name}-{form}")).absolute()
    if folder.exists():
        raise InvalidInputError(str(folder), "already exists: remove it, or give a different --output")

    def write(work: Path) -> None:
        write_quantized(model, work, how)
        write_origin(model, work)
        _check(model, work, how, shapes, "--to" if group_size is None or how.mode != "affine" else "--group-size")

    make_folder(folder, write)
    size = sum(path.stat().st_size for path in folder.iterdir())
    return {"folder": str(folder), "form": form, "group_size": how.group_size, "bytes": size}


def write_quantized(whole: Path, folder: Path, how: Quantization) -> None:
    """Quantize the model in the directory `whole`. mlx-lm leaves layers whose width the group size doesn't divide as
    they are: the caller decides about them. The config.json states RoPE where mlx-lm and transformers look for it."""
    from mlx_lm import utils

    with only_the_model(whole, rope_config.read(whole)) as clean:
        with opened_by("mlx-lm"):
            model, config = utils.load_model(clean, lazy=True)
        model, config = utils.quantize_model(model, config, how.group_size, how.bits, mode=how.mode)
        utils.save_model(folder, model)
    utils.save_config(config, folder / "config.json")
    copy_carried(folder, whole)


def _check(model: Path, quantized: Path, how: Quantization, shapes: dict[str, tuple[int, ...]], option: str) -> None:
    """Check that all that should be packed is, under its name. Raises InvalidInputError, blaming `option` if the groups
    don't divide a layer's width."""
    stored = {name: tensor.shape for name, tensor in stored_tensors(quantized).items()}
    if other := sorted(whole_shapes(stored, model_config(quantized)).keys() - shapes.keys()):
        problem = f"mlx-lm stores {other[0]!r} of this family under a name that torch doesn't know"
        raise InvalidInputError("MODEL", f"{problem}; it can't be trained on both")
    widths = {name: shape[1] for name, shape in shapes.items() if len(shape) == 2 and name in stored}
    for name, width in widths.items():
        layer = name.removesuffix(".weight")
        if width % how.group_size and not is_quantized(layer, stored):
            problem = f"groups of {how.group_size} don't divide the width {width} of {layer} in {model}"
            raise InvalidInputError(option, f"{problem}; {_alternatives({*widths.values()})}")


def _alternatives(widths: Collection[int]) -> str:
    """Return the formats and group sizes that divide all widths of layers, as advice."""
    affine = " or ".join(form for form, how in DEFAULTS.items() if how.mode == "affine")
    fitting = [(f"{affine} with --group-size {size}", size) for size in GROUP_SIZES]
    fitting += [(form, how.group_size) for form, how in DEFAULTS.items() if how.mode != "affine"]
    if names := [name for name, size in fitting if not any(width % size for width in widths)]:
        return f"these divide all widths: {', '.join(names)}"
    return 'no format has groups that divide all widths; on torch, model.base = "nf4" takes any width'


def write_origin(whole: Path, folder: Path) -> None:
    """Note in `folder` that it was made from the model in `whole`. Raises OSError."""
    named = reference(whole.absolute())
    write_object(folder / ORIGIN_FILE, msgspec.to_builtins(Origin(named.name, named.revision, _digest(whole))))


def original_of(quantized: Path) -> Path | None:
    """Return the directory of the model that `quantized` was made from; None if no file says which. Raises
    InvalidInputError if the file is damaged, or that model isn't on this machine with the same weights."""
    noted = quantized / ORIGIN_FILE
    if not noted.is_file():
        return None
    try:
        origin = msgspec.json.decode(noted.read_bytes(), type=Origin)
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidInputError(str(noted), f"cannot read it: {first_line(error)}") from None
    folder = model_folder(origin.model, origin.revision)
    if not (folder / "config.json").is_file():
        named = origin.model if origin.revision is None else f"{origin.model} (commit {origin.revision})"
        get = "download it" if is_hub_id(origin.model) else "put it there"
        problem = f"the base was made from {named}, which isn't on this machine: {get}, or use --to mlx or fused"
        raise InvalidInputError(str(noted), problem)
    if _digest(folder) != origin.weights:
        raise InvalidInputError(str(folder), f"its weights aren't those that the base was made from, by {noted}")
    return folder


def _digest(model: Path) -> str:
    return files_digests(sorted(weight_files(model)), model).whole


if __name__ == "__main__":
    sys.exit(main())
