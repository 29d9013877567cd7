"""The metrics of a run: one table, which the record, charts, columns, filters, exports and mirrors are made from.

A metric that every step has is a field of its message; all others go by name, in `values`. A metric that a run brings
and the table doesn't know is kept and shown all the same.
"""

import math
import operator
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from trainctl.protocol.config.objectives import HELD_OUT, OBJECTIVES
from trainctl.protocol.messages.trainer import BUSY_PHASES, PHASES

Scope = Literal["run", "rank", "host"]
Fold = Literal["mean", "sum", "max"]
MetricStyle = Literal[
    "number",
    "loss",
    "scientific",
    "seconds",
    "rate",
    "bytes",
    "megabytes",
    "megabytes_per_second",
    "ratio",
    "percent",
    "watts",
    "celsius",
    "megahertz",
]


class Metric(NamedTuple):
    """One row of the table."""

    name: str
    unit: str
    scope: Scope  # whether there is one of the run, of each rank, or of each rank's machine
    title: str
    help: str  # what it is, for docs and exporters
    style: MetricStyle = "number"
    field: str = ""  # where its message has it, with dots: `phases.wait`; of a machine `host.` or `gpu.`, the rank's
    # device, and a name; empty: by name in `values`
    sql: str = ""  # of a row of `steps`, or `r` of `rank_steps`; empty: by name in `metric_values`
    fold: Fold = "mean"  # what several ranks have together
    short: str = ""  # at the end of its line in a chart
    heading: str = ""  # of its column in the fleet table, where that is wide; empty: it has none, or one of its own
    drawn: bool = True  # whether charts offer it

    def of(self, message: Any) -> float | None:
        """Return the metric's value in a StepCommitted or RankStep; None where that has none. A rank's part has the
        values of its machine by name."""
        values: Mapping[str, float] = getattr(message, "values", {})
        in_field = self.field and self.scope != "host"
        return operator.attrgetter(self.field)(message) if in_field else values.get(self.name)

    def of_machine(self, host: Any, gpu: Any) -> float | None:
        """Return the value in a HostReading or the GpuReading of the rank's device; None where neither has one."""
        where, _, field = self.field.partition(".")
        if not field:
            return None if host is None else host.values.get(self.name)
        return getattr(gpu if where == "gpu" else host, field, None)

    def folded(self, values: Sequence[float]) -> float:
        """Return what several ranks have together: NaN if one has."""
        match self.fold:
            case "sum":
                return float(sum(values))
            case "max":
                return max(values, key=lambda value: (math.isnan(value), value))
            case "mean":
                return statistics.fmean(values)


