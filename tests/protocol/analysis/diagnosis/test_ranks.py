"""Rules of ranks that work together: late data, a slow rank, a slow or lossy link."""

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
    uneven_facts,
    with_parts,
    with_readings,
    with_steps,
)

from trainctl.protocol import messages as m
from trainctl.protocol.analysis.diagnosis.diagnosis_facts import DiagnosisFacts


def synced(facts: DiagnosisFacts, factor: float, every: int = 1) -> DiagnosisFacts:
    """With the sum's own seconds longer by this factor in each of some of the newest 40 steps, for all ranks."""
    own = {
        one.step: (factor - 1) * min(part.phases.sync for part in facts.parts if part.step == one.step)
        for one in facts.steps
    }
    last = facts.steps[-1].step

    def is_long(step: int) -> bool:
        return step > last - 40 and step % every == 0

    def part(one: m.RankStep) -> m.RankStep:
        more = own[one.step] if is_long(one.step) else 0.0
        phases = msgspec.structs.replace(one.phases, sync=one.phases.sync + more)
        values = {name: value for name, value in one.values.items() if name != "link_use"}
        return msgspec.structs.replace(one, phases=phases, step_seconds=one.step_seconds + more, values=values)

    def step(one: m.StepCommitted) -> m.StepCommitted:
        more = own[one.step] if is_long(one.step) else 0.0
        return msgspec.structs.replace(one, step_seconds=one.step_seconds + more)

    return with_steps(with_parts(facts, part), step)


def test_late_data_says_what_is_set_and_what_it_costs() -> None:
    found = first(longer(healthy_facts(), 1, {"data": 40}))
    assert (found.cause, found.rank, found.evidence[-1]) == ("late-data", 1, "prefetch 2, 1 worker")
    assert found.what_if is not None and found.what_if.part == pytest.approx(0.28, abs=0.05)
    assert commands(found)[:2] == [
        "trainctl run RUN.toml --set data.prefetch=4",
        "trainctl run RUN.toml --set data.workers=2",
    ]


def test_no_more_is_assembled_ahead_than_a_run_file_may_say() -> None:
    facts = longer(healthy_facts(), 1, {"data": 40})
    many = commands(first(simulated.with_config(facts, data={"prefetch": 40, "workers": 64})))
    assert "trainctl run RUN.toml --set data.prefetch=64" in many
    most = commands(first(simulated.with_config(facts, data={"prefetch": 64, "workers": 64})))
    assert not any("data.prefetch" in command or "data.workers" in command for command in (*most, *many[1:]))


def test_data_that_another_rank_hides_cost_nothing() -> None:
    facts = longer(longer(healthy_facts(), 1, {"data": 8}), 0, {"forward": 2.0, "backward": 2.0})
    assert "late-data" not in causes(facts)


def test_a_tiny_step_may_wait_for_data() -> None:
    def shorter(part: m.RankStep) -> m.RankStep:
        phases = m.Phases(**{name: getattr(part.phases, name) / 100 for name in m.PHASES})
        return msgspec.structs.replace(part, phases=phases, step_seconds=part.step_seconds / 100)

    facts = with_parts(longer(healthy_facts(), 1, {"data": 40}, newest=150), shorter)
    facts = with_steps(facts, lambda one: msgspec.structs.replace(one, step_seconds=one.step_seconds / 100))
    assert "late-data" not in causes(facts)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_slow_rank_is_named_with_its_phase_and_what_a_step_takes_without(phase: str) -> None:
    found = first(longer(healthy_facts(), 1, {phase: 2.0}))
    assert (found.cause, found.title) == ("slow-rank", f"node-1 is slow in {phase}")
    assert found.what_if is not None
    ladder = commands(found)
    assert (ladder[0], ladder[-1]) == ("trainctl send rebalance auto=true", "trainctl calibrate --node node-1")


def test_a_rank_that_keeps_no_other_waiting_is_not_slow() -> None:
    """Both are as slow as each other: no split helps, and neither explains a wait."""
    facts = longer(longer(healthy_facts(3), 1, {"forward": 1.04}), 0, {"forward": 1.04})
    assert causes(facts) == []


def test_a_slow_sum_is_named_with_a_batch_at_which_it_would_not_matter() -> None:
    found = first(synced(healthy_facts(), 10))
    assert found.cause == "slow-link"
    assert found.evidence[-1] == "400 MB of gradients are summed in each step"
    assert any(command.startswith("trainctl send set-global-batch value=") for command in commands(found))


