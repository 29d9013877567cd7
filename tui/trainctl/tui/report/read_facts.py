"""Reads a run's facts from its directory. The run may still be active: what its record has is what is read."""

import bisect
import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from trainctl.protocol.analysis.diagnosis.diagnose import diagnose
from trainctl.protocol.analysis.diagnosis.diagnosis_facts import config_of, facts_of_record
from trainctl.protocol.batch.cost import run_rates
from trainctl.protocol.messages import PHASES, Event, HostReading, RankView, RunView, Sample, Series, StepCommitted
from trainctl.protocol.messages.events import CheckpointWritten
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.rollups import Evaluation
from trainctl.protocol.record.whole_run import RankTotals, WholeRunReader
from trainctl.tui.charts.axis import axis_of
from trainctl.tui.report import interventions, recipe, timeline
from trainctl.tui.report.run_facts import (
    COMPUTING,
    CostFacts,
    HeldOutLoss,
    RankFacts,
    RunFacts,
    SharesFrom,
    named,
    parts_of,
)
from trainctl.tui.report.timeline import Recorded, Timeline
from trainctl.tui.state import effects, run_events, step_phases
from trainctl.tui.state.series import from_series
from trainctl.tui.state.step_phases import Compilation
from trainctl.tui.text import run_lines
from trainctl.tui.text.run_lines import cost_figures

COLUMNS: Final = 600
"""Buckets of a run's curve."""
RANK_COLUMNS: Final = 200
"""Buckets of each rank's curve."""
MOST_PLANS: Final = 400
"""Plan versions whose shares are read; of more, some are left out between."""
MOST_EFFECTS: Final = 800
"""Events whose effect is measured; each takes a query."""
CURVES: Final = ("loss", "eval_loss", "learning_rate", "grad_norm", "step_seconds", "committed_at")
OF_EFFICIENCY: Final = ("matmul_use", "mfu", "calibrated_speed", "link_use", "tflops")
"""Metrics of a rank whose mean over the run is given."""
SAMPLES_KEPT: Final = 16
"""Prompts whose first and last answers are kept."""


def read_facts(paths: RunPaths) -> RunFacts:
    """Return all facts. Raises InvalidInputError if the record can't be read."""
    with WholeRunReader(paths) as reader:
        known = facts_of_record(reader, config_of(paths))
        view, last = known.view, reader.last_step()
        events = reader.all_events()
        commits, evaluations = reader.commits(), reader.evaluations(undone=True)
        read_to = max([known.at, *(event.at for event in events), *(commit.committed_at for commit in commits[-1:])])
        rate = view.rate_metric if view is not None else "tokens_per_second"
        curves = {name: reader.series(name, columns=COLUMNS) for name in (*CURVES, rate, "run_tflops")}
        step_at = _step_at(curves["committed_at"], last)
        measure = _measure(reader, events)
        line = Timeline(Recorded(view.started_at if view is not None else None, read_to, commits, events, evaluations))
        again = [commit for commit in commits if commit.retracted]
        ranks = _ranks(reader, view)
        fields, changed = recipe.read_recipe(paths)
        hosts = [reading for node in _nodes(view, ranks) if (reading := reader.last_host_reading(node)) is not None]
        return RunFacts(
            run=reader.run,
            read_to=read_to,
            view=view,
            last=last,
            started_at=line.began_at if commits else None,
            first_at=commits[0].committed_at if commits else None,
            rates=run_rates(view, last) if view is not None else None,
            efficiency=_efficiency(ranks),
            curves=curves,
            efficiency_curve=_efficiency_curve(reader),
            shares=_shares(reader),
            ranks=ranks,
            time=tuple(timeline.time_parts(line, events, len(evaluations))) if commits else (),
            interventions=tuple(interventions.interventions(_shown(events, line), step_at, measure)),
            incidents=tuple(timeline.incidents(events, line, step_at, measure)),
            policies=tuple(interventions.policy_notes(events, step_at, measure)),
            samples=_samples(reader),
            recipe=fields,
            changed=changed,
            resolved=recipe.resolved(view),
            lineage=tuple(interventions.lineage(view, events, recipe.parent(paths))),
            environments=recipe.environments(paths),
            data=recipe.data_of(paths),
            diagnosis=diagnose(known),
            evaluations=len(evaluations),
            held_out=_held_out(evaluations, line),
            checkpoints=len(line.checkpoints),
            steps_again=len(again),
            seconds_again=sum(commit.seconds for commit in again),
            cost=_cost(view, last, read_to),
            energy=_energy(hosts, view, last),
        )


