"""The recipe of a run: its run file, and versions and digests from the checkpoints in its directory."""

import contextlib
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from trainctl.protocol.analysis.diagnosis.diagnosis_facts import config_of
from trainctl.protocol.config import run_file
from trainctl.protocol.config.run_tables import NodeTable, RunFile
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import RunView
from trainctl.protocol.record.checkpoints import Environment, Manifest, ParentCheckpoint, listed, read_manifest
from trainctl.protocol.record.paths import RunPaths
from trainctl.tui.report.run_facts import DataFacts

_SECRET = "env"  # noqa: S105  the name of a field
"""Field of [nodes.NAME] that may hold secrets; a report is given away."""


def read_recipe(paths: RunPaths) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the fields of the run file, and those of them that have no default or another value. A file that this
    program can't check is given as it is; without a file there is nothing."""
    config = config_of(paths)
    if config is not None:
        fields = flat(run_file.to_dict(config))
        usual = _defaults(config)
        return fields, tuple(name for name, value in fields.items() if usual.get(name) != value)
    with contextlib.suppress(OSError, ValueError):
        fields = flat(tomllib.loads(paths.run_file.read_text("utf-8")))
        return fields, tuple(fields)
    return {}, ()


def flat(tables: Mapping[str, Any]) -> dict[str, str]:
    """`batch.micro` -> `8`: each field of nested tables, its value as JSON; without environment variables."""
    return dict(_flat(tables, ()))


def _flat(tables: Mapping[str, Any], above: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for name, value in tables.items():
        if isinstance(value, Mapping) and not (name == _SECRET and above[:1] == ("nodes",)):
            yield from _flat(value, (*above, name))
        elif not isinstance(value, Mapping):
            yield ".".join((*above, name)), msgspec.json.encode(value).decode()


def _defaults(config: RunFile) -> dict[str, str]:
    """Return the fields that have a default, with it."""
    tables = {name: getattr(config, name) for name in RunFile.__struct_fields__ if name != "nodes"}
    required = {name: _required(table) for name, table in tables.items()}
    usual = RunFile(
        **{name: type(table)(**required[name]) for name, table in tables.items()},
        nodes=dict.fromkeys(config.nodes, NodeTable()),
    )
    without = {f"{name}.{field.removesuffix('_')}" for name, fields in required.items() for field in fields}
    return {name: value for name, value in flat(run_file.to_dict(usual)).items() if name not in without}


def _required(table: Any) -> dict[str, Any]:
    """Return the fields without a default."""
    return {field.name: getattr(table, field.name) for field in msgspec.structs.fields(table) if field.required}


def resolved(view: RunView | None) -> dict[str, str]:
    """Return what the run chose by itself or was changed to, as it was at the end."""
    if view is None:
        return {}
    found = {
        "engine that sums the gradients": view.engine,
        "global batch": _number(view.global_batch),
        "samples in an epoch": _number(view.samples),
        "unit of the loss": view.loss_unit,
        "mixes libraries": "yes" if view.mixed else "no",
        "policies that act": _named(view, "on"),
        "policies that advise": _named(view, "advise"),
        "skipped positions": ", ".join(f"{start:,} to {start + count - 1:,}" for start, count in view.skipped),
    }
    return {name: value for name, value in found.items() if value}


def _named(view: RunView, mode: str) -> str:
    return ", ".join(policy.name for policy in view.policies if policy.mode == mode)


def _number(value: int | None) -> str:
    return f"{value:,}" if value is not None else ""


class _LoopState(msgspec.Struct, frozen=True):
    """The part of a checkpoint's state.json that says what was trained, and on what."""

    samples: int
    data_digest: str
    layout_digest: str = ""
    base_digest: str = ""


def manifests(paths: RunPaths) -> Iterator[Manifest]:
    """Yield the manifests of checkpoints that can be read, newest first."""
    for folder in listed(paths.checkpoints):
        with contextlib.suppress(InvalidInputError):
            yield read_manifest(folder)


def environments(paths: RunPaths) -> tuple[Environment, ...]:
    """Return the environment that wrote the newest checkpoint of each node."""
    found: dict[str, Environment] = {}
    for manifest in manifests(paths):
        if manifest.metadata is not None:
            found.setdefault(manifest.metadata.environment.node, manifest.metadata.environment)
    return tuple(found[node] for node in sorted(found))


def parent(paths: RunPaths) -> ParentCheckpoint | None:
    """Return the checkpoint that the run branched off, by its newest own one that says so."""
    own = (manifest for manifest in manifests(paths) if manifest.run == paths.directory.name)
    found = (manifest.metadata.lineage.parent for manifest in own if manifest.metadata is not None)
    return next((one for one in found if one is not None), None)


def data_of(paths: RunPaths) -> DataFacts:
    """Return the data's digests and sizes by the newest checkpoint that has them."""
    for folder in listed(paths.checkpoints):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            loop = msgspec.json.decode((folder / "state.json").read_bytes(), type=_LoopState)
            return DataFacts(loop.data_digest, loop.samples, loop.layout_digest, loop.base_digest)
    return DataFacts()
