"""Tests of which nodes to use: figures that were worked out by hand, and a simulated ring."""

from typing import Any

import msgspec
import pytest
from tests.protocol.support.advised import BILLION, GRADIENTS, facts_of, link_to, node_of, ring_seconds, run_of

from trainctl.protocol.advice.advice import ROW_SECONDS, advise, batch_for
from trainctl.protocol.advice.advice_facts import AdviceFacts, NodeFacts
from trainctl.protocol.advice.group_links import HANDOVER_SECONDS, LOCAL_SUM_BYTES, ethernet
from trainctl.protocol.advice.memory_fit import cap_of
from trainctl.protocol.advice.node_speed import AGENT_SECONDS
from trainctl.protocol.advice.plans import Plan, plan_of
from trainctl.protocol.batch.eta import COPY_BYTES_PER_SECOND, Schedule
from trainctl.protocol.batch.flops import StepFlops
from trainctl.protocol.batch.memory_estimate import MemoryModel
from trainctl.protocol.calibration.profile import DiskRate, GridPoint, Pass

RATES = {"studio": 1.95, "mbp": 1.03}


def plan(facts: AdviceFacts, mode: str) -> Plan:
    return next(one for one in advise(facts).plans if one.mode == mode)


def measured(facts: AdviceFacts, **fields: Any) -> AdviceFacts:
    """Return the facts with a first node whose profile has these fields."""
    node = facts.nodes[0]
    assert node.profile is not None
    profile = msgspec.structs.replace(node.profile, **fields)
    return msgspec.structs.replace(facts, nodes=(msgspec.structs.replace(node, profiles=(profile,)), *facts.nodes[1:]))


def test_independent_work_runs_apart_where_sums_cost_much() -> None:
    facts = facts_of(RATES, ethernet(10))
    found = advise(facts)
    assert (found.independent.mode, found.independent.nodes) == ("separate", ("studio", "mbp"))
    assert found.independent.samples_per_second == pytest.approx(2.98, abs=0.005)
    assert plan(facts, "sync").samples_per_second == pytest.approx(2.5, rel=0.05)
    assert found.answer.mode == "sync"  # one run needs the same weights, and alone it would have 1.95


def test_a_billion_parameters_over_gigabit_ethernet_train_alone() -> None:
    facts = facts_of(RATES, ethernet(1))
    found = advise(facts)
    assert (found.answer.mode, found.answer.nodes) == ("alone", ("studio",))
    assert found.answer.samples_per_second == pytest.approx(1.95, abs=0.005)
    together = plan(facts, "sync")
    assert together.samples_per_second == pytest.approx(0.96, abs=0.015)
    assert together.sent_bytes == GRADIENTS
    assert together.shares in ({"studio": 31, "mbp": 17}, {"studio": 32, "mbp": 16})
    halves = facts_of(RATES, ethernet(10), {"studio": {"share": 24}, "mbp": {"share": 24}})
    assert plan(halves, "sync").step_seconds == pytest.approx(24 / 1.03 + GRADIENTS / ethernet(10) + HANDOVER_SECONDS)


@pytest.mark.parametrize("gigabits", [1, 2.5, 10])
def test_the_batch_for_95_percent_is_what_four_simulated_nodes_need(gigabits: float) -> None:
    names = ["a", "b", "c", "d"]
    facts = facts_of(dict.fromkeys(names, 1.5), ethernet(gigabits), global_batch=256)
    found = batch_for(facts, plan_of(facts, names, "sync"), 0.95)
    rate, alone = 4 * 1.5, ring_seconds(GRADIENTS, ethernet(gigabits), [0.0] * 4)
    assert found == pytest.approx(19 * rate * alone, rel=0.05)
    for batch, is_enough in ((found, True), (int(0.95 * found), False)):
        step = ring_seconds(GRADIENTS, ethernet(gigabits), [batch / rate] * 4)
        assert (batch / step >= 0.95 * rate * (1 - 0.001)) == is_enough


