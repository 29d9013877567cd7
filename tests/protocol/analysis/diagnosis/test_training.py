"""Rules of how a run trains, of its settings, and of one that makes no progress, lacks memory or computes NaN."""

import dataclasses
import math

import msgspec
from tests.protocol.support import planted_causes as simulated
from tests.protocol.support.diagnosed import (
    causes,
    commands,
    first,
    healthy_facts,
    longer,
    said_of,
    with_event,
    with_gpu,
    with_parts,
    with_readings,
    with_steps,
)

from trainctl.protocol import messages as m
from trainctl.protocol.analysis.diagnosis.diagnosis_facts import DiagnosisFacts
from trainctl.protocol.batch.pass_curve import PassCurve
from trainctl.protocol.calibration.profile import Pass, ProfileSummary
from trainctl.protocol.messages import events as e


def tiny(passes: tuple[tuple[int, float], ...] = ()) -> DiagnosisFacts:
    """Micro-batches of one sample, on nodes that were not calibrated but have such curves."""
    made = simulated.cluster(1)
    for node in made.nodes:
        node.micro = 1
    facts = dataclasses.replace(simulated.facts(made, simulated.record(made, 150, 150)), profiles={})
    return simulated.with_rank(simulated.with_rank(facts, 0, passes=passes), 1, passes=passes)


def test_a_small_micro_batch_is_named_by_the_nodes_curve() -> None:
    facts = tiny(((1, 0.05), (8, 0.19), (16, 0.35)))
    found = first(facts)
    assert (found.cause, found.node) == ("small-micro", "node-0")
    assert "20 samples/s with a micro-batch of 1, 45.7 samples/s with a micro-batch of 16" in found.evidence[0]
    assert commands(found)[0] == "trainctl send resize-batch micro=16 --node node-0"
    assert commands(found)[1] == "trainctl run RUN.toml --set batch.micro=auto"
    auto = simulated.with_config(facts, batch={"global": 64, "micro": "auto"})
    assert commands(first(auto)) == commands(found)[:1]
    assert found.what_if is not None
    assert [result for result, _ in said_of(tiny(), "small-micro")] == ["unknown", "unknown"]


def test_a_micro_batch_above_the_peak_is_named_with_the_gain_and_the_command() -> None:
    """The fastest passes are of 4; 16 take 2.5 times as long for a sample."""
    curve = PassCurve(((1, 0.06), (2, 0.09), (4, 0.16), (8, 0.5), (16, 1.6)))
    made = simulated.cluster(1)
    made.has_profiles = True
    for node in made.nodes:
        node.micro, node.share, node.curve = 16, 32, curve
    found = first(simulated.facts(made, simulated.record(made, 150, 150)))
    assert (found.cause, found.node) == ("large-micro", "node-0")
    assert "10 samples/s with a micro-batch of 16, 25.4 samples/s with a micro-batch of 4" in found.evidence[0]
    assert commands(found)[0] == "trainctl send resize-batch micro=4 --node node-0"
    assert found.what_if is not None and found.what_if.part > 0.4


def test_a_line_fitted_to_steps_is_believed_only_up_to_sizes_that_were_seen() -> None:
    """Its points are 1 and 2, but steps of the same run had passes of 16."""
    facts = tiny(((1, 0.05), (2, 0.07)))
    assert causes(facts) == []

    def once_larger(part: m.RankStep) -> m.RankStep:
        return msgspec.structs.replace(part, micro_batch=16) if part.step < 20 else part

    assert first(with_parts(facts, once_larger)).cause == "small-micro"


def test_a_larger_micro_batch_must_fit_into_memory() -> None:
    """4 GB at 1, 1 GB for each, 85 % of 8 GB."""
    passes = tuple(Pass(size, 0.03 + 0.02 * size, int(3e9 + 1e9 * size)) for size in (1, 2, 4, 8, 16))
    profile = ProfileSummary(created_at=0.0, passes=passes)
    found = first(dataclasses.replace(tiny(), profiles={0: profile, 1: profile}))
    assert commands(found)[0] == "trainctl send resize-batch micro=3 --node node-0"


