"""Quantized bases: torch unpacks MLX's bits to MLX's values, and both backends train one curve on them."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.trainer.support.chat_model import make_chat_model
from tests.trainer.support.passes import accumulate, blocks, furthest, loss_and_gradient
from tests.trainer.support.quantized_model import quantized_copy

from trainctl.protocol.batch.memory_estimate import estimate_memory
from trainctl.protocol.config.model_facts import read_facts
from trainctl.protocol.config.quantization import DEFAULTS, Quantization, whole_shapes
from trainctl.protocol.errors import InvalidInputError
from trainctl.trainer.common.model_files import stored_shapes
from trainctl.trainer.exports.quantize_model import quantize
from trainctl.trainer.model import rope_config

LORA = {"kind": "lora", "rank": 4, "alpha": 16.0}
HOWS = [*DEFAULTS.values(), Quantization("affine", 4, 32), Quantization("affine", 8, 128)]
OFFSET = 2.0
"""The mean of weights that aren't centred at 0: affine biases differ from group to group."""
BATCH = blocks()


@pytest.fixture(autouse=True, scope="module")
def libraries():
    global mx, torch, torch_model, torch_quantized
    import mlx.core as mx
    import torch

    from trainctl.trainer.model import torch_model, torch_quantized


def quantized(how, dtype="float32", rows=48):
    """A weight of `rows` by 256 as torch holds it, and as MLX unpacks it to float32."""
    values = np.random.default_rng(how.bits * how.group_size).normal(OFFSET, 1, (rows, 256)).astype(np.float32)
    words, *rest = mx.quantize(mx.array(values).astype(getattr(mx, dtype)), how.group_size, how.bits, how.mode)
    widened = [part if part.dtype == mx.uint8 else part.astype(mx.float32) for part in rest]
    expected = mx.dequantize(words, *widened, group_size=how.group_size, bits=how.bits, mode=how.mode, dtype=mx.float32)
    names = ("weight", "scales", "biases")
    parts = {name: torch.from_numpy(np.array(part)) for name, part in zip(names, [words, *widened], strict=False)}
    return torch_quantized.packed(how, parts), np.array(expected)


