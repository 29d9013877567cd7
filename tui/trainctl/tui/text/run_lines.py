"""Figures of a run in words: their names on the screens, rates, cost, separate work, settings and energy."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from trainctl.protocol.batch import cost
from trainctl.protocol.config.objectives import PAIRS, SAMPLES
from trainctl.protocol.messages import (
    ACTIVE_RUN_STATES,
    Compute,
    HostReading,
    RankView,
    RunRates,
    RunView,
    StepCommitted,
    WorkSummary,
)
from trainctl.protocol.messages.event_prose import rank_label
from trainctl.tui.text.formatting import NA, compact, duration, figure, money, percent, seconds, span
from trainctl.tui.text.styled_line import Line, Piece, clean, flowed, line, width

LOSS_STEPS = 16
"""Steps that the average loss is the mean of."""
RATE_STEPS = 8
"""Steps that a recent rate is the median of."""


@dataclass(frozen=True)
class Figure:
    """`label` stands beside the figure."""

    label: str
    meaning: str


AVERAGE_LOSS = Figure("avg loss", f"mean of the last {LOSS_STEPS} steps; charts show each step's loss")
LAST_LOSS = Figure("last loss", "the last step's alone")
RECENT_RATE = Figure("recent", f"rates beside the loss and in tables: medians of the last {RATE_STEPS} steps")
AVERAGE_RATE = Figure("average", "rate since the run began, without its pauses")
LAST_STEP = Figure("last step", "the last step's alone, as in `trainctl status`")
EFFICIENCY = Figure("eff", "efficiency: the group's rate divided by the sum of the ranks' own rates")

FIGURES = (AVERAGE_LOSS, LAST_LOSS, RECENT_RATE, AVERAGE_RATE, LAST_STEP, EFFICIENCY)
WORDS = (
    Figure("micro", "8×3: micro-batch 8, so the rank's share takes three passes"),
    Figure("own t/s", "tokens / (data + forward + backward): the rank's own speed"),
    Figure("SLOW", "the others wait for it; its slow phase is in capitals"),
    Figure("n/a", "unknown; an old value is dimmed and shows its age"),
    Figure("7  12", "commands that were applied, numbered in charts and events"),
    Figure("g1.4", "generation: the group's fourth formation under its first lead"),
    Figure("parent", "a trainer's parent process: it outlives the agent and records how the trainer ended"),
    Figure("spare", "a process that is ready for the group's next formation"),
)
PROCESS_NAMES = {"keeper": "parent", "standby": "spare"}
"""Roles of processes that have another name on the screens."""


# ---------------------------------------------------------------- rates


def rate_pieces(rates: RunRates, of: Figure = LAST_STEP) -> list[Line]:
    """Return the most important first: the average, then what is `of` the last step or of recent ones."""
    average, unit = compact(rates.average_per_second), clean(rates.unit)
    samples = samples_of(rates.unit)
    return [
        line(Piece(f"{AVERAGE_RATE.label} ", "label"), Piece(average, "strong"), Piece(f" {unit}", "label")),
        line(Piece(f"{of.label} ", "label"), _few(rates.steps_per_second), Piece(" steps/s", "label")),
        line(_few(rates.samples_per_second), Piece(f" {samples}/s", "label")),
        line(seconds(rates.seconds_per_sample), Piece(f" per {samples.removesuffix('s')}", "label")),
        line(duration(rates.seconds_per_epoch), Piece(" per epoch", "label")),
        line(figure(rates.epochs_left, "{:.2f}"), Piece(" epochs left", "label")),
    ]


def time_left(rates: RunRates) -> Line:
    """Return `left 1h 42m (1h 36m to 1h 55m)`; nothing of a run that has ended, or whose end isn't known."""
    if rates.seconds_left is None:
        return ()
    reach = span(rates.seconds_left_best, rates.seconds_left_worst)
    return line(Piece("left ", "label"), duration(rates.seconds_left), Piece(f" ({reach})" if reach else "", "dim"))


def samples_of(unit: str) -> str:
    """Return the name of the samples of a run with this unit of its rate."""
    return PAIRS if unit == f"{PAIRS}/s" else SAMPLES


def _few(value: float | None) -> str:
    return figure(value, "{:.2f}") if value is None or value < 9.995 else compact(value)


# ---------------------------------------------------------------- cost

_MOST_NAMES = 3
"""Nodes without a price that are named."""


def cost_figures(
    run: RunView, last: StepCommitted | None, now: float, seconds_left: float | None
) -> cost.CostFigures | None:
    """Return the cost figures at `now`, in Unix seconds; None for a run without a price."""
    if run.cost is None:
        return None
    samples = run.trained(last.cursor if last is not None else run.cursor)
    return cost.figures(run.cost, now, seconds_left, samples)


