"""When a rank is called slow: not by a few seconds, not where ranks wait by turns, and not for a busy machine."""

import dataclasses

import msgspec
from tests.protocol.support.diagnosed import (
    causes,
    healthy_facts,
    longer,
    said_of,
    uneven_facts,
    with_parts,
    with_steps,
)

from trainctl.protocol import messages as m
from trainctl.protocol.analysis.diagnosis.diagnosis_facts import DiagnosisFacts
from trainctl.protocol.analysis.diagnosis.pace import FIRST_STEPS
from trainctl.protocol.analysis.diagnosis.situation import Situation

FORK = 50


def uneven(steps: int = 150, part: float = 1.0) -> DiagnosisFacts:
    """Make a run of a rank with too large a share, whose steps take a part of the usual seconds."""
    facts = uneven_facts(steps)

    def shorter(one: m.RankStep) -> m.RankStep:
        phases = m.Phases(**{name: part * getattr(one.phases, name) for name in m.PHASES})
        return msgspec.structs.replace(one, phases=phases, step_seconds=part * one.step_seconds)

    whole = with_steps(facts, lambda one: msgspec.structs.replace(one, step_seconds=part * one.step_seconds), steps)
    return dataclasses.replace(with_parts(whole, shorter, steps), profiles={})


def test_short_steps_have_to_be_slow_for_ten_seconds_or_many_times() -> None:
    assert "slow-rank" in causes(uneven(150, 0.1))
    early = uneven(40, 0.1)
    assert causes(early) == []
    assert said_of(early, "slow-rank") == [("unknown", "10 s or 300 steps of the present plan")]
    # As many very short steps as are read of a record take less than 10 s.
    assert "slow-rank" in causes(uneven(400, 0.02))
    assert "slow-rank" not in causes(uneven(250, 0.02))


def test_long_steps_are_judged_before_there_are_many() -> None:
    """Eight of them, of 4 s or so, beside usual ones."""
    facts = healthy_facts()
    facts = longer(longer(facts, 1, {"forward": 4.0, "backward": 4.0}, newest=8), 0, {"forward": 1.0}, newest=8)
    assert causes(facts) == ["slow-rank"]


def test_ranks_that_keep_each_other_waiting_by_turns_are_not_slow() -> None:
    def in_one_of(every: int, part: m.RankStep) -> m.RankStep:
        late = part.phases.busy if part.step % every == 0 and part.rank == 1 else 0.0
        phases = msgspec.structs.replace(part.phases, backward=part.phases.backward + 2 * late)
        return msgspec.structs.replace(part, phases=phases)

    assert causes(with_parts(uneven(), lambda part: in_one_of(12, part))) == ["slow-rank"]
    assert causes(with_parts(uneven(), lambda part: in_one_of(4, part))) == []


def test_passes_that_became_longer_on_all_ranks_make_no_rank_slow() -> None:
    """Longer samples, or a machine that they share and that is busier."""
    facts = healthy_facts()
    slower = longer(facts, 1, {"forward": 1.5, "backward": 1.5}, newest=40)
    assert causes(slower) == ["slow-rank"]
    both = longer(slower, 0, {"forward": 1.5, "backward": 1.5}, newest=40)
    assert "slow-rank" not in causes(both)


def read(facts: DiagnosisFacts, cpu_percent: float, **values: float) -> DiagnosisFacts:
    """With only these readings of the processors, from the start on."""
    readings = {
        node: tuple(msgspec.structs.replace(one, cpu_percent=cpu_percent, values=values) for one in known)
        for node, known in facts.readings.items()
    }
    return dataclasses.replace(facts, readings=readings)


def test_a_busy_machine_needs_a_larger_slowdown() -> None:
    facts = longer(healthy_facts(), 1, {"backward": 1.35})
    assert "slow-rank" in causes(read(facts, 100.0, cpu_pressure=2.0))
    assert "slow-rank" not in causes(read(facts, 100.0, cpu_pressure=70.0))
    larger = longer(healthy_facts(), 1, {"backward": 2.0})
    assert "slow-rank" in causes(read(larger, 100.0, cpu_pressure=70.0))


def test_without_pressure_a_machine_whose_processors_are_all_in_use_is_not_judged() -> None:
    assert causes(read(uneven(), 60.0)) == ["slow-rank"]
    full = read(uneven(), 100.0)
    assert causes(full) == []
    assert "unknown" in dict(said_of(full, "slow-rank"))


def test_the_first_steps_of_a_branch_are_left_out_as_those_of_a_run() -> None:
    """Where steps of the same run before them are only not read, none is."""
    facts = healthy_facts()
    later = dataclasses.replace(facts, parts=tuple(part for part in facts.parts if part.step > FORK))
    assert facts.view is not None
    branch = dataclasses.replace(later, view=msgspec.structs.replace(facts.view, branch=m.BranchPoint("parent", FORK)))
    firsts = [next(iter(Situation(known)._present[0].values())).step for known in (facts, later, branch)]
    assert firsts == [1 + FIRST_STEPS, FORK + 1, FORK + 1 + FIRST_STEPS]
