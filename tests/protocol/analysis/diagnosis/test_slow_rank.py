"""When a rank is called slow: not by a few seconds, not where ranks wait by turns, and not for a busy machine."""

import dataclasses

import msgspec
from tests.protocol.support.diagnosed import (
    causes,
    commands,
    first,
    healthy_facts,
    longer,
    said_of,
    scaled,
    uneven_facts,
    with_parts,
)

from trainctl.protocol import messages as m
from trainctl.protocol.analysis.diagnosis.diagnosis_facts import DiagnosisFacts
from trainctl.protocol.analysis.diagnosis.pace import FIRST_STEPS
from trainctl.protocol.analysis.diagnosis.situation import Situation

FORK = 50


def test_a_slow_rank_is_named_with_its_phase() -> None:
    for phase in ("forward", "backward"):
        found = first(longer(healthy_facts(), 1, {phase: 2.0}))
        assert (found.cause, found.title) == ("slow-rank", f"node-1 is slow in {phase}")
    ladder = commands(found)
    assert (ladder[0], ladder[-1]) == ("trainctl send rebalance auto=true", "trainctl calibrate --node node-1")


def uneven(steps: int = 150, part: float = 1.0) -> DiagnosisFacts:
    return dataclasses.replace(scaled(uneven_facts(steps), part), profiles={})


def test_short_steps_have_to_be_slow_for_ten_seconds_or_many_times() -> None:
    """As many very short steps as are read of a record take less than 10 s."""
    for steps, part, is_slow in ((150, 0.1, True), (40, 0.1, False), (400, 0.02, True), (250, 0.02, False)):
        assert ("slow-rank" in causes(uneven(steps, part))) is is_slow


def test_ranks_that_keep_each_other_waiting_by_turns_or_not_at_all_are_not_slow() -> None:
    def in_one_of(every: int, part: m.RankStep) -> m.RankStep:
        late = part.phases.busy if part.step % every == 0 and part.rank == 1 else 0.0
        phases = msgspec.structs.replace(part.phases, backward=part.phases.backward + 2 * late)
        return msgspec.structs.replace(part, phases=phases)

    assert causes(with_parts(uneven(), lambda part: in_one_of(12, part))) == ["slow-rank"]
    assert causes(with_parts(uneven(), lambda part: in_one_of(4, part))) == []
    assert causes(longer(longer(healthy_facts(3), 1, {"forward": 1.04}), 0, {"forward": 1.04})) == []


def test_passes_that_became_longer_on_all_ranks_make_no_rank_slow() -> None:
    """Longer samples, or a machine that they share and that is busier."""
    slower = longer(healthy_facts(), 1, {"forward": 1.5, "backward": 1.5})
    assert causes(slower) == ["slow-rank"]
    assert causes(longer(healthy_facts(), 1, {"forward": 4.0, "backward": 4.0}, newest=8)) == ["slow-rank"], (
        "long steps"
    )
    assert "slow-rank" not in causes(longer(slower, 0, {"forward": 1.5, "backward": 1.5}))


def test_a_split_that_saves_little_of_the_wait_blames_no_rank() -> None:
    """Ranks that share processors: a rank waits for its turn, whatever its share."""
    facts = uneven_facts()
    assert first(facts).title == "node-0 has too large a share"
    assert commands(first(facts))[0] == "trainctl send rebalance auto=true"

    def waits(part: m.RankStep) -> m.RankStep:
        more = 20 * part.phases.busy if part.rank == 1 else 0.0
        return msgspec.structs.replace(part, phases=msgspec.structs.replace(part.phases, sync=part.phases.sync + more))

    crowded = with_parts(facts, waits)
    steps = tuple(msgspec.structs.replace(step, step_seconds=20 * step.step_seconds) for step in facts.steps)
    assert "slow-rank" not in causes(dataclasses.replace(crowded, steps=steps))


def test_a_busy_machine_needs_a_larger_slowdown() -> None:
    for factor, cpu_percent, values, is_slow in (
        (1.35, 100.0, {"cpu_pressure": 2.0}, True),
        (1.35, 100.0, {"cpu_pressure": 70.0}, False),
        (2.0, 100.0, {"cpu_pressure": 70.0}, True),
        (2.0, 60.0, {}, True),
        (2.0, 100.0, {}, False),  # all processors are in use, and pressure isn't known
    ):
        facts = longer(healthy_facts(), 1, {"backward": factor})
        readings = {
            node: tuple(msgspec.structs.replace(row, cpu_percent=cpu_percent, values=values) for row in rows)
            for node, rows in facts.readings.items()
        }
        facts = dataclasses.replace(facts, readings=readings)
        assert ("slow-rank" in causes(facts)) is is_slow
        assert values or is_slow or "unknown" in dict(said_of(facts, "slow-rank"))


def test_the_first_steps_of_a_branch_are_left_out_as_those_of_a_run() -> None:
    """Where steps of the same run before them are only not read, none is."""
    facts = healthy_facts()
    later = dataclasses.replace(facts, parts=tuple(part for part in facts.parts if part.step > FORK))
    assert facts.view is not None
    branch = dataclasses.replace(later, view=msgspec.structs.replace(facts.view, branch=m.BranchPoint("parent", FORK)))
    firsts = [next(iter(Situation(known)._present[0].values())).step for known in (facts, later, branch)]
    assert firsts == [1 + FIRST_STEPS, FORK + 1, FORK + 1 + FIRST_STEPS]


def test_what_the_first_remedy_saves_is_what_is_promised() -> None:
    found = first(longer(healthy_facts(), 1, {"backward": 2.0}))
    assert (found.cause, commands(found)[0]) == ("slow-rank", "trainctl send rebalance auto=true")
    assert found.what_if is not None and "this split" in found.what_if.saying
