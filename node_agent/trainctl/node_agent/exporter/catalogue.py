"""Every metric that the Prometheus endpoint can have: its name, type, labels and meaning; docs/exporters.md lists them.

Base units throughout: seconds, bytes, hertz, watts, degrees Celsius, and ratios from 0 to 1 instead of percentages.
"""

from dataclasses import dataclass
from typing import Literal

from trainctl.protocol.messages import METRICS, Compute, Metric, Scope

Kind = Literal["gauge", "counter", "histogram"]
RUN = ("run",)
COMPUTE = tuple(name for name in Compute.__struct_fields__ if name != "versions")
"""Fields of `Compute` that are labels."""
RUN_INFO = ("run", "name", "lead", "engine", "weight_unit", "loss_unit", *COMPUTE)
RANK = ("run", "node", "rank")
HOST = ("node",)
PROCESS = ("node", "role", "rank")
PHASE = (*RANK, "phase")
GPU = ("node", "gpu", "name")
STEP_BUCKETS_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Upper bounds of the histogram's buckets in seconds; an unbounded bucket follows."""


@dataclass(frozen=True)
class Spec:
    """One metric. A counter's name ends in `_total`; an information is a gauge that is always 1."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str


AGENT_SPECS = (
    Spec("trainctl_agent_info", "gauge", ("node", "version", "boot"), "Facts about the agent, as labels."),
    Spec("trainctl_agent_start_time_seconds", "gauge", HOST, "When the agent started, Unix time."),
    Spec("trainctl_agent_event_loop_lag_seconds", "gauge", HOST, "How late the event loop ran its last timer."),
    Spec("trainctl_agent_snapshot_age_seconds", "gauge", HOST, "Age of these values; grows if the agent hangs."),
    Spec("trainctl_agent_process_memory_bytes", "gauge", PROCESS, "Resident memory of trainctl's processes."),
    Spec("trainctl_agent_process_cpu_ratio", "gauge", PROCESS, "CPU use of trainctl's processes, in processors."),
    Spec("trainctl_peer_connected", "gauge", ("node", "peer"), "1 if the peer is reachable; absent before contact."),
    Spec("trainctl_active_runs", "gauge", HOST, "Active runs that this agent leads or follows."),
    Spec("trainctl_events_total", "counter", ("node", "kind", "severity"), "Events that this agent has recorded."),
    Spec("trainctl_commands_total", "counter", ("node", "verb", "outcome"), "Commands that have ended, by outcome."),
)
HOST_SPECS = (
    Spec("trainctl_host_read_timestamp_seconds", "gauge", HOST, "When the machine was last read, Unix time."),
    Spec("trainctl_host_cpu_ratio", "gauge", HOST, "Fraction of all processors in use."),
    Spec("trainctl_host_memory_used_bytes", "gauge", HOST, "Memory in use."),
    Spec("trainctl_host_memory_size_bytes", "gauge", HOST, "Total memory."),
    Spec("trainctl_host_disk_free_bytes", "gauge", HOST, "Free space on the disk that holds the runs."),
    Spec("trainctl_host_disk_size_bytes", "gauge", HOST, "Size of the disk that holds the runs."),
    Spec(
        "trainctl_host_energy_joules", "gauge", HOST, "Energy used by the machine's devices since the run began on it."
    ),
    Spec("trainctl_host_load1", "gauge", HOST, "Load average over a minute."),
    Spec("trainctl_host_temperature_celsius", "gauge", HOST, "Temperature of the hottest sensor."),
    Spec("trainctl_gpu_utilization_ratio", "gauge", GPU, "Fraction of time that the device was busy."),
    Spec("trainctl_gpu_clock_hertz", "gauge", GPU, "Clock rate of the device."),
    Spec(
        "trainctl_gpu_clock_limited",
        "gauge",
        (*GPU, "reason"),
        "1 for each reason that lowers the device's clock now: thermal, power or hardware.",
    ),
    Spec("trainctl_gpu_power_watts", "gauge", GPU, "Power drawn by the device."),
    Spec("trainctl_gpu_temperature_celsius", "gauge", GPU, "Temperature of the device."),
    Spec("trainctl_gpu_memory_used_bytes", "gauge", GPU, "Device memory in use."),
    Spec("trainctl_gpu_memory_size_bytes", "gauge", GPU, "Total device memory."),
)
RUN_SPECS = (
    Spec(
        "trainctl_run_info",
        "gauge",
        RUN_INFO,
        "Details of the active run, as labels. If ranks differ, a label lists all their values.",
    ),
    Spec("trainctl_run_state", "gauge", ("run", "state"), "1 for the run's state; other states are absent."),
    Spec("trainctl_run_start_time_seconds", "gauge", RUN, "When the run was started, Unix time."),
    Spec("trainctl_run_step", "gauge", RUN, "Last committed step; it goes back when steps are retracted."),
    Spec("trainctl_run_target_steps", "gauge", RUN, "Steps planned for the run."),
    Spec("trainctl_run_last_commit_timestamp_seconds", "gauge", RUN, "When the last step was committed, Unix time."),
    Spec(
        "trainctl_run_plan_version",
        "gauge",
        RUN,
        "Plan version; grows with each change of shares, sizes or learning rate.",
    ),
    Spec("trainctl_run_cursor_samples", "gauge", RUN, "Position in the endless sequence of samples."),
    Spec("trainctl_generation_term", "gauge", RUN, "Term of the generation; grows when the lead changes."),
    Spec("trainctl_generation_number", "gauge", RUN, "Number of the generation; grows whenever the group forms again."),
    Spec("trainctl_global_batch_samples", "gauge", RUN, "Samples per step over all ranks."),
    Spec("trainctl_perplexity", "gauge", RUN, "Perplexity of the latest evaluation: exp(held-out loss)."),
    Spec("trainctl_eval_loss", "gauge", RUN, "Latest loss on the held-out samples, in `loss_unit`."),
    Spec("trainctl_alerts_firing", "gauge", RUN, "Open alerts."),
    Spec("trainctl_alert_firing", "gauge", ("run", "kind", "node", "rank", "severity"), "1 for each open alert."),
    Spec("trainctl_steps_total", "counter", RUN, "Steps committed since the agent started, counting repeated ones."),
    Spec("trainctl_skipped_steps_total", "counter", RUN, "Committed steps that skipped the parameter update."),
    Spec(
        "trainctl_tokens_total", "counter", RUN, "Tokens processed in committed steps, including tokens without a loss."
    ),
    Spec("trainctl_weight_total", "counter", RUN, "Total loss weight of committed steps, in `weight_unit`."),
    Spec("trainctl_samples_total", "counter", RUN, "Samples in committed steps."),
    Spec("trainctl_step_duration_seconds", "histogram", RUN, "Time from a step's commit to the next, without pauses."),
)
RANK_SPECS = (
    Spec("trainctl_rank_state", "gauge", (*RANK, "state"), "1 for the rank's state; other states are absent."),
    Spec("trainctl_share_samples", "gauge", RANK, "The rank's share of the global batch, in samples."),
    Spec("trainctl_micro_batch_samples", "gauge", RANK, "Samples per forward and backward pass."),
    Spec("trainctl_rank_tokens_total", "counter", RANK, "Tokens that the rank processed in committed steps."),
    Spec("trainctl_rank_samples_total", "counter", RANK, "Samples that the rank processed in committed steps."),
    Spec("trainctl_rank_replays_total", "counter", RANK, "Micro-batches repeated after running out of memory."),
    Spec("trainctl_rank_phase_seconds_total", "counter", PHASE, "Time that the rank spent in each phase."),
)


def _exported(scope: Scope) -> tuple[Metric, ...]:
    """Metrics of the last step; those of times and totals have counters and a histogram."""
    drawn = [metric for metric in METRICS.values() if metric.scope == scope and metric.drawn]
    summed = ("step_seconds", "eval_loss", "perplexity")
    return tuple(metric for metric in drawn if metric.name not in summed and not metric.field.startswith("phases."))


def exported_name(metric: str) -> str:
    """Return the exported name of a run's metric, without characters that Prometheus allows in no name."""
    return {"grad_norm": "gradient_norm"}.get(metric, metric.replace("/", "_"))


RUN_METRICS, RANK_METRICS = _exported("run"), _exported("rank")
HOST_METRICS = tuple(metric for metric in _exported("host") if not metric.field)
"""Metrics of a machine by name; those with a field are in HOST_SPECS in base units."""
METRIC_SPECS = (
    *(Spec(f"trainctl_{exported_name(one.name)}", "gauge", RUN, one.help) for one in RUN_METRICS),
    *(Spec(f"trainctl_rank_{one.name.removeprefix('rank_')}", "gauge", RANK, one.help) for one in RANK_METRICS),
    *(Spec(f"trainctl_host_{one.name}", "gauge", HOST, one.help) for one in HOST_METRICS),
    Spec("trainctl_run_metric", "gauge", (*RUN, "metric"), "A metric that the run defines, at its last step."),
    Spec("trainctl_rank_metric", "gauge", (*RANK, "metric"), "A metric that the run defines, at the rank's last step."),
)
SPECS: dict[str, Spec] = {
    spec.name: spec for spec in (*AGENT_SPECS, *HOST_SPECS, *RUN_SPECS, *RANK_SPECS, *METRIC_SPECS)
}
