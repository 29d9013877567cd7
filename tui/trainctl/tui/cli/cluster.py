"""`trainctl cluster`: add, list and remove nodes, copy files to them, and list the agents that advertise themselves."""

import shlex
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from trainctl.protocol.config.cluster_file import Cluster
from trainctl.protocol.errors import InvalidInputError, RefusedError, installing
from trainctl.protocol.machine import discovery
from trainctl.protocol.machine.discovery import Advert
from trainctl.tui.cli import output, tables
from trainctl.tui.cli.options import ClusterFile, Json, Set, subcommands, subgroup
from trainctl.tui.commands import arguments, targets

app = subcommands()
group = subgroup("Add, list, find and remove nodes; copy a run's files to them.")
app.add_typer(group, name="cluster")


@group.command()
def add(
    host: Annotated[
        str, typer.Argument(metavar="USER@HOST", help="The machine to add, as you give it to ssh.", show_default=False)
    ],
    name: Annotated[str | None, typer.Option(help="The new node's name [its host name].")] = None,
    address: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Address its agent listens on [port 7474 at the address ssh uses]."),
    ] = None,
    here: Annotated[
        str | None, typer.Option(help="This machine's node name in the cluster file [its host name].")
    ] = None,
    python: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Path to Python 3.11 or newer on that machine [found automatically]."),
    ] = None,
    extras: Annotated[
        str | None,
        typer.Option(help="Extras to install: torch, mlx, torch,mlx or none [mlx on macOS, torch elsewhere]."),
    ] = None,
    pip_args: Annotated[str, typer.Option(help="Extra pip arguments, such as --index-url.")] = "",
    system_site_packages: Annotated[
        bool,
        typer.Option(
            "--system-site-packages",
            help="Let the virtual environment use the packages already installed for that Python.",
        ),
    ] = False,
    ssh_config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="ssh configuration file to use instead of yours (ssh -F).")
    ] = None,
    cluster: ClusterFile = None,
    json: Json = False,
) -> int:
    """Install trainctl on a machine over SSH, exchange keys, start its agent, and test the link.

    The machine needs only Python 3.11 or newer: trainctl is copied there and pip fetches its dependencies. You can run
    this again: it adds only what is missing. It writes the node to cluster.d/NAME.toml and doesn't edit your
    cluster.toml.
    """
    from trainctl.protocol.config import cluster_file as clusters
    from trainctl.tui.setup import add_node as joining
    from trainctl.tui.setup.remote_install import Install
    from trainctl.tui.setup.rsync import SshTarget

    chosen = None if extras is None else tuple(word for word in extras.split(",") if word not in ("", "none"))
    wanted = joining.AddNodeOptions(
        SshTarget(host, ssh_config),
        name,
        address,
        here,
        Install(python, chosen, tuple(_words(pip_args)), system_site_packages),
        interactive=output.has_screen(),
    )
    file = cluster or clusters.default_path()
    say = (lambda step: None) if json else lambda step: output.say(_step_line(step))
    found = joining.add(wanted, file, clusters.read_default(cluster), say)
    if json:
        output.emit_ok(**_fields(found))
        return 0
    for remark in found.remarks:
        output.tell(remark)
    return 0


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InvalidInputError("--pip-args", str(error)) from None


def _step_line(step: Any) -> str:
    return f"{'done' if step.changed else 'ok':<4}  {step.name}: {output.one_line(step.text)}"


def _fields(found: Any) -> dict[str, Any]:
    link = found.link
    return {
        "node": found.node,
        "address": found.address,
        "steps": [asdict(step) for step in found.steps],
        "round_trip_seconds": link.round_trip_seconds,
        "stream_bytes_per_second": link.bytes_per_second,
        "sent_bytes_per_second": link.sent_bytes_per_second,
        "remarks": found.remarks,
    }


