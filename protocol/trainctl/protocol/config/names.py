"""Patterns of the names of runs, nodes and files, the names of this machine and its user, and trainctl's folders and
sockets here."""

import contextlib
import getpass
import hashlib
import os
import pwd
import socket
import stat
import tempfile
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
    """Return the name of the user who asks, for the record; "unknown" where the system won't say."""
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


def state_root() -> Path:
    """The folder that holds every node's folder: $TRAINCTL_STATE, or the platform's state folder."""
    chosen = os.environ.get("TRAINCTL_STATE")
    return Path(chosen) if chosen else state_folder()


def node_directory(node: str, root: Path | None = None) -> Path:
    return (root or state_root()) / node


def agent_address(node_dir: Path) -> str:
    """Return where this node's agent listens unless an address is given: a Unix socket in its runtime folder."""
    return f"ipc://{_runtime_path(node_dir)}/agent.sock"


def _runtime_path(node_dir: Path) -> Path:
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    if len(base) > 40 or not os.access(base, os.W_OK):
        base = "/tmp"  # noqa: S108  the sockets' own folder below is private
    digest = hashlib.sha256(os.fsencode(node_dir.resolve())).hexdigest()[8:16]
    return Path(base) / f"trainctl-{os.getuid()}-{digest}"


def runtime_directory(node_dir: Path) -> Path:
    """Return a short folder for this node's sockets (macOS allows 104 bytes of socket path), made 0700. Raises
    InvalidInputError for one that others own or can enter."""
    folder = _runtime_path(node_dir)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    kept = folder.lstat()
    if not stat.S_ISDIR(kept.st_mode) or kept.st_uid != os.getuid():
        raise InvalidInputError(str(folder), "not a folder of this user's, which the agent's sockets need: remove it")
    if kept.st_mode & 0o077:
        problem = f"other users can enter this folder of the agent's sockets (mode {kept.st_mode & 0o777:04o})"
        raise InvalidInputError(str(folder), f"{problem}; run: chmod 700 {folder}")
    return folder
