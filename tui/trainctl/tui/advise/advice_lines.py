"""The advice as lines of at most 80 columns for a terminal: first the answer, then what it is chosen from. Pure."""

import textwrap
from collections.abc import Iterable, Iterator, Sequence

from trainctl.protocol.advice.advice import Advice, BatchSize, PlanChange
from trainctl.protocol.advice.advice_facts import PlannedRun
from trainctl.protocol.advice.checklist import Check
from trainctl.protocol.advice.memory_fit import MemoryFit
from trainctl.protocol.advice.plans import Plan
from trainctl.tui.text.formatting import NA, compact, count, duration, gigabytes, money, percent, seconds, span

WIDTH = 80
SHOWN_PLANS = 12
"""Plans that the table has at most; `--json` has all."""
LONGEST_NAMES = 16
"""Characters for the names of a plan's nodes; of more nodes, only their number is said."""
Row = tuple[str, ...]


def advice_lines(advice: Advice, run: PlannedRun, notes: Sequence[str]) -> list[str]:
    """Return all lines of the advice. Blank lines separate the parts."""
    parts = (
        _answer(advice, run),
        _speeds(advice, run),
        _durations(advice, run),
        _changes(advice),
        _sizes(advice),
        _checks(advice.checklist),
        _variables(advice),
        _notes(advice, notes),
    )
    return [line for part in parts if part for line in ("", *part)][1:]


def _answer(advice: Advice, run: PlannedRun) -> list[str]:
    found = advice.answer
    if found is None:
        if any(plan.fits is False for plan in advice.plans):
            return ["No node can do this run: none has enough memory."]
        if run.flops is None:
            return _wrapped(
                "No node's speed is known, nor the model's sizes. Run trainctl calibrate first, or put the model on "
                "this machine to estimate it."
            )
        return ["No node is known. Run trainctl calibrate first."]
    how = "alone" if found.mode == "alone" else "in step"
    time = f"{duration(found.expected_seconds)} ({span(found.best_seconds, found.worst_seconds)})"
    lines = _wrapped(f"Train on {_listed(found.nodes)} {how}: {_rate(found)} {run.unit}/s, {time}.")
    if found.smaller:
        lines += _wrapped(f"The micro-batch that {_listed([*found.smaller])} would begin with is too large:")
    if found.smaller or any(plan.nodes[0] not in found.nodes for plan in advice.plans if plan.mode == "alone"):
        lines.append(f"  {_command(found, run, found.nodes)}")
    apart = advice.independent
    if (
        apart is not None
        and apart.mode == "separate"
        and (apart.samples_per_second or 0) > (found.samples_per_second or 0)
    ):
        in_step = next((plan for plan in advice.plans if plan.mode == "sync" and plan.nodes == apart.nodes), None)
        against = f", against {_rate(in_step)} in step" if in_step is not None and in_step.samples_per_second else ""
        text = f"Several runs: use {_listed(apart.nodes)} separately: {_rate(apart)} {run.unit}/s{against}."
        lines += [*_wrapped(text), *(f"  {_command(apart, run, [name])}" for name in apart.nodes)]
    if advice.scoring is not None:
        mark = "~" if advice.scoring.source == "estimated" else ""
        rate = f"{mark}{advice.scoring.rows_per_second:,.3g}"
        lines += _wrapped(f"Scoring on {_listed([*advice.scoring.nodes])}: {rate} rows/s of full length.")
    return lines


def _command(plan: Plan, run: PlannedRun, nodes: Sequence[str]) -> str:
    """Return the command that starts the plan's part on these of its nodes, and on no others."""
    settings = [f"nodes.{name}.micro={size}" for name, size in plan.smaller.items() if name in nodes]
    return run.command(*settings, nodes=nodes)


# ---------------------------------------------------------------- tables