@group.command(name="list")
def list_nodes(cluster: ClusterFile = None, json: Json = False) -> int:
    """List the cluster's nodes with agent address, key fingerprint and file."""
    from trainctl.protocol.config import cluster_file as clusters
    from trainctl.protocol.machine.discovery import fingerprint

    file = cluster or clusters.default_path()
    known = clusters.read_default(cluster)
    head, rows = ("node", "address", "fingerprint", "file"), []
    for name, entry in known.nodes.items():
        added = clusters.added_directory(file) / f"{name}.toml"
        key = fingerprint(entry.key) if entry.key else ""
        rows.append((name, entry.address, key, str(added if added.is_file() else file)))
    return output.answer(
        tables.table(head, rows) if rows else "",
        json=json,
        nodes=[dict(zip(head, row, strict=True)) for row in rows],
        none=f"no nodes in {file}; run trainctl init, or add a node with trainctl cluster add",
    )


@group.command()
def remove(
    name: Annotated[str, typer.Argument(metavar="NODE", show_default=False)],
    cluster: ClusterFile = None,
    json: Json = False,
) -> int:
    """Remove a node added with `cluster add`. Deletes its file in cluster.d; nothing changes on the node itself."""
    from trainctl.protocol.config import cluster_file as clusters

    file = cluster or clusters.default_path()
    added, known = clusters.added_directory(file) / f"{name}.toml", clusters.read_default(cluster)
    if name not in known.nodes:
        raise InvalidInputError("NODE", f"no node {name!r} in {file}; the nodes are {', '.join(known.nodes) or 'none'}")
    if not added.is_file():
        raise InvalidInputError("NODE", f"{name} is defined in {file}: remove [nodes.{name}] from that file yourself")
    added.unlink()
    if json:
        output.emit_ok(removed=str(added))
    else:
        output.say(f"removed {added}")
        output.tell(
            f"running agents still accept its key until they restart; to reject it now, run trainctl keys revoke {name}"
        )
    return 0


@group.command()
def sync(
    file: Annotated[Path, typer.Argument(metavar="RUN.toml", show_default=False)],
    node: Annotated[
        list[str] | None, typer.Option("--node", metavar="NODE", help="Copy only to this node (repeatable).")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be copied; copy nothing.")] = False,
    limit: Annotated[
        float | None, typer.Option("--limit", metavar="MB", min=0.001, help="Send at most this many MB per second.")
    ] = None,
    ssh: Annotated[
        list[str] | None,
        typer.Option(
            "--ssh",
            metavar="NODE=USER@HOST",
            help="Where ssh finds a node [as given to cluster add, or the host of its address].",
        ),
    ] = None,
    here: Annotated[str | None, typer.Option(help="This machine's node name [its host name].")] = None,
    python: Annotated[
        str, typer.Option(metavar="PATH", help="Python of trainctl there [where cluster add installs it].")
    ] = "",
    ssh_config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="ssh configuration file to use instead of yours (ssh -F).")
    ] = None,
    set_: Set = None,
    cluster: ClusterFile = None,
    json: Json = False,
) -> int:
    """Copy a run's model and data to the nodes that lack them, with rsync over SSH.

    The files on this machine are the right ones. Nodes that have the same files are left alone. A model that this
    machine has in its Hugging Face cache is copied to the cache of each node. Only files that a run reads are copied,
    and nothing is deleted. If a copy is interrupted, run this again to continue. Afterwards, hashes are compared.
    Exits with 3 if a node couldn't be served; the others still are.
    """
    from trainctl.tui.setup import cluster_sync

    request = cluster_sync.SyncRequest(
        file,
        arguments.pairs(set_ or [], "--set"),
        only=tuple(node or ()),
        ssh=tuple(ssh or ()),
        here=here,
        ssh_config=ssh_config,
        python=python,
        dry_run=dry_run,
        megabytes_per_second=limit,
        interactive=output.has_screen() and not json,
    )
    report = cluster_sync.SyncReport(
        lambda text: output.say(output.log_text(text, raw=False).replace("\n", " ")), output.complain, quiet=json
    )
    try:
        found = cluster_sync.copy(request, targets.cluster_file(cluster), report)
    except KeyboardInterrupt:
        report.progress("")
        output.tell("interrupted; to copy the rest, run this again")
        raise
    return _show_copied(found, json=json)


