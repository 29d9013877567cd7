"""The file that keeps a run's lines while there is no agent: `spool/RUN.jsonl` in the state folder.

It has the lines that the loop would send over the socket: first `hello`, then `steps`, `event` and `end`, in the order
in which they happened. `hello` comes again, with `attach.after_step`, where the loop goes back to an earlier step, and
at each opening of the file. So an agent reads it as it reads a connection that nobody answers, and then deletes it.

- The loop holds an exclusive flock while it writes. Whoever reads or deletes the file holds that lock too. After it got
  the lock, each checks that the path still names the file it has open, and otherwise opens it again.
- The loop closes the file before it says hello to an agent. The agent takes up a run's file before it answers that
  run's hello, and otherwise when it starts and every few seconds, if it gets the lock at once.
- `hello.socket` is the path of the socket whose agent has earlier steps of the run. Other agents leave the file alone.
- A line may be incomplete where a loop was killed. It is left out.
- Steps that the record has are there once: an agent takes from the file only those after its newest, as from a socket.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

MAX_BYTES = 1 << 30
"""Largest spool file; a run that writes more than this without an agent keeps its newest rows in memory only."""
_LOCK_SECONDS = 0.2


class Spool:
    """The spool file of one run. Raises OSError where it can't be written; what was written before then stays."""

    def __init__(self, state: Path, run: str) -> None:
        self.path = state / "spool" / f"{run}.jsonl"
        self._file: int | None = None

    @property
    def is_open(self) -> bool:
        return self._file is not None

    def write(self, hello: bytes, lines: Sequence[bytes]) -> None:
        """Append whole lines, all or none, after `hello` if the file is opened for them."""
        opened = self._file is None
        file = self._file = self._open() if self._file is None else self._file
        end = os.lseek(file, 0, os.SEEK_END)
        before = (b"\n" if end else b"", hello) if opened else ()  # what a killed loop left may lack its end
        text = memoryview(b"".join((*before, *lines)))
        if end + len(text) > MAX_BYTES:
            raise OSError(f"{self.path} has reached {MAX_BYTES >> 20} MiB")
        try:
            while text:
                text = text[os.write(file, text) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(file, end)
            if opened:
                self.close()
            raise

    def close(self) -> None:
        """Let the agent read the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self) -> int:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            is_ours = False
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_ours = os.fstat(file).st_ino == self.path.stat().st_ino
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
            except FileNotFoundError:  # deleted by the agent that has read it
                pass
            finally:
                if not is_ours:
                    os.close(file)
            if is_ours:
                return file
