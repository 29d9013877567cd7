"""Rows of the record for a step, made from a rank's report."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from trainctl.protocol import messages as m

_OF_RUN = frozenset(name for name, metric in m.METRICS.items() if metric.scope == "run")
"""Values that go to the run's row of a step."""
_OF_OTHERS = frozenset(name for name, metric in m.METRICS.items() if metric.scope != "rank")
"""Values that don't go to a rank's row of a step; one that no table knows does."""


class RunSums(NamedTuple):
    """Of all committed steps of a run."""

    weight: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0

    def after(self, report: m.Report) -> "RunSums":
        """With the step that it commits."""
        return RunSums(
            self.weight + report.weight, self.tokens + report.tokens, self.seconds + max(report.step_seconds, 0.0)
        )


def step_committed(report: m.Report, plan: m.StepPlan, cursor: int, totals: RunSums) -> m.StepCommitted:
    """The run's row of a step, from the first report of it; `cursor` and `totals` are those after it."""
    return m.StepCommitted(
        run=report.run, generation=report.generation, step=report.step, committed_at=report.finished_at,
        loss=report.loss_sum / report.weight if report.weight else math.nan, weight=report.weight,
        samples=plan.global_batch, learning_rate=plan.learning_rate, grad_norm=report.grad_norm, cursor=cursor,
        global_batch=plan.global_batch, plan_version=plan.plan_version, step_seconds=report.step_seconds,
        tokens=report.tokens, weight_total=totals.weight, tokens_total=totals.tokens, seconds_total=totals.seconds,
        skipped=report.skipped, values={name: value for name, value in report.values.items() if name in _OF_RUN},
    )  # fmt: skip


def rank_step(report: m.Report, node: str) -> m.RankStep:
    """One rank's row of the step it reports."""
    return m.RankStep(
        run=report.run, generation=report.generation, step=report.step, rank=report.rank, node=node,
        tokens=report.own_tokens, samples=report.own_samples, micro_batch=report.micro_batch, replays=report.replays,
        step_seconds=report.step_seconds, phases=report.phases, weight=report.own_weight,
        values=report.values if _OF_OTHERS.isdisjoint(report.values) else _of_rank(report.values),
    )  # fmt: skip


def _of_rank(values: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if name not in _OF_OTHERS}


def samples(
    plan: m.StepPlan, at: float, answers: Sequence[m.Answer], node: str, by: str, loss: float | None,
    eval_loss: float | None,
) -> Iterator[m.Sample]:  # fmt: skip
    """A row of the record for each answer, and the losses of its step."""
    how = plan.sampling
    assert how is not None, "a sample plan says what it asks"
    for number, answer in enumerate(answers):
        yield m.Sample(
            run=plan.run, step=plan.step, at=at, number=number, prompt=answer.prompt, answer=answer.text,
            tokens=answer.tokens, ended=answer.ended, seconds=answer.seconds, loss=loss, eval_loss=eval_loss,
            max_tokens=how.max_tokens, temperature=how.temperature, top_p=how.top_p, seed=how.seed, node=node, by=by,
        )  # fmt: skip