def _show_copied(found: dict[str, list[Any]], *, json: bool) -> int:
    failed = [node for node, results in found.items() if any(result.state == "failed" for result in results)]
    code = RefusedError.exit_code if failed else 0
    if json:
        nodes = {node: [asdict(result) for result in results] for node, results in found.items()}
        output.emit({"ok": not code, "nodes": nodes, "failed": failed})
    elif not found:
        output.tell("the run has no nodes on other machines")
    elif failed:
        output.complain(f"{len(failed)} of {len(found)} nodes failed: {', '.join(failed)}")
    return code


@group.command()
def discover(
    cluster: ClusterFile = None,
    seconds: Annotated[float, typer.Option("--seconds", min=0.1, max=600, help="Seconds to listen.")] = 3.0,
    json: Json = False,
) -> int:
    """List the agents advertised on this machine's networks (trainctl-agent run --advertise). Treat the list as a
    hint: anyone on the network can advertise anything, and no key is taken from it. To add a node, use `trainctl
    cluster add`: it fetches the node's key over SSH.
    """
    known = targets.cluster_file(cluster)
    found = listen(seconds)
    both = [(one, standing(one, known.cluster if known is not None else None)) for one in found]
    rows = [(one.node, one.address, one.version, one.fingerprint or "no key", said) for one, said in both]
    return output.answer(
        tables.table(("node", "address", "version", "fingerprint", "here"), rows) if rows else "",
        json=json,
        none=f"no agent advertised itself within {seconds:g} s; start agents with trainctl-agent run --advertise",
        found=[one._asdict() | {"standing": said} for one, said in both],
    )


RESOLVE_MILLISECONDS = 1500


def listen(seconds: float) -> tuple[Advert, ...]:
    """Return all agents that are heard within so long, by name. Raises InvalidInputError where zeroconf isn't
    installed."""
    try:
        from zeroconf import InterfaceChoice, IPVersion, ServiceBrowser, Zeroconf
    except ModuleNotFoundError:
        raise InvalidInputError("cluster discover", f"zeroconf is not installed; {installing('discovery')}") from None
    listener, over = _Listener(), threading.Event()
    zeroconf = Zeroconf(interfaces=InterfaceChoice.All, ip_version=IPVersion.V4Only)
    try:
        browser = ServiceBrowser(zeroconf, discovery.SERVICE, listener)  # type: ignore[arg-type]
        over.wait(seconds)
        browser.cancel()
        infos = [zeroconf.get_service_info(discovery.SERVICE, name, RESOLVE_MILLISECONDS) for name in listener.names]
    finally:
        zeroconf.close()
    heard = [(host, info) for info in infos if info is not None for host in info.parsed_addresses()]
    return tuple(sorted({discovery.advert(host, info.port or 0, info.properties) for host, info in heard}))


def standing(advert: Advert, cluster: Cluster | None) -> str:
    """Return what the cluster file has of it."""
    entry = cluster.nodes.get(advert.node) if cluster is not None else None
    if entry is None:
        return "not in the cluster file"
    if entry.key and discovery.fingerprint(entry.key) != advert.fingerprint:
        return "KEY DIFFERS from the cluster file"
    return "in the cluster file" if entry.address == advert.address else f"in the cluster file at {entry.address}"


class _Listener:
    """The names heard, in the form that the library calls its listeners."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}

    def add_service(self, _zeroconf: Any, _kind: str, name: str) -> None:
        self.names[name] = None

    update_service = add_service

    def remove_service(self, _zeroconf: Any, _kind: str, name: str) -> None:
        self.names.pop(name, None)
