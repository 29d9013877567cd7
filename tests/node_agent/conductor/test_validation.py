"""Tests of what breaks a promise of the conductor's state is seen at the event that does it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.node_agent.support import walks

from trainctl.node_agent.conductor.background_writes import BackgroundWrites
from trainctl.node_agent.conductor.in_flight import InFlight
from trainctl.node_agent.conductor.state import ConductorState, Progress
from trainctl.node_agent.conductor.validation import BrokenPromiseError
from trainctl.node_agent.planning import plans, share_edits
from trainctl.node_agent.planning.plans import PlanMaker
from trainctl.protocol import messages as m

Patch = Callable[[pytest.MonkeyPatch], Any]


def lose_a_sample(patch: pytest.MonkeyPatch) -> None:
    """Deal one sample of a lost rank to no one."""
    lose = share_edits.lose

    def changed(settings: Any, rank: int) -> share_edits.Edit:
        edit = lose(settings, rank)
        first = min(edit.settings.live)
        less = msgspec.structs.replace(edit.settings.ranks[first], share=edit.settings.ranks[first].share - 1)
        ranks = {**edit.settings.ranks, first: less}
        return dataclasses.replace(edit, settings=msgspec.structs.replace(edit.settings, ranks=ranks))

    patch.setattr(share_edits, "lose", changed)


def keep_plans_of_a_generation_that_was_left(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(InFlight, "take_all", lambda in_flight: [each.plan for each in in_flight._plans.values()])


def issue_a_plan_too_many(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(InFlight, "may_issue", property(lambda in_flight: len(in_flight._plans) < 3))


def let_an_ended_command_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ConductorState, "uncarry", lambda state, id: None)


def deal_positions_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        plans, "deal", lambda start, shares: {rank: (m.Range(start, share),) for rank, share in shares.items()}
    )


def skip_a_position(patch: pytest.MonkeyPatch) -> None:
    commit = Progress.commit

    def changed(progress: Progress, plan: m.StepPlan, report: m.Report) -> m.StepCommitted:
        row = commit(progress, plan, report)
        progress.cursor += 1
        return row

    patch.setattr(Progress, "commit", changed)


def keep_the_generation(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(m.Generation, "next", lambda generation: generation)


def plan_for_one_that_is_out(patch: pytest.MonkeyPatch) -> None:
    make = PlanMaker.plan

    def changed(maker: PlanMaker, *args: Any, **more: Any) -> m.StepPlan:
        plan = make(maker, *args, **more)
        extra = [m.RankWork(rank, (), 1) for rank, setting in maker.durable.settings.ranks.items() if setting.out]
        return msgspec.structs.replace(plan, work=(*plan.work, *extra))

    patch.setattr(PlanMaker, "plan", changed)


def forget_who_copies(patch: pytest.MonkeyPatch) -> None:
    """As a conductor did that knew only of copiers whose disk failed."""
    end = BackgroundWrites.end

    def changed(writes: BackgroundWrites) -> str:
        writing = writes.now
        if writing is not None and not writing.ranks:
            writes._state.keep(writing=msgspec.structs.replace(writing, copier=None))
        return end(writes)

    patch.setattr(BackgroundWrites, "end", changed)


@pytest.mark.parametrize(
    "break_conductor",
    [
        lose_a_sample,
        keep_plans_of_a_generation_that_was_left,
        issue_a_plan_too_many,
        let_an_ended_command_wait,
        deal_positions_twice,
        skip_a_position,
        keep_the_generation,
        plan_for_one_that_is_out,
        forget_who_copies,
    ],
)
def test_a_broken_conductor_is_caught(break_conductor: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    break_conductor(monkeypatch)
    with pytest.raises(BrokenPromiseError):
        for seed in range(40):
            walks.walk(seed)