def cost_pieces(found: cost.CostFigures, samples: str, *, active: bool, energy: str) -> list[Line]:
    """Return the most important first. `samples`: what they are called; `active`: whether the run has an end to come;
    `energy`: what was used, in words, empty if that is not to be said."""
    each = Piece(f" per 1,000 {clean(samples)}", "label")
    return [
        cost_spent(found),
        *([line(cost_amount(found, found.to_end), Piece(" to the end", "label"))] if active else []),
        line(cost_amount(found, found.per_1000), each),
        *missing_prices(found),
        *([line(Piece("energy ", "label"), energy)] if energy else []),
    ]


def missing_prices(found: cost.CostFigures) -> list[Line]:
    """Return `no price: mbp`, where a node that took part has none."""
    names = [clean(node) for node in found.unpriced]
    more = [f"{len(names) - _MOST_NAMES} more"] if len(names) > _MOST_NAMES else []
    text = ", ".join([*names[:_MOST_NAMES], *more])
    return [line(Piece(f"no price: {text}", "warning"))] if names else []


def cost_spent(found: cost.CostFigures) -> Line:
    """Return `cost 12.40 USD`."""
    return line(Piece("cost ", "label"), Piece(cost_amount(found, found.spent), "strong"))


def cost_amount(found: cost.CostFigures, value: float | None) -> str:
    """Return `12.40 USD`, with a > where a node has no price, for what it costs is missing."""
    return f"{'>' if found.unpriced and value is not None else ''}{money(value, found.currency)}"


# ---------------------------------------------------------------- separate work

_ROLES = {"starting": "accent", "working": "good", "silent": "warning", "failed": "bad"}


def work_task(work: WorkSummary) -> str:
    """Return the work's kind and file: `score test.jsonl`."""
    kind = "score" if work.view.kind == "log-probabilities" else "answer"
    return f"{kind} {clean(work.file)}".rstrip()


def work_title(work: WorkSummary) -> str:
    """Return the work's kind and file with the checkpoint that is used."""
    return f"{work_task(work)} with {clean(work.view.run)} step {work.view.checkpoint:,}"


def work_progress(work: WorkSummary) -> list[Line]:
    """Return the most important first."""
    view = work.view
    rows = f"{view.answered:,}/{view.rows:,}"
    lines = [
        line(rows, Piece(" rows", "label"), f" {percent(view.answered / view.rows)}"),
        _outlook(work),
        line(f"{compact(work.rows_per_second)}", Piece(" rows/s", "label")),
        line(Piece("slices ", "label"), f"{work.slices_answered:,} of {work.slices:,} dealt"),
    ]
    return lines if work.is_active else lines[:2]


def _outlook(work: WorkSummary) -> Line:
    view = work.view
    if view.state == "receiving":
        return line(Piece(f"receiving rows: {view.received_bytes:,} bytes", "accent"))
    if work.is_active:
        return line(Piece("ETA ", "label"), duration(work.seconds_left))
    reason = f": {clean(view.reason)}" if view.reason else ""
    return line(Piece(f"{view.state.upper()}{reason}", "bad" if view.state == "failed" else "label"))


def work_nodes(work: WorkSummary) -> list[Line]:
    """Return each node, with its speed or the reason why it doesn't work."""
    return [
        line(
            Piece(f"{clean(node.node)} ", "label"),
            f"{compact(node.rows_per_second)} rows/s"
            if node.state == "working"
            else Piece(f"{node.state}{f': {clean(node.why)}' if node.why else ''}", _ROLES[node.state]),
        )
        for node in work.view.nodes
    ]


def compute_settings(compute: Compute) -> dict[str, str]:
    """Return the settings by name; `weights` is the form of the trained ones. What isn't known, or the device doesn't
    have, is left out."""
    found = {
        "dtype": compute.dtype,
        "weights": compute.weights,
        "tf32": _switch(compute.tf32),
        "compile": compute.compile,
        "attention": compute.attention,
        "deterministic": _switch(compute.deterministic),
        "cudnn_benchmark": _switch(compute.cudnn_benchmark),
        "update": compute.update,
    }
    return {name: clean(value) for name, value in found.items() if value}


def library_versions(compute: Compute) -> dict[str, str]:
    """Return the versions of the libraries that a rank computes with, by name."""
    return {clean(name): clean(version) for name, version in compute.versions}


def _switch(value: bool | None) -> str:
    return "" if value is None else "on" if value else "off"


def setting_pieces(found: dict[str, str]) -> list[Line]:
    """Return a group of words for each setting."""
    return [line(Piece(f"{name} ", "label"), value) for name, value in found.items()]