@pytest.fixture
def common_floats():
    """Refuses float types that torch's MPS device lacks: those of 64 and of 8 bits."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class CommonFloats(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor) and made.is_floating_point():
                assert made.dtype in (torch.float32, torch.bfloat16, torch.float16), func
            return made

    return CommonFloats()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("how", HOWS, ids=str)
def test_what_torch_unpacks_is_mlx_s_bit_for_bit(how, dtype, common_floats, monkeypatch):
    weight, expected = quantized(how, dtype)
    with common_floats:
        found = torch_quantized.unpack(weight, torch.float32)
    assert np.array_equal(found.numpy(), expected)
    monkeypatch.setattr(torch_quantized, "_BLOCK_VALUES", {"cpu": 1000})  # rows in parts
    assert np.array_equal(torch_quantized.unpack(weight, torch.float32).numpy(), expected)
    some = torch.tensor([[3, 1], [47, 3]])
    assert np.array_equal(torch_quantized.unpack(weight.rows(some), torch.float32).numpy(), expected[some.numpy()])


def test_scales_of_nvfp4_are_those_of_torch_s_type():
    stored = torch.arange(256, dtype=torch.uint8)
    found, expected = torch_quantized._scales("nvfp4", stored), stored.view(torch.float8_e4m3fn).float()
    assert torch.equal(found[~expected.isnan()], expected[~expected.isnan()])
    assert found.isnan().nonzero().flatten().tolist() == [127, 255]


@pytest.mark.parametrize("parts", [1, 5])
@pytest.mark.parametrize("how", HOWS, ids=str)
def test_a_packed_layer_computes_and_differentiates_as_a_whole_one(how, parts, monkeypatch):
    monkeypatch.setattr(torch_quantized, "UNPACKED_VALUES", 48 * 256 // parts)
    weight, expected = quantized(how)
    bias = torch.nn.Parameter(torch.linspace(-1, 1, 48))
    layer, plain = torch_quantized.QuantizedLinear(weight, bias), torch.nn.Linear(256, 48)
    plain.weight, plain.bias = torch.nn.Parameter(torch.from_numpy(expected)), bias
    found = []
    for each in (layer, plain):
        x = torch.linspace(-1, 1, 3 * 5 * 256).view(3, 5, 256).requires_grad_()
        y = each(x)
        (y * torch.arange(48)).sum().backward()
        found.append((y.detach(), x.grad))
    assert all(torch.allclose(one, other, rtol=1e-6, atol=1e-3) for one, other in zip(*found, strict=True))


def test_nothing_unpacked_is_kept_for_backward_and_an_embedding_unpacks_the_rows_it_is_asked_for():
    weight, expected = quantized(DEFAULTS["nvfp4"])
    kept: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        y = torch_quantized.QuantizedLinear(weight, None)(torch.ones(2, 256, requires_grad=True))
    assert y.requires_grad and not kept
    layer = torch_quantized.QuantizedEmbedding(weight, torch.float32, torch.tensor(3.0))
    assert np.array_equal(layer(torch.tensor([[7, 0]])).numpy(), 3 * expected[[[7, 0]]])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_chat_model(tmp_path_factory.mktemp("quantized") / "model", hidden=64, intermediate=128)


@pytest.fixture(scope="module")
def copies(model):
    """A quantized copy of the model, made once."""
    made: dict[Any, Path] = {}

    def copy(form, group_size=None):
        if (form, group_size) not in made:
            made[form, group_size] = quantized_copy(model, form, group_size)
        return made[form, group_size]

    return copy


def curve(backend, steps=6):
    losses = []
    for _ in range(steps):
        accumulate(backend, BATCH, scale=1 / 60)
        backend.update(1e-3, 1.0)
        losses.append(backend.evaluate(BATCH).losses["tokens"] / 60)
    return losses


def test_no_part_of_a_packed_layer_is_loaded_twice(copies, monkeypatch):
    loaded: list[str] = []
    load_state_dict = torch.nn.Module.load_state_dict

    def watched(self, state, **options):
        loaded.extend(state)
        return load_state_dict(self, state, **options)

    monkeypatch.setattr(torch.nn.Module, "load_state_dict", watched)
    model = torch_model.read_model(copies("nvfp4"), "run.toml", torch.bfloat16)
    assert loaded and all(name.endswith("norm.weight") for name in loaded)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize(
    "form", ["mlx-4bit", "nvfp4", *(pytest.param(one, marks=pytest.mark.tier("all")) for one in ("mlx-8bit", "mxfp4"))]
)
def test_both_backends_train_one_curve_on_the_same_bits(load_backend, copies, form):
    losses = {}
    for backend in ("torch", "mlx"):
        loaded: Any = load_backend(backend, model__base=form, adapter=LORA, model__path=str(copies(form)))
        assert all("lora_" in name for name in loaded.shapes)
        losses[backend] = curve(loaded)
    if form == "nvfp4":  # MLX unpacks embeddings to bfloat16; a model that scales them would round the product
        assert loaded._model.model.embed_tokens(mx.array([[1, 2]])).dtype == mx.float32
    assert losses["torch"][0] - losses["torch"][-1] > 0.01
    assert losses["torch"] == pytest.approx(losses["mlx"], rel=2e-6)


def test_a_copy_states_rope_where_both_libraries_look_for_it(model, tmp_path):
    """transformers 5 writes `rope_parameters` alone, which mlx-lm doesn't read."""
    shutil.copytree(model, tmp_path / "model")
    stated = json.loads((model / "config.json").read_text("utf-8"))
    new = {key: value for key, value in stated.items() if not key.startswith("rope")}
    new |= {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(new), "utf-8")
    assert not rope_config.mlx_reads(tmp_path / "model")
    copy = quantized_copy(tmp_path / "model", "mlx-4bit")
    assert rope_config.mlx_reads(copy)
    assert json.loads((copy / "config.json").read_text("utf-8"))["rope_theta"] == 500_000.0


