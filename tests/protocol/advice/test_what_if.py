"""Changes of the answer, which machine for which size, and described nodes: against predictions and datasheets."""

from typing import Any

import msgspec
import pytest
from tests.protocol.support.advised import BILLION, facts_of, node_of, run_of
from tests.protocol.support.profiles import profile_of

from trainctl.protocol.advice.advice import advise
from trainctl.protocol.advice.advice_facts import AdviceFacts, NodeFacts, described_link, described_node
from trainctl.protocol.advice.group_links import ethernet
from trainctl.protocol.advice.memory_fit import size_ranges
from trainctl.protocol.advice.plans import plan_of
from trainctl.protocol.batch.flops import StepFlops
from trainctl.protocol.batch.memory_estimate import MemoryModel
from trainctl.protocol.calibration.profile import LinkRate, MatmulRate, Pass
from trainctl.protocol.config.cluster_file import SimulatedNode

RATES = {"studio": 1.95, "mbp": 1.03}


def changes(facts: AdviceFacts) -> dict[str, float]:
    return {one.change: one.gain for one in advise(facts).what_ifs}


def test_a_faster_link_gains_what_a_whole_prediction_with_it_says() -> None:
    slow, fast = (plan_of(facts_of(RATES, ethernet(rate)), [*RATES], "sync") for rate in (1, 10))
    found = next(one for one in advise(facts_of(RATES, ethernet(1))).what_ifs if one.change == "10 GbE")
    assert found.gain == pytest.approx((fast.samples_per_second or 0) / (slow.samples_per_second or 1) - 1)
    assert found.beats_answer


def test_a_larger_global_batch_comes_nearer_to_the_sum_of_the_rates_and_adapters_shrink_it() -> None:
    adapters = facts_of(RATES, ethernet(1), adapter_gradient_bytes=40_000_000)
    assert changes(adapters)["LoRA: fewer gradients to sum"] > 1
    found = {one.change: one for one in advise(facts_of(RATES, ethernet(10))).what_ifs}
    assert 0.8 < (found["G = 96"].part_of_sum or 0) < (found["G = 192"].part_of_sum or 0) < 1


def test_only_a_faster_link_is_named_and_none_within_one_machine() -> None:
    shared = {name: {"machine": "box"} for name in RATES}
    links = {"2.5 GbE", "10 GbE", "25 GbE"}
    assert links <= set(changes(facts_of(RATES, ethernet(1))))
    assert links & set(changes(facts_of(RATES, ethernet(10)))) == {"25 GbE"}
    assert not links & set(changes(facts_of(RATES, ethernet(1), shared)))


def test_rdma_and_nccl_are_named_as_missing_between_devices_that_have_them() -> None:
    plain = advise(facts_of(RATES, ethernet(1)))
    assert not plain.needs and not [one for one in plain.what_ifs if one.needs]
    macs = advise(facts_of(RATES, ethernet(1), {name: {"system": "Darwin"} for name in RATES}))
    assert [one.needs for one in macs.what_ifs if one.needs] == ["engine jaccl"]
    assert any(need.startswith("RDMA") for need in macs.needs)
    nvidia = {name: {"device": "cuda:0 NVIDIA H100 80GB HBM3"} for name in RATES}
    assert any(need.startswith("NCCL") for need in advise(facts_of(RATES, ethernet(1), nvidia)).needs)


def test_the_peak_micro_batch_is_a_change_only_if_another_is_set() -> None:
    passes = tuple(Pass(micro, seconds) for micro, seconds in ((1, 0.01), (4, 0.016), (16, 0.1)))
    curved = node_of("studio", 1.0, profiles=(profile_of(passes=passes),), micro=16)
    facts = facts_of({"studio": 1.0}, 1e9)
    found = changes(msgspec.structs.replace(facts, nodes=(curved,)))
    assert found["micro-batch 4 on studio"] == pytest.approx(0.1 / 16 / (0.016 / 4) - 1, rel=0.02)
    assert not changes(msgspec.structs.replace(facts, nodes=(msgspec.structs.replace(curved, micro=4),)))


def test_sizes_go_to_the_faster_chip_until_its_memory_ends() -> None:
    nodes = [node_of("fast", 2.0, cap_bytes=24 * BILLION), node_of("large", 1.0, cap_bytes=160 * BILLION)]
    found = [one for one in size_ranges(nodes, {"fast": 2.0, "large": 1.0}) if one.method == "LoRA, bfloat16"]
    assert [one.node for one in found] == ["fast", "large"]
    assert found[0].up_to == found[1].above == pytest.approx(24e9 * 0.9 / 1.1 / 2)
    assert [one.node for one in size_ranges(nodes, {"fast": 1.0, "large": 2.0}) if "LoRA, b" in one.method] == ["large"]


