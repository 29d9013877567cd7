"""`trainctl exec`: runs a command as a run that the agent of this machine records and shows."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainctl.protocol.errors import InvalidInputError
from trainctl.tui.cli import output
from trainctl.tui.cli.options import Connect, subcommands

if TYPE_CHECKING:
    from trainctl.tui.exec.exec_run import RunPlace

app = subcommands()


@app.command(context_settings={"allow_interspersed_args": False})
def exec(  # noqa: A001
    command: Annotated[list[str] | None, typer.Argument(metavar="-- COMMAND ...", show_default=False)] = None,
    name: Annotated[
        str | None, typer.Option("--name", show_default=False, help="Name of the run. Default: the script's.")
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Print the run's id and return; its output is in trainctl logs.")
    ] = False,
    env: Annotated[
        bool, typer.Option("--env", help="Print the variables instead, for srun, containers and other hosts' shells.")
    ] = False,
    no_inject: Annotated[
        bool, typer.Option("--no-inject", help="Only log and exit status: put nothing into Python processes.")
    ] = False,
    metrics: Annotated[
        Path | None,
        typer.Option(
            "--metrics",
            metavar="FILE",
            show_default=False,
            help="Read steps from this file while it grows: JSON lines, CSV, or TensorBoard's, also a folder of those.",
        ),
    ] = None,
    connect: Connect = None,
    run: Annotated[str | None, typer.Option("--run", hidden=True)] = None,
    ready: Annotated[int | None, typer.Option("--ready", hidden=True)] = None,
) -> int:
    """Run a command as a run: its output is the run's log, and its training loop is watched and steered.

    The command's output, terminal, signals and exit status are the same as without. Put it after --.
    """
    from trainctl.tui.exec import exec_run  # with ZeroMQ: not for --help
    from trainctl.tui.exec.metric_files import MetricFile

    if env == bool(command):
        raise InvalidInputError("COMMAND", "give one after --, as in: trainctl exec -- python train.py")
    address = connect or os.environ.get("TRAINCTL_CONNECT")
    place = exec_run.place_of(command or [], name, run, address)
    variables = place.variables(os.environ, injects=not no_inject)
    if env:
        for key, value in variables.items():
            output.say(f"{key}={value}")
        return 0
    words = command or []
    if shutil.which(words[0]) is None:
        is_there = Path(words[0]).exists()
        output.complain(f"{words[0]}: {'permission denied' if is_there else 'command not found'}")
        return exec_run.CANNOT_EXECUTE if is_there else exec_run.NOT_FOUND
    followed = MetricFile(metrics) if metrics is not None else None
    if ready is None and not place.socket:
        output.complain("no agent runs on this machine: the run isn't shown; trainctl-agent run starts one")
    if detach:
        options = [*(["--no-inject"] if no_inject else []), *(["--metrics", str(metrics)] if metrics else [])]
        return _detach(place, [*options, *(["--connect", address] if address else []), "--", *words])
    if ready is not None:
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)  # which the shim has ignored
    return exec_run.run(place, words, {**os.environ, **variables}, followed, ready, output.complain)


def _detach(place: "RunPlace", options: list[str]) -> int:
    """Run the same under a shim, and return once the command runs, or can't be started."""
    from trainctl.tui.exec.exec_run import READY

    log = place.paths.log(0)
    log.parent.mkdir(parents=True, exist_ok=True)
    ours, theirs = os.pipe()
    itself = [sys.executable, "-m", "trainctl.tui.cli.main", "exec", "--run", place.run, "--name", place.name]
    shim = [sys.executable, "-m", "trainctl.protocol.machine.shim"]
    shim += ["--record", str(place.paths.directory / "command.process.json"), "--log", str(log), "--"]
    process = subprocess.Popen(
        [*shim, *itself, "--ready", str(theirs), *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(theirs,),
        start_new_session=True,
    )
    os.close(theirs)
    with os.fdopen(ours, "rb") as said:  # the shim has the other end too: its end is that of this one
        answer = said.read(len(READY))
    process.returncode = 0  # it outlives this process
    if answer != READY:
        output.complain(f"{place.run} didn't start: see {log}")
        return int(answer or 1)
    output.say(place.run)
    return 0
