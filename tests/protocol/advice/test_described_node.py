"""Nodes that a cluster file describes for `trainctl simulate`, in advice."""

from typing import Any

import pytest
from tests.protocol.support.advised import BILLION, run_of
from tests.protocol.support.profiles import profile_of

from trainctl.protocol.advice.advice import advise
from trainctl.protocol.advice.advice_facts import AdviceFacts, NodeFacts, described_link, described_node
from trainctl.protocol.advice.plans import plan_of
from trainctl.protocol.batch.flops import StepFlops
from trainctl.protocol.calibration.profile import LinkRate, Pass
from trainctl.protocol.config.cluster_file import SimulatedNode


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
