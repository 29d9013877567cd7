"""Models named by their id on the Hugging Face Hub, found in this machine's cache; nothing is downloaded."""

import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path

from trainctl.protocol.errors import InvalidInputError, NotCachedError, installing

_ID = re.compile(r"\b[\w\-.]+\b/\b[\w\-.]{1,96}\b", re.ASCII)
"""huggingface_hub's own pattern, with the organisation required."""
_CACHED = re.compile(r"^models--(?P<owner>.+?)--(?P<name>.+)$")
"""Folder of a model in the Hugging Face cache."""
_COMMIT = re.compile(r"[0-9a-f]{40}")


def is_hub_id(path: str) -> bool:
    """Return whether `path` has the form `org/name`."""
    return _ID.fullmatch(path) is not None and "--" not in path and ".." not in path


@dataclass(frozen=True)
class Reference:
    """The name by which other machines know a model."""

    name: str  # id on the hub, or a path
    revision: str | None = None  # commit on the hub, where it is known


def reference(model: Path) -> Reference:
    """Return the reference of a model's directory: id and commit if it is in a Hugging Face cache, else its path."""
    found = ((_CACHED.match(part), place) for place, part in enumerate(model.parts))
    match, place = next(((match, place) for match, place in found if match), (None, 0))
    if match is None:
        return Reference(str(model))
    after = model.parts[place + 1 :]
    revision = after[1] if len(after) == 2 and after[0] == "snapshots" and _COMMIT.fullmatch(after[1]) else None
    return Reference(f"{match['owner']}/{match['name']}", revision)


def model_folder(path: str, revision: str | None = None) -> Path:
    """Return the cached folder of the model with that id, of its main branch or of a commit; `path` itself if it is a
    folder, isn't an id or isn't cached."""
    if _is_folder(path) or not is_hub_id(path) or importlib.util.find_spec("huggingface_hub") is None:
        return Path(path)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, revision=revision, local_files_only=True))
    except (OSError, ValueError):
        return Path(path)


def check_cached(path: str, where: str) -> None:
    """Raise NotCachedError, blaming `where`, for the id of a model that isn't cached on this machine, or
    InvalidInputError if the library that reads the cache isn't installed."""
    if _is_folder(path) or not is_hub_id(path) or model_folder(path) != Path(path):
        return
    if importlib.util.find_spec("huggingface_hub") is None:
        problem = f"{path} is a Hugging Face id, which needs huggingface_hub here; {installing('torch', 'mlx')}"
        raise InvalidInputError(where, problem)
    raise NotCachedError(where, path)


def _is_folder(path: str) -> bool:
    return os.path.isdir(path)  # noqa: PTH112  a Path's `is_dir` raises for a name that is too long
