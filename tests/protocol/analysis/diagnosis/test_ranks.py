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
    assert (found.cause, found.title, found.rank) == ("late-data", "node-1 waits for data", 1)
    assert found.evidence[-1] == "prefetch 2, 1 worker"
    assert found.what_if is not None
    assert found.what_if.part == pytest.approx(0.28, abs=0.05)
    assert commands(found)[:3] == [
        "trainctl run RUN.toml --set data.prefetch=4", "trainctl run RUN.toml --set data.workers=2",
        "trainctl data bench RUN.toml",
    ]  # fmt: skip
    assert any(line.startswith("a disk is slow: I/O pressure ") for line in found.ruled_out)


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
    assert found.evidence[0].startswith(f"{phase} takes ")
    assert ", before " in found.evidence[0]
    assert any(line.startswith("node-0 waits ") for line in found.evidence)
    assert found.what_if is not None
    assert found.what_if.saying.startswith(f"without node-1's {phase} a step takes ")
    assert commands(found)[0] == "trainctl send rebalance auto=true"
    assert commands(found)[-1] == "trainctl calibrate --node node-1"


def test_a_rank_that_keeps_no_other_waiting_is_not_slow() -> None:
    """Both are as slow as each other: no split helps, and neither explains a wait."""
    facts = longer(longer(healthy_facts(3), 1, {"forward": 1.04}), 0, {"forward": 1.04})
    assert causes(facts) == []


def test_an_uneven_split_is_named_from_the_start() -> None:
    made = simulated.cluster(1)
    made.nodes[0].share, made.nodes[1].share = made.nodes[0].share + 16, made.nodes[1].share - 16
    found = first(simulated.facts(made, simulated.record(made, 150, 150)))
    assert (found.cause, found.title) == ("slow-rank", "node-0 has too large a share")
    shares = [node.share for node in made.nodes]
    assert found.evidence[0].startswith(f"{shares[0]} of {sum(shares)} samples take it ")
    assert any(line.startswith("the best split of the batch takes ") for line in found.evidence)
    assert commands(found)[0] == "trainctl send rebalance auto=true"


def test_a_slow_sum_is_named_with_a_batch_at_which_it_would_not_matter() -> None:
    facts = synced(healthy_facts(), 10)
    found = first(facts)
    assert (found.cause, found.title) == ("slow-link", "the link between the nodes is slow")
    assert found.evidence[0].endswith("waits for slower ranks aside")
    assert any(line.startswith("before: ") for line in found.evidence)
    assert found.evidence[-1] == "400 MB of gradients are summed in each step"
    assert any(command.startswith("trainctl send set-global-batch value=") for command in commands(found))


def test_where_one_rank_alone_is_faster_the_other_can_be_drained() -> None:
    found = first(synced(healthy_facts(), 60))
    assert found.cause == "slow-link"
    assert found.remedies[0].text.startswith("one rank alone takes ")
    assert commands(found)[0] in ("trainctl send drain --node node-0", "trainctl send drain --node node-1")


def test_segments_sent_again_make_a_link_lossy() -> None:
    facts = synced(healthy_facts(), 20, every=2)
    facts = with_readings(facts, "node-1", {"retransmits_per_second": 40, "network_out_bytes_per_second": 1e6})
    found = first(facts)
    assert (found.cause, found.title, found.node) == ("lossy-link", "node-1's link loses segments", "node-1")
    assert "node-1: 40 segments per second sent again" in found.evidence
    assert facts.view is not None
    ring = dataclasses.replace(facts, view=msgspec.structs.replace(facts.view, engine="ring"))
    several = "trainctl run RUN.toml --set group.links_per_peer=4"
    assert several in commands(first(ring))
    assert several not in commands(found), "gloo has one link"
    busy = with_readings(facts, "node-1", {"retransmits_per_second": 40, "network_out_bytes_per_second": 1e9})
    assert first(busy).cause == "slow-link"