def _shown(events: Sequence[Event], line: Timeline) -> list[Event]:
    """Leave out the other nodes' events of a checkpoint."""
    kept = {event.id for event, _ in line.checkpoints}
    return [event for event in events if event.id in kept or not isinstance(event.data, CheckpointWritten)]


def _held_out(evaluations: Sequence[Evaluation], line: Timeline) -> HeldOutLoss | None:
    """Evaluations of a step that was taken back don't count."""
    found = [evaluation for evaluation in evaluations if line.stands(evaluation.step, evaluation.at)]
    if not found:
        return None
    newest = max(found, key=lambda one: (one.step, one.at))
    best = min((one for one in found if math.isfinite(one.loss)), key=lambda one: one.loss, default=newest)
    return HeldOutLoss(newest.step, newest.loss, best.step, best.loss)


def _step_at(committed: Series, last: StepCommitted | None) -> Callable[[Event], int]:
    """Return an event's own step, or the last one before its time."""
    axis, newest = axis_of("time", committed, None), last.step if last is not None else 0

    def step_at(event: Event) -> int:
        if event.step is not None:
            return event.step
        if not axis.known:
            return 0
        step = float(axis.to_step(event.at))
        return min(max(math.floor(step), 0), newest)

    return step_at


def _measure(reader: WholeRunReader, events: Sequence[Event]) -> interventions.Measure:
    """Return what measures an event's effect on the rate, if it is one that changes it."""
    changes = sorted((one for one in events if run_events.changes_speed(one)), key=lambda one: one.step or 0)
    steps = [event.step or 0 for event in changes]
    known: dict[int, effects.Effect | None] = {}

    def measure(event: Event) -> effects.Effect | None:
        if event.id not in known and len(known) < MOST_EFFECTS:
            known[event.id] = measured(event)
        return known.get(event.id)

    def measured(event: Event) -> effects.Effect | None:
        step = event.step or 0
        first, last = max(step - effects.EFFECT_STEPS, 1), step + effects.EFFECT_STEPS - 1
        near = changes[bisect.bisect_left(steps, first) : bisect.bisect_right(steps, last)]
        if event not in near:
            return None
        series = reader.series("tokens_per_second", None, first, last, 2 * effects.EFFECT_STEPS)
        return effects.measured(from_series(series, last), near, event)

    return measure


def _nodes(view: RunView | None, ranks: Sequence[RankFacts]) -> list[str]:
    views = view.ranks if view is not None else ()
    return sorted({rank.node for rank in ranks} | {rank.node for rank in views})


# ---------------------------------------------------------------- ranks


def _ranks(reader: WholeRunReader, view: RunView | None) -> tuple[RankFacts, ...]:
    found = reader.rank_totals()
    totals, counts = named([(total.node, total) for total in found]), Counter(total.rank for total in found)
    views = {rank.rank: rank for rank in view.ranks} if view is not None else {}
    return tuple(
        _rank(reader, total, views.get(total.rank), name, moved=counts[total.rank] > 1)
        for name, total in totals.items()
    )


def _rank(reader: WholeRunReader, total: RankTotals, view: RankView | None, name: str, *, moved: bool) -> RankFacts:
    blank = RankView(total.rank, total.node, "done", 0.0, share=None, micro_batch=None)
    own = view if view is not None and view.node == total.node else blank
    return RankFacts(
        rank=total.rank,
        node=total.node,
        name=name,
        backend=own.backend or "",
        device=own.device or "",
        compute=own.compute,
        micro_batch=own.micro_batch,
        steps=total.steps,
        samples=total.samples,
        tokens=total.tokens,
        seconds=total.seconds,
        phases={name: getattr(total.phases, name) for name in PHASES},
        means=_means(reader, total, moved=moved),
        compiled=None if moved else _compiled(reader, total.rank),
    )