_LOSS_UNIT = "nats per token"
_MAX_NATS = 700.0
"""Loss above which its exponential is too large for a float."""
_BUSY = " + ".join(f"r.{name}_seconds" for name in BUSY_PHASES)
_TIMED = " + ".join(f"r.{name}_seconds" for name in PHASES)
_NOT_FINITE = "CASE WHEN {0} IS NULL OR abs({0}) >= 1e300 THEN 1.0 END"
_RUN = (
    Metric("loss", _LOSS_UNIT, "run", "loss", "Loss of the step.", "loss", "loss", "loss"),
    Metric("eval_loss", _LOSS_UNIT, "run", "eval loss", "Loss on the held-out samples.", "loss", short="eval"),
    Metric("perplexity", "", "run", "perplexity", "exp(held-out loss), if the loss is in nats per token.", short="ppl"),
    Metric(
        "loss_std",
        _LOSS_UNIT,
        "run",
        "loss deviation",
        "Standard deviation of the loss over the last 100 steps.",
        "loss",
        short="std",
    ),
    Metric(
        "loss_trend",
        f"{_LOSS_UNIT} and step",
        "run",
        "loss trend",
        "Slope of the least-squares line through the losses of the last 100 steps; below 0: the loss falls.",
        "scientific",
        short="trend",
    ),
    Metric(
        "loss_z",
        "",
        "run",
        "loss robust z",
        "Distance of the loss from the median of the 100 steps before, divided by their scaled median absolute "
        "deviation (1.4826 MAD).",
        "number",
        short="z",
    ),
    Metric(
        "grad_norm",
        "",
        "run",
        "gradient norm",
        "Global norm of the gradient before clipping.",
        "loss",
        "grad_norm",
        "grad_norm",
        short="norm",
    ),
    Metric(
        "grad_norm_trend",
        "per step",
        "run",
        "gradient norm trend",
        "Slope of the least-squares line through the gradient norms of the last 100 steps.",
        "scientific",
        short="trend",
    ),
    Metric(
        "recent_skipped_steps",
        "steps",
        "run",
        "skipped steps",
        "Steps of the last 100 whose update was skipped, because a gradient wasn't finite.",
        "number",
        short="skipped",
    ),
    Metric(
        "clip_scale",
        "",
        "run",
        "clip scale",
        "Factor by which clipping scaled the gradient; 1: no clipping.",
        "loss",
    ),
    Metric(
        "update_ratio",
        "",
        "run",
        "update ratio",
        "Norm of the step's update divided by the norm of the trained weights, if `optimizer.update_ratio_every` "
        "measures it.",
        "scientific",
        short="update",
    ),
    Metric(
        "learning_rate",
        "",
        "run",
        "learning rate",
        "Learning rate of the step.",
        "scientific",
        "learning_rate",
        "learning_rate",
        short="lr",
    ),
    Metric(
        "step_seconds",
        "s",
        "run",
        "step seconds",
        "Time from a step's commit to the next, without pauses.",
        "seconds",
        "step_seconds",
        "step_seconds",
        short="step",
    ),
    Metric(
        "tokens_per_second",
        "tokens/s",
        "run",
        "tokens/s",
        "Tokens processed per second during the step.",
        "rate",
        "tokens_per_second",
        "CASE WHEN step_seconds > 0 THEN tokens / step_seconds END",
        short="tok/s",
    ),
    Metric(
        "samples_per_second",
        "samples/s",
        "run",
        "samples/s",
        "Samples processed per second during the step.",
        "number",
        "samples_per_second",
        "CASE WHEN step_seconds > 0 AND samples > 0 THEN samples / step_seconds END",
        short="smp/s",
    ),
    Metric(
        "steps_per_second",
        "steps/s",
        "run",
        "steps/s",
        "Steps per second, based on the step's duration.",
        "number",
        "steps_per_second",
        "CASE WHEN step_seconds > 0 THEN 1.0 / step_seconds END",
        short="step/s",
    ),
    Metric(
        "seconds_per_sample",
        "s",
        "run",
        "seconds per sample",
        "Step duration divided by its samples.",
        "seconds",
        "seconds_per_sample",
        "CASE WHEN samples > 0 AND typeof(step_seconds) = 'real' THEN step_seconds / samples END",
        short="a sample",
    ),
    Metric(
        "weight_per_second",
        "weight/s",
        "run",
        "weight/s",
        "Loss weight processed per second, in the run's weight unit.",
        "rate",
        "weight_per_second",
        "CASE WHEN step_seconds > 0 AND typeof(weight) = 'real' THEN weight / step_seconds END",
    ),
    Metric(
        "run_tflops",
        "TFLOP/s",
        "run",
        "TFLOP/s",
        "Floating-point operations that the model needs for the step's tokens, divided by the step's duration, in "
        "10^12 per second.",
        "number",
        short="TFLOP/s",
    ),
    Metric(
        "time_left_seconds",
        "s",
        "run",
        "time left",
        "Expected time until the run's last step, with the evaluations, checkpoints and faults still to come.",
        "seconds",
        short="left",
    ),
    Metric(
        "time_left_best_seconds",
        "s",
        "run",
        "time left at best",
        "Time left in the best case: about 92 of 100 runs take between the best and the worst case.",
        "seconds",
        short="best",
    ),
    Metric(
        "time_left_worst_seconds",
        "s",
        "run",
        "time left at worst",
        "Time left in the worst case.",
        "seconds",
        short="worst",
    ),
    Metric(
        "loss_not_finite",
        "1, or absent",
        "run",
        "",
        "Steps whose loss is NaN or infinite.",
        drawn=False,
        sql=_NOT_FINITE.format("loss"),
    ),
    Metric(
        "grad_norm_not_finite",
        "1, or absent",
        "run",
        "",
        "Steps whose gradient norm is NaN or infinite.",
        drawn=False,
        sql=_NOT_FINITE.format("grad_norm"),
    ),
    Metric(
        "tokens_total",
        "tokens; a bucket's minimum is its first step's, its maximum its last step's",
        "run",
        "",
        "Tokens processed since the run began.",
        field="tokens_total",
        drawn=False,
    ),
    Metric(
        "committed_at",
        "Unix seconds; a bucket's minimum is its first step's, its maximum its last step's",
        "run",
        "",
        "Commit time of the step.",
        field="committed_at",
        drawn=False,
    ),
)

