"""Tests of what a step reports beside its loss: operations, calls, memory's trend, updates, loss scales, and data
rates."""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trainctl.trainer
from trainctl.protocol.batch.flops import step_flops
from trainctl.protocol.config.model_facts import read_facts
from trainctl.protocol.config.run_tables import AdapterTable
from trainctl.trainer.backends.memory import Memory
from trainctl.trainer.data.dataset import open_dataset
from trainctl.trainer.step import data_bench
from trainctl.trainer.step.data_bench import MicroBatchReader, bench
from trainctl.trainer.step.observer import TREND_STEPS, MemoryTrend
from trainctl.trainer.step.progress import LossScale

SEQUENCES, LENGTH, LAYERS = 3, 16, 3
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2, "tie_word_embeddings": False},
    "tied": {"tie_word_embeddings": True},
    "narrow heads": {"head_dim": 4},
    "phi": {},
}


def model_of(name):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("phi" if name == "phi" else "llama", **SIZES, **CONFIGS[name])
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def flops_of(model, folder, adapter):
    model.save_pretrained(folder)
    found = step_flops(adapter, read_facts(folder, "model"), "run file")
    assert found is not None
    return found


def expected(found):
    """Return the operations that torch counts: eager attention also multiplies what is masked, so twice as much."""
    return found._replace(per_token_pair=2 * found.per_token_pair).of(SEQUENCES * LENGTH, SEQUENCES)


def counted(model):
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    inputs = torch.randint(0, 96, (SEQUENCES, LENGTH))
    with FlopCounterMode(display=False) as counter:
        model(inputs).logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_that_is_trained_whole(name, tmp_path):
    model = model_of(name)
    found = flops_of(model, tmp_path, AdapterTable())
    # Rotary positions are an outer product of a few values.
    assert counted(model) == pytest.approx(expected(found), rel=0.001)


@pytest.mark.parametrize("layers", [1, 2, 0])
def test_adapters_on_the_last_layers_of_a_frozen_model(layers, tmp_path):
    import peft

    model = model_of("llama")
    adapter = AdapterTable(kind="lora", rank=4, layers=layers)
    found = flops_of(model, tmp_path, adapter)
    lora = peft.LoraConfig(
        r=4, target_modules=LINEAR, layers_to_transform=[*range(LAYERS)][-layers:], task_type="CAUSAL_LM"
    )  # fmt: skip
    # The input of the first layer with adapters needs no gradient: its q, k and v cost less than is counted.
    spared = 2 * SEQUENCES * LENGTH * (32 * 32 + 2 * 16 * 32)
    assert counted(peft.get_peft_model(model, lora)) == pytest.approx(expected(found) - spared, rel=0.01)


def test_longer_sequences_attend_to_more(tmp_path):
    found = flops_of(model_of("llama"), tmp_path, AdapterTable())
    assert found.of(128, 2) - found.of(128, 4) == pytest.approx(found.per_token_pair * 128 * 32)


MOST_CALLS, MOST_FILES = 300, 25
MOST_OF_A_MICRO_BATCH = 16
"""Functions of loop.py, step/ and backends/ on the way of a micro-batch from the cut to the accumulated gradient: those
called within loop.py's `_micro_batch`, and that itself. Comprehensions are part of their function."""
TRAINER = Path(next(iter(trainctl.trainer.__path__)))
ROOMS = TRAINER.parents[2]


@pytest.fixture
def calls(new_rig):
    """Calls by file and function: of a step of two micro-batches, and of the second micro-batch."""
    rig = new_rig("torch")
    for step in (1, 2):  # what is made once is made
        rig.train(step, 6)
    whole, second, began, is_within = Counter[tuple[Path, str]](), Counter[tuple[Path, str]](), 0, False

    def note(frame, event, _):
        nonlocal began, is_within
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_qualname
        if not path.is_relative_to(ROOMS) or {".venv", "tests"} & {*path.parts}:
            return
        if name == "_micro_batch":
            began += event == "call"
            is_within = event == "call" and began == 2
        if event == "call":
            whole[path, name] += 1
            second[path, name] += is_within

    sys.setprofile(note)
    try:
        rig.train(3, 6)
    finally:
        sys.setprofile(None)
    assert began == 2
    return whole, +second


def test_a_step_of_two_micro_batches_makes_few_calls(calls):
    whole, _ = calls
    print(whole.total(), whole.most_common(20))
    assert whole[TRAINER / "loop.py", "train"] == 1
    assert whole.total() <= MOST_CALLS
    assert len({path for path, _ in whole}) <= MOST_FILES