def _speeds(advice: Advice, run: PlannedRun) -> list[str]:
    if all(plan.source == "unknown" for plan in advice.plans):
        return []
    header = ("NODES", "MODE", "MEMORY GB", "STEP", f"{run.unit.upper()}/S", "TOK/S", "EFF", "SENT", "SUM")
    rows = [
        (
            _names(plan),
            plan.mode,
            _memory(plan),
            seconds(plan.step_seconds),
            _rate(plan),
            compact(plan.tokens_per_second),
            percent(plan.efficiency),
            _size(plan.sent_bytes),
            seconds(plan.sum_seconds),
        )
        for plan in advice.plans[:SHOWN_PLANS]
    ]
    left = len(advice.plans) - len(rows)
    return [*_table(header, rows, 2), *([f"and {left} slower ones: --json has all"] if left else ())]


def _durations(advice: Advice, run: PlannedRun) -> list[str]:
    rows: list[Row] = [
        (
            _names(plan),
            plan.mode,
            duration(plan.expected_seconds),
            duration(plan.best_seconds),
            duration(plan.worst_seconds),
            _cost(plan, run.currency),
            _energy(plan.energy_kwh),
        )
        for plan in advice.plans[:SHOWN_PLANS]
        if plan.can_run
    ]
    reference = advice.reference
    if reference is not None:
        time, energy = duration(reference.expected_seconds), _energy(reference.energy_kwh)
        rows.append((reference.name, "~sync", time, NA, NA, NA, energy))
    lines = _table(("NODES", "MODE", "TIME", "BEST", "WORST", "COST", "ENERGY"), rows, 2) if rows else []
    if reference is not None:
        rate = f"~{reference.samples_per_second:.3g} {run.unit}/s"
        short = "; too little memory for this model" if reference.fits is False else ""
        lines += _wrapped(f"{reference.name}, for comparison: {rate}; {reference.assumed}{short}.")
    return lines


