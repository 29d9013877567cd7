"""Models named by their id on the Hugging Face Hub, found in this machine's cache; nothing is downloaded."""

import importlib.util
import re
from pathlib import Path

from trainctl.protocol.errors import InvalidInputError, NotCachedError, installing

_ID = re.compile(r"\b[\w\-.]+\b/\b[\w\-.]{1,96}\b", re.ASCII)
"""huggingface_hub's own pattern, with the organisation required."""


def is_hub_id(path: str) -> bool:
    """Whether `path` has the form `org/name`."""
    return _ID.fullmatch(path) is not None and "--" not in path and ".." not in path


def model_folder(path: str) -> Path:
    """The cached folder of the model with that id; `path` itself if it isn't an id or isn't cached."""
    if not is_hub_id(path) or importlib.util.find_spec("huggingface_hub") is None:
        return Path(path)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, local_files_only=True))
    except (OSError, ValueError):
        return Path(path)


def check_cached(path: str, where: str) -> None:
    """Raises NotCachedError, blaming `where`, for the id of a model that isn't cached on this machine, or
    InvalidInputError if the library that reads the cache isn't installed."""
    if not is_hub_id(path) or model_folder(path) != Path(path):
        return
    if importlib.util.find_spec("huggingface_hub") is None:
        problem = f"{path} is a Hugging Face id, which needs huggingface_hub here; {installing('torch', 'mlx')}"
        raise InvalidInputError(where, problem)
    raise NotCachedError(where, path)
