"""A run's facts as the sections of a report. Pure."""

import datetime
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from trainctl.protocol.messages import PHASES, RunView
from trainctl.tui.report import setup_sections, svg_chart
from trainctl.tui.report.document import Block, Quotation, ReportPage, ReportSection, ReportTable, ReportText
from trainctl.tui.report.run_facts import HeldOutLoss, Incident, Intervention, InterventionKind, RankFacts, RunFacts
from trainctl.tui.screens import diagnosis_view
from trainctl.tui.text import formatting

_COUNTED: Final[dict[InterventionKind, tuple[str, str]]] = {
    "command": ("command", "commands"),
    "split": ("new split", "new splits"),
    "settings": ("change of settings", "changes of settings"),
    "membership": ("change of membership", "changes of membership"),
    "rollback": ("rollback", "rollbacks"),
    "state": ("change of the run's state", "changes of the run's state"),
    "note": ("note", "notes"),
}
"""One, and several."""
LEAST_SECONDS: Final = 0.001
"""A fault that kept the run from training for less has cost no time."""


def page(facts: RunFacts, *more: ReportSection) -> ReportPage:
    """Return all sections that have something to say, and then these."""
    filled = (ReportSection(title, tuple(blocks(facts))) for title, blocks in _SECTIONS.items())
    return ReportPage(f"Report of run {facts.run}", (*(section for section in filled if section.blocks), *more))


def when(at: float | None) -> str:
    """Return a time in UTC, so that a report reads the same everywhere."""
    found = formatting.moment(at, datetime.UTC) if at is not None else None
    return f"{found:%Y-%m-%d %H:%M:%S} UTC" if found is not None else formatting.NA


def _summary(facts: RunFacts) -> Iterator[Block]:
    yield ReportTable(("", ""), tuple((name, value) for name, value in _head(facts) if value))


def _head(facts: RunFacts) -> Iterator[tuple[str, str]]:
    view, last, rates = facts.view, facts.last, facts.rates
    if view is not None:
        yield "name", view.name
        yield "state", f"{view.state}{f': {view.reason}' if view.reason else ''}{_nature(view)}"
        yield "started", when(facts.started_at if facts.started_at is not None else view.started_at)
        if facts.first_at is not None and facts.first_at < view.started_at <= facts.read_to:
            yield "last resumed", when(view.started_at)
    yield "record read up to", when(facts.read_to) if facts.read_to else ""
    if last is None:
        yield "steps", "none was committed"
        return
    yield "steps", f"{last.step:,}{f' of {view.steps:,}' if view is not None and view.steps else ''}"
    yield "last loss", f"{formatting.loss(last.loss)} {view.loss_unit if view is not None else ''}".strip()
    if facts.held_out is not None:
        yield "held-out loss", _held_out(facts.held_out)
    yield "tokens", formatting.count(last.tokens_total or None)
    if rates is not None:
        yield "average rate", f"{formatting.rate(rates.average_per_second)} {rates.unit}"
    yield "efficiency", f"{formatting.percent(facts.efficiency)} of the ranks' time in steps was spent computing"
    yield "interventions", _counts(facts)
    yield "faults", f"{len(facts.incidents):,}"
    yield "checkpoints", f"{facts.checkpoints:,}"
    yield "cost", setup_sections.cost_words(facts)
    yield "energy", setup_sections.energy_words(facts)


def _nature(view: RunView) -> str:
    if view.simulated:
        return " (simulated: nothing was trained)"
    return " (a different program trained it)" if view.kind != "hosted" else ""


def _held_out(found: HeldOutLoss) -> str:
    best = f"; the lowest was {formatting.loss(found.best_loss)} at step {found.best_step:,}"
    return f"{formatting.loss(found.loss)} at step {found.step:,}{best if found.best_step != found.step else ''}"


def _changes(facts: RunFacts) -> list[Intervention]:
    """Interventions without faults and checkpoints, which are counted by themselves."""
    return [intervention for intervention in facts.interventions if intervention.kind not in ("checkpoint", "fault")]


def _counts(facts: RunFacts) -> str:
    kinds = [change.kind for change in _changes(facts)]
    counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
    return ", ".join(f"{count:,} {_COUNTED[kind][count != 1]}" for kind, count in counts.items()) or "none"


def _curves(facts: RunFacts) -> Iterator[Block]:
    yield from svg_chart.loss_charts(facts)


def _speed(facts: RunFacts) -> Iterator[Block]:
    yield from svg_chart.speed_charts(facts)
    rates = facts.rates
    if rates is not None and facts.last is not None:
        rows = (
            ("average since the start", f"{formatting.rate(rates.average_per_second)} {rates.unit}"),
            ("newest step", formatting.seconds(facts.last.step_seconds)),
            ("steps per second", formatting.figure(rates.steps_per_second, "{:.3g}")),
            ("samples per second", formatting.figure(rates.samples_per_second, "{:.3g}")),
            ("an epoch takes", _span(rates.seconds_per_epoch)),
        )
        yield ReportTable(("rate", ""), rows)


def _shares(facts: RunFacts) -> Iterator[Block]:
    yield from svg_chart.share_charts(facts)
    rows = [
        (
            f"{share.step:,}",
            f"{share.plan_version:,}",
            ", ".join(f"{name} {count:,}" for name, count in share.samples.items()),
        )
        for share in facts.shares
    ]
    if rows:
        yield setup_sections.table(("from step", "plan version", "samples of each step"), rows, right=(0, 1))