def _table(header: Row, rows: Iterable[Row], left: int) -> list[str]:
    """Align the first `left` columns to the left, the others to the right."""
    cells = [header, *rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    return ["  ".join(_aligned(row, widths, left)).rstrip() for row in cells]


def _aligned(row: Row, widths: Sequence[int], left: int) -> Iterator[str]:
    for column, (cell, width) in enumerate(zip(row, widths, strict=True)):
        yield cell.ljust(width) if column < left else cell.rjust(width)


def _names(plan: Plan) -> str:
    whole = "+".join(plan.nodes)
    if len(plan.nodes) > 1 and len(whole) > LONGEST_NAMES:
        more = f"+{len(plan.nodes) - 1} more"
        return f"{plan.nodes[0][: LONGEST_NAMES - len(more)]}{more}"
    return whole[:LONGEST_NAMES]


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _memory(plan: Plan) -> str:
    """Return what the node, or the machine that nodes share, with the least to spare needs and has, or what is
    missing."""
    known = [one for one in (*plan.memory, *plan.shared_memory) if one.spare_bytes is not None]
    if not known:
        return NA
    worst = min(known, key=lambda one: one.spare_bytes or 0)
    return f"lacks {gigabytes(-(worst.spare_bytes or 0))}" if worst.fits is False else _used(worst)


def _used(fit: MemoryFit) -> str:
    mark = "~" if fit.source == "estimated" else ""
    return f"{mark}{gigabytes(fit.needed_bytes)}/{gigabytes(fit.cap_bytes)}"


def _rate(plan: Plan) -> str:
    if plan.samples_per_second is None:
        return NA
    is_estimate = plan.source == "estimated" or not plan.link_measured
    rate = plan.samples_per_second
    return f"{'~' if is_estimate else ''}{rate:,.2f}" if rate < 99.5 else f"{'~' if is_estimate else ''}{count(rate)}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.3g}"


def _size(value: float | None) -> str:
    if value is None:
        return NA
    return f"{value / 1e9:.3g} GB" if value >= 1e8 else f"{value / 1e6:.3g} MB"


def _cost(plan: Plan, currency: str) -> str:
    """Return the cost, or the least that it can be where a node has no price."""
    return NA if plan.cost is None else f"{'>' if plan.unpriced else ''}{money(plan.cost, currency)}"


def _energy(kwh: float | None) -> str:
    return NA if kwh is None else f"{kwh:.3g} kWh"


# ---------------------------------------------------------------- lists


def _changes(advice: Advice) -> list[str]:
    lines = [line for batch_size in advice.batch_sizes for line in _wrapped(_batch(batch_size), "  ")]
    lines += [line for what_if in advice.what_ifs for line in _wrapped(_change(what_if), "  ")]
    lines += [line for need in advice.needs for line in _wrapped(need, "  ")]
    return ["What would change it", *lines] if lines else []


def _batch(size: BatchSize) -> str:
    reached = f"{_listed(size.nodes)} in step reach {size.efficiency:.0%} of their separate rates"
    if size.global_batch is None:
        return f"no global batch is large enough that {reached}"
    factor = round(size.efficiency / (1 - size.efficiency))
    product = f"{factor} R t = {_short(factor * size.rate_sum * size.sum_seconds)}"
    return (
        f"G >= {size.global_batch:,}: {reached} "
        f"({product}; R = {_short(size.rate_sum)}/s, t = {seconds(size.sum_seconds)})"
    )


def _change(change: PlanChange) -> str:
    part = f", {change.part_of_sum:.2f} of the nodes' sum" if change.part_of_sum is not None else ""
    answer = "; then this is the fastest" if change.beats_answer else ""
    needs = f" (needs {change.needs}, which trainctl doesn't have yet)" if change.needs else ""
    rate = f"{_short(change.samples_per_second)}/s on {_listed(change.nodes)}"
    return f"{change.change}: {change.gain:+.0%}, {rate}{part}{answer}{needs}"


def _sizes(advice: Advice) -> list[str]:
    by_method: dict[str, list[str]] = {}
    for model_size in advice.model_sizes:
        by_method.setdefault(model_size.method, []).append(f"{model_size.node} up to {model_size.up_to / 1e9:.3g} B")
    rows = [line for method, found in by_method.items() for line in _wrapped(f"{method}: {', '.join(found)}", "  ")]
    return ["Which node for which model size, in parameters; larger models need sharding", *rows] if rows else []


def _checks(checks: Sequence[Check]) -> list[str]:
    lines = ["Checklist"]
    for check in checks:
        lines += _wrapped(f"{check.state:<9}{check.name}: {check.text}", "  ", " " * 11)
        lines += [f"{'':11}{check.command}"] if check.command else []
    return lines if checks else []


def _variables(advice: Advice) -> list[str]:
    lines = ["Environment variables ([nodes.NAME] env)"]
    for variable in advice.variables:
        name = f"{variable.name}={variable.value}" if variable.value else variable.name
        lines += _wrapped(f"{variable.use:<11}{name}: {variable.text}", "  ", " " * 13)
    return lines if advice.variables else []


def _notes(advice: Advice, notes: Sequence[str]) -> list[str]:
    found = [note for plan in advice.plans if plan.source != "unknown" for note in plan.notes]
    links = [f"the link: {plan.link}" for plan in advice.plans if plan.link and not plan.link_measured]
    estimates = [line for note in dict.fromkeys(found + links) for line in _wrapped(note, "  ")]
    unknown = [f"{node} is unknown: {problem}" for node, problem in advice.unknown.items()]
    lines = [line for note in dict.fromkeys((*notes, *unknown)) for line in _wrapped(note)]
    return [*lines, *(["~ marks estimates:", *estimates] if estimates else [])]


def _wrapped(text: str, indent: str = "", following: str | None = None) -> list[str]:
    below = f"{indent}  " if following is None else following
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=below, break_long_words=False, break_on_hyphens=False
    )
