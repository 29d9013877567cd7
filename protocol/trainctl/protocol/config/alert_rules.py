"""Alerts: their kinds, the thresholds that a run file may set, and the hooks that a machine's settings may name.

Each kind has a threshold that raises it and a lower one that clears it, so that a value at the edge does neither.
Thresholds belong to a run; what is called when one is passed belongs to a machine, for a run file comes over the wire.
"""

import dataclasses
import shutil
from typing import Annotated, Final, Literal, get_args
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from trainctl.protocol.config.policies import CLIP_SCALE, DIVERGED_MADS, SPIKE_MADS, SPIKE_PERCENT, SPIKE_STEPS
from trainctl.protocol.errors import InvalidInputError

AlertKind = Literal[
    "nonfinite",
    "skipped",
    "loss-spike",
    "divergence",
    "clip",
    "own-loss",
    "kl",
    "stall",
    "throughput",
    "data-wait",
    "clock",
    "efficiency",
    "link",
    "device-idle",
    "memory",
    "memory-rise",
    "disk",
    "record",
    "node-silent",
    "node-lost",
    "lead-silent",
]
AlertSeverity = Literal["warning", "error"]
HookEvent = Literal["raised", "cleared", "finished", "failed", "paused"]
"""Events that hooks are called about: the first two are of alerts, the others of runs."""
Percent = Annotated[float, Meta(ge=0, le=100)]
Seconds = Annotated[float, Meta(ge=0, le=86400)]
Steps = Annotated[int, Meta(ge=1, le=10_000)]


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of alert: what is watched, and how bad it is."""

    severity: AlertSeverity
    summary: str


KINDS: Final[dict[AlertKind, Kind]] = {
    "nonfinite": Kind("error", "the loss or the gradient norm is NaN or infinite"),
    "skipped": Kind("warning", "many steps are skipped because their gradients overflow"),
    "loss-spike": Kind("warning", "the loss is far above its trend"),
    "divergence": Kind("warning", "the loss keeps rising above its best level"),
    "clip": Kind("warning", "clipping scales the gradients down to almost nothing"),
    "own-loss": Kind("warning", "a rank's own loss keeps differing from the other ranks' losses"),
    "kl": Kind("warning", "the model has moved far from its reference"),
    "stall": Kind("error", "the run is running but commits no steps"),
    "throughput": Kind("warning", "a rank is slower than before with the same micro-batch"),
    "data-wait": Kind("warning", "a rank spends much of its steps waiting for data"),
    "clock": Kind("warning", "a device under load runs at a lower clock rate than before"),
    "efficiency": Kind("warning", "a rank's passes are slower than when it was calibrated"),
    "link": Kind("warning", "the sum of gradients is slower than the calibrated links"),
    "device-idle": Kind("warning", "a rank's device is often idle (off by default)"),
    "memory": Kind("warning", "a rank's memory is near its cap"),
    "memory-rise": Kind("warning", "a rank's memory grows and will reach its cap during the run"),
    "disk": Kind("warning", "a node's disk is nearly full"),
    "record": Kind("error", "a node's record can't be written, or was made again"),
    "node-silent": Kind("warning", "a node's agent or trainer is silent"),
    "node-lost": Kind("error", "a rank is lost or has failed"),
    "lead-silent": Kind("error", "a follower receives no messages from the lead's agent"),
}
"""Every kind of alert."""


class AlertsTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[alerts]` of a run file: when an alert is raised and, lower, when it is cleared."""

    off: tuple[AlertKind, ...] = ("device-idle",)  # kinds that are not watched
    clear_seconds: Seconds = 30.0  # how long all must be well before an alert is cleared
    skipped_steps: Steps = 3  # skipped, of the last 100, that raise "skipped"; cleared with none in the last 20
    loss_spike_mads: Annotated[float, Meta(ge=1, le=1000)] = SPIKE_MADS  # over the trend, in its scatter (scaled MAD)
    loss_spike_percent: Percent = SPIKE_PERCENT  # and over it by this much; cleared below half of either
    loss_spike_steps: Steps = SPIKE_STEPS  # steps in a row
    diverged_mads: Annotated[float, Meta(ge=1, le=1000)] = DIVERGED_MADS  # over the best level, in the scatter at it
    clip_scale: Annotated[float, Meta(ge=0, lt=1)] = (
        CLIP_SCALE  # median over 100 steps below it; cleared above twice it
    )
    own_loss_deviations: Annotated[float, Meta(ge=1, le=1000)] = 1.5  # from the ranks' median, in its own scatter
    own_loss_percent: Percent = 5.0  # and from it by this much, over 50 steps; cleared below half of either
    kl_nats: Annotated[float, Meta(gt=0, le=1000)] = 0.5  # per token, of the last evaluation
    kl_clear_nats: Annotated[float, Meta(ge=0, le=1000)] = 0.4  # cleared below it
    stall_seconds: Annotated[float, Meta(ge=1, le=86400)] = 60.0  # without a commit, and
    stall_times: Annotated[float, Meta(ge=1, le=10_000)] = 10.0  # so many times the median step
    throughput_drop_percent: Percent = (
        7.0  # of the last 20 steps' own rate under the best 20 before, beyond its scatter
    )
    throughput_clear_percent: Percent = 4.0  # cleared below it
    data_wait_percent: Percent = 5.0  # of the last 100 steps, and 20 ms a step; cleared below 0.8 of either
    device_busy_percent: Percent = 85.0  # median over a minute below it; cleared 3 points above
    clock_drop_percent: Percent = 10.0  # of a device's clock under load, under the best minute before
    clock_clear_percent: Percent = 5.0  # cleared below it
    calibrated_slower_percent: Percent = 15.0  # median of 100 steps' passes, over their calibration; cleared below half
    link_percent: Percent = 50.0  # of the calibrated links, median of 100 sums below it; cleared above 1.2 times it
    memory_percent: Percent = 92.0  # of the cap
    memory_clear_percent: Percent = 88.0  # cleared below it
    disk_free_gb: Annotated[float, Meta(ge=0)] = 5.0  # 10^9 bytes left where runs are kept, or
    disk_clear_gb: Annotated[float, Meta(ge=0)] = 6.0  # cleared above it
    disk_free_percent: Percent = 2.0  # of that disk left; cleared above both
    disk_clear_percent: Percent = 3.0  # cleared above it
    silent_seconds: Annotated[float, Meta(ge=3, le=86400)] = 10.0  # of an agent, which speaks at 1 Hz


