"""What a person sees of `trainctl cluster sync`: a line per node and kind of files, and progress on a terminal."""

import sys
from collections.abc import Callable

from trainctl.tui.doctor.findings import Asset
from trainctl.tui.setup.sync.node_sync import State, SyncResult, words_of
from trainctl.tui.setup.sync.plan import gigabytes
from trainctl.tui.setup.sync.rsync import TransferProgress

_LEVELS: dict[State, str] = {"complete": "ok", "copied": "done", "to-copy": "copy", "failed": "fail"}


class SyncReport:
    """A `SyncListener`: lines go to `say`, failures to `complain`; progress to standard error if it is a terminal."""

    def __init__(self, say: Callable[[str], None], complain: Callable[[str], None]) -> None:
        self._say, self._complain = say, complain
        self._shown = ""

    def progress(self, node: str, what: Asset, progress: TransferProgress, total: int) -> None:
        """Replace the line of progress."""
        line = f"{node}: {what}: {progress.percent} % of {gigabytes(total)}"
        if sys.stderr.isatty() and line != self._shown:
            sys.stderr.write(f"\r\x1b[K{line}")
            sys.stderr.flush()
            self._shown = line

    def result(self, node: str, result: SyncResult) -> None:
        """One line in place of the progress."""
        self.clear()
        if result.state == "failed":
            self._complain(f"{node}: {words_of(result)}")
        else:
            self._say(f"{_LEVELS[result.state]:<4}  {node}: {words_of(result)}")

    def clear(self) -> None:
        """Remove the line of progress."""
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._shown = ""


class NoReport:
    """A `SyncListener` that shows nothing."""

    def progress(self, node: str, what: Asset, progress: TransferProgress, total: int) -> None:
        """Nothing."""

    def result(self, node: str, result: SyncResult) -> None:
        """Nothing."""
