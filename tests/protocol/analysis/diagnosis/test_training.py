"""Rules of how a run trains, and of its settings."""

import dataclasses

import msgspec
from tests.protocol.support import planted_causes as simulated
from tests.protocol.support.diagnosed import (
    causes,
    commands,
    first,
    healthy_facts,
    longer,
    said_of,
    with_gpu,
    with_parts,
    with_readings,
    with_steps,
)

from trainctl.protocol import messages as m
from trainctl.protocol.analysis.diagnosis.diagnosis_facts import DiagnosisFacts
from trainctl.protocol.calibration.profile import Pass, ProfileSummary


def tiny(seed: int = 1) -> DiagnosisFacts:
    made = simulated.cluster(seed)
    for node in made.nodes:
        node.micro = 1
    return simulated.facts(made, simulated.record(made, 150, 150))


def test_a_small_micro_batch_is_named_by_the_nodes_curve() -> None:
    facts = dataclasses.replace(tiny(), profiles={})
    facts = simulated.with_rank(facts, 0, passes=((1, 0.05), (8, 0.19), (16, 0.35)))
    facts = simulated.with_rank(facts, 1, passes=((1, 0.05), (8, 0.19), (16, 0.35)))
    found = first(facts)
    assert (found.cause, found.title) == ("small-micro", "node-0's micro-batch is small")
    assert found.evidence[0] == (
        "by its curve 20 samples/s with a micro-batch of 1, 45.7 samples/s with a micro-batch of 16"
    )
    assert commands(found)[0] == "trainctl send resize-batch micro=16 --node node-0"
    assert commands(found)[1] == "trainctl run RUN.toml --set batch.micro=auto"
    auto = simulated.with_config(facts, batch={"global": 64, "micro": "auto"})
    assert commands(first(auto)) == commands(found)[:1]
    assert found.what_if is not None
    assert found.what_if.saying.startswith("without the small micro-batches a step takes ")


def test_without_a_curve_a_micro_batch_is_unknown() -> None:
    facts = dataclasses.replace(tiny(), profiles={})
    facts = simulated.with_rank(simulated.with_rank(facts, 0, passes=()), 1, passes=())
    assert [result for result, _ in said_of(facts, "small-micro")] == ["unknown", "unknown"]


def test_a_line_fitted_to_steps_is_believed_only_up_to_sizes_that_were_seen() -> None:
    """Its points are 1 and 2, but steps of the same run had passes of 16."""
    line = ((1, 0.05), (2, 0.07))
    facts = dataclasses.replace(tiny(), profiles={})
    facts = simulated.with_rank(simulated.with_rank(facts, 0, passes=line), 1, passes=line)
    assert causes(facts) == []

    def once_larger(part: m.RankStep) -> m.RankStep:
        return msgspec.structs.replace(part, micro_batch=16) if part.step < 20 else part

    assert first(with_parts(facts, once_larger)).cause == "small-micro"


def test_a_larger_micro_batch_must_fit_into_memory() -> None:
    facts = tiny()
    passes = tuple(
        Pass(micro=size, seconds=0.03 + 0.02 * size, peak_bytes=int(3e9 + 1e9 * size)) for size in (1, 2, 4, 8, 16)
    )
    profile = ProfileSummary(created_at=0.0, passes=passes)
    found = first(dataclasses.replace(facts, profiles={0: profile, 1: profile}))
    assert (
        commands(found)[0] == "trainctl send resize-batch micro=3 --node node-0"
    )  # 4 GB at 1, 1 GB each, 85 % of 8 GB
    assert found.evidence[1] == "peak memory 4.0 GB of 8.0 GB"


def test_clipping_is_named_with_the_norm() -> None:
    facts = with_steps(
        healthy_facts(), lambda one: msgspec.structs.replace(one, grad_norm=500.0, values={"clip_scale": 0.002})
    )
    found = first(facts)
    assert found.cause == "clip-bound"
    assert found.evidence == (
        "median clip scale of 100 steps 0.002: each update is 0.2 % of its gradient", "median gradient norm 500",
        "optimizer.clip_norm is 1",
    )  # fmt: skip
    assert commands(found) == ["trainctl run RUN.toml --set optimizer.clip_norm=5e+02"]


def test_a_jump_of_the_loss_goes_back_before_it() -> None:
    def jump(step: m.StepCommitted) -> m.StepCommitted:
        return msgspec.structs.replace(step, loss=30.0, grad_norm=90.0) if step.step > 135 else step

    found = first(with_steps(healthy_facts(), jump))
    assert (found.cause, found.title) == ("unstable", "the loss has jumped")
    assert found.evidence[0].startswith("since step 136 up to 30, ")
    assert commands(found) == ["trainctl send rollback step=100 skip_batches=200", "trainctl send set-lr value=5e-05"]