def test_of_plans_that_are_as_fast_the_one_with_fewer_nodes_is_the_answer() -> None:
    found = advise(facts_of({"studio": 2.0, "mbp": 0.02}, ethernet(100), gradient_bytes=4_000_000))
    assert found.answer is not None and found.answer.nodes == ("studio",)
    many = advise(facts_of({f"n{number}": 1.0 + number for number in range(16)}, ethernet(10)))
    assert len(many.plans) == 16 + 2 * 15, "few of the plans of many nodes are looked at"


def test_a_plan_that_memory_forbids_is_not_the_answer() -> None:
    facts = facts_of(RATES, ethernet(1), {"studio": {"cap_bytes": 10_000}})
    found = advise(facts)
    assert found.answer is not None and found.answer.nodes == ("mbp",)
    (alone,) = [one for one in found.plans if one.nodes == ("studio",)]
    assert alone.fits is False
    assert alone.memory[0].spare_bytes == 10_000 - 11_000, "even with the smallest micro-batch"
    # A group also needs memory for the sum.
    facts = facts_of(RATES, ethernet(1), {"mbp": {"cap_bytes": GRADIENTS}})
    assert plan(facts, "separate").fits and not plan(facts, "separate").smaller
    assert plan(facts, "sync").fits is False
    nothing_fits = advise(facts_of(RATES, ethernet(1), {name: {"cap_bytes": 1} for name in RATES}))
    assert nothing_fits.answer is nothing_fits.independent is None
    assert "sharding" in nothing_fits.needs[0]


def test_a_plan_that_lacks_little_is_kept_with_a_smaller_micro_batch() -> None:
    """Nodes of 18,000 bytes with passes of 8, 14,000 with 4."""
    facts = facts_of(RATES, ethernet(1), {"studio": {"cap_bytes": 17_900}})
    found = advise(facts)
    assert found.answer is not None and (found.answer.nodes, found.answer.micro) == (("studio",), {"studio": 4})
    assert found.answer.smaller == {"studio": 4}
    line = NodeFacts(
        name="box",
        device="NVIDIA A100",
        micro=8,
        cap_bytes=7 * BILLION,
        memory=MemoryModel(4e9, 1e9),
    )
    run = run_of(flops=StepFlops(6 * BILLION, 0.0), dtype="bfloat16")
    estimated = plan_of(AdviceFacts(run=run, nodes=(line,)), ["box"], "alone")
    assert (estimated.micro, estimated.memory[0].needed_bytes, estimated.can_run) == ({"box": 2}, 6 * BILLION, True)


def test_the_memory_limit_of_another_run_s_profile_does_not_count() -> None:
    """Its settings may have had a limit of their own."""
    profile = node_of("box", 2.0).profile
    limited = msgspec.structs.replace(profile, memory_cap_bytes=1)
    for device, cap in (("cpu", None), ("NVIDIA A100", 80 * BILLION)):
        assert cap_of(NodeFacts(name="box", device=device, other_profile=limited)) == cap


def test_an_unknown_speed_is_not_blamed_on_the_device_where_the_model_s_size_is_missing() -> None:
    for fields, reason in (({}, "the model's sizes"), ({"flops": StepFlops(6 * BILLION, 0.0)}, "model.dtype")):
        facts = AdviceFacts(run=run_of(**fields), nodes=(NodeFacts(name="box", device="NVIDIA A100"),))
        assert reason in advise(facts).unknown["box"]


def test_a_plan_names_its_nodes_without_a_price() -> None:
    found = plan(facts_of(RATES, ethernet(10), {"studio": {"price_per_hour": 2.0}}), "sync")
    assert found.cost and found.unpriced == ("mbp",)


def test_a_node_without_a_profile_is_unknown_and_said_so() -> None:
    facts = facts_of(RATES, ethernet(1))
    bare = NodeFacts(name="box", problem="its agent doesn't answer")
    found = advise(msgspec.structs.replace(facts, nodes=(*facts.nodes, bare)))
    assert found.unknown == {"box": "its agent doesn't answer"}
    assert "box" not in found.answer.nodes
    assert [one.source for one in found.plans if "box" in one.nodes] == ["unknown"]


