"""Models that are trained from scratch: the same bits on both backends, and transformers' scale."""

import json
from typing import Any

import numpy as np
import pytest
from tests.trainer.support.families import EACH, FAMILIES

from trainctl.protocol.config.run_file import check_paths
from trainctl.protocol.errors import InvalidInputError
from trainctl.trainer.backends.load import random_weights
from trainctl.trainer.data.permutation import mix, uniform

ONE_OF_EACH = {family.kind: name for name, family in FAMILIES.items()}


@pytest.fixture
def unwritten(tmp_path):
    """A model's folder without weights."""

    def make(name):
        FAMILIES[name].config().save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    return make


@pytest.mark.parametrize("name", [each for each in EACH if str(each.values[0]) in ONE_OF_EACH.values()])
def test_every_tested_family_starts_alike_on_both_backends_and_at_transformers_scale(unwritten, load_backend, name):
    from trainctl.trainer.model.torch_model import read_model

    model, made = unwritten(name), {}
    for backend in ("torch", "mlx"):
        loaded = load_backend(backend, model__path=str(model), model__init="random")
        made[backend] = loaded.export_state().weights
    assert made["torch"].keys() == made["mlx"].keys()
    assert all(np.array_equal(values, made["mlx"][name]) for name, values in made["torch"].items())
    theirs = dict(read_model(model, "run.toml", with_weights=False).named_parameters())
    matrices: dict[bool, list[Any]] = {True: [], False: []}
    for name, values in made["torch"].items():
        other = theirs[name].detach().numpy()
        if values.ndim == 1:
            assert np.array_equal(values, other), name
        else:
            matrices[True].append(values.ravel())
            matrices[False].append(other.ravel())
    ours, drawn = (np.concatenate(matrices[mine]) for mine in (True, False))
    assert abs(ours.std() / drawn.std() - 1) < 0.03
    assert abs(ours.mean()) < 0.03 * ours.std()


def test_the_seed_and_the_place_of_a_weight_decide_its_values():
    shapes, config = {"a.weight": (4, 6), "b.weight": (4, 6), "c.bias": (4,)}, {"model_type": "llama"}
    one, again, other = (random_weights(shapes, config, seed) for seed in (1, 1, 2))
    assert all(np.array_equal(one[name], again[name]) for name in shapes)
    assert not np.array_equal(one["a.weight"], other["a.weight"])
    assert not np.array_equal(one["a.weight"], one["b.weight"])
    assert not one["c.bias"].any()
    assert np.array_equal(one["b.weight"], uniform((4, 6), int(mix(np.array([1], np.uint64))[0]) + 1, 0.02 * 3**0.5))


def test_large_weights_are_drawn_in_pieces_of_one_sequence():
    large = uniform(((1 << 20) + 3,), 5, 1.0)
    assert np.array_equal(large[:7], uniform((7,), 5, 1.0))
    assert len(np.unique(large[-1000:])) > 990
    assert not np.array_equal(large[1 << 20 :], large[:3])


def test_what_cannot_be_trained_from_scratch_is_refused(unwritten, run_file):
    model = unwritten("llama")
    with pytest.raises(InvalidInputError, match=r'no weights .*; model.init = "random" needs none'):
        check_paths(run_file(model__path=str(model), data__kind="text"))
    check_paths(run_file(model__path=str(model), model__init="random", data__tokenizer="bytes"))
    with pytest.raises(InvalidInputError, match=r"model.init: adapters need a trained model"):
        run_file(model__path=str(model), model__init="random", adapter={"kind": "lora"})
    (model / "config.json").write_text(json.dumps({"model_type": "gpt2"}), encoding="utf-8")
    with pytest.raises(InvalidInputError, match=r"knows the model types cohere, .*, not 'gpt2'"):
        check_paths(run_file(model__path=str(model), model__init="random", data__tokenizer="bytes"))
