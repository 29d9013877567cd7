"""Which model a quantized directory was made from: a small file beside its weights, which other programs ignore.

Nodes compare config.json and the weights, so the file may differ between them.
"""

from pathlib import Path

import msgspec

from trainctl.protocol.config.hub_models import is_hub_id, model_folder, reference
from trainctl.protocol.config.model_facts import weight_files
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.machine.file_digests import files_digests
from trainctl.trainer.common.errors import first_line
from trainctl.trainer.exports.result_files import write_json

ORIGIN_FILE = "quantized_from.json"


class Origin(msgspec.Struct, frozen=True):
    """Of a quantized directory."""

    model: str  # id on the hub, or a path on the machine that quantized it
    revision: str | None  # commit on the hub
    weights: str  # digest of the weights' files


def write_origin(whole: Path, folder: Path) -> None:
    """Note in `folder` that it was made from the model in `whole`. Raises OSError."""
    named = reference(whole.absolute())
    write_json(folder / ORIGIN_FILE, msgspec.to_builtins(Origin(named.name, named.revision, _digest(whole))))


def original_of(quantized: Path) -> Path | None:
    """The directory of the model that `quantized` was made from; None if no file says which. Raises InvalidInputError
    if the file is damaged, or that model isn't on this machine with the same weights."""
    noted = quantized / ORIGIN_FILE
    if not noted.is_file():
        return None
    try:
        origin = msgspec.json.decode(noted.read_bytes(), type=Origin)
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidInputError(str(noted), f"cannot read it: {first_line(error)}") from None
    found = model_folder(origin.model, origin.revision)
    if not (found / "config.json").is_file():
        named = origin.model if origin.revision is None else f"{origin.model} (commit {origin.revision})"
        get = "download it" if is_hub_id(origin.model) else "put it there"
        problem = f"the base was made from {named}, which isn't on this machine: {get}, or use --to mlx or fused"
        raise InvalidInputError(str(noted), problem)
    if _digest(found) != origin.weights:
        raise InvalidInputError(str(found), f"its weights aren't those that the base was made from, by {noted}")
    return found


def _digest(model: Path) -> str:
    return files_digests(sorted(weight_files(model)), model).whole
