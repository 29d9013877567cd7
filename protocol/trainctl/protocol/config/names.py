"""Patterns of the names of runs, nodes and files, and the names of this machine and its user."""

import getpass
import os
import pwd
import socket
from pathlib import Path

import platformdirs

from trainctl.protocol.errors import InvalidInputError

NAME_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,63}\Z"
FILE_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z"
"""The name of a file or folder that another machine sends: no path, no hidden file."""
ID_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,127}\Z"
"""The ID of a run or of separate work: in lower case, for some disks take `R-1` for `r-1`."""
_NODE_NAME_CHARACTERS = 64


def node_name(host: str | None = None) -> str:
    """A machine's name (default: this one's) as a node name of run files: its first label, what a name can't have as
    dashes, at most 64 characters; `node` where nothing is left."""
    label = (socket.gethostname() if host is None else host).split(".")[0].lower()
    kept = "".join(char if char.isascii() and (char.isalnum() or char in "_-") else "-" for char in label)
    return kept.strip("-_")[:_NODE_NAME_CHARACTERS].rstrip("-_") or "node"


def user_name() -> str:
    """Who is asking, for the record; "unknown" where the system won't say."""
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):
        return "unknown"


def config_folder() -> Path:
    """Return the folder of this user's configuration of trainctl. Raises InvalidInputError as `_check_home`."""
    _check_home()
    return platformdirs.user_config_path("trainctl")


def state_folder() -> Path:
    """Return the folder of this user's runs. Raises InvalidInputError as `_check_home`."""
    _check_home()
    return platformdirs.user_state_path("trainctl")


def _check_home() -> None:
    """Raise InvalidInputError for a user without a home, such as one that a container was given by number."""
    if os.environ.get("HOME"):
        return
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        problem = f"is not set, and user {os.getuid()} has no home: set it to a folder that this user can write"
        raise InvalidInputError("HOME", problem) from None