def _compiled(reader: WholeRunReader, rank: int) -> Compilation | None:
    """Return the longest: found in the whole run, then in the steps of its bucket."""
    whole = step_phases.compilations(reader.series(step_phases.COMPILE_METRIC, rank, columns=RANK_COLUMNS))
    found = step_phases.longest_compilation(whole)
    if found is None or found.first == found.last:
        return found
    size = found.last - found.first + 1
    near = step_phases.compilations(reader.series(step_phases.COMPILE_METRIC, rank, found.first, found.last, size))
    return step_phases.longest_compilation([found, *near])


def _means(reader: WholeRunReader, total: RankTotals, *, moved: bool) -> dict[str, float]:
    """Over all steps; one bucket has them all. Of a rank that `moved`: over the buckets in which it was on this node
    alone."""
    found = {name: reader.series(name, total.rank, columns=RANK_COLUMNS if moved else 1) for name in OF_EFFICIENCY}
    means = {name: _own(reader, total, series) if moved else series.mean for name, series in found.items()}
    return {name: statistics.fmean(mean) for name, mean in means.items() if mean}


def _own(reader: WholeRunReader, total: RankTotals, series: Series) -> tuple[float, ...]:
    nodes = reader.nodes_of(total.rank, series.bucket_steps) if series.steps else {}
    pairs = zip(series.steps, series.mean, strict=True)
    return tuple(mean for step, mean in pairs if nodes.get(step) == {total.node})


def _efficiency(ranks: Sequence[RankFacts]) -> float | None:
    """Part of the time of all ranks' steps in which they computed."""
    seconds = sum(sum(rank.phases.values()) for rank in ranks)
    busy = sum(rank.phases[name] for rank in ranks for name in COMPUTING)
    return busy / seconds if seconds > 0 else None


def _efficiency_curve(reader: WholeRunReader) -> tuple[tuple[int, float], ...]:
    """Return the same by bucket: what all ranks computed over what their steps took."""
    busy: dict[int, float] = {}
    whole: dict[int, float] = {}
    for rank in reader.ranks():
        for sums, name in (*((busy, f"{phase}_seconds") for phase in COMPUTING), (whole, "rank_step_seconds")):
            series = reader.series(name, rank, columns=RANK_COLUMNS)
            for step, mean in zip(series.steps, series.mean, strict=True):
                sums[step] = sums.get(step, 0.0) + mean
    return tuple((step, busy[step] / whole[step]) for step in sorted(busy) if whole.get(step))


def _shares(reader: WholeRunReader) -> tuple[SharesFrom, ...]:
    """Return the shares at each plan version, or at some of very many."""
    spans = reader.plan_spans()
    if len(spans) > MOST_PLANS:
        spans = tuple(spans[int(at)] for at in np.linspace(0, len(spans) - 1, MOST_PLANS))
    return tuple(
        SharesFrom(span.first, span.plan_version, {name: part.samples for name, part in parts_of(reader, span).items()})
        for span in spans
    )


# ---------------------------------------------------------------- samples, cost, energy


def _samples(reader: WholeRunReader) -> tuple[Sample, ...]:
    """Return the first and the last answer to each of the first prompts."""
    first: dict[str, Sample] = {}
    last: dict[str, Sample] = {}
    for sample in reader.all_samples():
        first.setdefault(sample.prompt, sample)
        last[sample.prompt] = sample
    prompts = [*first][:SAMPLES_KEPT]
    pairs = [(first[prompt], last[prompt]) for prompt in prompts]
    return tuple(one for early, late in pairs for one in ((early, late) if early != late else (early,)))


def _cost(view: RunView | None, last: StepCommitted | None, at: float) -> CostFacts | None:
    found = cost_figures(view, last, at, None) if view is not None else None
    return CostFacts(found.currency, found.spent, found.per_1000, found.unpriced) if found is not None else None


def _energy(hosts: Sequence[HostReading], view: RunView | None, last: StepCommitted | None) -> run_lines.EnergyFigures:
    if view is None:
        return run_lines.EnergyFigures(None, 0.0, None)
    return run_lines.energy_figures(hosts, view, last.cursor if last is not None else None)
