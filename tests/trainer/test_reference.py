"""The reference's log-probabilities: computed once, aligned with the samples, and as good as those of each step."""

import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.trainer.support import library_trainers
from tests.trainer.support.chat_model import write_rows
from tests.trainer.support.curves import worst
from tests.trainer.support.library_trainers import FULL, reports
from tests.trainer.support.preferences import preferences

from trainctl.protocol.config.run_tables import ModelTable
from trainctl.protocol.errors import InvalidInputError, TrainctlError
from trainctl.trainer.backends.backend import Backend
from trainctl.trainer.common.errors import DeviceMemoryError
from trainctl.trainer.common.reference_cache import (
    AlignedValues,
    ReferenceKey,
    compute_of,
    read_values,
)
from trainctl.trainer.reference import ReferenceModel


@pytest.fixture
def start(tune):
    """A rank that tunes preferences: `start("torch", "cached")`."""
    return lambda backend, kind="auto", **changes: tune(backend, {"kind": "dpo", "reference": kind}, **changes)


def losses(rig):
    return library_trainers.losses(reports(rig, 6))


def cached(folder):
    return sorted((folder / "data").glob("reference-*"))


def count_passes(monkeypatch):
    """Samples of each forward pass of a reference from here on, by any backend."""
    from trainctl.trainer.backends.mlx_backend import MlxBackend
    from trainctl.trainer.backends.torch_backend import TorchBackend

    passes: list[int] = []
    for kind in (TorchBackend, MlxBackend):
        compute = kind.token_log_probabilities

        def counted(self, batch, *, reference=False, compute=compute):
            passes.extend([len(batch)] * reference)
            return compute(self, batch, reference=reference)

        monkeypatch.setattr(kind, "token_log_probabilities", counted)
    return passes


@pytest.mark.parametrize("backend", ["torch", pytest.param("mlx", marks=pytest.mark.tier("all"))])
def test_cached_and_adapter_off_give_the_same_losses(start, tmp_path, backend):
    each_step = losses(start(backend, "adapter-off"))
    assert not cached(tmp_path)
    assert worst(losses(start(backend, "cached")), each_step) < 1e-6
    assert len(cached(tmp_path)) == 1


def test_all_weights_follow_a_second_model_that_stays_as_it_was(start, tmp_path):
    import copy

    import torch

    rig = start("torch", adapter=FULL)
    policy: Any = rig.backend._model
    frozen, found = copy.deepcopy(policy).eval(), []
    positions = np.arange(12)
    batch = rig.dataset.batch(rig.dataset.samples_at(positions, rig.config.run.seed))
    assert batch.reference is not None

    def sums(model):
        logits = model(input_ids=torch.tensor(batch.inputs, dtype=torch.int64)).logits
        picked = torch.log_softmax(logits, -1).gather(-1, torch.tensor(batch.targets, dtype=torch.int64)[..., None])
        return (picked[..., 0] * torch.tensor(batch.counted)).sum(-1)

    for _ in range(4):
        rig.seq += 1
        report = rig.train(rig.progress.last_step + 1, 12, cursor=0, work=rig.plan(1, 12).work)
        found.append(report.loss_sum / report.weight)
    with torch.no_grad():
        ratio = sums(policy) - sums(frozen)
        wanted = -torch.nn.functional.logsigmoid(0.1 * (ratio[0::2] - ratio[1::2])).mean().item()
    last = rig.train(rig.progress.last_step + 1, 12, cursor=0, work=rig.plan(1, 12).work)
    assert abs(last.loss_sum / last.weight - wanted) < 1e-6 < abs(found[0] - wanted)
    assert abs(found[0] - np.log(2)) < 1e-6  # policy and reference are one model at first


def test_a_second_run_makes_no_forward_pass_even_on_the_other_library(start, tmp_path, monkeypatch):
    passes = count_passes(monkeypatch)
    first = start("torch", adapter=FULL)
    assert sum(passes) == first.dataset.usable > first.dataset.samples
    passes.clear()
    again, other = start("torch", adapter=FULL), start("mlx", "cached")
    assert not passes
    held_out = [rig.dataset.held_out_batch(np.arange(1)) for rig in (first, again, other)]
    for one in held_out:
        assert one.reference.tobytes() == held_out[0].reference.tobytes()
        assert ((one.reference < 0) == (one.counted > 0)).all()
    start("torch", adapter=FULL, model__dtype="bfloat16")
    assert passes  # the same model computes other values in another type
    assert len(cached(tmp_path)) == 2


