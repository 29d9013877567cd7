"""Tests of what a run and its ranks reach: rates, operations of a step, and both beside calibrations and devices'
peaks."""

from typing import Any

import msgspec
import pytest
from tools.protocol_docs import examples

from trainctl.protocol import messages as m
from trainctl.protocol.batch.cost import run_rates
from trainctl.protocol.batch.device_table import (
    DEVICES,
    datasheet_tflops,
    device_named,
    device_of,
    no_such_device,
    types_of_device,
)
from trainctl.protocol.batch.flops import peak_parts, step_flops
from trainctl.protocol.batch.pass_curve import bandwidth, links_of, passes_seconds, sum_seconds
from trainctl.protocol.calibration.profile import LinkRate, Pass, ProfileSummary
from trainctl.protocol.config.model_facts import ModelFacts
from trainctl.protocol.config.run_tables import AdapterTable

SHOWN = examples.EXAMPLES["published by an agent"]
VIEW, STEP = SHOWN["run-view"], SHOWN["step-committed"]
RUN = msgspec.structs.replace(VIEW, step=40, steps=100, global_batch=24, samples=720, cursor=960)
LAST = msgspec.structs.replace(
    STEP, step=40, step_seconds=0.5, samples=24, tokens_total=96_000.0, weight_total=60_000.0, seconds_total=24.0
)


def rates(view: dict[str, Any] | None = None, last: dict[str, Any] | None = None, **other: Any) -> m.RunRates:
    return run_rates(msgspec.structs.replace(RUN, **view or {}), msgspec.structs.replace(LAST, **last or {}), **other)


def known(found: m.RunRates) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(found).items() if value is not None}


def test_all_of_it() -> None:
    assert rates() == m.RunRates(
        unit="tokens/s", average_per_second=4000.0, steps_per_second=2.0, samples_per_second=48.0,
        seconds_per_sample=0.5 / 24, seconds_per_epoch=pytest.approx(15.0), epochs_left=2.0, seconds_left=30.0,
    )  # fmt: skip


def test_what_a_step_takes_lately_counts_and_the_last_step_is_where_the_run_is() -> None:
    found = rates({"step": 3}, step_seconds=2.0)
    assert (found.steps_per_second, found.seconds_left, found.average_per_second) == (0.5, 120.0, 4000.0)
    past_the_last = rates({"steps": 30})
    assert (past_the_last.epochs_left, past_the_last.seconds_left) == (0.0, 0.0)
    assert rates({"global_batch": None}, {"samples": 12}).samples_per_second == 24.0, "those of the last step"


def test_the_lead_s_own_estimate_counts_while_the_run_is_under_way() -> None:
    values = {"time_left_seconds": 40.0, "time_left_best_seconds": 35.0, "time_left_worst_seconds": 50.0}
    found = rates(last={"values": values})
    assert (found.seconds_left_best, found.seconds_left, found.seconds_left_worst) == (35.0, 40.0, 50.0)
    for state in ("paused", "stopped", "finished"):
        ended = rates({"state": state}, {"values": values})
        assert (ended.seconds_left_best, ended.seconds_left, ended.seconds_left_worst) == (None, None, None)
    # Pairs are averaged where the loss is divided by pairs.
    found = rates({"weight_unit": "pairs", "loss_unit": "nats per pair"})
    assert (found.unit, found.average_per_second) == ("pairs/s", 2500.0)


def test_what_is_unknown_or_no_time_gives_no_rate() -> None:
    for samples in (None, 0):
        found = rates({"samples": samples})
        assert (found.seconds_per_epoch, found.epochs_left) == (None, None)
        assert (found.seconds_left, found.samples_per_second) == (30.0, 48.0)
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        found = known(rates(last={"step_seconds": seconds, "seconds_total": 0.0}))
        assert found == {"unit": "tokens/s", "epochs_left": 2.0}
    before_the_first_step = known(run_rates(msgspec.structs.replace(RUN, step=0), None))
    assert before_the_first_step == {"unit": "tokens/s", "epochs_left": pytest.approx(100 / 30)}


def test_of_a_run_that_says_little() -> None:
    view = {"kind": "guest", "steps": None, "global_batch": None, "samples": None, "cursor": None}
    found = rates(view, {"weight": None, "tokens": None, "weight_total": None, "seconds_total": None})
    speed = {"steps_per_second": 2.0, "samples_per_second": 48.0, "seconds_per_sample": 0.5 / 24}
    assert known(found) == {"unit": "tokens/s"} | speed
    none = rates(view, {"samples": 0})
    assert (none.samples_per_second, none.seconds_per_sample) == (None, None)


PROFILE = ProfileSummary(created_at=0.0, passes=(Pass(2, 0.2), Pass(4, 0.3), Pass(8, 0.5)))
PART = examples.EXAMPLES["published by an agent"]["rank-step"]


def part(samples: int, micro: int | None, replays: int = 0) -> m.RankStep:
    return msgspec.structs.replace(PART, samples=samples, micro_batch=micro, replays=replays)


def test_passes_of_a_share_by_what_was_timed() -> None:
    for samples, micro, seconds in ((8, 4, 0.6), (10, 4, 0.8), (12, 12, 0.7), (3, 8, 0.25)):
        assert passes_seconds(part(samples, micro), PROFILE) == pytest.approx(seconds, rel=0.02)
        assert passes_seconds(part(samples, micro, replays=1), PROFILE) is None, "its passes were cut"
    for samples, unknown in ((16, 16), (8, 1), (1, 8), (8, None)):
        assert passes_seconds(part(samples, unknown), PROFILE) is None


