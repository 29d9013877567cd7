"""What the record says of a step, made from a rank's report; and whether what the ranks loaded agrees."""

import math
from collections.abc import Mapping, Sequence

from trainctl.protocol import messages as m


def step_committed(
    report: m.Report, plan: m.StepPlan, learning_rate: float, cursor: int, tokens_total: float
) -> m.StepCommitted:
    """The run's row of a step, from the first report of it; `cursor` and `tokens_total` are those after it."""
    return m.StepCommitted(
        run=report.run,
        generation=report.generation,
        step=report.step,
        committed_at=report.finished_at,
        loss=report.loss_sum / report.weight if report.weight else math.nan,
        weight=report.weight,
        samples=plan.global_batch,
        learning_rate=learning_rate,
        grad_norm=report.grad_norm,
        cursor=cursor,
        global_batch=plan.global_batch,
        plan_version=plan.plan_version,
        step_seconds=report.step_seconds,
        tokens_total=tokens_total,
        skipped=report.skipped,
    )


def rank_step(report: m.Report, node: str) -> m.RankStep:
    """One rank's row of the step it reports."""
    return m.RankStep(
        run=report.run,
        generation=report.generation,
        step=report.step,
        rank=report.rank,
        node=node,
        tokens=report.own_weight,
        samples=report.own_samples,
        micro_batch=report.micro_batch,
        replays=report.replays,
        step_seconds=report.step_seconds,
        phases=report.phases,
        memory_bytes=report.memory_bytes,
        memory_peak_bytes=report.memory_peak_bytes,
        memory_cap_bytes=report.memory_cap_bytes,
    )


def disagreement(ready: Mapping[str, m.Ready]) -> str | None:
    """The first difference between what the nodes loaded, with the file that makes it; None if there is none."""
    first_node, first = next(iter(ready.items()))
    for node, mine in ready.items():
        for what, files in (("layout", "model_files"), ("data", "data_files"), ("model", "model_files")):
            digest = f"{what}_digest"
            if getattr(mine, digest) != getattr(first, digest):
                difference = _unlike_file(getattr(mine, files), getattr(first, files), node, first_node)
                return f"{what} digest of {node} is not that of {first_node}{difference}"
    return None


def _unlike_file(mine: Sequence[m.FileDigest], others: Sequence[m.FileDigest], node: str, other_node: str) -> str:
    """The first file by name that one of them lacks or that differs, after a colon; empty if none is known to."""
    here, there = ({file.name: file.digest for file in files} for files in (mine, others))
    for name in sorted(here | there):
        if name not in here or name not in there:
            return f": {name} is only on {node if name in here else other_node}"
        if here[name] != there[name]:
            return f": {name} differs"
    return ""
