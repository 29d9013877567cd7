"""The key of a run's profile on one node: what must be the same for the profile to fit."""

import hashlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from trainctl.protocol.calibration.profile import ProfileKey
from trainctl.protocol.config.run_file import on_node
from trainctl.protocol.config.run_tables import NodeTable, RunFile

_OF_MODEL = ("gradient_checkpointing", "base", "double_quantization", "compute_dtype", "chunked_loss")
_OF_DATA = ("kind", "tokenizer", "packing", "overlong")
_OF_NODE = ("backend", "device", "threads", "memory_limit_gb", "env")
UNKNOWN = "unknown"
"""Stands for the version of a package that isn't installed."""


def key_of(config: RunFile, node: str, *, backend: str, device: str, model_digest: str) -> ProfileKey:
    """The key of a run on `node`, whose rank has chosen a backend and device. Call it on that node: it reads which
    versions are installed."""
    return ProfileKey(
        device=device, model_digest=model_digest, sequence_length=config.data.sequence_length,
        dtype=config.model.dtype, backend=backend, backend_version=_installed(backend),
        trainctl_version=_installed("trainctl"), settings=settings_digest(config, node),
    )  # fmt: skip


def settings_digest(config: RunFile, node: str) -> str:
    """Digest of the settings, other than those in the key itself, that change a pass's time or memory."""
    here, table = on_node(config, node), config.nodes.get(node, NodeTable())
    micro_tokens = config.batch.micro_tokens if table.micro_tokens is None else table.micro_tokens
    settings: list[Any] = [
        [getattr(here.model, name) for name in _OF_MODEL], [getattr(here.data, name) for name in _OF_DATA],
        [getattr(table, name) for name in _OF_NODE], here.adapter, here.objective, here.optimizer.kind, micro_tokens,
        here.data.path if here.data.kind != "text" else "",  # the lengths of rows differ from file to file
    ]  # fmt: skip
    settings += [[name, value] for name, value, default in _newer(config, table) if value != default]
    return hashlib.sha256(msgspec.json.encode(settings, order="sorted")).hexdigest()[:16]


def _newer(config: RunFile, table: NodeTable) -> tuple[tuple[str, object, object], ...]:
    """Settings with their defaults that count only where they differ: profiles from before they existed still fit."""
    return (
        ("tf32", config.model.tf32, False),
        ("cudnn_benchmark", table.cudnn_benchmark, True), ("deterministic", table.deterministic, False),
        ("compile", table.compile or config.model.compile, "off"),
        ("attention", table.attention or config.model.attention, "auto"),
    )  # fmt: skip


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return UNKNOWN
