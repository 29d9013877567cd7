"""Every metric that the Prometheus endpoint can have: its name, type, labels and meaning; docs/exporters.md shows them.

Base units throughout: seconds, bytes, hertz, watts, degrees Celsius, and ratios from 0 to 1 instead of percentages.
"""

from typing import Literal, NamedTuple

from trainctl.protocol import messages as m

Kind = Literal["gauge", "counter", "histogram"]
RUN = ("run",)
RUN_INFO = ("run", "name", "lead", "engine", "weight_unit", "loss_unit", *m.Compute.__struct_fields__)
RANK = ("run", "node", "rank")
HOST = ("node",)
PROCESS = ("node", "role", "rank")
PHASE = (*RANK, "phase")
GPU = ("node", "gpu", "name")
STEP_BUCKETS_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Upper ends of the histogram's buckets; one without an end comes after."""


class Spec(NamedTuple):
    """One metric. A counter's name ends in `_total`; an information is a gauge that is always 1."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str


AGENT_SPECS = (
    Spec("trainctl_agent_info", "gauge", ("node", "version", "boot"), "The agent, as labels."),
    Spec("trainctl_agent_start_time_seconds", "gauge", HOST, "When the agent started, Unix time."),
    Spec("trainctl_agent_event_loop_lag_seconds", "gauge", HOST, "How late the event loop ran its last timer."),
    Spec("trainctl_agent_snapshot_age_seconds", "gauge", HOST, "Age of what is shown; grows if the agent hangs."),
    Spec("trainctl_agent_process_memory_bytes", "gauge", PROCESS, "Resident memory of this program's processes."),
    Spec("trainctl_agent_process_cpu_ratio", "gauge", PROCESS, "Processors that its processes have in use."),
    Spec("trainctl_peer_connected", "gauge", ("node", "peer"), "Whether another agent is heard; absent if not yet."),
    Spec("trainctl_active_runs", "gauge", HOST, "Runs that this agent conducts or follows now."),
    Spec("trainctl_events_total", "counter", ("node", "kind", "severity"), "Events that this agent has recorded."),
    Spec("trainctl_commands_total", "counter", ("node", "verb", "outcome"), "Commands that have ended, by how."),
)  # fmt: skip
HOST_SPECS = (
    Spec("trainctl_host_read_timestamp_seconds", "gauge", HOST, "When the machine was read, Unix time."),
    Spec("trainctl_host_cpu_ratio", "gauge", HOST, "Processors in use, of all."),
    Spec("trainctl_host_memory_used_bytes", "gauge", HOST, "Memory in use."),
    Spec("trainctl_host_memory_size_bytes", "gauge", HOST, "Memory there is."),
    Spec("trainctl_host_disk_free_bytes", "gauge", HOST, "Room on the disk that holds the runs."),
    Spec("trainctl_host_disk_size_bytes", "gauge", HOST, "Size of that disk."),
    Spec("trainctl_host_energy_joules", "gauge", HOST, "Drawn by its devices since the run began there, as read."),
    Spec("trainctl_host_load1", "gauge", HOST, "Load average over a minute."),
    Spec("trainctl_host_temperature_celsius", "gauge", HOST, "Hottest sensor."),
    Spec("trainctl_gpu_utilization_ratio", "gauge", GPU, "Part of the time in which the device was busy."),
    Spec("trainctl_gpu_clock_hertz", "gauge", GPU, "Clock rate."),
    Spec("trainctl_gpu_power_watts", "gauge", GPU, "Power drawn."),
    Spec("trainctl_gpu_temperature_celsius", "gauge", GPU, "Temperature of the device."),
    Spec("trainctl_gpu_memory_used_bytes", "gauge", GPU, "Memory of the device in use."),
    Spec("trainctl_gpu_memory_size_bytes", "gauge", GPU, "Memory of the device."),
)
RUN_SPECS = (
    Spec("trainctl_run_info", "gauge", RUN_INFO, "The active run, as labels; where ranks differ, all values."),
    Spec("trainctl_run_state", "gauge", ("run", "state"), "1 for the state that the run is in; the others are absent."),
    Spec("trainctl_run_start_time_seconds", "gauge", RUN, "When the run was started, Unix time."),
    Spec("trainctl_run_step", "gauge", RUN, "Last committed step; it goes back when steps are retracted."),
    Spec("trainctl_run_target_steps", "gauge", RUN, "Steps that the run is to have."),
    Spec("trainctl_run_last_commit_timestamp_seconds", "gauge", RUN, "When the last step was committed, Unix time."),
    Spec("trainctl_run_plan_version", "gauge", RUN, "Grows with each change of shares, micro-batches, batch or rate."),
    Spec("trainctl_run_cursor_samples", "gauge", RUN, "Position in the endless sequence of samples."),
    Spec("trainctl_generation_term", "gauge", RUN, "Term of the generation; grows when another node conducts."),
    Spec("trainctl_generation_number", "gauge", RUN, "Number of the generation; grows whenever the group forms anew."),
    Spec("trainctl_global_batch_samples", "gauge", RUN, "Samples of a step, over all ranks."),
    Spec("trainctl_eval_loss", "gauge", RUN, "Newest loss on the held-out samples, in `loss_unit`."),
    Spec("trainctl_alerts_firing", "gauge", RUN, "Open alerts."),
    Spec("trainctl_alert_firing", "gauge", ("run", "kind", "node", "rank", "severity"), "1 for each open alert."),
    Spec("trainctl_steps_total", "counter", RUN, "Steps committed since the agent started, redone ones again."),
    Spec("trainctl_skipped_steps_total", "counter", RUN, "Of these, steps that left the parameters alone."),
    Spec("trainctl_tokens_total", "counter", RUN, "Tokens processed in these steps, with those that have no loss."),
    Spec("trainctl_weight_total", "counter", RUN, "What the losses of these steps are divided by, in `weight_unit`."),
    Spec("trainctl_samples_total", "counter", RUN, "Samples of these steps."),
    Spec("trainctl_step_duration_seconds", "histogram", RUN, "Time from commit to commit, pauses excluded."),
)  # fmt: skip
RANK_SPECS = (
    Spec("trainctl_rank_state", "gauge", (*RANK, "state"), "1 for the state that it is in; the others are absent."),
    Spec("trainctl_share_samples", "gauge", RANK, "Samples of the global batch that are the rank's."),
    Spec("trainctl_micro_batch_samples", "gauge", RANK, "Samples of one forward and backward."),
    Spec("trainctl_rank_tokens_total", "counter", RANK, "Tokens processed in the rank's part of the steps."),
    Spec("trainctl_rank_samples_total", "counter", RANK, "Samples of the rank's part of the steps."),
    Spec("trainctl_rank_replays_total", "counter", RANK, "Micro-batches run again after memory ran out."),
    Spec("trainctl_rank_phase_seconds_total", "counter", PHASE, "Seconds in each phase of its steps."),
)  # fmt: skip


def _exported(scope: m.Scope) -> tuple[m.Metric, ...]:
    """Metrics of the last step; those of times and totals have counters and a histogram."""
    return tuple(
        metric for metric in m.METRICS.values() if metric.scope == scope and metric.drawn and not _is_summed(metric)
    )


def _is_summed(metric: m.Metric) -> bool:
    return metric.name in ("step_seconds", "eval_loss") or metric.field.startswith("phases.")


EXPORTED_AS = {"grad_norm": "gradient_norm"}
"""Metrics of the run that have another name here."""
RUN_METRICS, RANK_METRICS = _exported("run"), _exported("rank")
HOST_METRICS = tuple(metric for metric in _exported("host") if not metric.field)
"""Of a machine, by name; those with a field are among HOST_SPECS in base units."""
METRIC_SPECS = (
    *(Spec(f"trainctl_{EXPORTED_AS.get(one.name, one.name)}", "gauge", RUN, one.help) for one in RUN_METRICS),
    *(Spec(f"trainctl_rank_{one.name.removeprefix('rank_')}", "gauge", RANK, one.help) for one in RANK_METRICS),
    *(Spec(f"trainctl_host_{one.name}", "gauge", HOST, one.help) for one in HOST_METRICS),
    Spec("trainctl_run_metric", "gauge", (*RUN, "metric"), "A metric that the run brings, of its last step."),
    Spec("trainctl_rank_metric", "gauge", (*RANK, "metric"), "A metric that the run brings, of the rank's last step."),
)
SPECS: dict[str, Spec] = {
    spec.name: spec for spec in (*AGENT_SPECS, *HOST_SPECS, *RUN_SPECS, *RANK_SPECS, *METRIC_SPECS)
}
