"""The words of subcommands for runs, ranks, alerts, steps, events and replies: tables and lines, safe to show."""

import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence

from trainctl.protocol.analysis.straggler import same_step, waits
from trainctl.protocol.batch.cost import CostFigures, figures, run_rates
from trainctl.protocol.messages import (
    ACTIVE_RUN_STATES,
    METRICS,
    Alerts,
    AlertView,
    CommandReply,
    Compute,
    Event,
    HostReading,
    PeerView,
    PolicyView,
    RankStep,
    RankView,
    RunSummary,
    RunView,
    Sample,
    Snapshot,
    StepCommitted,
    StepPlan,
    Viewer,
    WorkSummary,
)
from trainctl.tui.cli.output import one_line
from trainctl.tui.state import run_events
from trainctl.tui.text import formatting as fmt
from trainctl.tui.text import run_lines
from trainctl.tui.text.run_lines import (
    LAST_LOSS,
    LAST_STEP,
    cost_amount,
    cost_figures,
    cost_pieces,
    rate_pieces,
    work_nodes,
    work_progress,
    work_title,
)
from trainctl.tui.text.styled_line import clean, groups, line, plain

_POLICY_COLUMNS, _COMPUTE_COLUMNS = 100, 69
"""Most columns of a line with policies, or with what ranks resolved, without its heading."""


