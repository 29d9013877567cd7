"""`python -m trainctl.trainer.exports.quantize_model MODEL --to FORMAT`: a model in MLX's format, by mlx-lm.

Ranks with torch and with MLX train adapters on the same directory. One JSON line on standard output says what was made,
or what is wrong, with the exit status that fits. The folder appears under its name only when whole.
"""

import argparse
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from trainctl.protocol.config import hub_models
from trainctl.protocol.config.model_facts import stored_tensors
from trainctl.protocol.config.quantization import DEFAULTS, FORMATS, Quantization, format_of, is_quantized, whole_shapes
from trainctl.protocol.errors import InvalidInputError, check_installed
from trainctl.trainer.common.atomic_folder import make_folder
from trainctl.trainer.common.model_files import model_config, stored_shapes
from trainctl.trainer.exports.answers import answered
from trainctl.trainer.exports.origin import write_origin
from trainctl.trainer.exports.quantized import write_quantized

GROUP_SIZES = (32, 64, 128)
"""Those of the affine formats for which MLX has kernels."""


def main(argv: list[str] | None = None) -> int:
    """Quantize once; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m trainctl.trainer.exports.quantize_model")
    parser.add_argument("model")
    parser.add_argument("--to", required=True, choices=FORMATS)
    parser.add_argument("--group-size", type=int)
    parser.add_argument("--output", type=Path)
    wanted = parser.parse_args(argv)
    return answered(wanted.model, lambda: quantize(wanted.model, wanted.to, wanted.group_size, wanted.output))


def quantize(named: str, form: str, group_size: int | None, output: Path | None) -> dict[str, Any]:
    """Make the folder `output`, or MODEL-FORMAT in the current one; returns what it is. Raises TrainctlError and what
    libraries raise; then there is none."""
    check_installed("mlx-lm", "mlx", "--to", form)
    how = _how(form, group_size)
    hub_models.check_cached(named, "MODEL")
    model = hub_models.model_folder(named)
    if not (model / "config.json").is_file():
        raise InvalidInputError("MODEL", f"no Hugging Face model (config.json and *.safetensors) in {model}")
    if (already := format_of(model_config(model))) is not None:
        raise InvalidInputError("MODEL", f"{model} is quantized already ({already}); give the whole model")
    shapes = stored_shapes(model)
    if not shapes:
        raise InvalidInputError("MODEL", f"no *.safetensors weights in {model}")
    folder = (output or Path(f"{Path(hub_models.reference(model).name).name}-{form}")).absolute()
    if folder.exists():
        raise InvalidInputError(str(folder), "already exists: remove it, or give a different --output")

    def write(work: Path) -> None:
        write_quantized(model, work, how)
        write_origin(model, work)
        _check(model, work, how, shapes, "--to" if group_size is None or how.mode != "affine" else "--group-size")

    make_folder(folder, write)
    size = sum(path.stat().st_size for path in folder.iterdir())
    return {"folder": str(folder), "form": form, "group_size": how.group_size, "bytes": size}


def _how(form: str, group_size: int | None) -> Quantization:
    how = DEFAULTS[form]
    if group_size is None or group_size == how.group_size:
        return how
    if how.mode != "affine":
        raise InvalidInputError("--group-size", f"{form} always has groups of {how.group_size}: leave it out")
    if group_size not in GROUP_SIZES:
        raise InvalidInputError("--group-size", f"{group_size} isn't one of {', '.join(map(str, GROUP_SIZES))}")
    return how._replace(group_size=group_size)


def _check(model: Path, made: Path, how: Quantization, shapes: dict[str, tuple[int, ...]], option: str) -> None:
    """Whether all that should be packed is, under its name. Raises InvalidInputError, blaming `option` if the groups
    don't divide a layer's width."""
    stored = {name: tensor.shape for name, tensor in stored_tensors(made).items()}
    if other := sorted(whole_shapes(stored, model_config(made)).keys() - shapes.keys()):
        problem = f"mlx-lm stores {other[0]!r} of this family under a name that torch doesn't know"
        raise InvalidInputError("MODEL", f"{problem}; it can't be trained on both")
    widths = {name: shape[1] for name, shape in shapes.items() if len(shape) == 2 and name in stored}
    for name, width in widths.items():
        layer = name.removesuffix(".weight")
        if width % how.group_size and not is_quantized(layer, stored):
            problem = f"groups of {how.group_size} don't divide the width {width} of {layer} in {model}"
            raise InvalidInputError(option, f"{problem}; {_alternatives({*widths.values()})}")


def _alternatives(widths: Collection[int]) -> str:
    """The formats and group sizes that divide all widths of layers, as advice."""

    def divides(size: int) -> bool:
        return not any(width % size for width in widths)

    affine = " or ".join(form for form, how in DEFAULTS.items() if how.mode == "affine")
    found = [f"{affine} with --group-size {size}" for size in GROUP_SIZES if divides(size)]
    found += [form for form, how in DEFAULTS.items() if how.mode != "affine" and divides(how.group_size)]
    if not found:
        return 'no format has groups that divide all widths; on torch, model.base = "nf4" takes any width'
    return f"these divide all widths: {', '.join(found)}"


if __name__ == "__main__":
    sys.exit(main())