def test_clipping_is_named_with_the_norm_and_a_jump_of_the_loss_goes_back_before_it() -> None:
    clipped = {"grad_norm": 500.0, "values": {"clip_scale": 0.002}}
    found = first(with_steps(healthy_facts(), lambda step: msgspec.structs.replace(step, **clipped)))
    assert found.cause == "clip-bound"
    assert found.evidence[1:] == ("median gradient norm 500", "optimizer.clip_norm is 1")
    assert commands(found) == ["trainctl run RUN.toml --set optimizer.clip_norm=5e+02"]

    def jump(step: m.StepCommitted) -> m.StepCommitted:
        return msgspec.structs.replace(step, loss=30.0, grad_norm=90.0) if step.step > 135 else step

    found = first(with_steps(healthy_facts(), jump))
    assert found.cause == "unstable" and found.evidence[0].startswith("since step 136 up to 30, ")
    run = "trainctl run RUN.toml --set"
    assert commands(found) == [
        "trainctl send rollback step=100 skip_batches=200",
        "trainctl send set-lr value=5e-05",
        f"{run} optimizer.clip_norm=0.5",
        f"{run} optimizer.warmup_steps=136",
        f"{run} model.dtype=float32",
        "trainctl data preview RUN.toml",
    ]
    late = simulated.with_config(with_steps(healthy_facts(), jump), run={"steps": 300})
    assert not any("warmup" in command for command in commands(first(late))), "a warm-up is long over"


def test_slower_than_calibrated_is_named_where_nothing_else_explains_it() -> None:
    def slow(part: m.RankStep) -> m.RankStep:
        return msgspec.structs.replace(part, values={**part.values, "calibrated_speed": 0.8})

    found = first(with_parts(healthy_facts(), slow))
    assert found.title == "node-0 is 25 % slower than calibrated"
    explained = with_readings(with_parts(healthy_facts(), slow), "node-0", {"cpu_steal_percent": 12})
    assert causes(explained) == ["stolen-cpu", "below-calibration"]  # node-1's is not explained
    assert first(explained).node == "node-0"


def test_checkpoints_that_take_long_say_how_often_they_may_come() -> None:
    made = simulated.cluster(1)
    made.checkpoint_part = 0.2
    facts = simulated.facts(made, simulated.record(made, 150, 150))
    found = first(facts)
    assert found.cause == "long-checkpoint"
    assert found.what_if is not None and found.what_if.part > 0.15
    assert 200 < int(commands(found)[0].partition("every_steps=")[2]) < 300
    assert len(found.remedies) == 1, "a faster disk doesn't help: training waits only for the copy"
    waits = first(simulated.with_config(facts, checkpoint={"background": False}))
    assert commands(waits)[0] == "trainctl run RUN.toml --set checkpoint.background=true"
    assert waits.remedies[-1].text == "keep the runs on a faster disk"


def test_an_idle_gpu_is_named_last() -> None:
    found = first(with_gpu(healthy_facts(), "node-1", utilization_percent=30.0))
    assert (found.cause, found.evidence[0]) == ("low-use", "used 30 % of the time")
    ahead = "trainctl run RUN.toml --set data.prefetch=4"
    assert ahead in commands(found)
    facts = simulated.with_config(healthy_facts(), data={"prefetch": 4})
    assert ahead not in commands(first(with_gpu(facts, "node-1", utilization_percent=30.0)))
    late = longer(healthy_facts(), 1, {"data": 40})
    assert causes(with_gpu(late, "node-1", utilization_percent=30.0)) == ["late-data"]
    from_disk = with_readings(late, "node-1", {"disk_read_bytes_per_second": 3e7})
    assert causes(from_disk) == ["late-data", "tokens-not-cached"]


