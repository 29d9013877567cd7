"""The profile of a device: how fast it trains one model, what its machine's parts can do, its key and its file.

Passes are a forward and a backward pass of one micro-batch, timed together. Rates are in samples or bytes per second.
"""

import contextlib
import hashlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import tomli_w
from msgspec import Meta

from trainctl.protocol.config import validation_errors
from trainctl.protocol.config.run_tables import NodeTable, RunFile, micro_tokens_of
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.files.durable_files import make_folder, write_file

Size = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Micro = Annotated[int, Meta(ge=1, le=2**40)]
Seconds = Annotated[float, Meta(gt=0, le=1e9)]
Rate = Annotated[float, Meta(gt=0, le=1e18)]
Word = Annotated[str, Meta(min_length=1, max_length=200)]
MAX_PASSES = 64
"""Micro-batches in one profile, at most."""


class ProfileKey(msgspec.Struct, frozen=True, kw_only=True):
    """The conditions that a profile holds for. If any of them differs, the profile doesn't fit."""

    device: Word  # for example cpu, cuda:0 NVIDIA H200 or gpu Apple M2 Ultra
    model_digest: Word  # SHA-256 digest of the model's configuration and weights
    sequence_length: Micro  # tokens that a sample has at most
    dtype: Word  # data type of forward and backward passes
    backend: Word  # torch or mlx
    backend_version: Word  # installed version of that library
    trainctl_version: Word  # installed version of trainctl
    settings: str = ""  # digest of the run's other settings that change a pass


class Pass(msgspec.Struct, frozen=True):
    """A forward and backward pass of one micro-batch."""

    micro: Micro  # samples
    seconds: Seconds  # of several measurements, without waits for data
    peak_bytes: Size | None = None  # most memory held during the pass; None: unknown

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.micro / self.seconds


class GridPoint(msgspec.Struct, frozen=True):
    """A step of the effective batch, cut one way."""

    micro: Micro  # samples in a micro-batch
    accumulation: Micro  # micro-batches in the step
    seconds: Seconds  # all passes and the update


class MatmulRate(msgspec.Struct, frozen=True):
    """Best rate of square matrix products in one data type."""

    dtype: Word  # data type of the matrices
    gflops: Rate  # 10^9 floating-point operations per second


class DiskRate(msgspec.Struct, frozen=True):
    """The disk that holds the token caches."""

    write_bytes_per_second: Rate  # until the bytes are on the disk
    read_bytes_per_second: Rate | None = None  # None: the system keeps the file in memory


class LinkRate(msgspec.Struct, frozen=True):
    """The network link to another node, with both directions busy at once."""

    peer: Word  # name of the other node
    sent_bytes_per_second: Rate  # to the other node
    received_bytes_per_second: Rate  # from the other node
    latency_seconds: Seconds | None = None  # median round trip; None: unknown


class DeviceProfile(msgspec.Struct, frozen=True, kw_only=True):
    """All that a calibration has measured on one node."""

    key: ProfileKey  # what the profile holds for
    created_at: float  # Unix seconds
    duration_seconds: float = 0.0  # time that the calibration took
    passes: Annotated[tuple[Pass, ...], Meta(min_length=1, max_length=MAX_PASSES)]  # by micro-batch, ascending
    out_of_memory_micro: Micro | None = None  # smallest micro-batch that ran out of memory; None: none did
    grid: Annotated[tuple[GridPoint, ...], Meta(max_length=MAX_PASSES)] = ()  # steps of one effective batch
    optimizer_seconds: Seconds | None = None  # time of a step beside its passes: the update, norms, the report
    forward: Annotated[tuple[Pass, ...], Meta(max_length=MAX_PASSES)] = ()  # forward passes only, as scoring runs them
    beside: Annotated[tuple[Word, ...], Meta(max_length=64)] = ()  # nodes of the machine that were calibrated with it
    matmul: Annotated[tuple[MatmulRate, ...], Meta(max_length=16)] = ()  # by data type
    memory_cap_bytes: Size | None = None  # memory that the trainer may take
    disk: DiskRate | None = None  # None: not measured
    links: Annotated[tuple[LinkRate, ...], Meta(max_length=64)] = ()  # to the lead's node, or from it to the others


class ProfileSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a profile that plans need."""

    created_at: float  # Unix seconds
    passes: Annotated[tuple[Pass, ...], Meta(min_length=1, max_length=MAX_PASSES)]  # by micro-batch, ascending
    out_of_memory_micro: Micro | None = None  # smallest micro-batch that ran out of memory; None: none did
    optimizer_seconds: Seconds | None = None  # time of a step beside its passes
    gflops: Annotated[dict[Word, float], Meta(max_length=16)] = msgspec.field(
        default_factory=dict
    )  # best rate of matrix products by data type, 10^9 per second
    links: Annotated[tuple[LinkRate, ...], Meta(max_length=64)] = ()  # to the lead's node, or from it to the others


def summary(profile: DeviceProfile) -> ProfileSummary:
    """Return the part of a profile that plans need."""
    return ProfileSummary(
        created_at=profile.created_at,
        passes=profile.passes,
        out_of_memory_micro=profile.out_of_memory_micro,
        optimizer_seconds=profile.optimizer_seconds,
        gflops={rate.dtype: rate.gflops for rate in profile.matmul},
        links=profile.links,
    )


# ---------------------------------------------------------------- the lines that the measuring process prints, as JSON


class CalibrationProgress(msgspec.Struct, frozen=True, tag_field="type", tag="progress"):
    """A line for people."""

    text: str


class CalibrationTrying(msgspec.Struct, frozen=True, tag_field="type", tag="trying"):
    """The next measurement: if the system kills the process before another line, memory has run out for this."""

    micro: Annotated[int, Meta(ge=1)] | None = None  # micro-batch of passes or steps; None: something else


class CalibrationPoint(msgspec.Struct, frozen=True, tag_field="type", tag="profile"):
    """One more measurement: the profile so far. The last one is the calibration's result."""

    profile: DeviceProfile


