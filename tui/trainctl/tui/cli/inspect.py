"""The subcommands that look at a run: `status`, `alerts`, `policies`, `diagnose`, `report`, `diff` and `replay`."""

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from trainctl.protocol.batch.cost import run_rates
from trainctl.protocol.errors import InvalidInputError, RefusedError, UnreachableError
from trainctl.protocol.messages import (
    AttendRequest,
    DiagnosisReply,
    DiagnosisRequest,
    HookTestRequest,
    HostReading,
    Snapshot,
    SnapshotRequest,
    Viewer,
    WorksRequest,
    WorkSummary,
)
from trainctl.tui.cli import agent_call, output, runs, tables
from trainctl.tui.cli.options import ClusterFile, Connect, Json, subcommands
from trainctl.tui.cli.output import has_screen
from trainctl.tui.cli.runs import RunArgument, RunAtAgent

app = subcommands()
Hosts = dict[str, HostReading]
HOOK_TEST_SECONDS = 30.0
"""More than a command and a webhook may take, one after the other."""
DIFFERS = 1
"""Exit code of `diff` if the runs differ, as that of diff(1)."""


@app.command()
def status(
    ctx: typer.Context,
    run: RunAtAgent = None,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", help="Also print each rank's GPU, library, attention and precision, in one table."
        ),
    ] = False,
    connect: Connect = None,
    cluster: ClusterFile = None,
    json: Json = False,
) -> int:
    """Show the run, its ranks, separate work and machines."""

    at = runs.at_agent(ctx, connect, cluster, run)

    async def look(client: Any) -> tuple[Snapshot, Hosts, tuple[Viewer, ...], tuple[WorkSummary, ...]]:
        snapshot = await agent_call.settled_snapshot(client, at.run)
        hosts, works = await agent_call.hosts_of(snapshot.peers), (await client.ask(WorksRequest)).works
        return snapshot, hosts, (await client.ask(AttendRequest)).viewers, works

    snapshot, hosts, viewers, works = agent_call.call(at.address, look, lead=run is None)
    devices = f"\n\n{tables.devices_table(snapshot, hosts)}" if verbose else ""
    return output.answer(
        tables.status_text(snapshot, hosts, viewers, works) + devices,
        json=json,
        node=snapshot.node,
        run=snapshot.run,
        last_step=snapshot.last_step,
        rank_steps=snapshot.rank_steps,
        peers=snapshot.peers,
        hosts=hosts,
        viewers=viewers,
        works=[work for work in works if work.is_active],
        at=snapshot.at,
        rates=run_rates(snapshot.run, snapshot.last_step) if snapshot.run else None,
        cost=tables.figures_of(snapshot),
        energy=tables.energy_of(snapshot, hosts),
        alerts=snapshot.alerts.alerts if snapshot.alerts else (),
    )


@app.command()
def alerts(
    ctx: typer.Context,
    run: RunAtAgent = None,
    connect: Connect = None,
    cluster: ClusterFile = None,
    test: Annotated[
        bool, typer.Option("--test", help="Have the agent call its alert hooks once, and print how that went.")
    ] = False,
    json: Json = False,
) -> int:
    """List the active run's open alerts, urgent ones first. Without an active run, list the alerts for the agent's
    machine."""
    at = runs.at_agent(ctx, connect, cluster, run)
    if test:
        return _test_hooks(at.address, json=json)
    snapshot = agent_call.call(at.address, lambda client: client.ask(SnapshotRequest, 0, at.run), lead=run is None)
    told = snapshot.alerts
    found = told.alerts if told is not None else ()
    problem = told.hook_problem if told is not None else ""
    if problem and not json:
        output.tell(problem)
    return output.answer(
        tables.alerts_table(found) if found else "",
        json=json,
        none="no open alerts",
        alerts=found,
        mutes=told.mutes if told is not None else (),
        watched=told is not None,
        hook_problem=problem,
    )


def _test_hooks(address: str, *, json: bool) -> int:
    outcomes = agent_call.call(
        address, lambda client: client.ask(HookTestRequest), answer_seconds=HOOK_TEST_SECONDS
    ).outcomes
    failed = [outcome for outcome in outcomes if outcome.problem]
    if json:
        output.emit({"ok": not failed, "outcomes": outcomes})
    for outcome in () if json else outcomes:
        output.say(f"{outcome.hook}: {output.one_line(outcome.problem) or 'called'}")
    if not outcomes and not json:
        problem = (
            "the agent has no alert hooks: set them in [alerts] of its machine's cluster.toml, which must name its node"
        )
        raise RefusedError(problem)
    return RefusedError.exit_code if failed else 0


@app.command()
def policies(
    ctx: typer.Context, run: RunAtAgent = None, connect: Connect = None, cluster: ClusterFile = None, json: Json = False
) -> int:
    """Show what each policy of an active run sees, what it would do next and why, and its last commands with their
    measured effect."""
    from trainctl.tui.screens import policies_view

    at = runs.at_agent(ctx, connect, cluster, run)
    from trainctl.tui.state import effects

    report = agent_call.call(at.address, lambda client: effects.policy_report(client, at.run), lead=run is None)
    return output.answer(
        policies_view.text(report),
        json=json,
        run=report.told.run,
        step=report.told.step,
        policies=policies_view.objects(report),
    )