MEMORY_PARTS: Final[dict[str, str]] = {
    "weights": "Memory of the model's weights on the device, and of what is kept beside them.",
    "gradients": "Memory of the accumulated gradients on the device.",
    "moments": "Memory of the optimizer's moments on the device.",
    "activations": "What else the step's peak has: activations, logits, gradients of one micro-batch and working "
    "memory. On a CPU, an estimate from the process's size.",
}
"""Parts of a trainer's memory, with the metric's meaning; `memory_cache_bytes` is another."""
_RANK = (
    Metric(
        "own_loss",
        _LOSS_UNIT,
        "rank",
        "own loss",
        "Mean loss on the rank's own samples.",
        "loss",
        heading="LOSS",
    ),
    Metric(
        "rank_step_seconds",
        "s",
        "rank",
        "rank step seconds",
        "Duration of the rank's step, including waits.",
        "seconds",
        "step_seconds",
        "r.step_seconds",
        "max",
        "step",
    ),
    Metric(
        "busy_seconds",
        "s",
        "rank",
        "busy seconds",
        "Time spent in the data, forward and backward phases.",
        "seconds",
        "phases.timed_busy",
        f"CASE WHEN {_TIMED} > 0 THEN {_BUSY} END",
        "max",
        "busy",
    ),
    Metric(
        "own_tokens_per_second",
        "tokens/s",
        "rank",
        "own tok/s",
        "Tokens per second that the rank would reach on its own.",
        "rate",
        "own_tokens_per_second",
        f"CASE WHEN {_BUSY} > 0 AND r.tokens > 0 THEN r.tokens / ({_BUSY}) END",
        "sum",
        "own",
    ),
    *(
        Metric(
            f"{name}_seconds",
            "s",
            "rank",
            f"{name} seconds",
            f"Time that the step spent in the {name} phase.",
            "seconds",
            f"phases.{name}",
            f"r.{name}_seconds",
            "max",
            name,
        )
        for name in PHASES
    ),
    Metric(
        "tflops",
        "TFLOP/s",
        "rank",
        "rank TFLOP/s",
        "Floating-point operations that the model needs for the rank's tokens, divided by the duration of the rank's "
        "step, in 10^12 per second.",
        "number",
        fold="sum",
        short="TFLOP/s",
    ),
    Metric(
        "matmul_use",
        "of the peak",
        "rank",
        "matmul use",
        "`tflops` divided by the device's own best rate of matrix products, as calibration measured it.",
        "ratio",
        short="matmul",
    ),
    Metric(
        "mfu",
        "of the peak",
        "rank",
        "MFU",
        "Model FLOPs utilisation: `tflops` divided by the datasheet's dense peak, for NVIDIA devices and bfloat16.",
        "ratio",
        short="MFU",
    ),
    Metric(
        "calibrated_speed",
        "of the calibration",
        "rank",
        "speed of calibration",
        "What the rank's passes took when it was calibrated, divided by what they take; below 1: it is slower now.",
        "ratio",
        short="speed",
    ),
    Metric(
        "link_use",
        "of the calibration",
        "rank",
        "link use",
        "What the sum of gradients takes by the calibrated links, divided by the rank's time in it. The rank with the "
        "highest value waits least for others.",
        "ratio",
        fold="max",
        short="link",
    ),
    Metric(
        "memory_bytes",
        "B",
        "rank",
        "memory held GB",
        "Trainer memory in use after the step.",
        "bytes",
        sql="r.memory_bytes",
        fold="sum",
        short="held",
    ),
    Metric(
        "memory_peak_bytes",
        "B",
        "rank",
        "memory peak GB",
        "Peak trainer memory during the step.",
        "bytes",
        sql="r.memory_peak_bytes",
        fold="sum",
        short="memory",
    ),
    Metric(
        "memory_cap_bytes",
        "B",
        "rank",
        "memory cap GB",
        "Maximum memory that the trainer may use.",
        "bytes",
        sql="r.memory_cap_bytes",
        fold="sum",
        short="cap",
    ),
    Metric(
        "memory_cache_bytes",
        "B",
        "rank",
        "memory cache GB",
        "Memory that the allocator keeps for later and no array uses.",
        "bytes",
        fold="sum",
        short="cache",
    ),
    *(
        Metric(f"memory_{name}_bytes", "B", "rank", f"memory of {name} GB", meaning, "bytes", fold="sum", short=name)
        for name, meaning in MEMORY_PARTS.items()
    ),
    Metric(
        "memory_use",
        "of the cap",
        "rank",
        "memory use",
        "Mean peak memory over the last 10 steps, divided by the memory cap.",
        "ratio",
        fold="max",
        short="use",
    ),
    Metric(
        "memory_growth",
        "B/step",
        "rank",
        "memory growth",
        "Growth of peak memory per step, over the last 10 steps.",
        "bytes",
        short="growth",
    ),
    Metric(
        "sum_bytes",
        "B",
        "rank",
        "sum MB",
        "Size of the float32 gradients that the rank adds to the sum (not the network traffic).",
        "megabytes",
        fold="max",
        short="sum",
    ),
    Metric(
        "sum_bytes_per_second",
        "B/s",
        "rank",
        "sum MB/s",
        "`sum_bytes` divided by the duration of the sum, including the wait for slower ranks.",
        "megabytes_per_second",
        fold="max",
        short="sum",
    ),
    Metric(
        "compile_seconds",
        "s",
        "rank",
        "compile s",
        "Time in which the model was compiled: in the first steps, and when a new length or micro-batch needs another "
        "form. Neither the step's duration nor its phases count it.",
        "seconds",
        fold="max",
        short="compile",
    ),
    Metric(
        "drift",
        "relative",
        "rank",
        "drift",
        "Relative difference between the rank's parameters and those it receives at a sync.",
        "scientific",
    ),
)

