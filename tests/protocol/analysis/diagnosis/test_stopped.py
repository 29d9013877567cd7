"""Rules of a run that makes no progress, runs out of memory, or computes NaN."""

import dataclasses
import math

import msgspec
from tests.protocol.support import planted_causes as simulated
from tests.protocol.support.diagnosed import (
    causes,
    commands,
    first,
    healthy_facts,
    said_of,
    with_event,
    with_parts,
    with_steps,
)

from trainctl.protocol import messages as m
from trainctl.protocol.analysis.diagnosis.diagnosis_facts import DiagnosisFacts
from trainctl.protocol.messages import events as e


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
