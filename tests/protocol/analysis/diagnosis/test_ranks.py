"""Rules of ranks that work together: late data, a slow or lossy link, and when a rank is called slow."""

import dataclasses

import msgspec
import pytest
from tests.protocol.support import planted_causes as simulated
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
    with_readings,
    with_steps,
)

from trainctl.protocol import messages as m
from trainctl.protocol.analysis.diagnosis.diagnosis_facts import DiagnosisFacts
from trainctl.protocol.analysis.diagnosis.pace import FIRST_STEPS
from trainctl.protocol.analysis.diagnosis.situation import Situation


def synced(facts: DiagnosisFacts, factor: float, every: int = 1) -> DiagnosisFacts:
    """Make the sum's own seconds longer by this factor in each of some of the newest 40 steps, for all ranks."""
    last = facts.steps[-1].step
    more = {
        step.step: (factor - 1) * min(part.phases.sync for part in facts.parts if part.step == step.step)
        for step in facts.steps
        if step.step > last - 40 and step.step % every == 0
    }

    def part(row: m.RankStep) -> m.RankStep:
        phases = msgspec.structs.replace(row.phases, sync=row.phases.sync + more.get(row.step, 0.0))
        values = {name: value for name, value in row.values.items() if name != "link_use"}
        seconds = row.step_seconds + more.get(row.step, 0.0)
        return msgspec.structs.replace(row, phases=phases, step_seconds=seconds, values=values)

    def step(row: m.StepCommitted) -> m.StepCommitted:
        return msgspec.structs.replace(row, step_seconds=row.step_seconds + more.get(row.step, 0.0))

    return with_steps(with_parts(facts, part), step)


def test_late_data_says_what_is_set_and_what_it_costs() -> None:
    facts = longer(healthy_facts(), 1, {"data": 40})
    found = first(facts)
    assert (found.cause, found.rank, found.evidence[-1]) == ("late-data", 1, "prefetch 2, 1 worker")
    assert found.what_if is not None and found.what_if.part == pytest.approx(0.28, abs=0.05)
    settings = [command.partition(" --set ")[2] for command in commands(found)]
    assert settings[:2] == ["data.prefetch=4", "data.workers=2"]
    for prefetch, offered in ((40, {"data.prefetch=64"}), (64, set())):  # no more than a run file may say
        most = commands(first(simulated.with_config(facts, data={"prefetch": prefetch, "workers": 64})))
        assert {command.partition(" --set ")[2] for command in most if " --set data." in command} == offered


def test_data_that_another_rank_hides_or_that_are_late_in_a_tiny_step_cost_nothing() -> None:
    hidden = longer(longer(healthy_facts(), 1, {"data": 8}), 0, {"forward": 2.0, "backward": 2.0})
    assert "late-data" not in causes(hidden)
    assert "late-data" not in causes(scaled(longer(healthy_facts(), 1, {"data": 40}, newest=150), 0.01))


def test_a_slow_sum_is_named_with_a_batch_at_which_it_would_not_matter() -> None:
    found = first(synced(healthy_facts(), 10))
    assert (found.cause, found.evidence[-1]) == ("slow-link", "400 MB of gradients are summed in each step")
    assert any(command.startswith("trainctl send set-global-batch value=") for command in commands(found))
    slower = first(synced(healthy_facts(), 60))  # one rank alone is faster
    assert slower.cause == "slow-link"
    assert commands(slower)[0] in ("trainctl send drain --node node-0", "trainctl send drain --node node-1")


def test_segments_sent_again_make_a_link_lossy() -> None:
    varying = synced(healthy_facts(), 20, every=2)
    counters = {"retransmits_per_second": 40, "network_out_bytes_per_second": 1e6}
    facts = with_readings(varying, "node-1", counters)
    found = first(facts)
    assert (found.cause, found.node) == ("lossy-link", "node-1")
    assert facts.view is not None
    ring = dataclasses.replace(facts, view=msgspec.structs.replace(facts.view, engine="ring"))
    several = "trainctl run RUN.toml --set group.links_per_peer=4"
    assert several in commands(first(ring))
    assert several not in commands(found), "gloo has one link"
    busy = with_readings(facts, "node-1", counters | {"network_out_bytes_per_second": 1e9})
    assert first(busy).cause == "slow-link"
    uncounted = dataclasses.replace(varying, readings={})
    assert first(uncounted).cause == "slow-link" and "unknown" in dict(said_of(uncounted, "lossy-link"))


def long_sums(sum_bytes: float | None) -> DiagnosisFacts:
    """Make facts of ranks whose sums take a fifth of a step from the start, without a calibration."""
    cluster = simulated.cluster(1)
    cluster.link_part = 0.2
    facts = simulated.facts(cluster, simulated.record(cluster, 150, 150))
    values = {"sum_bytes": sum_bytes} if sum_bytes is not None else {}
    return dataclasses.replace(
        with_parts(facts, lambda part: msgspec.structs.replace(part, values=values)), profiles={}
    )


def test_a_sum_whose_bytes_cross_no_network_or_that_waits_for_processors_blames_no_link() -> None:
    def sent(facts: DiagnosisFacts, rate: float) -> DiagnosisFacts:
        for node in list(facts.readings):
            facts = with_readings(facts, node, {"network_out_bytes_per_second": rate})
        return facts

    facts = long_sums(4e8)
    assert first(sent(facts, 4e8)).title == "the sum of gradients takes long"
    assert causes(sent(facts, 1e4)) == causes(sent(synced(facts, 10), 1e4)) == []
    assert "clear" in dict(said_of(sent(facts, 1e4), "slow-link"))
    assert causes(with_readings(facts, "node-0", {"cpu_pressure": 70})) == []


def test_a_sum_that_few_bytes_do_not_explain_blames_no_link() -> None:
    """Where the bytes that a node sends aren't counted."""
    large, small, unknown = (dataclasses.replace(long_sums(size), readings={}) for size in (4e8, 1e5, None))
    assert first(large).title == "the sum of gradients takes long"
    assert causes(small) == causes(unknown) == []
    assert first(synced(small, 10)).title == "the link between the nodes is slow"


def test_one_rank_alone_has_no_link() -> None:
    facts = healthy_facts()
    alone = dataclasses.replace(facts, parts=tuple(part for part in facts.parts if part.rank == 0))
    for cause in ("slow-link", "slow-rank"):
        assert [result for result, _ in said_of(alone, cause)] == ["clear"]


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