def test_a_micro_batch_passes_few_functions(calls):
    _, second = calls
    places = (TRAINER / "loop.py", TRAINER / "step", TRAINER / "backends")
    passed = [
        name for path, name in second if any(path.is_relative_to(place) for place in places) and not name.endswith(">")
    ]
    print(len(passed), passed)
    assert {"_micro_batch", "TorchBackend._pass", "accumulate"} <= {*passed}
    assert len(passed) <= MOST_OF_A_MICRO_BATCH


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=40), st.integers(1, 10**12))
def test_mean_and_slope_are_those_of_the_last_steps(peaks, cap):
    trend = MemoryTrend()
    for count, peak in enumerate(peaks, 1):
        found = trend.add(Memory(peak, peak, cap))
        last = peaks[max(0, count - TREND_STEPS) : count]
        assert found["memory_use"] == pytest.approx(sum(last) / len(last) / cap)
        assert ("memory_growth" in found) == (len(last) == TREND_STEPS)
        if len(last) == TREND_STEPS:
            assert found["memory_growth"] == pytest.approx(
                np.polyfit(range(TREND_STEPS), last, 1)[0], rel=1e-6, abs=0.01
            )


def test_what_cannot_be_read_says_nothing():
    trend = MemoryTrend()
    assert trend.add(Memory(1, None, 2)) == {}
    assert trend.add(Memory(1, 1, None)) == {}
    assert Memory(1, None, 3).values == {"memory_bytes": 1.0, "memory_cap_bytes": 3.0}


@pytest.mark.parametrize(("reason", "factor"), [("overflow", 0.5), ("nan", 0.5), ("empty", 1.0), (None, 1.0)])
def test_the_scale_is_halved_only_after_a_step_that_was_not_finite(reason: str | None, factor: float) -> None:
    scale = LossScale.of("float16")
    before = scale.value
    scale.committed("float16", reason)
    assert scale.value == factor * before


def test_the_scale_is_doubled_after_2000_finite_steps_in_a_row_with_empty_ones_between() -> None:
    scale = LossScale.of("float16")
    scale.committed("float16", "overflow")
    before = scale.value
    for _ in range(1999):
        scale.committed("float16", None)
        scale.committed("float16", "empty")
    assert scale.value == before
    scale.committed("float16", None)
    assert scale.value == 2 * before


def flat(rig):
    weights = rig.backend.copy_out("weights")
    return np.concatenate([weights[name].ravel() for name in sorted(weights)]).astype(np.float64)


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_it_is_the_norm_of_the_update_over_that_of_the_weights(new_rig, backend):
    rig, plain = new_rig(backend, optimizer__update_ratio_every=2), new_rig(backend)
    for step in range(1, 5):
        before = flat(rig)
        report = rig.train(step, 4)
        assert "update_ratio" not in plain.train(step, 4).values
        expected = np.linalg.norm(flat(rig) - before) / np.linalg.norm(before)
        assert report.values.get("update_ratio") == (None if step % 2 else pytest.approx(expected, rel=1e-5))
    assert (flat(rig) == flat(plain)).all()


def test_an_epoch_is_each_step_s_share_in_micro_batches(run_file, tmp_path):
    here = {"backend": "torch", "device": "cpu", "threads": 1, "share": 8, "micro": 3}
    config = run_file(nodes__here=here, nodes__there={"share": 4})
    dataset = open_dataset(config, tmp_path / "caches", "run.toml")
    pieces = list(MicroBatchReader(config, "here", dataset).pieces())
    steps = dataset.samples // 12
    assert [len(piece) for piece in pieces] == [3, 3, 2] * steps
    whole = np.concatenate(pieces).reshape(steps, 8)
    assert (whole == whole[:, :1] + np.arange(8)).all() and (np.diff(whole[:, 0]) == 12).all()


@pytest.mark.parametrize("workers", [1, 2])
def test_rates_are_those_of_the_data(run_file, tmp_path, monkeypatch, workers):
    monkeypatch.setattr(data_bench, "WARM_SECONDS", 0.01)
    config = run_file(data__workers=workers, data__prefetch=2 * (workers - 1))
    dataset = open_dataset(config, tmp_path / "caches", "run.toml")
    found = bench(config, "here", "run.toml", tmp_path, with_model=workers == 1)
    epoch = dataset.samples // 12 * 12 * 20
    assert found.cold is None or found.cold.tokens == epoch
    assert found.warm.tokens > 0 and found.warm.tokens / found.warm.micro_batches == 4 * 20
    assert dataset.samples * 20 < found.tokens < found.source_bytes + 100
    assert (found.need is not None) == (workers == 1)
    if found.need is not None:
        assert found.need.tokens_per_second > 0 and found.need.detail == "3 micro-batches with torch on cpu"
    assert not list(tmp_path.glob("trainctl-bench-*"))
