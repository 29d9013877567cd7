"""A run's facts as the sections of a report. Pure."""

import datetime
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from trainctl.protocol import messages as m
from trainctl.tui.report import curve_charts, setup_sections
from trainctl.tui.report.document import (
    Block,
    Quotation,
    ReportPage,
    ReportSection,
    ReportTable,
    ReportText,
)
from trainctl.tui.report.run_facts import Incident, Intervention, RankFacts, RunFacts
from trainctl.tui.screens import diagnosis_view
from trainctl.tui.text import formatting as f


def page(facts: RunFacts) -> ReportPage:
    """All sections that have something to say."""
    made = ((title, tuple(blocks(facts))) for title, blocks in _SECTIONS.items())
    return ReportPage(f"Report of run {facts.run}", tuple(ReportSection(*one) for one in made if one[1]))


def when(at: float | None) -> str:
    """A time in UTC, so that a report reads the same everywhere."""
    found = f.moment(at, datetime.UTC) if at is not None else None
    return f"{found:%Y-%m-%d %H:%M:%S} UTC" if found is not None else f.NA


def _summary(facts: RunFacts) -> Iterator[Block]:
    yield ReportTable(("", ""), tuple((name, value) for name, value in _head(facts) if value))


def _head(facts: RunFacts) -> Iterator[tuple[str, str]]:
    view, last, rates = facts.view, facts.last, facts.rates
    if view is not None:
        yield "name", view.name
        yield "state", f"{view.state}{f': {view.reason}' if view.reason else ''}{_nature(view)}"
        yield "started", when(view.started_at)
    yield "record read up to", when(facts.read_to) if facts.read_to else ""
    if last is None:
        yield "steps", "none was committed"
        return
    yield "steps", f"{last.step:,}{f' of {view.steps:,}' if view is not None and view.steps else ''}"
    yield "last loss", f"{f.loss(last.loss)} {view.loss_unit if view is not None else ''}".strip()
    if view is not None and view.eval_loss is not None:
        yield "held-out loss", f"{f.loss(view.eval_loss)} at step {view.eval_step or 0:,}{_best(facts)}"
    yield "tokens", f.count(last.tokens_total)
    if rates is not None:
        yield "average rate", f"{f.rate(rates.average_per_second)} {rates.unit}"
    yield "efficiency", f"{f.percent(facts.efficiency)} of the ranks' time in steps was spent computing"
    yield "interventions", _counts(facts)
    yield "faults", f"{len(facts.incidents):,}"
    yield "cost", setup_sections.cost_words(facts)
    yield "energy", setup_sections.energy_words(facts)


def _nature(view: m.RunView) -> str:
    if view.simulated:
        return " (simulated: nothing was trained)"
    return " (a different program trained it)" if view.kind != "hosted" else ""


def _best(facts: RunFacts) -> str:
    losses = facts.curves["eval_loss"]
    if not losses.minimum:
        return ""
    loss, step = min(zip(losses.minimum, losses.steps, strict=True))
    return f"; the lowest was {f.loss(loss)} at about step {step:,}"


def _counts(facts: RunFacts) -> str:
    kinds = [one.kind for one in facts.interventions]
    return ", ".join(f"{kinds.count(kind):,} {curve_charts.NAMES[kind]}" for kind in dict.fromkeys(kinds)) or "none"


def _curves(facts: RunFacts) -> Iterator[Block]:
    yield from curve_charts.loss_charts(facts)


def _speed(facts: RunFacts) -> Iterator[Block]:
    yield from curve_charts.speed_charts(facts)
    rates = facts.rates
    if rates is not None and facts.last is not None:
        rows = (
            ("average since the start", f"{f.rate(rates.average_per_second)} {rates.unit}"),
            ("newest step", f.seconds(facts.last.step_seconds)),
            ("steps per second", f.figure(rates.steps_per_second, "{:.3g}")),
            ("samples per second", f.figure(rates.samples_per_second, "{:.3g}")),
            ("an epoch takes", _span(rates.seconds_per_epoch)),
        )
        yield ReportTable(("rate", ""), rows)


def _shares(facts: RunFacts) -> Iterator[Block]:
    yield from curve_charts.share_charts(facts)
    rows = [
        (
            f"{one.step:,}",
            f"{one.plan_version:,}",
            ", ".join(f"{name} {count:,}" for name, count in one.samples.items()),
        )
        for one in facts.shares
    ]
    if rows:
        yield setup_sections.table(("from step", "plan version", "samples of each step"), rows, right=(0, 1))


