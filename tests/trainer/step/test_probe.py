"""Tests of what a rank says of the probe batch: of which tokens, by which numbers, and that nothing changes by it."""

import time

import numpy as np
import pytest

from trainctl.protocol import messages as m
from trainctl.protocol.wire import codec
from trainctl.trainer.common.errors import DeviceMemoryError
from trainctl.trainer.step import side_plans

BACKENDS = ("torch", "mlx")
ROUNDING = 2e-5


def probe(rig):
    plan = rig.plan(0, 1, kind="probe", work=(m.RankWork(0, (), 1),))
    return side_plans.probe(rig.rank, plan, time.perf_counter(), "llama")


def values(packed):
    return np.frombuffer(packed, "<f4")


def states(rig):
    state = rig.backend.export_state()
    return {**state.weights, **{f"m {name}": array for name, array in state.slots["exp_avg"].items()}}


@pytest.mark.parametrize("samples", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_it_is_of_256_tokens_and_they_sum_to_the_loss(new_rig, same_bits, backend, samples):
    rig = new_rig(backend, samples=samples)
    before = states(rig)
    report = probe(rig)
    batch = rig.dataset.probe_batch()
    found = values(report.log_probabilities)
    assert len(found) == sum(report.lengths) == batch.weight == 256
    assert -found.sum() == pytest.approx(rig.backend.evaluate(batch).losses["tokens"], rel=1e-5)
    assert (found < 0).all()
    assert same_bits(states(rig), before)
    assert (report.kind, report.family, report.tf32) == ("probe", "llama", False)
    assert codec.decode_answer(codec.encode(report)) == report


def test_data_of_fewer_tokens_are_taken_whole(new_rig, tmp_path):
    (tmp_path / "few.txt").write_text("def import self " * 5)
    report = probe(new_rig("torch", data__path=str(tmp_path / "few.txt"), data__held_out=0.0))
    assert report.lengths == (20,) * 4


@pytest.mark.parametrize("samples", [False, True])
def test_both_backends_say_the_same(new_rig, samples):
    one, other = (probe(new_rig(backend, samples=samples)) for backend in BACKENDS)
    assert (one.tokens_digest, one.lengths) == (other.tokens_digest, other.lengths)
    assert np.abs(values(one.log_probabilities) - values(other.log_probabilities)).max() < ROUNDING
    np.testing.assert_allclose(values(one.weight_norms), values(other.weight_norms), rtol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_that_were_scaled_show(new_rig, backend):
    rig = new_rig(backend)
    before = probe(rig)
    weights = {name: array * np.float32(1.001) for name, array in rig.backend.export_state().weights.items()}
    rig.backend.copy_in("weights", weights)
    after = probe(rig)
    np.testing.assert_allclose(values(after.weight_norms), values(before.weight_norms) * 1.001, rtol=1e-5)
    assert np.abs(values(after.log_probabilities) - values(before.log_probabilities)).max() > 1e-4


def test_what_memory_does_not_suffice_for_is_done_in_halves(new_rig, monkeypatch):
    rig = new_rig("torch")
    whole, asked = probe(rig), []
    original = rig.backend.probe

    def limited(batch, flips):
        asked.append(len(batch))
        if len(batch) > 4:
            raise DeviceMemoryError("no")
        return original(batch, flips)

    monkeypatch.setattr(rig.backend, "probe", limited)
    halved = probe(rig)
    assert asked[:3] == [13, 6, 3]
    assert halved.lengths == whole.lengths
    np.testing.assert_allclose(values(halved.log_probabilities), values(whole.log_probabilities), atol=ROUNDING)
