"""`python -m trainctl.trainer`: one rank of a run, as its node's agent starts it.

Exit status 0: told to leave, or the agent was gone for too long; 1: one line on standard error says why; 2: usage.
"""

import argparse
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from trainctl.protocol.machine.process_title import set_title
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.status_page import StatusWriter
from trainctl.trainer.backends.load import import_library
from trainctl.trainer.collective.standby import early_standby
from trainctl.trainer.common import logs
from trainctl.trainer.common.errors import FAILURES, first_line
from trainctl.trainer.common.libraries import keep_what_is_loaded
from trainctl.trainer.common.logs import log
from trainctl.trainer.control.orders import Signalled
from trainctl.trainer.control.thread import Control
from trainctl.trainer.loading import WHERE, Loader, checked_run_file, engine_of_run
from trainctl.trainer.runtime import Trainer
from trainctl.trainer.step.progress import Progress
from trainctl.trainer.step.rank import Identity, Rank

SIGNALS = {signal.SIGTERM, signal.SIGINT}
GRACE_SECONDS = 5.0
"""Seconds the main thread may take to leave by itself, if there is nothing to write."""
WRITE_SECONDS, LOOK_SECONDS = 60.0, 0.1
"""Seconds that a checkpoint may make no progress, and between two looks at that. A micro-batch in flight is finished
before it begins."""


class Termination:
    """SIGTERM and SIGINT, taken by a thread that waits for them, so that no wait in C code can swallow one. A handler
    of Python's own runs on the main thread between two bytecodes; one that comes just before the thread sleeps on a
    queue is seen only when something else wakes it.

    Make it before any other thread, so that all inherit the mask. `number` is the signal that came, else None."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._leave: Callable[[], None] | None = None
        self._written: Callable[[], int | None] = lambda: None
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        threading.Thread(target=self._wait, name="termination", daemon=True).start()

    @property
    def exit_status(self) -> int:
        """Return the status as a shell gives it; 0 if no signal came."""
        return 0 if self.number is None else 128 + self.number

    def leave_by(self, leave: Callable[[], None], written: Callable[[], int | None] = lambda: None) -> None:
        """Take what makes the main thread leave. Without it there is nothing to save, and a signal ends at once.
        `written`: bytes written of a checkpoint that is to be waited for; None: there is none."""
        self._leave, self._written = leave, written

    def _wait(self) -> None:
        self.number = signal.sigwait(SIGNALS)
        if self._leave is not None:
            self._leave()
            self._be_patient()
        os._exit(self.exit_status)

    def _be_patient(self) -> None:
        """Wait as long as a checkpoint makes progress, and for a while without one."""
        mark, since = self._written(), time.monotonic()
        while time.monotonic() < since + (GRACE_SECONDS if mark is None else WRITE_SECONDS):
            time.sleep(LOOK_SECONDS)
            if (now := self._written()) != mark:
                mark, since = now, time.monotonic()


def main() -> int:
    """Run one rank to its end; returns the exit status."""
    arguments = _parser().parse_args()
    set_title("trainer", f"rank {arguments.rank} of {arguments.run}")
    logs.configure()
    logs.write_stacks_on_signal()
    termination = Termination()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # no terminal takes a trainer with it
    try:
        _run(arguments, termination)
    except FAILURES as error:
        log.error("rank %s: %s", arguments.rank, first_line(error))
        return 1
    return termination.exit_status


def _run(arguments: argparse.Namespace, termination: Termination) -> None:
    who = Identity(arguments.run, arguments.node, arguments.rank)
    paths = RunPaths(arguments.run_directory)
    status = StatusWriter(paths.status_page(who.rank), os.getpid())
    progress = Progress()
    gc.disable()  # what libraries make as they are imported stays: looking through it over and over took a fifth of it
    standby = early_standby(engine_of_run(paths, who.node))
    with Control(who, arguments.endpoint, progress, status) as control:
        config = checked_run_file(paths, who.node)
        import_library(config, who.node, WHERE)
        control.orphan_seconds = config.run.orphan_seconds
        loader = Loader(who, config, paths, status, control)
        dataset = loader.data()
        backend, model_files = loader.model(dataset, is_new=arguments.resume_from is None)
        rank = Rank(who, config, backend, dataset, progress, status, send=control.send)
        trainer = Trainer(rank, config, paths, control, model_files, standby)
        trainer.resume(arguments.resume_from, loader.look)
        termination.leave_by(lambda: control.leave(Signalled("ended by a signal")), lambda: trainer.written_bytes)
        trainer.announce()
        keep_what_is_loaded()
        trainer.serve()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainctl.trainer", description="Run one rank of a training run.")
    parser.add_argument("--run-directory", type=Path, required=True, metavar="DIR", help="folder with run.toml")
    parser.add_argument("--run", required=True, metavar="ID", help="run ID")
    parser.add_argument("--node", required=True, metavar="NAME", help="name of this node in the run file")
    parser.add_argument("--rank", type=int, required=True, metavar="R")
    parser.add_argument("--endpoint", required=True, metavar="ipc://PATH", help="address of the node's agent")
    parser.add_argument("--resume-from", type=Path, metavar="DIR", help="checkpoint folder to start from")
    return parser


if __name__ == "__main__":
    sys.exit(main())