class CalibrationWaits(msgspec.Struct, frozen=True, tag_field="type", tag="waits"):
    """It is ready for a stage, which other calibrations of the machine aren't; repeated as a sign of life."""

    stage: int


CalibrationLine = CalibrationProgress | CalibrationTrying | CalibrationPoint | CalibrationWaits


# ---------------------------------------------------------------- the key


_OF_MODEL = ("gradient_checkpointing", "base", "double_quantization", "compute_dtype", "chunked_loss")
_OF_DATA = ("kind", "tokenizer", "packing", "overlong")
_OF_NODE = ("backend", "device", "threads", "memory_limit_gb", "env")
UNKNOWN = "unknown"
"""Stands for the version of a package that isn't installed."""


def key_of(config: RunFile, node: str, *, backend: str, device: str, model_digest: str) -> ProfileKey:
    """The key of a run on `node`, whose rank has chosen a backend and device. Call it on that node: it reads which
    versions are installed."""
    return ProfileKey(
        device=device,
        model_digest=model_digest,
        sequence_length=config.data.sequence_length,
        dtype=config.model.dtype,
        backend=backend,
        backend_version=_installed(backend),
        trainctl_version=_installed("trainctl"),
        settings=settings_digest(config, node),
    )


def settings_digest(config: RunFile, node: str) -> str:
    """Return a digest of the settings, other than those in the key itself, that change a pass's time or memory."""
    from trainctl.protocol.config.run_file import on_node  # its rules take long to load: not for each client

    here, table = on_node(config, node), config.nodes.get(node, NodeTable())
    settings: list[Any] = [
        [getattr(here.model, name) for name in _OF_MODEL],
        [getattr(here.data, name) for name in _OF_DATA],
        [getattr(table, name) for name in _OF_NODE],
        here.adapter,
        here.objective,
        here.optimizer.kind,
        micro_tokens_of(config, table),
        here.data.path if here.data.kind != "text" else "",  # the lengths of rows differ from file to file
    ]
    settings += [[name, value] for name, value, default in _newer(config, table) if value != default]
    return hashlib.sha256(msgspec.json.encode(settings, order="sorted")).hexdigest()[:16]


def _newer(config: RunFile, table: NodeTable) -> tuple[tuple[str, object, object], ...]:
    """Settings with their defaults that count only where they differ: profiles from before they existed still fit."""
    return (
        ("tf32", config.model.tf32, False),
        ("cudnn_benchmark", table.cudnn_benchmark, True),
        ("deterministic", table.deterministic, False),
        ("compile", table.compile or config.model.compile, "off"),
        ("attention", table.attention or config.model.attention, "auto"),
    )


def _installed(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version  # with email and zipfile: not for each client

    try:
        return version(package)
    except PackageNotFoundError:
        return UNKNOWN


# ---------------------------------------------------------------- the file


SCHEMA: Final = 1
"""Number of the files' layout; a file with a higher one is of a newer trainctl."""
KEPT = 8
"""Profiles of one key that are kept, the newest."""


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schema: int
    profile: DeviceProfile


def write_profile(folder: Path, profile: DeviceProfile) -> Path:
    """Store a profile, and delete the oldest ones of its key; the file. Raises OSError."""
    at = datetime.fromtimestamp(profile.created_at, UTC)
    path = folder / f"{_name(profile.key)}-{at:%Y%m%d-%H%M%S}-{at.microsecond // 1000:03}.toml"
    content = {"schema": SCHEMA, "profile": _without_none(msgspec.to_builtins(profile))}
    make_folder(path.parent)
    write_file(path, tomli_w.dumps(content).encode())
    for old in _of_key(folder, profile.key)[:-KEPT]:
        with contextlib.suppress(OSError):
            old.unlink()
    return path


def read_profile(path: Path) -> DeviceProfile:
    """Raise InvalidInputError naming the file and what is wrong with it."""
    raw = validation_errors.read_toml(path, "profile")
    number = raw.get("schema")
    if not isinstance(number, int) or number < 1:
        raise InvalidInputError(str(path), "has no schema number; delete it and calibrate again")
    if number > SCHEMA:
        problem = f"has schema {number}, and this trainctl reads up to {SCHEMA}: install the trainctl that wrote it"
        raise InvalidInputError(str(path), problem)
    return validation_errors.checked(raw, _File, str(path)).profile


def profiles_of_key(folder: Path, key: ProfileKey) -> list[DeviceProfile]:
    """The readable profiles of a key, oldest first."""
    return _readable(_of_key(folder, key))


def all_profiles(folder: Path) -> list[DeviceProfile]:
    """All readable profiles in a folder, oldest first."""
    return sorted(_readable(sorted(folder.glob("*.toml"))), key=lambda profile: profile.created_at)


def _of_key(folder: Path, key: ProfileKey) -> list[Path]:
    return sorted(folder.glob(f"{_name(key)}-*.toml"))


def _name(key: ProfileKey) -> str:
    """The start of a file's name: the same for the same key."""
    return hashlib.sha256(msgspec.json.encode(key)).hexdigest()[:16]


def _readable(paths: list[Path]) -> list[DeviceProfile]:
    """A damaged file costs its own profile only."""
    found = []
    for path in paths:
        with contextlib.suppress(InvalidInputError):
            found.append(read_profile(path))
    return found


def _without_none(value: Any) -> Any:
    """TOML has no null."""
    if isinstance(value, dict):
        return {name: _without_none(item) for name, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_without_none(item) for item in value]
    return value