def compute_rows(
    ranks: Sequence[RankView], columns: int, of: Callable[[Compute], dict[str, str]] = compute_settings
) -> list[Line]:
    """Return what the ranks resolved, in lines of at most `columns` cells; ranks that differ are named."""
    alike: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for rank in ranks:
        if rank.compute is not None and (found := of(rank.compute)):
            name = rank_label(rank.node, rank.rank, (other.node for other in ranks))
            alike.setdefault(tuple(found.items()), []).append(clean(name))
    return [
        row
        for found, names in alike.items()
        for row in _compute_rows(dict(found), names if len(alike) > 1 else (), columns)
    ]


def _compute_rows(found: dict[str, str], names: Sequence[str], columns: int) -> list[Line]:
    groups = setting_pieces(found)
    if not names:
        return flowed(groups, columns)
    first = line(Piece(f"{', '.join(names)}: "), *groups[0])
    if width(first) <= columns:
        return flowed([first, *groups[1:]], columns)
    ends = [*"," * (len(names) - 1), ":"]
    named = [line(f"{name}{end}") for name, end in zip(names, ends, strict=True)]
    return [*flowed(named, columns, " "), *flowed(groups, columns)]


JOULES_PER_WATT_HOUR = 3600.0
GAP_PART = 0.01
"""Part of the time without a reading that is worth a word."""
BEGINNING_SECONDS = 60.0
"""Seconds from the run's beginning within which a machine's count must begin to be of the whole run."""


class EnergyFigures(msgspec.Struct, frozen=True):
    """Energy of a run's machines; None: unknown."""

    joules: float | None
    unread_seconds: float  # the longest time of a machine without power readings
    joules_per_1000: float | None  # per 1,000 samples or pairs, if power was read on all machines for the whole run


def energy_text(hosts: Iterable[HostReading], per_1000: float | None = None) -> str:
    """Return `61.5 Wh`, `over 61.5 Wh (12 min unread)`, with the joules per 1,000 samples `61.5 Wh (2.1 Wh per 1,000)`;
    n/a where no power is read."""
    counted = _counted(hosts)
    if not counted:
        return NA
    watt_hours = sum(host.energy_joules or 0.0 for host in counted) / JOULES_PER_WATT_HOUR
    missing = max(counted, key=lambda host: host.energy_gap_seconds)
    if not _is_read(missing):
        return f"over {_watt_hours(watt_hours)} ({duration(missing.energy_gap_seconds)} unread)"
    each = f" ({per_1000 / JOULES_PER_WATT_HOUR:.3g} Wh per 1,000)" if per_1000 is not None else ""
    return f"{_watt_hours(watt_hours)}{each}"


def readings_of(hosts: Iterable[HostReading], run: RunView) -> list[HostReading]:
    """Return the readings of the machines that take part; of a run that has ended only those whose count is surely its
    own."""
    nodes, active = {view.node for view in run.ranks}, run.state in ACTIVE_RUN_STATES
    return [host for host in hosts if host.node in nodes and (active or _began_with(host, run))]


def energy_figures(hosts: Iterable[HostReading], run: RunView, cursor: int | None) -> EnergyFigures:
    """Return the energy of the run's machines; `cursor`: the first position that the run has not come to yet."""
    own, samples = readings_of(hosts, run), run.trained(cursor)
    counted = _counted(own)
    joules = sum(host.energy_joules or 0.0 for host in counted) if counted else None
    whole = {host.node for host in counted if _is_read(host) and _began_with(host, run)}
    is_whole = joules is not None and whole == {view.node for view in run.ranks}
    return EnergyFigures(
        joules,
        max((host.energy_gap_seconds for host in counted), default=0.0),
        1000 * joules / samples if joules is not None and is_whole and samples else None,
    )


def run_energy(hosts: Iterable[HostReading], run: RunView, cursor: int | None) -> str:
    """Return the run's energy, and per 1,000 samples where that is known."""
    own = readings_of(hosts, run)
    return energy_text(own, energy_figures(own, run, cursor).joules_per_1000)


def _counted(hosts: Iterable[HostReading]) -> list[HostReading]:
    return [host for host in hosts if host.energy_joules is not None and host.energy_since_at is not None]


def _is_read(host: HostReading) -> bool:
    return host.energy_gap_seconds <= GAP_PART * max(0.0, host.read_at - (host.energy_since_at or 0.0))


def _began_with(host: HostReading, run: RunView) -> bool:
    return host.energy_since_at is not None and abs(host.energy_since_at - run.started_at) <= BEGINNING_SECONDS


def _watt_hours(value: float) -> str:
    return f"{value / 1000:.2f} kWh" if value >= 9995 else f"{value:,.0f} Wh" if value >= 99.95 else f"{value:.1f} Wh"
