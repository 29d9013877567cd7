"""The subcommand `diagnose`: why a run is slow or stuck, by the agent that leads it or by its record alone."""

from pathlib import Path
from typing import Annotated

import typer

from trainctl.protocol import messages as m
from trainctl.protocol.errors import InvalidInputError, RefusedError, UnreachableError
from trainctl.tui.cli import agent_call, output, run_lookup
from trainctl.tui.cli.options import ClusterFile, Connect, Json, address_of, subcommands

app = subcommands()


@app.command()
def diagnose(
    ctx: typer.Context,
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="A run id, or a run directory. Default: the active run, or the newest."),
    ] = None,
    step: Annotated[
        int | None, typer.Option("--step", min=1, help="Judge the run as it was at this step.", show_default="now")
    ] = None,
    connect: Connect = None,
    cluster: ClusterFile = None,
    json: Json = False,
) -> int:
    """Say why a run is slow or stuck: what shows it, what it costs, what it is not, and what to do. Asks the agent; a
    run directory, or the id of a run on this machine, needs none."""
    from trainctl.tui.screens import diagnosis_view

    told = _told(ctx, run, step, connect, cluster)
    return output.answer(diagnosis_view.text(told), json=json, **diagnosis_view.objects(told))


def _told(
    ctx: typer.Context, run: str | None, step: int | None, connect: str | None, cluster: Path | None
) -> m.DiagnosisReply:  # fmt: skip
    """A directory is read here, and so is a run that no agent answers for. Raises InvalidInputError for a bad RUN."""
    if run is not None and ("/" in run or Path(run).exists()):
        return _read(run_lookup.find(run), step)
    try:
        return agent_call.call(
            address_of(ctx, connect, cluster), lambda client: client.diagnosis(run, step), lead=run is None
        )
    except (UnreachableError, RefusedError) as error:
        here = run_lookup.find_here(run) if run is not None else None
        if here is None and run is not None and isinstance(error, UnreachableError):
            raise InvalidInputError(run, f"no run with that id on this machine, and {error}") from None
        if here is None:
            raise
        return _read(here, step)


def _read(directory: Path, step: int | None) -> m.DiagnosisReply:
    from trainctl.protocol.analysis.diagnosis.of_record import of_record
    from trainctl.protocol.record.paths import RunPaths

    found = of_record(RunPaths(directory), step)
    return m.DiagnosisReply(rid="", run=directory.name, live=False, diagnosis=found)
