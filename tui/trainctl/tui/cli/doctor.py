"""`trainctl doctor` and `calibrate`: faults of the nodes' machines, and what these can do."""

import asyncio
from collections import Counter
from dataclasses import asdict
from functools import partial
from ipaddress import ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainctl.protocol.errors import InvalidInputError, RefusedError, TrainctlError
from trainctl.protocol.messages import Calibration, FactsRequest, SnapshotRequest
from trainctl.tui.cli import agent_call, output
from trainctl.tui.cli.options import ClusterFile, Connect, Json, Set, subcommands, where
from trainctl.tui.doctor.check_cluster import (
    of_alert_hooks,
    of_clock,
    of_disks,
    of_files,
    of_interfaces,
    of_jaccl,
    of_reach,
    of_versions,
)
from trainctl.tui.doctor.check_machine import of_compile, of_environment, of_machine
from trainctl.tui.doctor.findings import ClusterFacts, Finding, Look

if TYPE_CHECKING:
    from trainctl.protocol.client.client import Client
    from trainctl.tui.commands.targets import Where
    from trainctl.tui.doctor.findings import ClusterFacts, Level
    from trainctl.tui.setup.calibration_request import CalibrationTarget

app = subcommands()
HERE, NO_AGENT = "this machine", "ipc:///-"


def findings(scene: ClusterFacts) -> tuple[Finding, ...]:
    """Return all findings: node by node, then of all together."""
    found: list[Finding] = []
    for look in scene.looks:
        found += of_reach(look, scene.here)
        if look.facts is not None:
            found += of_machine(look, look.facts)
            found += of_compile(look, look.facts, scene.run)
            found += of_clock(look)
            found += of_alert_hooks(look)
            found += of_interfaces(look, look.facts, scene)
            found += of_environment(look, look.facts)
    if not any(look.is_here for look in scene.looks):  # it may be a node whose agent doesn't run, or none
        here = Look(HERE, NO_AGENT)
        found += [*of_machine(here, scene.here), *of_environment(here, scene.here)]
    return (*found, *of_versions(scene), *of_jaccl(scene), *of_disks(scene), *of_files(scene))


def _of_textual() -> list[Finding]:
    from trainctl.tui.terminal import guard  # Textual: not for `--help`

    said, tried = guard.fallback(), f"pip install 'textual=={guard.TRIED[-1]}*'"
    return [Finding("warn", HERE, "version", said, f"for those, {tried}")] if said else []


def line(finding: Finding) -> str:
    """Return a finding as it is printed after its level."""
    where = f"{finding.node}: " if finding.node else ""
    do = f" → {finding.do}" if finding.do else ""
    return f"{where}{finding.subject}: {finding.text}{do}"


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

    found = (*findings(asyncio.run(_scene(where(ctx, connect, cluster), file))), *_of_textual())
    counts = Counter(finding.level for finding in found)
    code = RefusedError.exit_code if counts["fail"] else 0
    if json:
        shown = [asdict(finding) for finding in found]
        output.emit({"ok": not code, "findings": shown, "counts": {level: counts[level] for level in LEVELS}})
        return code
    for finding in found:
        if not quiet or finding.level != "ok":
            output.say(f"{finding.level:<4}  {output.one_line(line(finding))}")
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


@app.command()
def calibrate(
    ctx: typer.Context,
    file: Annotated[
        Path | None, typer.Argument(metavar="[RUN.toml]", help="Run file. Default: that of each node's newest run.")
    ] = None,
    node: Annotated[str | None, typer.Option("--node", help="Calibrate only this node.")] = None,
    alone: Annotated[
        bool, typer.Option("--alone", help="Measure nodes of one machine one after another, not at the same time.")
    ] = False,
    set_: Set = None,
    connect: Connect = None,
    cluster: ClusterFile = None,
    json: Json = False,
) -> int:
    """Measure which micro-batch is the fastest on each node, and how fast its parts are. It takes about a minute per
    machine, one after another, and no run may be in progress. Nodes of one machine are measured at the same time, as
    they would train. Ctrl-C cancels. Prints samples per second and peak memory by micro-batch,
    the rates of matrix products, memory, disk and data, the link to the lead's node, and what has become slower. Each
    node stores its profile.
    Exits with 3 if a node can't be calibrated.
    """
    from trainctl.tui.setup import calibration_request

    at = where(ctx, connect, cluster)
    wanted = calibration_request.CalibrationTarget(_config(file, set_ or [], at), _lead(at))
    found, problems = dict[str, Calibration](), dict[str, str]()
    for group in _machines(_nodes(at, wanted.config, node), alone):
        for name, result in _calibrated(wanted, group, json).items():
            if isinstance(result, Calibration):
                found[name] = result
                if not json:
                    _show(name, result)
            else:
                problems[name] = str(result)
                if not json:
                    output.complain(f"{name}: {result}")
    if json:
        nodes = {name: calibration_request.fields(one) for name, one in found.items()}
        output.emit({"ok": not problems, "nodes": nodes, "problems": problems})
    return RefusedError.exit_code if problems else 0