_HOST = (
    Metric(
        "cpu_percent",
        "%",
        "host",
        "CPU use",
        "CPU utilisation of the machine, in percent.",
        "percent",
        "host.cpu_percent",
        short="cpu",
    ),
    Metric(
        "load_1min",
        "",
        "host",
        "load average",
        "One-minute load average of the machine.",
        field="host.load_1min",
        short="load",
    ),
    Metric(
        "memory_used_bytes",
        "B",
        "host",
        "machine memory GB",
        "Machine memory in use.",
        "bytes",
        "host.memory_used_bytes",
        short="memory",
    ),
    Metric(
        "disk_free_bytes",
        "B",
        "host",
        "disk free GB",
        "Free space on the disk that stores the runs.",
        "bytes",
        "host.disk_free_bytes",
        short="disk",
    ),
    Metric(
        "temperature_celsius",
        "°C",
        "host",
        "CPU °C",
        "CPU temperature.",
        "celsius",
        "host.temperature_celsius",
        fold="max",
        short="°C",
    ),
    Metric(
        "gpu_utilization_percent",
        "%",
        "host",
        "GPU use",
        "Percentage of time that the device was busy.",
        "percent",
        "gpu.utilization_percent",
        short="gpu",
    ),
    Metric(
        "gpu_clock_mhz",
        "MHz",
        "host",
        "GPU clock",
        "Clock rate of the device.",
        "megahertz",
        "gpu.clock_mhz",
        short="clock",
    ),
    Metric(
        "gpu_power_watts",
        "W",
        "host",
        "GPU power",
        "Power draw of the device.",
        "watts",
        "gpu.power_watts",
        fold="sum",
        short="power",
    ),
    Metric(
        "gpu_temperature_celsius",
        "°C",
        "host",
        "GPU °C",
        "Temperature of the device.",
        "celsius",
        "gpu.temperature_celsius",
        fold="max",
        short="°C",
    ),
    Metric(
        "gpu_memory_used_bytes",
        "B",
        "host",
        "GPU memory GB",
        "Device memory in use.",
        "bytes",
        "gpu.memory_used_bytes",
        fold="sum",
        short="memory",
    ),
    Metric(
        "round_trip_seconds",
        "s",
        "host",
        "round trip",
        "Round-trip time of the last ping from the lead's agent to the node's agent. The lead itself has no value.",
        "seconds",
        short="ping",
        heading="PING",
    ),
    *(
        Metric(
            f"{name}_pressure",
            "%",
            "host",
            f"{title} pressure",
            f"Percentage of the last 10 s in which at least one task waited for {what} (Linux PSI, `some avg10`).",
            "percent",
            fold="max",
            short="psi",
        )
        for name, title, what in (
            ("cpu", "CPU", "a processor"),
            ("io", "I/O", "input or output"),
            ("memory", "memory", "memory"),
        )
    ),
    Metric(
        "cpu_throttled_percent",
        "%",
        "host",
        "CPU throttled",
        "Percentage of CPU quota periods in which the control group used up its quota and was stopped.",
        "percent",
        fold="max",
        short="quota",
    ),
    Metric(
        "cpu_steal_percent",
        "%",
        "host",
        "CPU steal",
        "Percentage of processor time that the hypervisor gave to other virtual machines.",
        "percent",
        fold="max",
        short="steal",
        drawn=False,
    ),
    Metric("swap_used_bytes", "B", "host", "swap GB", "Swap space in use.", "bytes", short="swap", drawn=False),
    *(
        Metric(
            f"swap_{way}_bytes_per_second",
            "B/s",
            "host",
            f"swap {way} MB/s",
            f"Bytes per second swapped {way}.",
            "megabytes_per_second",
            fold="max",
            short=f"swap {way}",
            drawn=False,
        )
        for way in ("in", "out")
    ),
    *(
        Metric(
            f"disk_{way}_bytes_per_second",
            "B/s",
            "host",
            f"disk {way} MB/s",
            f"Bytes per second {done} the disk that stores the runs (on macOS: all disks).",
            "megabytes_per_second",
            fold="max",
            short=way,
        )
        for way, done in (("read", "read from"), ("write", "written to"))
    ),
    Metric(
        "disk_busy_percent",
        "%",
        "host",
        "disk busy",
        "Percentage of time that the disk that stores the runs was busy.",
        "percent",
        fold="max",
        short="disk",
        drawn=False,
    ),
    *(
        Metric(
            f"network_{way}_bytes_per_second",
            "B/s",
            "host",
            f"network {way} MB/s",
            f"Bytes per second {done} by the network interfaces, without loopback.",
            "megabytes_per_second",
            fold="max",
            short=way,
        )
        for way, done in (("in", "received"), ("out", "sent"))
    ),
    Metric(
        "retransmits_per_second",
        "1/s",
        "host",
        "TCP retransmits",
        "TCP segments per second that were sent again.",
        fold="max",
        short="resent",
        drawn=False,
    ),
    Metric(
        "thermal_pressure",
        "",
        "host",
        "thermal pressure",
        "macOS thermal pressure: 0 nominal, 1 moderate, 2 heavy, 3 trapping, 4 sleeping.",
        fold="max",
        short="heat",
        drawn=False,
    ),
)
"""Metrics of a machine and its devices, read once a second. A step has the mean of the readings made during it of those
that charts offer; the others are in the machine's own readings alone, which keeps steps small."""