def test_tied_embeddings_are_the_head_too(load_backend, tmp_path):
    tied = make_chat_model(tmp_path / "tied", hidden=64, intermediate=128)
    without_head(tied)
    config = json.loads((tied / "config.json").read_text())
    (tied / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    copy = quantized_copy(tied, "mlx-4bit")
    stated = json.loads((copy / "config.json").read_text())
    stated["quantization_config"] = stated.pop("quantization")  # as some tools have it
    (copy / "config.json").write_text(json.dumps(stated))
    one, other = (curve(load_backend(name, model__path=str(copy), adapter=LORA), 3) for name in ("torch", "mlx"))
    assert one == pytest.approx(other, rel=2e-6)


def without_head(model):
    stored: Any = mx.load(str(model / "model.safetensors"))
    kept = {name: array for name, array in stored.items() if not name.startswith("lm_head.")}
    mx.save_safetensors(str(model / "model.safetensors"), kept, {"format": "mlx"})


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_a_head_that_is_missing_is_not_made_of_the_embeddings(load_backend, copies, tmp_path, backend):
    folder = shutil.copytree(copies("nvfp4"), tmp_path / "model")
    without_head(folder)
    with pytest.raises(InvalidInputError, match=r"model\.path"):
        load_backend(backend, model__path=str(folder), adapter=LORA)


def test_shapes_and_memory_are_those_of_the_whole_weights(run_file, copies, model):
    copy = copies("mlx-4bit")
    assert stored_shapes(copy) == stored_shapes(model)
    found = {}
    for name, path in (("whole", model), ("packed", copy)):
        config, facts = run_file(model__path=str(path), adapter=LORA), read_facts(path, "model.path")
        assert facts is not None
        found[name] = estimate_memory(config, facts, config.nodes["here"], "mlx", "run.toml")
    assert found["packed"].parameters == found["whole"].parameters
    saved = found["whole"].parts["weights"] - found["packed"].parts["weights"]
    matrices = sum(shape[0] * shape[1] for shape in stored_shapes(model).values() if len(shape) == 2)
    assert saved == matrices * (4 - 4 / 8 - 8 / 64)


def test_a_model_is_made_whole_again(copies):
    tokens = torch.arange(24).view(2, 12)
    with torch.inference_mode():
        expected = torch_model.read_model(copies("mxfp4"), "run.toml")(input_ids=tokens).logits
        made = torch_quantized.whole(torch_model.read_model(copies("mxfp4"), "run.toml"))
        assert torch.allclose(made(input_ids=tokens).logits, expected, rtol=1e-6, atol=1e-6)
        assert all(each.is_floating_point() for each in made.parameters())


def test_a_quantized_base_that_does_not_fit_the_run_is_one_line(run_file, copies):
    from trainctl.protocol.config.run_file import check_paths

    for change, says in (
        ({"adapter": {}}, "is quantized, and only whole weights can be trained"),
        ({"adapter": LORA, "model__base": "nvfp4"}, 'model.base = "nvfp4", but it is mlx-4bit in '),
    ):
        with pytest.raises(InvalidInputError, match=rf"run\.toml: model\.path: .*{says}"):
            check_paths(run_file(model__path=str(copies("mlx-4bit")), **change), "run.toml")


PARTS = {"a.weight": (4, 8), "a.scales": (4, 1), "a.biases": (4, 1)}
MLX_4BIT = {"bits": 4, "group_size": 64}


@pytest.mark.parametrize(
    ("stated", "shapes", "says"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, PARTS, "gptq isn't MLX's; "),
        ({"quantization": MLX_4BIT | {"a": {"bits": 6, "group_size": 64}}}, PARTS, "a has affine values of 6 bits; "),
        ({"quantization": MLX_4BIT, "quantization_config": {"bits": 8}}, PARTS, "quantization_config differs from it"),
        ({}, PARTS, "a is packed, but config.json doesn't say how; "),
        ({"quantization": {"bits": 8, "group_size": 64}}, PARTS, "the tensors of a (weight [4, 8], scales [4, 1], "),
        ({"quantization": MLX_4BIT}, {"a.weight": (4, 8), "a.scales": (4, 1)}, "don't fit affine"),
    ],
)
def test_tensors_and_configuration_that_do_not_fit_are_refused_by_name(stated, shapes, says):
    with pytest.raises(InvalidInputError) as refusal:
        whole_shapes(shapes, stated)
    assert says in str(refusal.value)
    assert whole_shapes(PARTS, {"quantization": MLX_4BIT, "quantization_config": MLX_4BIT}) == {"a.weight": (4, 64)}


@pytest.mark.parametrize(
    ("width", "form", "group_size", "option", "says"),
    [
        (64, "mxfp4", 64, "--group-size", "mxfp4 always has groups of 32"),
        (64, "mlx-8bit", 48, "--group-size", "48 isn't one of 32, 64, 128"),
        (
            96,
            "mlx-4bit",
            128,
            "--group-size",
            "mlx-4bit or mlx-8bit with --group-size 32, mxfp4, nvfp4",
        ),
        (48, "mxfp4", 32, "--to", "these divide all widths: nvfp4"),
        (40, "nvfp4", None, "--to", 'no format has groups that divide all widths; on torch, model.base = "nf4"'),
    ],
)
def test_a_group_size_that_a_format_or_a_width_lacks_is_one_line_and_leaves_nothing(
    tmp_path, width, form, group_size, option, says
):
    model = make_chat_model(tmp_path / "model", hidden=width, intermediate=128)
    with pytest.raises(InvalidInputError) as refusal:
        quantize(str(model), form, group_size, tmp_path / "out")
    assert (refusal.value.where, says in refusal.value.problem) == (option, True), refusal.value
    assert [*tmp_path.iterdir()] == [model]