def test_where_one_rank_alone_is_faster_the_other_can_be_drained() -> None:
    found = first(synced(healthy_facts(), 60))
    assert found.cause == "slow-link"
    assert commands(found)[0] in ("trainctl send drain --node node-0", "trainctl send drain --node node-1")


def test_segments_sent_again_make_a_link_lossy() -> None:
    facts = synced(healthy_facts(), 20, every=2)
    facts = with_readings(facts, "node-1", {"retransmits_per_second": 40, "network_out_bytes_per_second": 1e6})
    found = first(facts)
    assert (found.cause, found.node) == ("lossy-link", "node-1")
    assert facts.view is not None
    ring = dataclasses.replace(facts, view=msgspec.structs.replace(facts.view, engine="ring"))
    several = "trainctl run RUN.toml --set group.links_per_peer=4"
    assert several in commands(first(ring))
    assert several not in commands(found), "gloo has one link"
    busy = with_readings(facts, "node-1", {"retransmits_per_second": 40, "network_out_bytes_per_second": 1e9})
    assert first(busy).cause == "slow-link"


def test_without_counters_losses_are_unknown_and_a_sum_that_varies_is_slow() -> None:
    facts = dataclasses.replace(synced(healthy_facts(), 20, every=2), readings={})
    assert first(facts).cause == "slow-link"
    assert "unknown" in dict(said_of(facts, "lossy-link"))


def long_sums(sum_bytes: float | None) -> DiagnosisFacts:
    """Of ranks whose sums take a fifth of a step from the start, without a calibration."""
    made = simulated.cluster(1)
    made.link_part = 0.2
    facts = dataclasses.replace(simulated.facts(made, simulated.record(made, 150, 150)), profiles={})
    values = {"sum_bytes": sum_bytes} if sum_bytes is not None else {}
    return with_parts(facts, lambda part: msgspec.structs.replace(part, values=values))


def test_a_sum_whose_bytes_cross_no_network_blames_no_link() -> None:
    def sent(facts: DiagnosisFacts, rate: float) -> DiagnosisFacts:
        for node in list(facts.readings):
            facts = with_readings(facts, node, {"network_out_bytes_per_second": rate})
        return facts

    facts = long_sums(4e8)
    assert first(sent(facts, 4e8)).title == "the sum of gradients takes long"
    assert causes(sent(facts, 1e4)) == causes(sent(synced(facts, 10), 1e4)) == []
    assert "clear" in dict(said_of(sent(facts, 1e4), "slow-link"))


def test_a_sum_that_few_bytes_do_not_explain_blames_no_link() -> None:
    """Where the bytes that a node sends aren't counted."""
    large, small, unknown = (dataclasses.replace(long_sums(size), readings={}) for size in (4e8, 1e5, None))
    assert first(large).title == "the sum of gradients takes long"
    for facts in (small, unknown):
        assert causes(facts) == []
    assert first(synced(small, 10)).title == "the link between the nodes is slow"


def test_a_split_that_saves_little_of_the_wait_blames_no_rank() -> None:
    """Ranks that share processors: a rank waits for its turn, whatever its share."""
    facts = uneven_facts()
    assert first(facts).title == "node-0 has too large a share"
    assert commands(first(facts))[0] == "trainctl send rebalance auto=true"

    def waits(part: m.RankStep) -> m.RankStep:
        more = 20 * part.phases.busy
        phases = msgspec.structs.replace(part.phases, sync=part.phases.sync + (more if part.rank == 1 else 0.0))
        return msgspec.structs.replace(part, phases=phases, step_seconds=part.step_seconds + more)

    crowded = with_parts(facts, waits)
    crowded = with_steps(crowded, lambda one: msgspec.structs.replace(one, step_seconds=20 * one.step_seconds))
    assert "slow-rank" not in causes(crowded)


def test_a_sum_that_waits_for_processors_blames_no_link() -> None:
    """Ranks that share a machine's processors, from the start."""
    facts = long_sums(4e8)
    assert first(facts).title == "the sum of gradients takes long"
    assert causes(with_readings(facts, "node-0", {"cpu_pressure": 70})) == []


def test_one_rank_alone_has_no_link() -> None:
    facts = healthy_facts()
    alone = dataclasses.replace(facts, parts=tuple(part for part in facts.parts if part.rank == 0))
    for cause in ("slow-link", "slow-rank"):
        assert [result for result, _ in said_of(alone, cause)] == ["clear"]