_OBJECTIVE = tuple(
    Metric(metric.name, metric.unit, "run", metric.title, metric.help, "loss")
    for metric in dict.fromkeys(metric for objective in OBJECTIVES.values() for metric in objective.metrics)
)
"""Metrics of the objectives, over the batches of all ranks; several objectives may have the same one."""

_HELD_OUT = tuple(
    Metric(f"{HELD_OUT}{metric.name}", metric.unit, "run", f"eval {metric.title}", f"Held out: {metric.help}", "loss")
    for metric in dict.fromkeys(metric for objective in OBJECTIVES.values() for metric in objective.evaluated)
)
"""Metrics of the objectives, over the held-out samples: only evaluations have a value."""

METRICS: Final[dict[str, Metric]] = {metric.name: metric for metric in (*_RUN, *_OBJECTIVE, *_HELD_OUT, *_RANK, *_HOST)}
"""Every metric of the table by name, in the order in which they are offered."""
RANK_COLUMNS: Final = tuple(metric.name for metric in _RANK if metric.sql == f"r.{metric.name}" and not metric.field)
"""Metrics that go by name in a message and have a column in the record."""


EVALUATED: Final = frozenset(metric.name for metric in _HELD_OUT)
"""Metrics that only an evaluation has, beside its loss."""
KL: Final = f"{HELD_OUT}kl"
"""The one of them that an alert watches."""
_OWN_TABLES: Final = frozenset({"eval_loss", "perplexity", "drift"}) | EVALUATED
"""Metrics that the record has a table for, with few rows."""