@app.command()
def diagnose(
    ctx: typer.Context,
    run: RunAtAgent = None,
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

    told = _diagnosis(ctx, run, step, connect, cluster)
    return output.answer(diagnosis_view.text(told), json=json, **diagnosis_view.objects(told))


def _diagnosis(
    ctx: typer.Context, run: str | None, step: int | None, connect: str | None, cluster: Path | None
) -> DiagnosisReply:
    """Return a run's diagnosis. A directory is read here, and so is a run that no agent answers for. Raises
    InvalidInputError for a bad RUN."""
    if run is not None and ("/" in run or Path(run).exists()):
        return _diagnosis_of_record(runs.find(run), step)
    try:
        at = runs.at_agent(ctx, connect, cluster, run)
        return agent_call.call(at.address, lambda client: client.ask(DiagnosisRequest, at.run, step), lead=run is None)
    except (UnreachableError, RefusedError) as error:
        here = runs.find_here(run) if run is not None else None
        if here is None and run is not None and isinstance(error, UnreachableError):
            raise InvalidInputError(run, f"no run with that id on this machine, and {error}") from None
        if here is None:
            raise
        return _diagnosis_of_record(here, step)


def _diagnosis_of_record(directory: Path, step: int | None) -> DiagnosisReply:
    from trainctl.protocol.analysis.diagnosis.diagnose import of_record
    from trainctl.protocol.record.paths import RunPaths

    found = of_record(RunPaths(directory), step)
    return DiagnosisReply(rid="", run=directory.name, live=False, diagnosis=found)


@app.command()
def report(
    ctx: typer.Context,
    run: RunArgument,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write one HTML page, with charts.")
    ] = None,
    md: Annotated[
        Path | None, typer.Option("--md", metavar="FILE", help="Write Markdown [standard output].", show_default=False)
    ] = None,
    bench: Annotated[
        Path | None,
        typer.Option(
            "--bench", metavar="FILE", show_default=False, help="Add the table that trainctl bench --json printed."
        ),
    ] = None,
    connect: Connect = None,
    cluster: ClusterFile = None,
    json: Json = False,
) -> int:
    """Report on a run from its record: its curve with every intervention, speed, time, faults, policies and recipe.
    Reads the run's directory, or a copy of its record from the agent; the run may still be active."""
    from trainctl.protocol.record.paths import RunPaths
    from trainctl.tui.bench import bench_rows
    from trainctl.tui.export.writers import destination
    from trainctl.tui.report import document, html_page, read_facts, sections

    with runs.record_of(ctx, run, connect, cluster) as directory:
        facts = read_facts.read_facts(RunPaths(directory))
    saved = bench_rows.read_saved(bench) if bench is not None else None
    page = sections.page(facts, *([bench_rows.section(saved)] if saved is not None else []))
    makers = (("--html", html, html_page.page_html), ("--md", md, document.page_markdown))
    written = {}
    for option, file, make in makers:
        if file is not None:
            written[file] = make(page)
            with destination(file, option) as stream:
                stream.write(written[file].encode("utf-8", "replace"))
    if json:
        output.emit_ok(files=[str(file) for file in written], bench=saved, **msgspec.structs.asdict(facts))
    elif written:
        output.tell(", ".join(f"{file}: {len(text.encode()):,} bytes" for file, text in written.items()))
    else:
        output.say(document.page_markdown(page))
    return 0


@app.command()
def diff(
    ctx: typer.Context,
    run: RunArgument,
    other: Annotated[str, typer.Argument(metavar="OTHER", help="The run to compare with, given in the same way.")],
    connect: Connect = None,
    cluster: ClusterFile = None,
    json: Json = False,
) -> int:
    """Compare two runs by their records: recipe, data, versions, plans, and the first step where their losses part.
    The exit code is 0 if nothing differs, and 1 if something does."""
    from trainctl.protocol.record.paths import RunPaths
    from trainctl.tui.report import run_diff, run_side

    sides = []
    for name in (run, other):
        with runs.record_of(ctx, name, connect, cluster) as directory:
            sides.append(run_side.read_side(RunPaths(directory)))
    found = run_diff.compare(*sides)
    output.answer(run_diff.text(found), json=json, **run_diff.objects(found))
    return 0 if found.same else DIFFERS


@app.command()
def replay(
    ctx: typer.Context,
    run: RunArgument,
    speed: Annotated[
        float, typer.Option(min=0.25, max=4096, help="Playback speed; 2 is twice as fast as the run.")
    ] = 8.0,
    connect: Connect = None,
    cluster: ClusterFile = None,
) -> int:
    """Replay a run in the full screen, from its directory. You can play, pause and seek, but not send commands."""
    with runs.record_of(ctx, run, connect, cluster) as directory:
        if not has_screen():
            raise InvalidInputError(
                "terminal",
                "a replay needs a terminal on standard input, output and error; use trainctl export for its figures",
            )
        from trainctl.tui.replay.replay_app import run_replay  # Textual: only for the full screen

        return run_replay(directory, speed)