def profile(*links: LinkRate) -> ProfileSummary:
    return ProfileSummary(created_at=0.0, passes=(Pass(1, 1.0),), links=links)


def test_a_link_is_known_from_either_end() -> None:
    first, second, other = LinkRate("a", 1e8, 2e8), LinkRate("c", 5e7, 4e7), LinkRate("c", 1.0, 1.0)
    known = links_of({"lead": profile(second), "b": profile(LinkRate("lead", 1e8, 2e8), other), "c": profile()}, "lead")
    assert known == {"c": second, "b": LinkRate("lead", 1e8, 2e8)}
    assert [bandwidth(link) for link in (first, second)] == [1e8, 4e7]


def test_a_ring_is_as_fast_as_its_slowest_link() -> None:
    fast, slow = LinkRate("a", 1e9, 1e9, 0.001), LinkRate("b", 1e8, 1e8, 0.004)
    assert sum_seconds(1e8, 2, [slow]) == pytest.approx(1.0 + 0.004)
    assert sum_seconds(1e8, 4, [fast, slow]) == pytest.approx(1.5 + 6 * 0.002)


MEASURED = ProfileSummary(created_at=0.0, passes=(Pass(1, 1.0),), gflops={"float32": 500.0, "bfloat16": 800_000.0})
H100 = "cuda:0 NVIDIA H100 80GB HBM3"
SHAPES = {
    "model.embed_tokens.weight": (100, 8), "lm_head.weight": (100, 8), "model.norm.weight": (8,),
    "model.layers.0.self_attn.q_proj.weight": (16, 8), "model.layers.0.self_attn.o_proj.weight": (8, 16),
}  # fmt: skip


def facts(shapes: dict[str, tuple[int, ...]], **other: int) -> ModelFacts:
    return ModelFacts("llama", shapes, 8, 32, 1, 2, 100, **other)


def test_a_model_by_hand() -> None:
    found = step_flops(AdapterTable(), facts(SHAPES), "run file")
    assert found == (6 * (800 + 128 + 128), 6 * 1 * 16)
    assert found.of(30, 3) == 30 * (6336 + 96 * 10)
    tied = {name: shape for name, shape in SHAPES.items() if name != "lm_head.weight"}
    assert step_flops(AdapterTable(), facts(tied), "run file") == found, "a tied head counts once"
    experts = facts({**SHAPES, "model.layers.0.mlp.experts.0.up_proj.weight": (8, 8)})
    for unknown in (None, facts(SHAPES, crossing=1), experts):
        assert step_flops(AdapterTable(), unknown, "run file") is None


def test_the_part_of_a_peak_is_of_the_data_type_that_is_computed_in() -> None:
    assert peak_parts(100e9, "cpu", "float32", MEASURED) == {"matmul_use": pytest.approx(0.2)}
    both = peak_parts(400e12, H100, "bfloat16", MEASURED)
    assert both == {"matmul_use": pytest.approx(0.5), "mfu": pytest.approx(400 / 989)}
    assert peak_parts(1e12, "cpu", "float16", MEASURED) == {}
    assert peak_parts(1e12, "cpu", "float32", None) == {}


def test_names_of_drivers_say_the_device_and_its_16_bit_types() -> None:
    devices = {
        "cuda:0 NVIDIA H100 80GB HBM3": "H100", "NVIDIA A100-SXM4-80GB": "A100", "NVIDIA H100 PCIe": None,
        "NVIDIA A100-PCIE-40GB": "A100 PCIe 40GB", "NVIDIA A100-SXM4-40GB": "A100 40GB", "gpu Apple M2 Ultra": None,
        "Tesla T4": "T4", "NVIDIA GeForce RTX 4090": "GeForce RTX 4090", "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    }  # fmt: skip
    assert {name: getattr(device_of(name), "name", None) for name in devices} == devices
    both = ("bfloat16", "float16")
    types = {
        "cuda:0 NVIDIA A100-SXM4-80GB": both, "NVIDIA RTX A6000": both, "Tesla T4": ("float16",),
        "NVIDIA GeForce GTX 1080 Ti": (), "NVIDIA of tomorrow": None, "gpu Apple M1 Pro": ("float16",),
        "gpu Apple M2 Ultra": both, "Apple M4 Max GPU": both, "mps": None, "cpu": None, "": None,
    }  # fmt: skip
    assert {name: types_of_device(name) for name in types} == types


def test_each_device_is_found_by_its_name_in_a_cluster_file_and_by_its_title() -> None:
    for one in DEVICES:
        assert device_named(one.key) is one
        assert device_of(one.title) is one
        assert one.peak(one.dtypes[0]) == pytest.approx(one.tflops * 1e12)
        assert one.peak("float32") is None
    assert device_named("RTX-4090") is device_named("rtx4090")
    assert [datasheet_tflops("cuda:0 NVIDIA H200", dtype) for dtype in ("bfloat16", "float32")] == [989.0, None]
    assert device_named("abacus") is None
    assert "no device 'abacus'; known are a100, a100-40gb, a100-pcie-40gb" in no_such_device("abacus")
