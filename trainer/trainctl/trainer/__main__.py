"""`python -m trainctl.trainer`: one rank of a run, as its node's agent starts it.

Exit status 0: told to leave, or the agent was gone for too long; 1: one line on standard error says why; 2: usage.
"""

import argparse
import gc
import os
import signal
import sys
from pathlib import Path

from trainctl.protocol.machine.process_title import set_title
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.status_page import StatusWriter
from trainctl.trainer.backends.load import import_library
from trainctl.trainer.collective.standby import early_standby
from trainctl.trainer.common import logs
from trainctl.trainer.common.errors import first_line
from trainctl.trainer.common.garbage import keep_what_is_loaded
from trainctl.trainer.common.logs import log
from trainctl.trainer.control.thread import Control
from trainctl.trainer.runtime import WHERE, Failures, checked_run_file, likely_engine, load_trainer
from trainctl.trainer.signals import Termination
from trainctl.trainer.step.progress import Progress
from trainctl.trainer.step.rank import Identity


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
    except Failures as error:
        log.error("rank %s: %s", arguments.rank, first_line(error))
        return 1
    return termination.exit_status


def _run(arguments: argparse.Namespace, termination: Termination) -> None:
    who = Identity(arguments.run, arguments.node, arguments.rank)
    paths = RunPaths(arguments.run_directory)
    status = StatusWriter(paths.status_page(who.rank), os.getpid())
    progress = Progress()
    gc.disable()  # what libraries make as they are imported stays: looking through it over and over took a fifth of it
    standby = early_standby(likely_engine(paths, who.node))
    with Control(who, arguments.endpoint, progress, status) as control:
        config = checked_run_file(paths, who.node)
        import_library(config, who.node, WHERE)
        trainer = load_trainer(who, paths, progress, status, control, standby, is_new=arguments.resume_from is None)
        trainer.resume(arguments.resume_from)
        termination.leave_by(control.leave_by_signal, lambda: trainer.written_bytes)
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