def test_held_out_files_have_values_of_their_own(start, tmp_path):
    path = write_rows(tmp_path / "held-out.jsonl", preferences(12))
    data = {"path": str(tmp_path / "pairs.jsonl"), "kind": "rows", "sequence_length": 256, "held_out_path": str(path)}
    rig = start("torch", adapter=FULL, data=data)
    batch = rig.dataset.held_out_batch(np.arange(rig.dataset.held_out))
    assert np.allclose(batch.reference, rig.backend.token_log_probabilities(batch, reference=True), atol=1e-6)
    assert len(cached(tmp_path)) == 2
    evaluated = rig.backend.evaluate(batch)
    assert abs(evaluated.losses["pairs"] / len(batch) - np.log(2)) < 1e-5


def test_short_memory_halves_the_passes(start):
    rig = start("torch", "cached")
    model, compute, sizes = ReferenceModel(rig.backend, rig.dataset, 1 << 20), Backend.token_log_probabilities, []
    compute = rig.backend.token_log_probabilities

    def small(batch, **how):
        sizes.append(len(batch))
        if len(batch) > 3:
            raise DeviceMemoryError("full")
        return compute(batch, **how)

    rig.backend.token_log_probabilities = small
    wanted = rig.dataset._reference._values
    assert np.allclose(model.values(0, 24, lambda _: None), wanted[: int(model.counts[:24].sum())], atol=1e-6)
    assert sizes[0] == 24 and sizes[-1] <= 3
    rig.backend.token_log_probabilities = lambda _, **how: (_ for _ in ()).throw(DeviceMemoryError("full"))
    with pytest.raises(TrainctlError, match="out of memory with one sample"):
        model.values(0, 4, lambda _: None)


def test_values_that_are_not_finite_are_refused_by_their_row(start):
    rig = start("torch", "cached")
    model, compute = ReferenceModel(rig.backend, rig.dataset, 1000), rig.backend.token_log_probabilities
    wrong = rig.dataset.usable_batch(np.array([7])).inputs

    def broken(batch, **how):
        found = compute(batch, **how)
        width = min(wrong.shape[1], batch.inputs.shape[1])
        found[(batch.inputs[:, :width] == wrong[0, :width]).all(axis=1)] = np.nan
        return found

    rig.backend.token_log_probabilities = broken
    with pytest.raises(InvalidInputError, match="line 8: the reference has no finite"):
        model.values(2, 12, lambda _: None)


def test_a_cache_that_cannot_be_read_is_named(start, tmp_path):
    start("torch", adapter=FULL)
    (folder,) = cached(tmp_path)
    values = folder / "values.bin"
    whole = values.read_bytes()
    damaged = {whole[:-4]: "bytes of values for", bytes([whole[0] ^ 1]) + whole[1:]: "values that have changed"}
    for content, problem in damaged.items():
        values.write_bytes(content)
        with pytest.raises(InvalidInputError, match=f"{problem}.* delete the folder to have") as refused:
            start("torch", adapter=FULL)
        assert refused.value.where == str(folder)
    (folder / "reference.json").write_text("{")
    with pytest.raises(InvalidInputError, match="cannot be read"):
        start("torch", adapter=FULL)


def test_a_key_has_another_name_for_each_thing_it_depends_on(tmp_path):
    key = ReferenceKey("samples", "model", "float32", 3)
    changes: list[dict[str, Any]] = [{"samples": "s"}, {"model": "m"}, {"compute": "bfloat16"}, {"counted": 2}]
    assert len({key.name, *(dataclasses.replace(key, **change).name for change in changes)}) == 5
    table = ModelTable(path="m", dtype="bfloat16")
    packed = [{"base": "nf4"}, {"base": "nf4", "double_quantization": True}, {"base": "mlx-4bit"}]
    found = [compute_of(msgspec.structs.replace(table, **changes)) for changes in packed]
    assert found == ["bfloat16 nf4", "bfloat16 nf4 double", "bfloat16"]  # files tell the others apart
    with pytest.raises(InvalidInputError, match="cannot be read"):
        read_values(tmp_path / key.name, key)


def test_values_go_to_the_counted_tokens_of_their_sequences():
    values = np.array([-1, -2, -3, -4, -5, -6], np.float32)
    aligned = AlignedValues(values, np.array([2, 0, 3, 1], np.int64))  # sequence 1 isn't used
    counted = np.array([[0, 1, 0, 0], [0, 1, 1, 1], [1, 0, 1, 0]], np.float32)
    found = aligned.of(np.array([3, 2, 0], np.int64), counted)
    assert found.tolist() == [[0, -6, 0, 0], [0, -3, -4, -5], [-1, 0, -2, 0]]
