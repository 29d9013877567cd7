"""`[nodes.NAME.simulated]` of a cluster file: the machine that `trainctl simulate` puts in a node's place."""

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from trainctl.protocol.errors import InvalidInputError

Micro = Annotated[int, Meta(ge=1, le=2**20)]
Step = Annotated[int, Meta(ge=1, le=2**40)]
Positive = Annotated[float, Meta(gt=0, le=1e12)]
NotNegative = Annotated[float, Meta(ge=0, le=1e9)]
SPEEDS: Final = ("profile", "device", "samples_per_second", "passes")
"""Settings that say how fast a simulated node is; exactly one is given."""


class SpeedChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """From a step on the node has another speed, as when a fan fails."""

    step: Step
    speed: Annotated[float, Meta(gt=0, le=100)]  # relative to the node's own


class SimulatedNode(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One machine with one rank. GB are 10^9 bytes."""

    profile: str = ""  # file of a calibration profile, relative to the cluster file
    device: str = ""  # a device by name, such as a100; its speed is an estimate
    samples_per_second: Positive | None = None  # training speed of one rank alone
    passes: Annotated[tuple[tuple[Micro, Positive], ...], Meta(max_length=64)] = ()  # [micro-batch, seconds of a pass]
    pass_seconds: NotNegative = 0.0  # with samples_per_second: what each pass takes whatever its size
    step_seconds: NotNegative | None = None  # what each step takes beside passes and sum; None: the profile's, or 0
    memory_gb: Positive | None = None  # memory that the trainer may take; None: the device's or profile's, or no limit
    model_gb: NotNegative | None = None  # memory that it holds at any micro-batch; None: profile or estimate
    sample_gb: NotNegative | None = None  # memory of each sample of a micro-batch; None: profile or estimate
    noise: Annotated[float, Meta(ge=0, le=1)] = 0.02  # standard deviation of a step's seconds, relative
    drift: Annotated[float, Meta(ge=0, le=1)] = 0.0  # standard deviation by which its speed wanders in an hour
    speeds: Annotated[tuple[SpeedChange, ...], Meta(max_length=64)] = ()  # changes of its speed
    mtbf_hours: Positive | None = None  # mean time between failures of its trainer; None: it has none by chance
    fails_at: Annotated[tuple[Step, ...], Meta(max_length=64)] = ()  # steps in which its trainer dies
    load_seconds: NotNegative = 20.0  # until a started trainer has loaded
    link_gbit: Positive | None = None  # bandwidth in each direction, 10^9 bit/s; None: the profile's link, or 1
    latency_ms: NotNegative | None = None  # round trip to another node; None: the profile's, or 0.2
    disk_mb: Positive = 500.0  # 10^6 bytes per second that a checkpoint is written with
    backend: Literal["torch", "mlx"] = "torch"


def check(node: SimulatedNode, where: str) -> None:
    """Raises InvalidInputError by the field."""
    given = [name for name in SPEEDS if getattr(node, name)]
    if len(given) != 1:
        problem = f"gives {' and '.join(given) or 'no speed'}; give exactly one of {', '.join(SPEEDS)}"
        raise InvalidInputError(where, problem)
    if node.pass_seconds and node.samples_per_second is None:
        raise InvalidInputError(f"{where}.pass_seconds", "applies only to samples_per_second: leave it out")
    sizes = [micro for micro, _ in node.passes]
    if sizes != sorted(set(sizes)):
        raise InvalidInputError(f"{where}.passes", "give each micro-batch once, in ascending order")