def _config(file: Path | None, set_: list[str], at: "Where") -> dict[str, Any]:
    """Return the run file, checked as for a run; empty without one."""
    from trainctl.tui.commands import arguments, targets
    from trainctl.tui.commands.checked_run_file import check_run_file

    if file is None:
        if set_:
            raise InvalidInputError("--set", "needs RUN.toml")
        return {}
    local = targets.is_local(at.addresses[0])
    return check_run_file(file, arguments.pairs(set_, "--set"), local=local, cluster=at.cluster).message


def _calibrated(
    wanted: "CalibrationTarget", addresses: dict[str, str], json: bool
) -> dict[str, Calibration | TrainctlError]:
    """Calibrate the nodes of one machine at the same time, or one node. Return the results by name, with why one
    failed."""
    from trainctl.tui.setup import calibration_request

    def tell(node: str, line: str) -> None:
        if not json:
            output.tell(f"{node}: {line}")

    try:
        if len(addresses) > 1:
            return agent_call.call_all(addresses, partial(calibration_request.measured_together, wanted, tell))
        ((name, address),) = addresses.items()
        return {name: agent_call.call(address, partial(calibration_request.measured, wanted, partial(tell, name)))}
    except TrainctlError as error:
        return dict.fromkeys(addresses, error)


def _machines(nodes: list[tuple[str, str]], alone: bool) -> list[dict[str, str]]:
    """Return the nodes' addresses in groups that are measured at the same time: those of one machine, if not
    `alone`."""
    groups = dict[str, dict[str, str]]()
    for name, address in nodes:
        machine = "" if alone or len(nodes) < 2 else _machine(address)
        groups.setdefault(machine or name, {})[name] = address
    return [*groups.values()]


def _machine(address: str) -> str:
    """Return what identifies an agent's machine; empty if that isn't known, or the agent doesn't answer."""
    try:
        return agent_call.call(address, _boot)
    except TrainctlError:
        return ""  # its own call says why


async def _boot(client: "Client") -> str:
    return (await client.ask(FactsRequest)).boot or ""


def _nodes(at: "Where", config: dict[str, Any], node: str | None) -> list[tuple[str, str]]:
    """Name and address of each node to calibrate. Raises InvalidInputError for one that isn't known."""
    if at.cluster is None:
        name = agent_call.call(at.addresses[0], _name)
        if node not in (None, name):
            raise InvalidInputError("--node", f"the agent at {at.addresses[0]} is {name}; give --cluster for {node}")
        return [(name, at.addresses[0])]
    of_run = [name for name in at.cluster.nodes if name in config.get("nodes", {})] or [*at.cluster.nodes]
    return [(name, at.cluster.address_of(name)) for name in ([node] if node is not None else of_run)]


def _lead(at: "Where") -> str | None:
    """Return the cluster's node whose agent would lead a run that is started now; None without a cluster file or an
    answer."""
    if at.cluster is None:
        return None
    try:
        address = agent_call.find_agent(at.addresses)
    except TrainctlError:
        return None  # each node's own call says why
    return next((name for name in at.cluster.nodes if at.cluster.address_of(name) == address), None)


async def _name(client: "Client") -> str:
    return (await client.ask(SnapshotRequest, 0)).node.node


def _show(node: str, found: Calibration) -> None:
    from trainctl.tui.cli import tables
    from trainctl.tui.screens import calibration_lines

    profile, earlier = found.profile, found.earlier
    assert profile is not None
    header = ("MICRO", "SAMPLES/S", "OF PEAK", "PEAK GB", "")
    output.say(calibration_lines.title(node, profile))
    output.say(tables.table(header, calibration_lines.curve_rows(profile), right="MICRO SAMPLES/S PEAK"))
    for name, text in calibration_lines.part_lines(profile):
        output.say(f"{name:<18}{text}")
    when = tables.date_and_time(earlier.created_at) if earlier is not None else ""
    for line in calibration_lines.slower_lines(node, earlier, profile, when):
        output.say(line)
    output.say("")
