"""What `trainctl cluster sync` prints: a line per node and kind of files, and its progress on a terminal."""

import sys
from collections.abc import Mapping, Sequence

from trainctl.protocol.errors import RefusedError
from trainctl.tui.cli import output
from trainctl.tui.doctor.findings import Asset
from trainctl.tui.setup.rsync import Progress
from trainctl.tui.setup.sync_node import State, SyncResult, words_of
from trainctl.tui.setup.sync_plan import gigabytes

_LEVELS: dict[State, str] = {"complete": "ok", "copied": "done", "to-copy": "copy", "failed": "fail"}


class SyncReport:
    """Prints as it happens; with `json`, one object at the end."""

    def __init__(self, *, json: bool) -> None:
        self._json = json
        self._shows_progress = not json and sys.stderr.isatty()
        self._shown = ""

    def progress(self, node: str, what: Asset, progress: Progress, total: int) -> None:
        """Replace the line of progress."""
        line = f"{node}: {what}: {progress.percent} % of {gigabytes(total)}"
        if self._shows_progress and line != self._shown:
            sys.stderr.write(f"\r\x1b[K{line}")
            sys.stderr.flush()
            self._shown = line

    def result(self, node: str, result: SyncResult) -> None:
        """One line: failures on standard error, the rest on standard output."""
        if self._json:
            return
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._shown = ""
        if result.state == "failed":
            output.complain(f"{node}: {words_of(result)}")
        else:
            output.say(f"{_LEVELS[result.state]:<4}  {node}: {output.one_line(words_of(result))}")

    def finish(self, found: Mapping[str, Sequence[SyncResult]]) -> int:
        """Print the summary; the exit code."""
        failed = [node for node, results in found.items() if any(result.state == "failed" for result in results)]
        code = RefusedError.exit_code if failed else 0
        if self._json:
            nodes = {node: [result._asdict() for result in results] for node, results in found.items()}
            output.emit({"ok": not code, "nodes": nodes, "failed": failed})
        elif not found:
            output.tell("the run has no nodes on other machines")
        elif failed:
            output.complain(f"{len(failed)} of {len(found)} nodes failed: {', '.join(failed)}")
        return code