def test_without_counters_losses_are_unknown_and_a_sum_that_varies_is_slow() -> None:
    facts = dataclasses.replace(synced(healthy_facts(), 20, every=2), readings={})
    found = first(facts)
    assert found.cause == "slow-link"
    assert any(line.startswith("the middle half of the sums differ by a factor of ") for line in found.evidence)
    assert said_of(facts, "lossy-link") == [("unknown", "TCP segments sent again")]


def long_sums(sum_bytes: float | None) -> DiagnosisFacts:
    """Of ranks whose sums take a fifth of a step from the start, without a calibration."""
    made = simulated.cluster(1)
    made.link_part = 0.2
    facts = dataclasses.replace(simulated.facts(made, simulated.record(made, 150, 150)), profiles={})
    values = {"sum_bytes": sum_bytes} if sum_bytes is not None else {}
    return with_parts(facts, lambda part: msgspec.structs.replace(part, values=values))


def sent(facts: DiagnosisFacts, rate: float) -> DiagnosisFacts:
    """With so many bytes per second that each node sends."""
    for node in list(facts.readings):
        facts = with_readings(facts, node, {"network_out_bytes_per_second": rate})
    return facts


def test_a_sum_whose_bytes_cross_no_network_blames_no_link() -> None:
    facts = long_sums(4e8)
    assert first(sent(facts, 4e8)).title == "the sum of gradients takes long"
    assert causes(sent(facts, 1e4)) == []
    assert said_of(sent(facts, 1e4), "slow-link") == [
        ("clear", "the gradients don't leave the machine: no network link carries them")
    ]
    assert causes(sent(synced(facts, 10), 1e4)) == []


def test_a_sum_that_few_bytes_do_not_explain_blames_no_link() -> None:
    """Where the bytes that a node sends aren't counted."""
    large, small, unknown = (dataclasses.replace(long_sums(size), readings={}) for size in (4e8, 1e5, None))
    assert first(large).title == "the sum of gradients takes long"
    for facts in (small, unknown):
        assert causes(facts) == []
        assert said_of(facts, "slow-link")[0][1].endswith("more than its bytes explain: it waits for processors")
    assert first(synced(small, 10)).title == "the link between the nodes is slow"


def test_a_split_that_saves_little_of_the_wait_blames_no_rank() -> None:
    """Ranks that share processors: a rank waits for its turn, whatever its share."""
    made = simulated.cluster(1)
    made.nodes[0].share, made.nodes[1].share = made.nodes[0].share + 16, made.nodes[1].share - 16
    facts = simulated.facts(made, simulated.record(made, 150, 150))
    assert causes(facts) == ["slow-rank"]

    def waits(part: m.RankStep) -> m.RankStep:
        more = 20 * part.phases.busy
        phases = msgspec.structs.replace(part.phases, sync=part.phases.sync + (more if part.rank == 1 else 0.0))
        return msgspec.structs.replace(part, phases=phases, step_seconds=part.step_seconds + more)

    crowded = with_parts(facts, waits, newest=150)
    crowded = with_steps(
        crowded, lambda one: msgspec.structs.replace(one, step_seconds=20 * one.step_seconds), newest=150
    )
    assert "slow-rank" not in causes(crowded)


def test_a_sum_that_waits_for_processors_blames_no_link() -> None:
    """Ranks that share a machine's processors, from the start."""
    facts = long_sums(4e8)
    assert first(facts).title == "the sum of gradients takes long"
    crowded = with_readings(facts, "node-0", {"cpu_pressure": 70})
    assert causes(crowded) == []
    assert said_of(crowded, "slow-link")[0][1].endswith("at a CPU pressure of 70 %: it waits for processors")


def test_one_rank_alone_has_no_link() -> None:
    facts = healthy_facts()
    alone = dataclasses.replace(facts, parts=tuple(part for part in facts.parts if part.rank == 0))
    assert said_of(alone, "slow-link") == [("clear", "one rank alone sums with no other")]
    assert said_of(alone, "slow-rank") == [("clear", "one rank alone waits for no other")]