def test_whole_steps_are_slower_than_passes_as_calibration_measured() -> None:
    seconds = 0.5 + 1.1 * 24
    grid = (GridPoint(1, 48, seconds), GridPoint(8, 6, seconds))
    facts = measured(facts_of({"studio": 2.0}, 1e9), optimizer_seconds=0.5, grid=grid)
    assert plan_of(facts, ["studio"], "alone").step_seconds == pytest.approx(seconds)


def test_time_cost_and_energy_follow_from_the_rate() -> None:
    nodes = {"studio": {"price_per_hour": 2.0, "watts": 200.0}, "mbp": {"watts": 50.0}}
    found = plan_of(facts_of(RATES, ethernet(10), nodes), ["studio"], "alone")
    seconds = 1000 * 48 / 1.95
    assert found.expected_seconds == pytest.approx(seconds, rel=0.05)
    assert (found.best_seconds or 0) < (found.expected_seconds or 0) < (found.worst_seconds or 0)
    assert found.cost == pytest.approx(2.0 * (found.expected_seconds or 0) / 3600)
    assert found.energy_kwh == pytest.approx(200.0 * (found.expected_seconds or 0) / 3.6e6)


def test_checkpoints_and_evaluations_take_time_too() -> None:
    schedules = {"checkpoint": Schedule(100, True), "evaluate": Schedule(10)}
    facts = facts_of({"studio": 2.0}, 1e9, schedules=schedules)
    busy = facts_of({"studio": 2.0}, 1e9, schedules=schedules, checkpoint_bytes=60 * BILLION, held_out=60)
    busy = measured(busy, disk=DiskRate(0.5e9))
    waits = msgspec.structs.replace(busy, run=msgspec.structs.replace(busy.run, background_checkpoints=False))
    more = [plan_of(one, ["studio"], "alone").expected_seconds or 0.0 for one in (facts, busy, waits)]
    evaluations = 99 * 60 / 2.0 / 3
    assert more[1] - more[0] == pytest.approx(10 * 60e9 / COPY_BYTES_PER_SECOND + evaluations, rel=0.1)
    assert more[2] - more[0] == pytest.approx(10 * 60 / 0.5 + evaluations, rel=0.1)


def test_agents_take_time_from_ranks_that_compute_on_all_cores() -> None:
    apart = facts_of(RATES, 1e9, {key: {"machine": "one"} for key in RATES}, gradient_bytes=0)
    for cores, threads, device, quota, seconds in (
        (2, 1, "cpu", None, AGENT_SECONDS), (3, 1, "cpu", None, 0.0), (8, 0, "cpu", None, AGENT_SECONDS),
        (2, 1, "cuda:0 NVIDIA H100", None, 0.0), (None, 1, "cpu", None, 0.0), (9, 1, "cpu", 2.0, 0.0),
        (9, 1, "cpu", 0.2, 5 * AGENT_SECONDS),
    ):  # fmt: skip
        tables = {"machine": "one", "cores": cores, "threads": threads, "device": device, "cpu_quota": quota}
        facts = facts_of(RATES, 1e9, dict.fromkeys(RATES, tables), gradient_bytes=0)
        more = plan(facts, "sync").step_seconds - plan(apart, "sync").step_seconds
        assert more == pytest.approx(seconds, abs=1e-9)


def on_one_machine(beside: bool) -> AdviceFacts:
    """Two nodes that were measured alone, and perhaps also at once: half as fast."""
    facts = facts_of(RATES, 1e9, {name: {"machine": "one"} for name in RATES})
    slow = facts_of({name: rate / 2 for name, rate in RATES.items()}, 1e9).nodes
    nodes = []
    for node, halved, other in zip(facts.nodes, slow, reversed([*RATES]), strict=True):
        assert halved.profile is not None
        together = msgspec.structs.replace(halved.profile, beside=(other,))
        nodes.append(msgspec.structs.replace(node, profiles=((together,) if beside else ()) + node.profiles))
    return msgspec.structs.replace(facts, nodes=tuple(nodes))


