"""Checks of a run file before it is sent: whether it fits the nodes, and the files that are on this machine."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainctl.protocol.config import data_files, names, run_tables
from trainctl.protocol.config import run_file as runfile
from trainctl.protocol.errors import Collected, InvalidInputError
from trainctl.tui.commands.targets import ClusterFile, is_local


@dataclass(frozen=True)
class CheckedRunFile:
    """A run file that was read and checked."""

    config: dict[str, Any]  # resolved, as plain values
    unseen: dict[str, str]  # by field, the paths that only another machine may have
    here: tuple[str, ...] = ()  # nodes that are this machine; "" without any in the file

    @property
    def message(self) -> dict[str, Any]:
        """Return what is sent of it to an agent."""
        return runfile.to_message(runfile.parse(self.config))


def check_run_file(
    path: Path, overrides: dict[str, str], *, local: bool, cluster: ClusterFile | None = None
) -> CheckedRunFile:
    """Return a run file, resolved and checked. Raises InvalidInputError naming the file and the field; with several
    wrong that can be said at once, all of them.

    With `cluster`, its nodes must be there, and the files of those that are this machine; without one, those of the
    node that is this machine if `local` says that the agent is on it. Of a node that may be this machine or another,
    behind a forwarded port, files that its own table names and that aren't here are left to its agent.
    """
    config = runfile.read(path, overrides)
    wrong = Collected()
    if cluster is not None:
        with wrong.going_on():
            _check_nodes(config, cluster, str(path))
        here, perhaps = _nodes_near(config, cluster)
    else:
        here, perhaps = nodes_here(config) if local else [], []
    missing = {node: _missing(config, node) for node in perhaps}
    seen = (*here, *(node for node in perhaps if not missing[node]))
    with wrong.going_on():
        _check_paths(config, seen, str(path))
    wrong.raise_any()
    unseen = {field: own for fields in missing.values() for field, own in fields.items()}
    return CheckedRunFile(runfile.to_dict(config), unseen, seen)


def nodes_here(config: run_tables.RunFile) -> list[str]:
    """Return the nodes of the run file that are this machine, as far as is known without a cluster file: the only one,
    or the one with this machine's name. `[""]` where the file names none."""
    if len(config.nodes) < 2:
        return [*config.nodes] or [""]
    return [node for node in config.nodes if node == names.node_name()]


def _nodes_near(config: run_tables.RunFile, cluster: ClusterFile) -> tuple[list[str], list[str]]:
    """Return of the run's nodes on loopback those that are this machine, being of its name or alone there, and the
    others."""
    loopback = [node for node, entry in cluster.cluster.nodes.items() if is_local(entry.address)]
    near = [node for node in config.nodes or cluster.nodes if node in loopback]
    here = [node for node in near if len(loopback) == 1 or node == names.node_name()]
    return here, [node for node in near if node not in here]


def _missing(config: run_tables.RunFile, node: str) -> dict[str, str]:
    table = config.nodes.get(node, run_tables.NodeTable())
    own = {"model_path": table.model_path, "data_path": table.data_path, "held_out_path": table.held_out_path}
    missing = {key: path for key, path in own.items() if path and not _is_there(Path(path), config.data.kind)}
    if table.cache_path and not Path(table.cache_path).parent.is_dir():
        missing["cache_path"] = table.cache_path
    return {f"nodes.{node}.{key}": path for key, path in missing.items()}


def _is_there(path: Path, kind: run_tables.DataKind) -> bool:
    try:
        return path.exists() or (data_files.is_glob(path) and bool(data_files.data_files(path, kind)))
    except OSError:  # in a folder of another user
        return False


def _check_paths(config: run_tables.RunFile, nodes: Sequence[str], where: str) -> None:
    """Check model, data and token caches as each of these nodes has them, once where several have the same."""
    seen: set[tuple[str, ...]] = set()
    wrong = Collected()
    for node in nodes:
        own = runfile.on_node(config, node)
        caches = str(runfile.cache_folder(config, node, Path()))
        if (files := (own.model.path, own.data.path, own.data.held_out_path, caches)) not in seen:
            seen.add(files)
            with wrong.going_on():
                runfile.check_paths(config, where, node)
    wrong.raise_any()


def _check_nodes(config: run_tables.RunFile, cluster: ClusterFile, where: str) -> None:
    """Check that every node is of the cluster, the batch has a sample for each, and all can read data that grow."""
    from trainctl.protocol.config.cluster_file import check_growing  # ZeroMQ: not for `--help`

    wrong = Collected()
    for node in config.nodes:
        with wrong.going_on():
            if node not in cluster.nodes:
                known = ", ".join(cluster.nodes)
                raise InvalidInputError(
                    f"{where}: nodes.{node}", f"no such node in {cluster.path}; the nodes are {known}"
                )
    with wrong.going_on():
        _check_room(config, cluster, where)
    with wrong.going_on():
        check_growing(config, cluster.cluster, where)
    wrong.raise_any()


def _check_room(config: run_tables.RunFile, cluster: ClusterFile, where: str) -> None:
    given = [table.share for table in config.nodes.values() if table.share is not None]
    free = len(config.nodes or cluster.nodes) - len(given)
    if sum(given) + free > config.batch.global_:
        raise InvalidInputError(
            f"{where}: batch.global",
            f"{config.batch.global_} is too small: shares sum to {sum(given)}, and {free} more nodes need samples",
        )
