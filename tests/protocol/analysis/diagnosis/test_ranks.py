"""Rules of ranks that work together: late data, a slow or lossy link."""

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
    with_parts,
    with_readings,
    with_steps,
)

from trainctl.protocol import messages as m
from trainctl.protocol.analysis.diagnosis.diagnosis_facts import DiagnosisFacts


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