def _time(facts: RunFacts) -> Iterator[Block]:
    whole = sum(part.seconds for part in facts.time)
    rows = [(part.name, _span(part.seconds), _part(part.seconds, whole), part.detail) for part in facts.time]
    if rows:
        yield ReportTable(("where the time went", "time", "part", ""), tuple(rows), right=(1, 2))
    if facts.ranks:
        head = ("rank", *m.PHASES, "computing")
        phases = [(rank.name, *_phases(rank), f.percent(rank.busy)) for rank in facts.ranks]
        yield setup_sections.table(head, phases, right=tuple(range(1, len(head))), title="Phases of the ranks' steps")


def _phases(rank: RankFacts) -> Iterator[str]:
    whole = sum(rank.phases.values())
    for name in m.PHASES:
        yield f"{_span(rank.phases[name])} ({_part(rank.phases[name], whole)})"


def _span(seconds: float | None) -> str:
    """A duration; a short one with its fraction."""
    return f.seconds(seconds) if seconds is not None and seconds < 60 else f.duration(seconds)


def _part(seconds: float, whole: float) -> str:
    return f"{100 * seconds / whole:.1f}%" if whole > 0 else f.NA


def _faults(facts: RunFacts) -> Iterator[Block]:
    rows = [(f"{one.step:,}", when(one.at), "; ".join(one.texts), _costs(one)) for one in facts.incidents]
    if rows:
        waited = sum(one.waited_seconds or 0.0 for one in facts.incidents)
        again = sum(one.seconds_again for one in facts.incidents)
        yield ReportText(
            f"All faults cost {_span(waited + again)}: {_span(waited)} without training, and "
            f"{_span(again)} for steps that were made again."
        )
        yield setup_sections.table(("step", "time", "what happened", "what it cost"), rows, right=(0,))
    elif facts.last is not None:
        yield ReportText("The record has no fault.")


def _costs(one: Incident) -> str:
    costs = [f"{_span(one.waited_seconds)} without training"] if one.waited_seconds is not None else []
    if one.steps_again:
        steps = "1 step" if one.steps_again == 1 else f"{one.steps_again:,} steps"
        costs.append(f"{steps} made again ({_span(one.seconds_again)})")
    if one.rate_change is not None:
        until = f"until step {one.back_step:,}" if one.back_step is not None else "from then on"
        costs.append(f"the rate changed by {100 * one.rate_change:+.1f} % {until}")
    return ", ".join(costs) or "nothing that was measured"


def _interventions(facts: RunFacts) -> Iterator[Block]:
    kept = [one for one in facts.interventions if one.kind not in ("checkpoint", "fault")]
    rows = [_row(one) for one in kept]
    if rows:
        yield setup_sections.table(
            ("step", "time", "kind", "by", "what changed", "effect on the rate"), rows, right=(0,)
        )


def _row(one: Intervention) -> tuple[str, ...]:
    return (f"{one.step:,}", when(one.at), curve_charts.NAMES[one.kind], one.by, one.text, one.effect)


def _policies(facts: RunFacts) -> Iterator[Block]:
    rows = [
        (f"{one.step:,}", one.policy, "acted" if one.acted else "advised", one.text, one.effect)
        for one in facts.policies
    ]
    if rows:
        yield setup_sections.table(("step", "policy", "", "what and why", "measured effect"), rows, right=(0,))


def _diagnosis(facts: RunFacts) -> Iterator[Block]:
    found = facts.diagnosis
    steps = f"Steps {found.first_step:,} to {found.step:,}: " if found.step else ""
    yield ReportText(f"{steps}{diagnosis_view.verdict(found)}.")
    rows = [
        (
            one.severity, one.title, "; ".join(one.evidence),
            one.what_if.saying if one.what_if is not None else "",
            "; ".join(f"{remedy.text}{f' ({remedy.command})' if remedy.command else ''}" for remedy in one.remedies),
        )
        for one in found.findings
    ]  # fmt: skip
    if rows:
        yield setup_sections.table(("severity", "cause", "evidence", "what it costs", "what to do"), rows)


def _samples(facts: RunFacts) -> Iterator[Block]:
    for prompt, answers in itertools.groupby(facts.samples, lambda one: one.prompt):
        yield ReportText(f"Prompt: {setup_sections.cut(prompt)}")
        for one in answers:
            yield Quotation(f"Step {one.step:,}, on {one.node}", setup_sections.cut(one.answer))


_SECTIONS: Final[dict[str, Callable[[RunFacts], Iterable[Block]]]] = {
    "Summary": _summary, "Loss": _curves, "Speed and efficiency": _speed, "Shares": _shares,
    "Where the time went": _time, "Faults": _faults, "Interventions": _interventions, "Policies": _policies,
    "Diagnosis": _diagnosis, "Samples": _samples, "Ranks": setup_sections.ranks, "Recipe": setup_sections.recipe,
    "Lineage": setup_sections.lineage, "Cost and energy": setup_sections.money,
}  # fmt: skip
