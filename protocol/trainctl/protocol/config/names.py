"""Patterns of the names of runs, nodes and files, and the names of this machine and its user."""

import getpass
import socket

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