FIRST_TIMES: Final = 5.0
"""Factor by which the first step may take longer: devices compile and warm up."""
SIDE_TIMES: Final = 10.0
"""Factor by which an evaluation or a checkpoint may take longer, as it commits no step."""
MIN_DATA_SECONDS: Final = 0.02
"""Seconds of a step below which waiting for data is no trouble: a tiny step is mostly fixed costs."""
LOADED_PERCENT: Final = 50.0
"""Percent of use above which a device counts as loaded; a less used one may lower its clock."""


def stall_limit_seconds(table: AlertsTable, doing: str, usual_seconds: float | None) -> float:
    """Return how long a run may commit nothing. `doing`: the kind of its newest plan; `usual_seconds`: of a step, None
    before the first one."""
    if doing != "train":
        return SIDE_TIMES * table.stall_seconds
    if usual_seconds is None:
        return FIRST_TIMES * table.stall_seconds
    return max(table.stall_seconds, table.stall_times * usual_seconds)


class AlertHooks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[alerts]` of cluster.toml: what an agent of that machine calls about its alerts and the runs that it leads."""

    command: tuple[str, ...] = ()  # program and arguments, run without a shell, the event as JSON on standard input
    webhook: str = ""  # an http or https address that the same JSON is posted to
    on: tuple[HookEvent, ...] = get_args(HookEvent)  # what they are called about


def check_thresholds(table: AlertsTable, where: str) -> None:
    """Raise InvalidInputError where an alert would be cleared at a worse value than it is raised at."""
    rising = (
        ("kl_clear_nats", "kl_nats"),
        ("memory_clear_percent", "memory_percent"),
        ("throughput_clear_percent", "throughput_drop_percent"),
        ("clock_clear_percent", "clock_drop_percent"),
        ("disk_free_gb", "disk_clear_gb"),
        ("disk_free_percent", "disk_clear_percent"),
    )
    for lower, upper in rising:
        low, high = getattr(table, lower), getattr(table, upper)
        if low > high:
            raise InvalidInputError(f"{where}: alerts.{lower}", f"{low:g} must be at most alerts.{upper} = {high:g}")


def check_command(hooks: AlertHooks, where: str) -> None:
    """Raise InvalidInputError, about the setting named by `where`, for a program that isn't on this machine."""
    if hooks.command and (not hooks.command[0] or shutil.which(hooks.command[0]) is None):
        raise InvalidInputError(where, f"program {hooks.command[0]!r} not found on this machine")


def check_webhook(hooks: AlertHooks, where: str) -> None:
    """Raise InvalidInputError, about the setting named by `where`, for what is no address to post to."""
    if not hooks.webhook:
        return
    try:
        parts = urlsplit(hooks.webhook)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise InvalidInputError(where, f"{hooks.webhook!r} is not a URL such as http://host:8080/alerts")
