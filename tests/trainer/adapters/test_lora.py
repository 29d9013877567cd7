"""Low-rank adapters: one curve however the batch is cut, on either backend, and peft's own."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.trainer.support.curves import group_losses, losses, plain_losses, worst
from tests.trainer.support.library_trainers import library_model

from trainctl.protocol.config.run_tables import AdapterTable
from trainctl.protocol.errors import InvalidInputError
from trainctl.trainer.adapters.lora import Lora, lora_of
from trainctl.trainer.common.model_files import stored_shapes

LORA = {"kind": "lora", "rank": 4, "alpha": 64.0}
STEPS = 20


def adapted(new_rig, backend, **changes):
    return new_rig(backend, **{"samples": True, "adapter": LORA, "optimizer__learning_rate": 1e-2, **changes})


def test_peft_is_told_the_bases_id_on_the_hub():
    lora = Lora(AdapterTable(kind="lora"), {"model.layers.0.mlp.up_proj": (4, 2)}, 1)
    stated = lora.peft_config(Path("/cache/models--org--tiny/snapshots") / ("a" * 40))
    assert (stated["base_model_name_or_path"], stated["revision"]) == ("org/tiny", "a" * 40)
    assert lora.peft_config(Path("/models/tiny"))["base_model_name_or_path"] == "/models/tiny"


@pytest.mark.parametrize("backend", ["torch", pytest.param("mlx", marks=pytest.mark.tier("all"))])
def test_resizing_micro_batches_never_bends_the_curve(new_rig, backend):
    undisturbed, resized = (losses(adapted(new_rig, backend), cut, STEPS) for cut in (False, True))
    assert undisturbed[0] / undisturbed[-1] - 1 > 1000 * 1e-5, "it has to learn for this to mean anything"
    assert worst(resized, undisturbed) < 1e-5


@pytest.mark.parametrize("kind", ["rslora", pytest.param("lora", marks=pytest.mark.tier("all"))])
def test_torch_and_mlx_draw_the_same_curve(new_rig, kind):
    curves = [losses(adapted(new_rig, name, adapter=LORA | {"kind": kind}), False, STEPS) for name in ("torch", "mlx")]
    assert worst(*curves) < 5e-5


def test_the_curve_is_that_of_peft_and_a_plain_torch_loop(new_rig):
    import torch

    rig = adapted(new_rig, "torch")
    model = library_model(rig, alpha=64).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    plain = plain_losses(rig, model, optimizer, STEPS)
    assert worst(losses(rig, True, STEPS), plain) < 1e-5


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.tier("all"))])
@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_a_frozen_base_is_held_in_the_compute_dtype_and_adapters_in_float32(new_rig, backend, dtype):
    rig = adapted(new_rig, backend, model__dtype=dtype)
    assert rig.backend.compute.dtype == dtype
    model = rig.backend._model
    if backend == "torch":
        held = {name: str(p.dtype) for name, p in model.named_parameters()}
    else:
        from mlx.utils import tree_flatten

        flat: Any = tree_flatten(model.parameters())
        held = {name: str(p.dtype) for name, p in flat}
    types = {("lora" in name, kind.rpartition(".")[2]) for name, kind in held.items()}
    assert types == {(True, "float32"), (False, dtype)}
    exact = losses(adapted(new_rig, backend), False, 5)
    assert 1e-8 < worst(losses(rig, False, 5), exact) < 2e-2


def test_only_the_adapters_are_trained_and_travel(new_rig):
    shapes = adapted(new_rig, "torch").backend.shapes
    assert all(".lora_" in name for name in shapes)
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == 2 * 4 * (4 * 64 + 3 * 96)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"targets": ("q_proj", "wrong")}, r"adapter.targets: the model has no layer 'wrong'; it has down_proj, "),
        (
            {"targets": ("lm_head",)},
            r"adapter.targets: adapters can't be attached to lm_head or the embeddings; choose",
        ),
        ({"layers": 3}, r"adapter.layers: 3 is above the model's 2; 0 means all"),
    ],
)
def test_a_layer_that_is_not_there_is_refused(assets, change, what):
    with pytest.raises(InvalidInputError, match=what):
        lora_of(AdapterTable(kind="lora", **change), stored_shapes(assets / "model"), "run.toml")


def test_layers_and_targets_choose(assets):
    table = AdapterTable(kind="lora", targets=("q_proj", "mlp.up_proj"), layers=1)
    lora = lora_of(table, stored_shapes(assets / "model"), "run.toml")
    assert dict(lora.layers) == {
        "model.layers.1.self_attn.q_proj": (32, 32), "model.layers.1.mlp.up_proj": (64, 32),
    }  # fmt: skip


def test_first_values_depend_on_the_seed_and_lie_within_their_bound(assets):
    lora = lora_of(AdapterTable(kind="lora", rank=8), stored_shapes(assets / "model"), "run.toml")
    one, other = lora.first_values(1), lora.first_values(1 << 20 | 1)
    for name, values in one.items():
        assert values.any() == ("lora_A" in name)
        bound = values.shape[1] ** -0.5
        assert np.abs(values).max() <= bound
        if "lora_A" in name:
            assert not np.array_equal(values, other[name])
            assert values.std() == pytest.approx(bound / 3**0.5, rel=0.15)
    assert len({values.tobytes() for name, values in one.items() if "lora_A" in name}) == 14


@pytest.mark.parametrize(
    ("engine", "backends", "tolerance"),
    [
        ("ring", ("torch", "mlx", "mlx"), 5e-5),
        pytest.param("gloo", ("torch", "torch", "torch"), 1e-5, marks=pytest.mark.tier("all")),
    ],
)
def test_three_ranks_draw_the_curve_of_one(new_rig, new_ranks, engine, backends, tolerance):
    table = {"samples": True, "adapter": LORA}
    shares = [(6, 4, 2)] * 6 + [(3, 4, 5)] * 7 + [(1, 9, 2)] * 7
    micros = [(4, 3, 2)] * 4 + [(2, 3, 1)] * 6 + [(5, 4, 3)] * 10
    found = group_losses(new_ranks(engine, backends, **table), [*zip(shares, micros, strict=True)])
    alone = losses(new_rig("torch", **table), False, STEPS)
    assert alone[0] / alone[-1] - 1 > 1000 * 1e-5
    assert worst(found, alone) < tolerance