def test_float32_is_named_by_measured_products_or_the_devices_name() -> None:
    facts = dataclasses.replace(healthy_facts(), profiles={})
    facts = simulated.with_rank(facts, 1, compute=m.Compute(dtype="float32", attention="sdpa"))
    found = first(facts)
    assert (found.cause, found.node) == ("float32", "node-1")
    assert commands(found) == ["trainctl run RUN.toml --set model.dtype=auto"]
    assert causes(simulated.with_rank(facts, 0, device="cuda:0 NVIDIA GeForce GTX 1080")) == []
    on_cpu = simulated.with_rank(facts, 1, device="cpu")
    assert causes(on_cpu) == []
    measured = ProfileSummary(created_at=0.0, passes=(Pass(1, 1.0),), gflops={"float32": 100.0, "bfloat16": 250.0})
    assert causes(dataclasses.replace(on_cpu, profiles={1: measured})) == ["float32"]


def test_other_settings_that_cost_time_are_named() -> None:
    eager = simulated.with_rank(healthy_facts(), 0, compute=m.Compute(dtype="bfloat16", attention="eager"))
    assert first(eager).title == "node-0's attention is not fused"
    short = simulated.with_config(healthy_facts(), data={"kind": "rows", "sequence_length": 2048})
    assert first(short).cause == "unpacked"
    assert causes(simulated.with_config(short, data={"packing": "best-fit"})) == []
    facts = simulated.with_config(healthy_facts(), model={"gradient_checkpointing": "all"})
    assert first(facts).cause == "recomputed"
    full = with_parts(
        facts, lambda part: msgspec.structs.replace(part, values={**part.values, "memory_peak_bytes": 7e9})
    )
    assert causes(full) == []


def stalled(**view: object) -> DiagnosisFacts:
    facts = dataclasses.replace(healthy_facts(), step_age_seconds=95.0)
    assert facts.view is not None
    return dataclasses.replace(facts, view=msgspec.structs.replace(facts.view, **view))


def test_a_hang_is_named_with_the_rank_that_hangs_but_an_evaluation_or_a_first_step_may_take_long() -> None:
    found = first(simulated.with_rank(stalled(), 1, state="hung", why="no progress in backward"))
    assert (found.cause, found.rank) == ("hang", 1)
    assert "rank 1 on node-1 is hung: no progress in backward" in found.evidence
    assert commands(found) == ["trainctl logs --rank 1", "trainctl send drain --node node-1"]
    assert causes(dataclasses.replace(stalled(), doing="evaluate")) == []
    before = dataclasses.replace(stalled(), steps=(), parts=(), step_age_seconds=200.0)
    assert causes(before) == []
    assert causes(dataclasses.replace(before, step_age_seconds=400.0)) == ["hang"]


def test_a_run_that_is_meant_to_wait_does_not_hang() -> None:
    for view in ({"state": "paused"}, {"reason": "waiting for data: the next step needs 64"}, {"state": "starting"}):
        assert "clear" in dict(said_of(stalled(**view), "hang"))
        assert causes(stalled(**view)) == []


def test_a_record_that_ends_in_a_hang_offers_to_resume_only_with_a_checkpoint() -> None:
    facts = with_event(healthy_facts(), e.RankChanged(("node-1",), "hung", "made no progress"))
    assert facts.view is not None
    ended = dataclasses.replace(facts, is_live=False, view=msgspec.structs.replace(facts.view, state="failed"))
    assert "trainctl run --resume run" in commands(first(ended))
    assert "trainctl run --resume run" not in commands(first(dataclasses.replace(ended, checkpoint_step=None)))
    went_on = with_event(healthy_facts(), e.RankChanged(("node-1",), "hung", ""), at=healthy_facts().at - 50)
    assert causes(dataclasses.replace(went_on, is_live=False)) == []