def table(header: Sequence[str], rows: Iterable[Sequence[str]], right: str | Sequence[str] = "") -> str:
    """Columns two spaces apart; names in `right` (separated by spaces, or a sequence) are right-aligned."""
    rights = right.split() if isinstance(right, str) else right
    cells = [list(header), *([one_line(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    laid = [str.rjust if name in rights else str.ljust for name in header]
    rows_of_parts = ([lay(cell, width) for lay, cell, width in zip(laid, row, widths, strict=True)] for row in cells)
    return "\n".join("  ".join(parts).rstrip() for parts in rows_of_parts)


def time_of_day(at: float, form: str = "%H:%M:%S", none: str = "--:--:--") -> str:
    """Return a Unix time as local 14:31:07, or `none` if there is no time."""
    when = fmt.moment(at, None)
    return when.strftime(form) if when is not None else none


def date_and_time(at: float) -> str:
    """Return a Unix time as local 2026-11-20 14:31."""
    return time_of_day(at, "%Y-%m-%d %H:%M", fmt.NA)


def runs_table(runs: Sequence[RunSummary]) -> str:
    """Return the output of `trainctl ls`."""
    rows = [
        (
            _titled(run),
            f"{run.state}{'?' if run.stale else ''}{' SIMULATED' if run.simulated else ''}",
            f"{run.step:,}/{fmt.count(run.steps)}",
            fmt.count(run.global_batch),
            fmt.loss(run.last_loss),
            _spent(run),
            fmt.space(run.size_bytes),
            run.lead or fmt.NA,
            date_and_time(run.started_at),
            run.directory,
        )
        for run in runs
    ]
    header = ("RUN", "STATE", "STEP", "BATCH", LAST_LOSS.label.upper(), "COST", "SPACE", "LEAD", "STARTED", "DIRECTORY")
    return table(header, rows, right=("STEP", "BATCH", LAST_LOSS.label.upper(), "COST", "SPACE"))


def _titled(run: RunSummary) -> str:
    """Return the run's id, with its name if that isn't how the id begins."""
    return run.run if run.run.startswith(run.name) else f"{run.run} ({run.name})"


def _spent(run: RunSummary) -> str:
    if run.cost is None:
        return fmt.NA
    found = figures(run.cost, time.time(), None, None)
    return cost_amount(found, found.spent)


def status_text(
    snapshot: Snapshot,
    hosts: Mapping[str, HostReading] | None = None,
    viewers: Sequence[Viewer] = (),
    works: Sequence[WorkSummary] = (),
) -> str:
    """Return the output of `trainctl status`: the run, its last step, ranks, separate work, machines and clients.
    `hosts` are the other nodes' machines."""
    run = snapshot.run
    machines = [
        *_work_lines(works),
        *_host_lines(snapshot.node.host),
        *_peer_lines(snapshot.peers, hosts or {}),
        *_viewer_lines(viewers),
    ]
    if run is None:
        errors = [event_line(event) for event in snapshot.events if event.severity == "error"]  # its record is damaged
        return "\n".join([*(errors or [f"no run on {snapshot.node.node} yet"]), *machines])
    why = f": {one_line(run.reason)}" if run.reason else ""
    origin = "  SIMULATED" if run.simulated else ""
    lines = [
        f"run        {run.run}  {run.state.upper()}{origin}{why}",
        f"step       {run.step:,}/{fmt.count(run.steps)} ({fmt.percent(run.step / run.steps if run.steps else None)})"
        f"  lead {run.lead}  {_engine(run)}  {run.generation}",
        f"{LAST_STEP.label}  {_last_step(run, snapshot.last_step)}",
        *_evaluation_lines(run),
        f"rates      {plain(groups(rate_pieces(run_rates(run, snapshot.last_step)), 200))}",
        *_left_lines(snapshot),
        *_cost_lines(snapshot, [*_own_host(snapshot), *(hosts or {}).values()]),
        f"plan       {_plan(run)}global batch {fmt.count(run.global_batch)}  "
        f"learning rate {fmt.scientific(run.learning_rate)}",
        *_pass_lines(run.ranks),
        *_compute_lines(run.ranks),
        *_policy_lines(run.policies),
        *_skip_lines(run.skipped),
        *([f"branch     of {run.branch.run} at step {run.branch.step:,}"] if run.branch is not None else []),
        f"directory  {run.directory}",
        *machines,
        *_alert_lines(snapshot.alerts),
        "",
        ranks_table(run.ranks, snapshot.rank_steps, run.global_batch),
        *_straggler_lines(run),
    ]
    return "\n".join(lines)


def _left_lines(snapshot: Snapshot) -> list[str]:
    """Return the time left of a run under way, when it ends, and its best and worst case."""
    assert snapshot.run is not None
    rates = run_rates(snapshot.run, snapshot.last_step)
    if rates.seconds_left is None:
        return []
    span = fmt.span(rates.seconds_left_best, rates.seconds_left_worst)
    return [f"time left  {fmt.eta(rates.seconds_left, snapshot.at)}{f' ({span})' if span else ''}"]


def _own_host(snapshot: Snapshot) -> list[HostReading]:
    return [snapshot.node.host] if snapshot.node.host is not None else []


def _cost_lines(snapshot: Snapshot, hosts: Sequence[HostReading]) -> list[str]:
    """Return what the run costs, and its energy; no line without a price."""
    run, last = snapshot.run, snapshot.last_step
    spent = figures_of(snapshot)
    if run is None or spent is None:
        return []
    words = run_lines.run_energy(hosts, run, last.cursor if last is not None else run.cursor)
    active = run.state in ACTIVE_RUN_STATES
    pieces = cost_pieces(spent, run.sample_unit, active=active, energy=words)
    return [f"cost       {plain(groups(pieces, 200)).removeprefix('cost ')}"]


def figures_of(snapshot: Snapshot) -> CostFigures | None:
    """Return what the run costs by the agent's clock; None without a price."""
    run, last = snapshot.run, snapshot.last_step
    return cost_figures(run, last, snapshot.at, run_rates(run, last).seconds_left) if run is not None else None


def energy_of(snapshot: Snapshot, hosts: Mapping[str, HostReading]) -> run_lines.EnergyFigures | None:
    """Return what the run's machines have used; None without a run."""
    run, last = snapshot.run, snapshot.last_step
    if run is None:
        return None
    cursor = last.cursor if last is not None else run.cursor
    return run_lines.energy_figures([*_own_host(snapshot), *hosts.values()], run, cursor)


def _work_lines(works: Sequence[WorkSummary]) -> list[str]:
    """Separate work that is in progress: what, how far, and each node."""
    lines = []
    for work in works:
        if work.is_active:
            lines.append(f"work       {plain(groups([line(work_title(work)), *work_progress(work)], 200))}")
            lines.append(f"           {plain(groups(work_nodes(work), 200))}".rstrip())
    return lines


def _engine(run: RunView) -> str:
    """Return the engine that sums its gradients; for another program's run, its kind."""
    return f"engine {run.engine}{' (mixed)' if run.mixed else ''}" if run.kind == "hosted" else run.kind


def _plan(run: RunView) -> str:
    return f"version {run.plan_version}  " if run.kind == "hosted" else ""


def _compute_lines(ranks: Sequence[RankView]) -> list[str]:
    """Return what the ranks resolved, and by which versions; none where that isn't known."""
    found = {"computing": run_lines.compute_settings, "versions": run_lines.library_versions}
    return [
        f"{'' if number else label:<11}{plain(row)}"
        for label, of in found.items()
        for number, row in enumerate(run_lines.compute_rows(ranks, _COMPUTE_COLUMNS, of))
    ]


def _policy_lines(policies: Sequence[PolicyView]) -> list[str]:
    """Return what the run decides by itself; none where that isn't known."""
    words = "  ".join(f"{view.name}={view.mode}" for view in policies)
    lines = textwrap.wrap(words, _POLICY_COLUMNS, break_on_hyphens=False)
    return [f"{' ' * 11 if number else 'policies   '}{text.replace('=', ' ')}" for number, text in enumerate(lines)]


def _skip_lines(skipped: Sequence[tuple[int, int]]) -> list[str]:
    """Positions that the run doesn't train on."""
    parts = [f"{start:,} to {start + count - 1:,}" for start, count in skipped]
    return [f"skipped    positions {', '.join(parts)}: not trained on, by rollback"] if parts else []


def alerts_table(alerts: Sequence[AlertView]) -> str:
    """Return the output of `trainctl alerts`: urgent alerts first, then newest first."""

    def held(alert: AlertView) -> str:
        by = alert.acknowledged_by
        return f"acknowledged by {by}" if by is not None else "muted" if alert.muted else "open"

    ordered = sorted(alerts, key=lambda alert: (held(alert) != "open", -alert.raised_at))
    rows = [
        (alert.id, alert.severity, date_and_time(alert.raised_at), held(alert), f"{alert.node} {alert.text}")
        for alert in ordered
    ]
    return table(("ID", "SEVERITY", "SINCE", "STATE", "WHAT"), rows)


def _alert_lines(alerts: Alerts | None) -> list[str]:
    """Return the alerts that call for somebody, a line each."""
    return [
        f"alert      since {time_of_day(alert.raised_at)}  {one_line(f'{alert.node} {alert.text}')}"
        for alert in (alerts.alerts if alerts is not None else ())
        if alert.acknowledged_by is None and not alert.muted
    ]


def ranks_table(ranks: Sequence[RankView], parts: Sequence[RankStep], global_batch: int | None) -> str:
    """Return a row for each rank: share, own rate, wait for slower ranks and for the plan, and how long it has been
    out."""
    newest = {part.rank: part for part in parts}
    waited = waits(same_step(ranks, parts))
    rows = [_rank_row(rank, newest.get(rank.rank), waited.get(rank.rank), global_batch) for rank in ranks]
    header = ("RANK", "NODE", "STATE", "SHARE", "PART", "MICRO", "OWN T/S", "STEP", "WAIT", "MEM GB", "BACKEND", "WHY")
    return table(header, rows, right="RANK SHARE PART MICRO STEP WAIT")


def devices_table(snapshot: Snapshot, hosts: Mapping[str, HostReading]) -> str:
    """Format what each rank computes on and by, or what GPUs the machines have where there is no run."""
    machines = {host.node: host for host in (*hosts.values(), *_own_host(snapshot))}
    if snapshot.run is None:
        rows = [(node, fmt.NA, _gpu_names(host) or "none") for node, host in machines.items()]
        return table(("NODE", "GPU USED", "GPU"), rows)
    ranks = [_device_row(rank, machines.get(rank.node)) for rank in snapshot.run.ranks]
    return table(("NODE", "GPU USED", "DEVICE", "LIBRARY", "ATTENTION", "PRECISION", "COMPILER"), ranks)


def _device_row(rank: RankView, host: HostReading | None) -> tuple[str, ...]:
    compute = rank.compute
    versions = dict(compute.versions) if compute is not None else {}
    device, library = rank.device or "", rank.backend or ""
    head = rank.node, _gpu_used(device, versions, host), device or fmt.NA
    if compute is None:
        return (*head, library or fmt.NA, fmt.NA, fmt.NA, fmt.NA)
    tf32 = ", TF32" if compute.tf32 and compute.dtype == "float32" else ""
    weights = f", weights {compute.weights}" if compute.weights not in ("", compute.dtype) else ""
    precision = f"{compute.dtype}{tf32}{weights}"
    return (
        *head,
        f"{library} {versions.get(library, '')}".rstrip(),
        compute.attention or fmt.NA,
        precision,
        compute.compile,
    )


def _gpu_used(device: str, versions: Mapping[str, str], host: HostReading | None) -> str:
    """Return whether a rank's device is a GPU, and the one that it leaves idle if it is none."""
    if not device:
        return fmt.NA
    if device.startswith("cuda") or (device.startswith("gpu") and "cuda" in versions):
        return "yes (CUDA)"
    if not device.startswith("cpu"):
        return "yes (Metal)"
    names = _gpu_names(host)
    return f"no: {names} is idle" if names else "no: none here"


def _gpu_names(host: HostReading | None) -> str:
    return ", ".join(dict.fromkeys(gpu.name for gpu in host.gpus)) if host is not None else ""


def step_line(step: StepCommitted, run: RunView | None = None) -> str:
    """Return a committed step as a line of `trainctl watch`. Its rate is the whole run's."""
    skipped = f"  skipped: {one_line(step.skipped)}" if step.skipped else ""
    return (
        f"{time_of_day(step.committed_at)}  step {step.step:,}  loss {fmt.loss(step.loss)}  "
        f"|g| {fmt.loss(step.grad_norm)}  lr {fmt.learning_rate(step.learning_rate)}  "
        f"{fmt.seconds(step.step_seconds)}  {_rate(step, run)}{skipped}"
    )


def plan_line(at: float, plan: StepPlan) -> str:
    """Return a plan as a line: its time (Unix seconds), version, step and commands."""
    carried = f", carries {', '.join(plan.commands)}" if plan.commands else ""
    made = f"plan v{plan.plan_version} in generation {plan.generation}"
    return f"{time_of_day(at)}  {made}: {plan.kind} at step {plan.step:,}{carried}"


def event_line(event: Event) -> str:
    """Return an event as a line: time, who caused it, and its text."""
    mark = f"{event.severity.upper()} " if event.severity in ("warning", "error") else ""
    return clean(f"{time_of_day(event.at)}  {mark}{event.by or 'auto'}  {run_events.event_words(event)}").rstrip()


def sample_line(sample: Sample) -> str:
    """Return a prompt and the model's answer as a line."""
    prompt, answer = one_line(sample.prompt), one_line(sample.answer)
    return f"{time_of_day(sample.at)}  sample at step {sample.step:,}  {prompt} → {answer}"


def reply_line(verb: str, reply: CommandReply, node: str | None = None) -> str:
    """Return how a command ended: its node and the step it took effect at, or why it failed."""
    if reply.state == "applied":
        at = f" at step {reply.step:,}" if reply.step is not None else ""
        change = f": {reply.before} → {reply.after}" if reply.before is not None and reply.after is not None else ""
        change = f": {reply.after}" if verb == "evaluate" and reply.after else change
        change = f": {reply.after} (no change: already set)" if change and reply.before == reply.after else change
        if node and change and f"{node}=" not in change:
            change = change.replace(": ", f": {node} ", 1)
        return one_line(f"{verb} applied{at}{change}")
    if reply.state == "accepted":
        return f"{verb} accepted, id {reply.id}"
    field = f"{reply.field}: " if reply.field and not reply.reason.startswith(f"{reply.field}:") else ""
    return one_line(f"{verb} {reply.state}: {field}{reply.reason or 'no reason given'}")


def _precision(compute: Compute | None) -> str:
    """Return what a rank computes in, unless that is float32."""
    return "" if compute is None or compute.dtype == "float32" else compute.dtype


def _passes(rank: RankView) -> int:
    """Return the passes in which a rank runs its share, and accumulates their gradients; 0: not known."""
    return -(-rank.share // rank.micro_batch) if rank.micro_batch and rank.share else 0


def _pass_lines(ranks: Sequence[RankView]) -> list[str]:
    """Explain the column MICRO, where a step has several passes."""
    several = [f"{one_line(rank.node)} {_passes(rank)} of {rank.micro_batch}" for rank in ranks if _passes(rank) > 1]
    words = textwrap.wrap(", ".join(several), _COMPUTE_COLUMNS)
    return [f"passes     a step accumulates gradients over passes: {words[0]}", *words[1:]] if words else []


def _rank_row(rank: RankView, part: RankStep | None, waited: float | None, global_batch: int | None) -> tuple[str, ...]:
    backend = " ".join(word for word in (rank.backend, rank.device, _precision(rank.compute)) if word)
    micro = f"{rank.micro_batch}x{_passes(rank)}" if _passes(rank) else fmt.NA
    share = fmt.percent(rank.share / global_batch if global_batch and rank.share is not None else None)
    head = (str(rank.rank), rank.node, rank.state, fmt.count(rank.share), share, micro)
    out = rank.is_silent
    why = f"since {time_of_day(rank.since_at)}{f': {rank.why}' if rank.why else ''}" if rank.why or out else ""
    if part is None or out:
        return (*head, fmt.NA, fmt.NA, fmt.NA, fmt.NA, backend or fmt.NA, why)
    wait = fmt.seconds(None if waited is None else part.phases.wait + waited)
    memory = fmt.used_of(part.peak_or_held_bytes, part.memory_cap_bytes)
    own, step = fmt.count(part.own_tokens_per_second), fmt.seconds(part.step_seconds)
    return (*head, own, step, wait, memory, backend or fmt.NA, why)


def _straggler_lines(run: RunView) -> list[str]:
    """Return who the others wait for, and why."""
    slow = run.straggler
    if slow is None:
        return []
    waited, excess = fmt.seconds(slow.waited_seconds), fmt.seconds(slow.excess_seconds)
    return ["", f"straggler  {slow.node}: the others wait {waited} for it in each step; +{excess} in {slow.phase}"]


def _last_step(run: RunView, last: StepCommitted | None) -> str:
    if last is None:
        return "none committed yet"
    return (
        f"loss {fmt.loss(last.loss)}  |g| {fmt.loss(last.grad_norm)}  "
        f"{fmt.seconds(last.step_seconds)} a step  {_rate(last, run)}"
    )


def _evaluation_lines(run: RunView) -> list[str]:
    if run.eval_loss is None:
        return []
    perplexity = f" (perplexity {run.perplexity:.4g})" if run.perplexity is not None else ""
    return [f"evaluation loss {fmt.loss(run.eval_loss)} @{run.eval_step or 0:,}{perplexity}"]


def _rate(step: StepCommitted, run: RunView | None) -> str:
    metric, unit = (run.rate_metric, run.rate_unit) if run is not None else ("tokens_per_second", "tokens/s")
    samples = METRICS["samples_per_second"].of(step)
    also = f", {samples:.3g} samples/s" if metric == "tokens_per_second" and samples is not None else ""
    return f"{fmt.rate(METRICS[metric].of(step))} {one_line(fmt.short_unit(unit))}{also}"


def _host_lines(host: HostReading | None) -> list[str]:
    if host is None:
        return []
    cpu = fmt.NA if host.cpu_percent is None else f"{host.cpu_percent:.0f}%"
    memory = fmt.used_of(host.memory_used_bytes, host.memory_total_bytes)
    disk = fmt.used_of(host.disk_free_bytes, host.disk_total_bytes)
    return [f"host       {host.node}  cpu {cpu}  memory {memory} GB  disk free {disk} GB"]


def _viewer_lines(viewers: Sequence[Viewer]) -> list[str]:
    """`attached   anna since 14:02, cron since 14:20 (read-only)`; no line where nobody is."""
    clients = [
        f"{one_line(viewer.by) or '?'} since {time_of_day(viewer.since_at)}{' (read-only)' if viewer.read_only else ''}"
        for viewer in viewers
    ]
    return [f"attached   {', '.join(clients)}"] if clients else []


def _peer_lines(peers: Sequence[PeerView], hosts: Mapping[str, HostReading]) -> list[str]:
    """Return the other nodes: their machines, or since when and why their agents aren't heard."""
    made = []
    for peer in peers:
        if peer.node in hosts:
            made += _host_lines(hosts[peer.node])
        elif peer.state == "connected":
            made.append(f"host       {peer.node}  its agent doesn't answer at {peer.address}")
        else:
            why = f": {one_line(peer.why)}" if peer.why else ""
            since = f" since {time_of_day(peer.since_at)}" if peer.since_at > 0 else ""
            made.append(f"host       {peer.node}  {peer.state}{since}{why}")
    return made
