"""Titles of this program's processes in `ps`: `trainctl: ROLE WHOSE`, as in `trainctl: reducer rank 1 of RUN g1.3`."""

import os
import sys
from collections.abc import Sequence

_PREFIX = "trainctl: "
_whose = ""


def set_title(role: str, whose: str | None = None, more: str = "") -> None:
    """Show this process as `role`, and whose it is; `whose` None: as before, or as the process that forked this one.

    A title is cut at the length of the command line. On macOS the library uses system services, which no fork may
    follow but one that executes a program at once; on Linux it only writes to this process's memory.

    Needs setproctitle, which the extra `tui` installs.
    """
    global _whose
    _whose = _whose if whose is None else whose
    title = _PREFIX + " ".join(part for part in (role, _whose, more) if part)
    if sys.platform == "darwin":
        # The environment is found from outside by counting zero bytes: leave as many as there were arguments.
        room = sum(len(os.fsencode(word)) for word in sys.orig_argv)
        title = title[:room].ljust(room)
    before = os.environ.get("SPT_NOENV")
    os.environ["SPT_NOENV"] = "1"  # read at the first call: the environment must stay readable from outside
    import setproctitle

    setproctitle.setproctitle(title)
    if before is None:
        del os.environ["SPT_NOENV"]  # not for what this process starts


def whose() -> str:
    """Return the words that name this process's owner, for a process that it starts."""
    return _whose


def role_of(command_line: Sequence[str]) -> str:
    """The role in the title of a rank's process; empty if there is none."""
    title = " ".join(command_line)
    return title.removeprefix(_PREFIX).partition(" rank ")[0] if title.startswith(_PREFIX) else ""