def _time(facts: RunFacts) -> Iterator[Block]:
    whole = sum(part.seconds for part in facts.time)
    rows = [(part.name, _span(part.seconds), _part(part.seconds, whole), part.detail) for part in facts.time]
    if rows:
        yield ReportTable(("where the time went", "time", "part", ""), tuple(rows), right=(1, 2))
    if facts.ranks:
        head = ("rank", *PHASES, "computing")
        phases = [(rank.name, *_phases(rank), formatting.percent(rank.busy)) for rank in facts.ranks]
        yield setup_sections.table(head, phases, right=tuple(range(1, len(head))), title="Phases of the ranks' steps")


def _phases(rank: RankFacts) -> Iterator[str]:
    whole = sum(rank.phases.values())
    for name in PHASES:
        yield f"{_span(rank.phases[name])} ({_part(rank.phases[name], whole)})"


def _span(seconds: float | None) -> str:
    """Return a duration; a short one with its fraction."""
    return formatting.seconds(seconds) if seconds is not None and seconds < 60 else formatting.duration(seconds)


def _part(seconds: float, whole: float) -> str:
    return f"{100 * seconds / whole:.1f}%" if whole > 0 else formatting.NA


def _faults(facts: RunFacts) -> Iterator[Block]:
    rows = [
        (f"{incident.step:,}", when(incident.at), "; ".join(incident.texts), _costs(incident))
        for incident in facts.incidents
    ]
    if rows:
        yield ReportText(_total(facts))
        yield setup_sections.table(("step", "time", "what happened", "what it cost"), rows, right=(0,))
    elif facts.last is not None:
        yield ReportText("The record has no fault.")
    steps = facts.steps_again - sum(one.steps_again for one in facts.incidents)
    if steps > 0:
        seconds = facts.seconds_again - sum(one.seconds_again for one in facts.incidents)
        made = "1 step was" if steps == 1 else f"{steps:,} steps were"
        yield ReportText(
            f"{made} made again or taken back without a fault ({_span(seconds)}): the run was resumed from an earlier "
            "step."
        )


def _total(facts: RunFacts) -> str:
    waited = sum(incident.waited_seconds or 0.0 for incident in facts.incidents)
    again = sum(one.seconds_again for one in facts.incidents)
    parts = [f"{_span(waited)} without training"] if waited > 0 else []
    parts += [f"{_span(again)} for steps that were made again"] if again > 0 else []
    if not parts:
        return "No fault cost time that was measured."
    whole = f"{_span(waited + again)} in all: " if len(parts) > 1 else ""
    return f"The faults cost {whole}{', and '.join(parts)}."


def _costs(incident: Incident) -> str:
    costs = (
        [f"{_span(incident.waited_seconds)} without training"]
        if (incident.waited_seconds or 0.0) >= LEAST_SECONDS
        else []
    )
    if incident.steps_again:
        steps = "1 step" if incident.steps_again == 1 else f"{incident.steps_again:,} steps"
        costs.append(f"{steps} made again ({_span(incident.seconds_again)})")
    if incident.rate_change is not None:
        until = f"until step {incident.back_step:,}" if incident.back_step is not None else "from then on"
        costs.append(f"the rate changed by {100 * incident.rate_change:+.1f} % {until}")
    return ", ".join(costs) or "no time that was measured"


def _interventions(facts: RunFacts) -> Iterator[Block]:
    rows = [_row(change) for change in _changes(facts)]
    if rows:
        yield setup_sections.table(
            ("step", "time", "kind", "by", "what changed", "effect on the rate"), rows, right=(0,)
        )


def _row(intervention: Intervention) -> tuple[str, ...]:
    return (
        f"{intervention.step:,}",
        when(intervention.at),
        svg_chart.NAMES[intervention.kind],
        intervention.by,
        intervention.text,
        intervention.effect,
    )


def _policies(facts: RunFacts) -> Iterator[Block]:
    rows = [
        (f"{policy.step:,}", policy.policy, "acted" if policy.acted else "advised", policy.text, policy.effect)
        for policy in facts.policies
    ]
    if rows:
        yield setup_sections.table(("step", "policy", "", "what and why", "measured effect"), rows, right=(0,))


def _diagnosis(facts: RunFacts) -> Iterator[Block]:
    found = facts.diagnosis
    steps = f"Steps {found.first_step:,} to {found.step:,}: " if found.step else ""
    yield ReportText(f"{steps}{diagnosis_view.verdict(found)}.")
    rows = [
        (
            finding.severity,
            finding.title,
            "; ".join(finding.evidence),
            finding.what_if.saying if finding.what_if is not None else "",
            "; ".join(
                f"{remedy.text}{f' ({remedy.command})' if remedy.command else ''}" for remedy in finding.remedies
            ),
        )
        for finding in found.findings
    ]
    if rows:
        yield setup_sections.table(("severity", "cause", "evidence", "what it costs", "what to do"), rows)


def _samples(facts: RunFacts) -> Iterator[Block]:
    for prompt, answers in itertools.groupby(facts.samples, lambda one: one.prompt):
        yield ReportText(f"Prompt: {setup_sections.cut(prompt)}")
        for answer in answers:
            yield Quotation(f"Step {answer.step:,}, on {answer.node}", setup_sections.cut(answer.answer))


_SECTIONS: Final[dict[str, Callable[[RunFacts], Iterable[Block]]]] = {
    "Summary": _summary,
    "Loss": _curves,
    "Speed and efficiency": _speed,
    "Shares": _shares,
    "Where the time went": _time,
    "Faults": _faults,
    "Interventions": _interventions,
    "Policies": _policies,
    "Diagnosis": _diagnosis,
    "Samples": _samples,
    "Ranks": setup_sections.ranks,
    "Recipe": setup_sections.recipe,
    "Lineage": setup_sections.lineage,
    "Cost and energy": setup_sections.money,
}