def test_slower_than_calibrated_is_named_where_nothing_else_explains_it() -> None:
    def slow(part: m.RankStep) -> m.RankStep:
        return msgspec.structs.replace(part, values={**part.values, "calibrated_speed": 0.8})

    found = first(with_parts(healthy_facts(), slow))
    assert (found.cause, found.title) == ("below-calibration", "node-0 is 25 % slower than calibrated")
    assert " when calibrated" in found.evidence[0]
    explained = with_readings(with_parts(healthy_facts(), slow), "node-0", {"cpu_steal_percent": 12})
    assert causes(explained) == ["stolen-cpu", "below-calibration"]  # node-1's is not explained
    assert first(explained).node == "node-0"


def test_checkpoints_that_take_long_say_how_often_they_may_come() -> None:
    made = simulated.cluster(1)
    made.checkpoint_part = 0.2
    found = first(simulated.facts(made, simulated.record(made, 150, 150)))
    assert found.cause == "long-checkpoint"
    assert ", every 50 steps: " in found.evidence[0]
    assert found.evidence[1].startswith("1.0 GB each, copied at ")
    assert found.what_if is not None
    assert found.what_if.part > 0.15
    every = int(commands(found)[0].partition("every_steps=")[2])
    assert 200 < every < 300
    assert len(found.remedies) == 1, "a faster disk doesn't help: training waits only for the copy"


def test_checkpoints_that_training_waits_for_can_be_written_in_the_background() -> None:
    made = simulated.cluster(1)
    made.checkpoint_part = 0.2
    facts = simulated.facts(made, simulated.record(made, 150, 150))
    found = first(simulated.with_config(facts, checkpoint={"background": False}))
    assert " each, written at " in found.evidence[1]
    assert commands(found)[0] == "trainctl run RUN.toml --set checkpoint.background=true"
    assert found.remedies[-1].text == "keep the runs on a faster disk"


def test_an_idle_gpu_is_named_last() -> None:
    found = first(with_gpu(healthy_facts(), "node-1", utilization_percent=30.0))
    assert (found.cause, found.evidence[0]) == ("low-use", "used 30 % of the time")
    ahead = "trainctl run RUN.toml --set data.prefetch=4"
    assert ahead in commands(found)
    facts = simulated.with_config(healthy_facts(), data={"prefetch": 4})
    assert ahead not in commands(first(with_gpu(facts, "node-1", utilization_percent=30.0)))
    late = with_gpu(longer(healthy_facts(), 1, {"data": 40}), "node-1", utilization_percent=30.0)
    assert causes(late) == ["late-data"]


# ---------------------------------------------------------------- settings


def test_float32_is_named_by_measured_products_or_the_devices_name() -> None:
    facts = dataclasses.replace(healthy_facts(), profiles={})
    facts = simulated.with_rank(facts, 1, compute=m.Compute(dtype="float32", attention="sdpa"))
    found = first(facts)
    assert (found.cause, found.evidence) == ("float32", ("node-1 computes in float32 on cuda:0 NVIDIA A100",))
    assert commands(found) == ["trainctl run RUN.toml --set model.dtype=auto"]
    assert causes(simulated.with_rank(facts, 0, device="cuda:0 NVIDIA GeForce GTX 1080")) == []
    on_cpu = simulated.with_rank(facts, 1, device="cpu")
    assert causes(on_cpu) == []
    measured = ProfileSummary(
        created_at=0.0, passes=(Pass(micro=1, seconds=1.0),), gflops={"float32": 100.0, "bfloat16": 250.0}
    )
    assert first(dataclasses.replace(on_cpu, profiles={1: measured})).evidence[1] == (
        "its matrix products are 2.5 times as fast in bfloat16"
    )


def test_attention_that_is_not_fused_is_named() -> None:
    facts = simulated.with_rank(healthy_facts(), 0, compute=m.Compute(dtype="bfloat16", attention="eager"))
    assert first(facts).title == "node-0's attention is not fused"


def test_gradient_checkpointing_while_memory_is_free_is_named() -> None:
    facts = simulated.with_config(healthy_facts(), model={"gradient_checkpointing": "all"})
    found = first(facts)
    assert (found.cause, found.evidence) == (
        "recomputed", ("node-0: peak 4.0 GB of 8.0 GB with gradient checkpointing all",),
    )  # fmt: skip
    full = with_parts(
        facts, lambda part: msgspec.structs.replace(part, values={**part.values, "memory_peak_bytes": 7e9})
    )
    assert causes(full) == []


def test_short_samples_that_are_not_packed_are_named() -> None:
    facts = simulated.with_config(healthy_facts(), data={"kind": "rows", "sequence_length": 2048})
    found = first(facts)
    assert (found.cause, found.evidence) == (
        "unpacked", ("a mean sample has 400 tokens, 20 % of data.sequence_length = 2,048",),
    )  # fmt: skip
    packed = simulated.with_config(facts, data={"packing": "best-fit"})
    assert causes(packed) == []


def test_tokens_that_are_read_from_the_disk_are_named() -> None:
    facts = with_readings(longer(healthy_facts(), 1, {"data": 40}), "node-1", {"disk_read_bytes_per_second": 3e7})
    assert causes(facts) == ["late-data", "tokens-not-cached"]
    assert said_of(facts, "tokens-not-cached")[-1] == ("found", "node-1's tokens are not in memory")