def test_nodes_of_one_machine_are_predicted_by_what_was_measured_at_once() -> None:
    facts = on_one_machine(beside=False)
    assert "will slow it down" in plan(facts, "separate").notes[0]
    assert plan(facts, "separate").source == "estimated"
    assert not plan(facts, "alone").notes
    facts = on_one_machine(beside=True)
    # A sum within one machine is no faster than gloo adds.
    fast = msgspec.structs.replace(facts, links=dict.fromkeys(facts.links, link_to(20e9)))
    assert plan(fast, "sync").sum_seconds == pytest.approx(HANDOVER_SECONDS + GRADIENTS / LOCAL_SUM_BYTES)
    assert plan(facts, "sync").sum_seconds == pytest.approx(HANDOVER_SECONDS + GRADIENTS / 1e9)
    assert plan(facts, "separate").samples_per_second == pytest.approx(2.98 / 2)
    assert plan(facts, "separate").source == "measured"
    assert plan(facts, "alone").samples_per_second == pytest.approx(1.95)
    alone = msgspec.structs.replace(facts.nodes[0], profiles=facts.nodes[0].profiles[:1])
    found = plan_of(msgspec.structs.replace(facts, nodes=(alone,)), ["studio"], "alone")
    assert "alone it is faster" in found.notes[0]


def test_rows_are_scored_at_the_forward_rate_with_a_pause_between_slices() -> None:
    facts = facts_of({"studio": 2.0}, 1e9)
    estimate = advise(facts).scoring
    assert estimate is not None and estimate.source == "estimated"
    scoring = advise(measured(facts, forward=tuple(Pass(micro, micro / 50.0) for micro in (1, 8, 16)))).scoring
    assert scoring is not None and scoring.source == "measured"
    assert scoring.rows_per_second == pytest.approx(2.0 / 2.1 / (1 / 50 + ROW_SECONDS))
    # Estimated nodes by their own rates: an A100 and an H100, with a third of a training pass.
    run = run_of(flops=StepFlops(6 * BILLION, 0.0), dtype="bfloat16")
    bare = tuple(NodeFacts(name=name, device=f"NVIDIA {name.upper()}") for name in ("a100", "h100"))
    rates = advise(AdviceFacts(run=run, nodes=bare)).scoring.nodes
    rows = 3 * 0.4 * 312e12 / (512 * 6 * BILLION)
    assert rates["a100"] == pytest.approx(2.0 / 2.1 * rows, rel=0.02)
    assert rates["h100"] > 2 * rates["a100"]


def test_links_are_assumed_where_none_was_measured() -> None:
    facts = AdviceFacts(run=run_of(), nodes=(node_of("studio", 1.95), node_of("mbp", 1.03)))
    found = plan_of(facts, ["studio", "mbp"], "sync")
    assert (found.link, found.link_measured) == ("1 GbE, assumed", False)
    linked = msgspec.structs.replace(facts, links={"mbp": link_to(ethernet(1))})
    assert plan_of(linked, ["studio", "mbp"], "sync").link_measured


def test_a_checkpoint_s_copy_counts_where_the_device_s_memory_is_the_host_s() -> None:
    nodes = {"studio": {"shared_bytes": 90_000}}
    for in_background, copied_bytes in ((False, 0), (True, 7)):
        facts = facts_of(RATES, 1e9, nodes, checkpoint_bytes=7, background_checkpoints=in_background)
        needed = {fit.node: fit.needed_bytes for fit in plan(facts, "separate").memory}
        assert needed == {"studio": 18_000 + copied_bytes, "mbp": 18_000}


def test_nodes_that_share_a_machines_memory_must_fit_together() -> None:
    """Each node alone fits in it, but not both."""
    one = {"machine": "one", "shared_bytes": 21_000, "micro": 1}
    found = advise(facts_of(RATES, 1e9, {"studio": one, "mbp": one}, gradient_bytes=0))
    by_mode = {(found_plan.mode, found_plan.nodes): found_plan for found_plan in found.plans}
    assert by_mode["alone", ("studio",)].can_run
    assert by_mode["separate", ("studio", "mbp")].fits is False
    assert by_mode["separate", ("studio", "mbp")].shared_memory[0].needed_bytes == 2 * 11_000
    assert found.answer.mode == "alone"
    apart = advise(facts_of(RATES, 1e9, {"studio": one, "mbp": one | {"machine": "two"}}, gradient_bytes=0))
    assert all(found_plan.can_run for found_plan in apart.plans)
