"""The profile of a device: how fast it trains one model, and what its machine's parts can do. Plain values.

Passes are a forward and a backward pass of one micro-batch, timed together. Rates are in samples or bytes per second.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

Size = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Micro = Annotated[int, Meta(ge=1, le=2**40)]
Seconds = Annotated[float, Meta(gt=0, le=1e9)]
Rate = Annotated[float, Meta(gt=0, le=1e18)]
Word = Annotated[str, Meta(min_length=1, max_length=200)]
MOST_PASSES = 64
"""Micro-batches in one profile, at most."""


class ProfileKey(msgspec.Struct, frozen=True, kw_only=True):
    """What a profile holds for. If any of it differs, the profile doesn't fit."""

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
    gflops_per_core: Rate | None = None  # of one thread; None: not a CPU


class DiskRate(msgspec.Struct, frozen=True):
    """The disk that holds the token caches."""

    write_bytes_per_second: Rate  # until the bytes are on the disk
    read_bytes_per_second: Rate | None = None  # None: the system keeps the file in memory


class DataRate(msgspec.Struct, frozen=True):
    """The run's data, read and assembled without training."""

    warm_samples_per_second: Rate  # from memory
    cold_samples_per_second: Rate | None = None  # from the disk; None: the page cache can't be emptied


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
    passes: Annotated[tuple[Pass, ...], Meta(min_length=1, max_length=MOST_PASSES)]  # by micro-batch, ascending
    out_of_memory_micro: Micro | None = None  # smallest micro-batch that ran out of memory; None: none did
    grid: Annotated[tuple[GridPoint, ...], Meta(max_length=MOST_PASSES)] = ()  # steps of one effective batch
    optimizer_seconds: Seconds | None = None  # time of a step beside its passes: the update, norms, the report
    forward: Annotated[tuple[Pass, ...], Meta(max_length=MOST_PASSES)] = ()  # forward passes only, as scoring runs them
    beside: Annotated[tuple[Word, ...], Meta(max_length=64)] = ()  # nodes of the machine that were calibrated with it
    matmul: Annotated[tuple[MatmulRate, ...], Meta(max_length=16)] = ()  # by data type
    memory_bytes_per_second: Rate | None = None  # bandwidth of copies in the device's memory, read and written
    memory_cap_bytes: Size | None = None  # memory that the trainer may take
    disk: DiskRate | None = None  # None: not measured
    data: DataRate | None = None  # None: not measured
    links: Annotated[tuple[LinkRate, ...], Meta(max_length=64)] = ()  # to the lead's node, or from it to the others


class ProfileSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a profile that plans need."""

    created_at: float  # Unix seconds
    passes: Annotated[tuple[Pass, ...], Meta(min_length=1, max_length=MOST_PASSES)]  # by micro-batch, ascending
    out_of_memory_micro: Micro | None = None  # smallest micro-batch that ran out of memory; None: none did
    optimizer_seconds: Seconds | None = None  # time of a step beside its passes
    gflops: Annotated[dict[Word, float], Meta(max_length=16)] = msgspec.field(
        default_factory=dict
    )  # best rate of matrix products by data type, 10^9 per second
    links: Annotated[tuple[LinkRate, ...], Meta(max_length=64)] = ()  # to the lead's node, or from it to the others


def summary(profile: DeviceProfile) -> ProfileSummary:
    """What plans need of a profile."""
    return ProfileSummary(
        created_at=profile.created_at, passes=profile.passes, out_of_memory_micro=profile.out_of_memory_micro,
        optimizer_seconds=profile.optimizer_seconds, gflops={rate.dtype: rate.gflops for rate in profile.matmul},
        links=profile.links,
    )  # fmt: skip
