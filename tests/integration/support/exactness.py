"""Checks that a disturbed run did each sample of each step once: by a lead's journal and rows."""

from collections.abc import Iterable, Sequence

from tests.cluster.folding import given_state
from tests.cluster.run_files import NODES
from tests.cluster.waits import plans_of
from tests.integration.support.clusters import Cluster

from trainctl.protocol import messages as m
from trainctl.protocol.record.reader import RecordReader


def check_ledger(
    cluster: Cluster, run: str, last: int, was_lost: Iterable[str], lead: str = NODES[0], others: Iterable[str] = ()
) -> None:
    """Every step up to `last` is there once, of a plan of its generation whose positions are the batch that follows
    the step before; what ranks say of their parts comes to the whole of it. A part may be missing of a node that
    `was_lost`, for it can have ended before it sent its row, or before it had the sum, and of a rank that was given
    the state of the step by another one. `others`: nodes that led before; a lead that was away then lacks their
    plans."""
    plans = [plan for plan in plans_of(cluster.run_paths(lead, run)) if plan.kind == "train"]
    keys = [(plan.generation, plan.step) for plan in plans]
    assert len(set(keys)) == len(keys)
    by_key = {
        (plan.generation, plan.step): plan
        for node in (*others, lead) for plan in plans_of(cluster.run_paths(node, run)) if plan.kind == "train"
    }  # fmt: skip
    with RecordReader(cluster.run_paths(lead, run)) as reader:
        steps, _ = reader.steps(0, last + 1)
        lost, given = {NODES.index(node) for node in was_lost}, given_state(reader)
        assert [step.step for step in steps] == list(range(1, last + 1))
        cursor = 0
        for step in steps:
            plan = by_key[step.generation, step.step]
            assert (plan.cursor, step.cursor) == (cursor, cursor + step.global_batch), step.step
            _check_positions(plan, by_key)
            excused = lost | {rank for at, rank in given if at == step.step}
            _check_parts(plan, reader.rank_steps(step.step), excused)
            cursor = step.cursor


def _check_positions(plan: m.StepPlan, by_key: dict[tuple[m.Generation, int], m.StepPlan]) -> None:
    """All of the batch for a plan that begins it; one that finishes it has a part, of what the plan that began it had
    in its time."""
    batch = list(range(plan.cursor, plan.cursor + plan.global_batch))
    positions = sorted(at for work in plan.work for piece in work.ranges for at in range(piece.start, piece.stop))
    assert len(set(positions)) == len(positions), plan
    if plan.finishes is None:
        assert positions == batch, plan
        return
    assert set(positions) <= set(batch), plan
    begun = by_key[plan.finishes, plan.step]
    assert begun.finishes is None and begun.generation < plan.generation, plan
    assert _rule(begun) == _rule(plan), plan


def _rule(plan: m.StepPlan) -> tuple[object, ...]:
    """Return what a half-done batch is finished by, as it was begun."""
    return plan.commands, plan.learning_rate, plan.global_batch, plan.divisor, plan.cursor


def _check_parts(plan: m.StepPlan, rows: Sequence[m.RankStep], excused: set[int]) -> None:
    ranks = {work.rank for work in plan.work}
    missing = ranks - {row.rank for row in rows}
    assert {row.rank for row in rows} <= ranks, plan
    assert rows and missing <= excused, (plan, missing)
    samples = sum(row.samples for row in rows)
    assert samples <= plan.global_batch if missing else samples == plan.global_batch, (plan, rows)


def worst_deviation(steps: Sequence[m.StepCommitted], others: Sequence[m.StepCommitted]) -> float:
    """The greatest relative difference of two runs' losses, which must be of the same steps, samples and rates."""
    for one, other in zip(steps, others, strict=True):
        assert (one.step, one.weight, one.cursor) == (other.step, other.weight, other.cursor)
        assert one.learning_rate == other.learning_rate, one.step
    return max(abs(one.loss - other.loss) / abs(other.loss) for one, other in zip(steps, others, strict=True))
