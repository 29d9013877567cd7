"""`trainctl doctor`: a line for each thing that is well, worth a word, or wrong, and what would fix it."""

import asyncio
from collections import Counter
from ipaddress import ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainctl.protocol.errors import RefusedError
from trainctl.tui.cli import output
from trainctl.tui.cli.options import ClusterFile, Connect, Json, subcommands, where

if TYPE_CHECKING:
    from trainctl.tui.commands.targets import Where
    from trainctl.tui.doctor.findings import ClusterFacts, Level

app = subcommands()


@app.command()
def doctor(
    ctx: typer.Context,
    file: Annotated[
        Path | None, typer.Argument(metavar="[RUN.toml]", help="Run file whose model and data to compare.")
    ] = None,
    connect: Connect = None,
    cluster: ClusterFile = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only warnings and failures.")] = False,
    json: Json = False,
) -> int:
    """Check the cluster's machines and suggest fixes. Prints one line per finding: ok, warn or fail. With a run file,
    it also reads and compares the model and data files of all nodes. On each node, it measures the disk that holds the
    token caches, with a temporary file of up to 32 MiB. It changes nothing. Exits with 3 if any check fails, else 0.
    """
    from trainctl.tui.doctor.run_checks import findings, line

    found = findings(asyncio.run(_scene(where(ctx, connect, cluster), file)))
    counts = Counter(finding.level for finding in found)
    code = RefusedError.exit_code if counts["fail"] else 0
    if json:
        shown = [finding._asdict() for finding in found]
        output.emit({"ok": not code, "findings": shown, "counts": {level: counts[level] for level in LEVELS}})
        return code
    for finding in found:
        if not quiet or finding.level != "ok":
            output.say(f"{finding.level:<4}  {output.arrowed(output.one_line(line(finding)))}")
    output.say(", ".join(f"{counts[level]} {level}" for level in LEVELS))
    return code


LEVELS: tuple["Level", ...] = ("fail", "warn", "ok")


async def _scene(at: "Where", file: Path | None) -> "ClusterFacts":
    from trainctl.protocol.config import run_file
    from trainctl.tui.doctor import probe
    from trainctl.tui.doctor.findings import ClusterFacts

    run = run_file.read(file) if file is not None else None
    here = probe.here()
    entries = at.cluster.cluster.nodes if at.cluster is not None else {}
    nodes = [(name, entry.address) for name, entry in entries.items()] or [("", at.addresses[0])]
    looks = await probe.looks(nodes, here)
    hashed = await probe.hashed(run, looks) if run is not None else ()
    measured = await probe.measured(run, looks)
    trusted = at.cluster.cluster.trusted_networks if at.cluster is not None else ()
    return ClusterFacts(here, looks, tuple(ip_network(network) for network in trusted), run, hashed, measured)