def test_a_quantized_model_or_a_folder_that_is_there_is_left_alone(copies, tmp_path):
    with pytest.raises(InvalidInputError, match=r"quantized already \(mlx-4bit\)"):
        quantize(str(copies("mlx-4bit")), "nvfp4", None, tmp_path / "out")
    with pytest.raises(InvalidInputError, match="already exists"):
        quantize(str(copies("mlx-4bit").with_name("model")), "nvfp4", None, tmp_path)


@pytest.mark.parametrize(
    ("double", "computed"), [(False, "float32"), pytest.param(True, "bfloat16", marks=pytest.mark.tier("all"))]
)
def test_nf4_is_peft_on_bitsandbytes(load_backend, model, double, computed):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    changes = {"model__double_quantization": double, "adapter": LORA, "model__compute_dtype": computed}
    ours: Any = load_backend(model__path=str(model), model__base="nf4", **changes)
    how = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=getattr(torch, computed),
    )
    base = AutoModelForCausalLM.from_pretrained(model, quantization_config=how, dtype=torch.float32)
    targets = sorted(ours.recipe.adapter.layers)
    theirs = get_peft_model(base, LoraConfig(r=4, lora_alpha=16, lora_dropout=0.0, target_modules=targets))
    theirs.train()  # for inference it sums in bfloat16 where the CPU has AVX512-BF16
    values = dict(ours._model.named_parameters())
    trained = {name: parameter for name, parameter in theirs.named_parameters() if parameter.requires_grad}
    for name, parameter in trained.items():
        parameter.data.copy_(values[name])
    found, gradients = loss_and_gradient(ours, BATCH, scale=1 / 60)
    tokens = torch.from_numpy(np.concatenate([BATCH.inputs, BATCH.targets[:, -1:]], 1).astype(np.int64))
    loss = theirs(input_ids=tokens, labels=tokens).loss
    loss.backward()
    assert found / 60 == pytest.approx(float(loss.detach()), rel=1e-6)
    expected = {name.replace(".default", ""): parameter.grad.numpy() for name, parameter in trained.items()}
    assert furthest(gradients, expected) <= 1e-5
    whole = load_backend(model__path=str(model), adapter=LORA)
    assert abs(ours.evaluate(BATCH).losses["tokens"] - whole.evaluate(BATCH).losses["tokens"]) > 1e-3, "packed"


@pytest.mark.parametrize("double", [False, True], ids=["single", "double"])
def test_nf4_trains_on_after_an_evaluation(load_backend, model, double):
    """On a CPU with AVX512-BF16, bitsandbytes evaluates in a layout that has no gradients."""
    changes = {"model__base": "nf4", "model__double_quantization": double, "adapter": LORA}
    backend = load_backend(model__path=str(model), **changes)
    loss, before = loss_and_gradient(backend, BATCH, scale=1 / 60)
    assert backend.evaluate(BATCH).losses["tokens"] == pytest.approx(loss, rel=1e-5), "summed in the same type"
    again, after = loss_and_gradient(backend, BATCH, scale=1 / 60)
    assert again == loss
    assert all(np.array_equal(after[name], array) for name, array in before.items())


@pytest.mark.needs("linux")  # mapped files are read from /proc, which only Linux has
def test_nf4_keeps_no_whole_weights_of_the_files(model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "model")
    packing = torch_model.Nf4(torch.device("cpu"), torch.float32, False)
    loaded = torch_model.read_model(folder, "run.toml", packing=packing)
    assert any(parameter.dtype == torch.uint8 for parameter in loaded.parameters())
    assert str(folder) not in Path("/proc/self/maps").read_text("utf-8")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"adapter": {}}, "run.toml: model.base: 'nf4' is for adapters"),
        ({"nodes__here": {"backend": "mlx"}}, 'run.toml: nodes.here.backend: MLX has no "nf4"'),
        ({"model__base": "stored", "model__double_quantization": True}, "model.double_quantization: acts only"),
    ],
)
def test_nf4_that_does_not_fit_the_run_is_one_line(run_file, change, says):
    with pytest.raises(InvalidInputError) as refusal:
        run_file(**({"model__base": "nf4", "adapter": LORA} | change))
    assert says in str(refusal.value)