def is_by_name(name: str) -> bool:
    """Return whether a metric goes in `values` and `metric_values`, and has no column or table of its own."""
    metric = METRICS.get(name)
    return metric is None or metric.scope == "host" or not (metric.sql or metric.field or name in _OWN_TABLES)


def host_values(host: Any, device: str | None) -> dict[str, float]:
    """Return by name what a HostReading says about a rank's machine, and of the device that the rank has there: what
    charts offer."""
    gpu = host.gpu_of(device)
    found = (
        (name, metric.of_machine(host, gpu))
        for name, metric in METRICS.items()
        if metric.scope == "host" and metric.drawn
    )
    return {name: float(value) for name, value in found if value is not None}


def perplexity(loss: float | None, unit: str = _LOSS_UNIT) -> float | None:
    """exp(loss); None if there is none, if the loss is in another unit, or if it is too large."""
    return math.exp(loss) if loss is not None and unit == _LOSS_UNIT and loss < _MAX_NATS else None


def metric_of(name: str, *, per_rank: bool = True) -> Metric:
    """A metric by its name; of one that a run brings no more is known than that."""
    title = name.removeprefix("user:").replace("_", " ")
    known = Metric(name, "", "rank" if per_rank else "run", title, "A metric that the run defines.", "loss")
    return METRICS.get(name, known)


def peak_of_cap(values: Mapping[str, float]) -> float | None:
    """Return the part of its memory cap that a rank's step took at its peak; None if either isn't known."""
    size, cap = values.get("memory_peak_bytes"), values.get("memory_cap_bytes")
    return None if size is None or not cap else size / cap
