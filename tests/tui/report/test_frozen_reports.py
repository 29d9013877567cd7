"""Reports of the runs that release 0.1.0 left: resumed, paused, killed, hung and taken back. No figure contradicts
another one."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from trainctl.protocol import messages as m
from trainctl.protocol.messages import events as e
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.whole_run import Commit, WholeRunReader
from trainctl.tui.report import markdown_page, sections
from trainctl.tui.report.read_facts import read_facts
from trainctl.tui.report.run_facts import Incident, RunFacts

LEAST_FAULTS = 20
TOLERANCE = 1e-3
"""Seconds."""


@pytest.fixture(scope="module")
def reports(runs: dict[str, Path]) -> dict[str, RunFacts]:
    return {name: read_facts(RunPaths(directory)) for name, directory in runs.items()}


def text(facts: RunFacts) -> str:
    return markdown_page.page_markdown(sections.page(facts))


def test_the_time_of_each_run_is_split_without_a_rest(reports: dict[str, RunFacts]) -> None:
    for name, facts in reports.items():
        if facts.started_at is None:
            assert facts.last is None and facts.time == ()
            continue
        assert min(part.seconds for part in facts.time) >= 0, name
        span = facts.read_to - facts.started_at
        assert span > 0 and sum(part.seconds for part in facts.time) == pytest.approx(span, abs=TOLERANCE), name
        assert facts.started_at <= facts.view.started_at if facts.view is not None else True


def test_a_fault_costs_at_least_the_gap_between_the_commits_around_it(
    runs: dict[str, Path], reports: dict[str, RunFacts]
) -> None:
    checked = 0
    for name, facts in reports.items():
        for one in facts.incidents:
            least = least_cost(one, runs[name])
            if one.waited_seconds is not None and least is not None:
                assert one.waited_seconds >= least - TOLERANCE, (name, one)
                checked += least > TOLERANCE
    assert checked >= LEAST_FAULTS


def least_cost(one: Incident, directory: Path) -> float | None:
    """The time between both commits without the later step, and without what is known to be something else."""
    with WholeRunReader(RunPaths(directory)) as reader:
        commits, events, evaluations = reader.commits(), reader.all_events(), reader.evaluations()
    before = [commit for commit in commits if commit.committed_at <= one.at]
    after = [commit for commit in commits if commit.committed_at > one.at]
    if not before or not after:
        return None
    since, until = before[-1].committed_at, after[0].committed_at - after[0].seconds
    states = [event for event in events if isinstance(event.data, e.RunStateChanged)]
    else_spent = sum(other.seconds for other in evaluations if other.step == before[-1].step)
    else_spent += max([0.0, *loops(events, before[-1])])
    for state, following in zip(states, [*states[1:], None], strict=True):
        if isinstance(state.data, e.RunStateChanged) and state.data.after in ("paused", "stopped", "failed"):
            end = following.at if following is not None else until
            else_spent += max(min(end, until) - max(state.at, since), 0.0)
    return until - since - else_spent


def loops(events: Iterable[m.Event], commit: Commit) -> Iterator[float]:
    for event in events:
        if isinstance(event.data, e.CheckpointWritten) and event.data.step == commit.step:
            yield event.data.loop_seconds or 0.0


def test_a_resumed_run_has_its_first_start_and_no_loss_of_a_step_taken_back(reports: dict[str, RunFacts]) -> None:
    facts = reports["alpha stopped"]
    assert facts.view is not None and facts.started_at is not None and facts.started_at < facts.view.started_at - 30
    assert (facts.view.eval_step, facts.held_out, facts.steps_again) == (100, None, 49)
    parts = {part.name: part.seconds for part in facts.time}
    assert parts["between a stop and a resume"] > 20 > parts.get("start", 0.0)
    page = text(facts)
    assert "49 steps were made again or taken back without a fault" in page and "held-out loss |" not in page


def test_a_step_that_hung_is_a_fault_with_its_cost(reports: dict[str, RunFacts]) -> None:
    first, *_ = reports["alpha stopped"].incidents
    assert "has not finished its part of step 64" in first.texts[0]
    assert first.waited_seconds is not None and 30 < first.waited_seconds < 31


def test_checkpoints_and_changes_are_counted_once(runs: dict[str, Path], reports: dict[str, RunFacts]) -> None:
    directory = runs["alpha mixed"]
    facts = reports["alpha mixed"]
    with WholeRunReader(RunPaths(directory)) as reader:
        steps = {event.data.step for event in reader.all_events() if isinstance(event.data, e.CheckpointWritten)}
    assert facts.checkpoints == len(steps) == sum(one.kind == "checkpoint" for one in facts.interventions)
    assert [one.text for one in facts.interventions if "gamma now leads the run" in one.text] == [
        "promote: gamma now leads the run (term 2, previously alpha)"
    ]
    page = text(facts)
    assert f"{len(steps)} checkpoints; training was stopped for them" in page
    counted = "| interventions | 7 new splits, 6 commands, 4 changes of settings, 2 notes, "
    assert counted in page
    rows = page.split("## Interventions")[1].split("\n## ")[0].count("| split |")
    assert rows == 7


def test_skipped_steps_in_a_row_are_one_row(reports: dict[str, RunFacts]) -> None:
    facts = reports["alpha overflow"]
    page = text(facts)
    assert "steps 59 to 61 skipped their update: overflow" in page
    assert "steps 67 to 88 skipped their update: nan" in page and "step 70 skipped" not in page
    assert sum(one.kind == "fault" for one in facts.interventions) == len(facts.incidents) == 3
    assert "cost 0 ms" not in page and " 0 ms without" not in page


def test_computing_is_forward_backward_and_optimizer(reports: dict[str, RunFacts]) -> None:
    facts = reports["alpha mixed"]
    for rank in facts.ranks:
        phases = rank.phases
        computed = phases["forward"] + phases["backward"] + phases["optimizer"]
        assert rank.busy == pytest.approx(computed / sum(phases.values()))
    assert facts.efficiency is not None and facts.efficiency_curve
    mean = sum(value for _, value in facts.efficiency_curve) / len(facts.efficiency_curve)
    assert mean == pytest.approx(facts.efficiency, abs=0.15)