def test_passes_that_are_repeated_and_a_rank_given_up_at_one_sample_name_too_little_memory() -> None:
    given_up = first(with_event(healthy_facts(), e.RankChanged(("node-1",), "out-of-memory", "8.1 of 8.0 GB")))
    assert (given_up.cause, given_up.node) == ("out-of-memory", "node-1")
    assert not any("resize-batch" in command for command in commands(given_up))

    def change(part: m.RankStep) -> m.RankStep:
        return msgspec.structs.replace(part, replays=1) if part.rank == 1 and part.step % 10 == 0 else part

    found = first(with_parts(healthy_facts(), change))
    assert (found.cause, found.node) == ("out-of-memory", "node-1")
    assert found.evidence == ("10 of the last 100 steps repeated passes", "peak 4.0 GB of 8.0 GB")
    assert commands(found) == [
        "trainctl send resize-batch micro=8 --node node-1", "trainctl run RUN.toml --set model.chunked_loss=on",
        "trainctl run RUN.toml --set model.gradient_checkpointing=all",
        "trainctl run RUN.toml --set data.sequence_length=256",
    ]  # fmt: skip


def test_with_adapters_the_ladder_has_4_bits_and_a_smaller_rank() -> None:
    data = e.MicroBatchChanged((("node-0", 16),), (("node-0", 8),), "out of memory, 7.9 of 8.0 GB")
    facts = with_event(healthy_facts(), data)
    facts = simulated.with_config(facts, adapter={"kind": "lora", "rank": 16}, model={"chunked_loss": "on"})
    ladder = commands(first(facts))
    assert {"trainctl run RUN.toml --set model.base=nf4", "trainctl run RUN.toml --set adapter.rank=8"} <= {*ladder}
    assert not any("chunked_loss" in command for command in ladder)
    for refused in (
        simulated.with_rank(facts, 1, backend="mlx"), simulated.with_config(facts, model={"compile": "default"}),
        simulated.with_config(
            facts, objective={"kind": "seq2seq"}, data={"kind": "rows", "tokenizer": "model", "packing": "none"}
        ),
    ):  # fmt: skip
        assert not any("nf4" in command for command in commands(first(refused)))


def skipping(facts: DiagnosisFacts, why: str, *steps: int) -> DiagnosisFacts:
    """Skip these steps."""

    def change(step: m.StepCommitted) -> m.StepCommitted:
        loss = math.nan if why == "nan" else step.loss
        return msgspec.structs.replace(step, loss=loss, skipped=why) if step.step in steps else step

    return with_steps(facts, change)


def test_nan_goes_back_to_a_checkpoint_before_it() -> None:
    facts = skipping(healthy_facts(), "nan", *range(111, 151))
    found = first(facts)
    assert (found.cause, found.severity) == ("not-finite", "error")
    assert found.what_if is None, "a skipped step takes as long"
    assert found.evidence[0] == "40 of the last 100 steps, the newest 150"
    assert commands(found)[:2] == [
        "trainctl send rollback step=100 skip_batches=200",
        "trainctl send set-lr value=5e-05",
    ]
    without = dataclasses.replace(facts, events=())
    assert commands(first(without))[0] == "trainctl send set-lr value=5e-05"
    assert causes(skipping(healthy_facts(), "nan", 100)) == [], "one step, long ago"


def test_overflow_advises_bfloat16_in_float16_alone() -> None:
    facts = skipping(healthy_facts(), "overflow", *range(20, 150, 20))
    found = first(simulated.with_config(facts, model={"dtype": "float16"}))
    assert (found.cause, found.evidence[0]) == ("overflow", "5 of the last 100 steps, the newest 140")
    assert commands(found)[0] == "trainctl run RUN.toml --set model.dtype=auto"
    on_turing = simulated.with_rank(facts, 0, device="cuda:0 Tesla T4")
    ladder = commands(first(simulated.with_config(on_turing, model={"dtype": "float16"})))
    assert ladder[-1] == "trainctl run RUN.toml --set model.dtype=float32"
    assert not any(one.endswith("=auto") for one in ladder)
    found = first(facts)
    assert found.cause == "not-finite", "in float32 an overflow is no matter of the loss scale"
    assert not any(command.endswith("=auto") for command in commands(found))
