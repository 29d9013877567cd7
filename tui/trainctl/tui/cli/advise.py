"""`trainctl advise`: which nodes a run should use, and what it would take."""

from pathlib import Path
from typing import Annotated

import typer

from trainctl.tui.cli import output
from trainctl.tui.cli.options import ClusterFile, Connect, Json, Set, subcommands, where

app = subcommands()


@app.command()
def advise(
    ctx: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="RUN.toml", show_default=False)],
    set_: Set = None,
    connect: Connect = None,
    cluster: ClusterFile = None,
    no_data: Annotated[bool, typer.Option("--no-data", help="Don't read the run's data.")] = False,
    parameters: Annotated[
        int | None,
        typer.Option("--parameters", min=1, help="Trained parameters, if the model isn't on this machine."),
    ] = None,
    json: Json = False,
) -> int:
    """Advise on which nodes to train, alone, in step or separately, how long it takes and what it costs.

    It computes with the nodes' profiles (trainctl calibrate), from their agents or from their folders on this machine.
    Nodes that the cluster file only describes, for trainctl simulate, are taken as described.
    Nodes without a profile are estimated from device tables if their device is known; estimates are marked with ~.
    It also prints what would change the answer, a checklist of the run's settings, and environment variables. Rows and
    samples are read for their lengths. Nothing is started or changed.
    """
    from trainctl.protocol.advice.advice import advise as advice_for
    from trainctl.tui.advise import advice_fields, advice_lines
    from trainctl.tui.advise.gather import gather
    from trainctl.tui.commands import arguments

    at = where(ctx, connect, cluster, simulated=True)
    agent = None if at.cluster is not None else at.addresses[0]
    pairs = arguments.pairs(set_ or [], "--set")
    found = gather(file, pairs, at.cluster, agent, read_data=not no_data, parameters=parameters)
    advice = advice_for(found.facts, found.checks)
    if json:
        output.emit_ok(**advice_fields.advice_fields(advice, found.facts, found.notes))
        return 0
    for line in advice_lines.advice_lines(advice, found.facts.run, found.notes):
        output.say(output.log_text(line, raw=False))
    return 0