def test_the_reference_is_an_estimate_from_the_datasheet() -> None:
    facts = facts_of(RATES, ethernet(1), flops=StepFlops(6 * BILLION, 0.0))
    found = advise(facts).reference
    compute = 48 / 8 * 512 * 6 * BILLION / (0.4 * 312e12)
    assert found.step_seconds == pytest.approx(compute + 2 * 7 / 8 * 4e9 / 300e9, rel=0.01)
    assert advise(facts_of(RATES, ethernet(1))).reference is None
    # It has a micro-batch of its own, whatever the run's nodes have.
    own = {"studio": {"memory": MemoryModel(60e9, 10e9)}}
    assert advise(facts_of(RATES, ethernet(1), own, flops=StepFlops(6 * BILLION, 0.0))).reference.fits


def test_a_node_without_a_fitting_profile_is_estimated_from_its_products() -> None:
    other = profile_of(matmul=(MatmulRate("float32", 2000.0),))
    facts = facts_of(RATES, ethernet(1), flops=StepFlops(6 * BILLION, 0.0))
    box = NodeFacts(name="box", other_profile=other, micro=8)
    found = plan_of(msgspec.structs.replace(facts, nodes=(*facts.nodes, box)), ["box"], "alone")
    assert found.source == "estimated"
    assert found.samples_per_second == pytest.approx(0.4 * 2e12 / (512 * 6e9), rel=0.01)
    assert "products" in found.notes[0]


def alone(settings: SimulatedNode, *, dtype: str = "bfloat16", **run: Any) -> AdviceFacts:
    node = described_node(NodeFacts(name="box", micro=4), settings, None)
    return AdviceFacts(run=run_of(flops=StepFlops(6 * BILLION, 0.0), dtype=dtype, **run), nodes=(node,))


def test_a_described_speed_makes_an_estimate() -> None:
    """A global batch of 48 in passes of 4."""
    for settings, seconds in (
        (SimulatedNode(samples_per_second=2.0), 24.0),
        (SimulatedNode(samples_per_second=2.0, pass_seconds=0.5), 30.0),
        (SimulatedNode(passes=((1, 0.3), (4, 1.0)), step_seconds=0.2), 12.2),
    ):
        found = plan_of(alone(settings), ["box"], "alone")
        assert (found.source, found.step_seconds) == ("estimated", pytest.approx(seconds, rel=0.01))


def test_a_described_device_is_taken_from_its_datasheet() -> None:
    found = plan_of(alone(SimulatedNode(device="h200")), ["box"], "alone")
    assert found.samples_per_second == pytest.approx(0.4 * 989e12 / (512 * 6 * BILLION), rel=0.01)
    unknown = alone(SimulatedNode(device="abacus"))
    assert plan_of(unknown, ["box"], "alone").source == "unknown"
    assert "no device 'abacus'; known are a100" in unknown.nodes[0].problem
    # A device without bfloat16 is estimated in float16 alone.
    assert "float16" in advise(alone(SimulatedNode(device="T4"), dtype="bfloat16")).unknown["box"]
    for settings in ({"auto_dtype": True}, {"dtype": "float16"}):
        found = plan_of(alone(SimulatedNode(device="T4"), **settings), ["box"], "alone")
        assert found.samples_per_second == pytest.approx(0.4 * 65e12 / (512 * 6 * BILLION), rel=0.01)


def test_a_described_node_begins_as_an_agent_would_and_memory_is_compared() -> None:
    """An agent knows no profile of a device that is only named; described passes are one, whose peak is 4."""
    for settings, micro in (
        (SimulatedNode(device="rtx4090"), 8),
        (SimulatedNode(passes=((1, 1.0), (4, 1.0), (16, 8.0))), 4),
    ):
        node = described_node(NodeFacts(name="box"), settings, None)
        facts = AdviceFacts(run=run_of(flops=StepFlops(6 * BILLION, 0.0), dtype="float16"), nodes=(node,))
        assert plan_of(facts, ["box"], "alone").micro == {"box": micro}
    for settings in (
        SimulatedNode(samples_per_second=2.0, memory_gb=24.0, model_gb=20.0, sample_gb=5.0),
        SimulatedNode(device="h100", memory_gb=24.0, model_gb=20.0, sample_gb=5.0),
    ):
        (fit,) = plan_of(alone(settings), ["box"], "alone").memory
        assert (fit.needed_bytes, fit.cap_bytes, fit.fits) == (25 * BILLION, 24 * BILLION, False)


def test_a_named_profile_gives_passes_and_link() -> None:
    given = profile_of(passes=(Pass(4, 2.0),), links=(LinkRate("x", 2e9, 1e9, 0.001),))
    settings = SimulatedNode(profile="x.json")
    node = described_node(NodeFacts(name="box"), settings, given)
    assert node.profile is given
    assert described_link(settings, given, "studio").sent_bytes_per_second == 1e9
    assert described_link(SimulatedNode(profile="x.json", link_gbit=10), given, "studio") == LinkRate(
        "studio", 1.25e9, 1.25e9, 2e-4
    )
