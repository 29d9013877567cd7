"""The probe refuses a rank that computes another model, and never one that differs by rounding.

Those on real weights are of the soak; `python -m tools.real_model build/real-model` makes the model.
"""

import itertools
import json
import shutil
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import tests.lacking
from tests.trainer.support.chat_model import VOCABULARY
from tests.trainer.support.families import EACH, SMALL, save
from tests.trainer.support.passes import blocks, whole_rows
from tests.trainer.support.seq2seq_model import make_seq2seq_model

from trainctl.node_agent.planning import results
from trainctl.protocol import messages as m
from trainctl.protocol.wire import codec
from trainctl.trainer.backends.backend import Backend
from trainctl.trainer.data import batch as batches
from trainctl.trainer.step import preflight

Load = Callable[..., Backend]
REAL = tests.lacking.ROOT / "build" / "real-model"
real = [pytest.mark.tier("soak"), pytest.mark.needs("real-model"), pytest.mark.timeout(900)]


@pytest.fixture
def load_model(load_backend):
    def make(model, backend, dtype="float32", **changes):
        settings = {"model__path": str(model), "model__dtype": dtype, "data__sequence_length": 64}
        return load_backend(backend, **settings | changes)

    return make


@pytest.fixture(autouse=True, scope="module")
def libraries():
    global load_file, save_file, torch_backend, transformers
    import transformers
    from safetensors.torch import load_file, save_file

    from trainctl.trainer.backends import torch_backend


BATCH = blocks(3, 30, first=1, stop=SMALL["vocab_size"])


def probed(backend, tokens=BATCH):
    report = m.Report(
        run="r", rank=0, generation=m.Generation(1, 1), seq=1, kind="probe", step=0, loss_sum=0.0, weight=0.0,
        own_weight=0.0, own_samples=0,
    )  # fmt: skip
    found = preflight.probe(backend, tokens, tf32=False, check=lambda: None)
    return preflight.probed(report, backend, tokens, "", *found)


def judged(one, other, dtype="float32"):
    """Return that the pair is refused, by how much it differs, and the tolerance."""
    (difference,) = results.compare({0: one, 1: other}, (), results.Precision(dtype, tf32=False))
    return difference.is_refused, difference.largest, difference.limit


def prompted():
    """Prompts for an encoder, and completions."""
    chance = np.random.default_rng(3)
    rows = [chance.integers(5, VOCABULARY, length, dtype=np.int32) for length in (12, 9, 14, 11)]
    flags = [(tokens, np.ones(len(tokens) - 1, np.bool_)) for tokens in rows]
    return batches.collate_apart([tokens[::-1].copy() for tokens in rows], flags)


def larger(model, factor):
    """Its matrices times `factor`, so that rounding grows as in a trained model."""
    file = model / "model.safetensors"
    tensors = {name: tensor * factor if tensor.ndim == 2 else tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return model


@pytest.mark.parametrize(
    ("dtype", "factor"), [("float32", 12), ("bfloat16", 12), pytest.param("float16", 1, marks=pytest.mark.tier("all"))]
)
@pytest.mark.parametrize("name", EACH)
def test_two_libraries_differ_by_rounding(load_model, tmp_path, name, dtype, factor):
    model = larger(save(name, tmp_path / "model"), factor)
    one, other = (probed(load_model(model, backend, dtype)) for backend in ("torch", "mlx"))
    refused, largest, limit = judged(one, other, dtype)
    assert not refused and largest < limit / 2, (largest, limit)
    assert results.first_layer(one, other) == (len(one.layer_noise) // 4, len(one.layer_noise) // 4)
    assert one.noise and other.noise


@pytest.mark.parametrize("name", ["gemma", "gemma2", "gemma3"])
def test_embeddings_are_scaled_as_transformers_does(load_model, family, name):
    """The root of this width is no bfloat16 number."""
    model = family(name, hidden_size=48)
    for dtype in ("float32", "bfloat16"):
        refused, largest, limit = judged(*(probed(load_model(model, kind, dtype)) for kind in ("torch", "mlx")), dtype)
        assert not refused, (dtype, largest, limit)


def test_sixteen_bits_show_as_little_noise_as_float32(load_model, tmp_path):
    model = save("llama", tmp_path / "model")
    for kind in ("torch", "mlx"):
        loaded = load_model(model, kind, "bfloat16")
        before = loaded.token_log_probabilities(BATCH)
        found = np.frombuffer(probed(loaded).log_probabilities, "<f4")
        after = loaded.token_log_probabilities(BATCH)
        assert (before == after).all()
        assert 1e-4 < np.abs(found - before.ravel()).max() < 0.1
        assert probed(loaded).noise < 1e-5


@pytest.mark.parametrize(
    "kind", ["qwen3_moe", "t5", *(pytest.param(one, marks=pytest.mark.tier("all")) for one in ("gemma2", "bart"))]
)
def test_the_probe_computes_in_float32_from_weights_of_16_bits(load_model, tmp_path, kind):
    model = tmp_path / "model"
    sizes: dict[str, Any] = {**SMALL, **MOE}
    seq2seq = kind in ("t5", "bart")
    if seq2seq:
        make_seq2seq_model(model, kind)
    else:
        config = transformers.AutoConfig.for_model(kind, **sizes)
        loader: Any = transformers.AutoModelForCausalLM
        loader.from_config(config).save_pretrained(model)
    tensors = load_file(model / "model.safetensors")
    rounded = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(rounded, model / "model.safetensors", metadata={"format": "pt"})
    data = {"path": str(model), "kind": "rows", "sequence_length": 64}
    objective = {"objective": {"kind": "seq2seq"}, "data": data} if seq2seq else {}
    tokens = prompted() if seq2seq else BATCH
    one, other = (probed(load_model(model, "torch", dtype, **objective), tokens) for dtype in ("float32", "bfloat16"))
    refused, largest, limit = judged(one, other)
    assert not refused, (largest, limit)
    assert one.layers and len(one.layers) == len(other.layers)


def test_a_deep_model_s_probe_fits_into_a_frame(load_model, tmp_path):
    model = save("llama", tmp_path / "model", num_hidden_layers=128, max_position_embeddings=512)
    loaded = load_model(model, "torch", data__sequence_length=300)
    report = probed(loaded, blocks(1, 300, first=1, stop=SMALL["vocab_size"]))
    assert codec.decode_answer(codec.encode(report)) == report


def rope_base(model):
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq**1.02


def norm_epsilon(model):
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1e-6 if module.variance_epsilon > 5e-6 else 1e-5


def swapped_gate(model):
    mlp = model.model.layers[1].mlp
    mlp.gate_proj, mlp.up_proj = mlp.up_proj, mlp.gate_proj


def dropped_bias(model):
    model.model.layers[1].self_attn.q_proj.bias.data.zero_()


def wrong_expert(model):
    experts = model.model.layers[1].mlp.experts
    experts.down_proj.data[0] = experts.down_proj.data[1]


FAULTS = {"rope_base": 0, "norm_epsilon": 0, "swapped_gate": 1, "dropped_bias": 1, "wrong_expert": 1}
"""The first layer that each changes."""
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16}


def faulty_model(fault, folder):
    """A random model that can have the fault."""
    if fault == "wrong_expert":
        config = transformers.AutoConfig.for_model("qwen3_moe", **{**SMALL, **MOE})
        loader: Any = transformers.AutoModelForCausalLM
        loader.from_config(config).save_pretrained(folder)
        return folder
    return with_biases(save("qwen2", folder))


def with_biases(model):
    """A Qwen2's biases, which are new ones' zeros, are given values."""
    tensors = load_file(model / "model.safetensors")
    values = np.random.default_rng(5)
    for name, tensor in tensors.items():
        if name.endswith("proj.bias"):
            tensor.copy_(tensor.new_tensor(values.normal(0, 0.1, tensor.shape)))
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    return model


@pytest.fixture
def load_faulty(load_model, monkeypatch):
    """Load a model with torch, as if the library had a fault in its code: the files and weights are the same."""

    def make(fault, *args, **changes):
        read = torch_backend.read_model

        def read_and_change(*read_args, **options):
            model = read(*read_args, **options)
            globals()[fault](model)
            return model

        with monkeypatch.context() as patch:
            patch.setattr(torch_backend, "read_model", read_and_change)
            return load_model(*args, **changes)

    return make


def check_refused(usual, faulty, fault, dtype):
    faulty = msgspec.structs.replace(faulty, weight_norms=usual.weight_norms)  # not by its weights
    refused, largest, limit = judged(usual, faulty, dtype)
    assert refused and largest > 2 * limit, (largest, limit)
    first = results.first_layer(usual, faulty)
    assert first is not None and first[0] == FAULTS[fault]


@pytest.mark.parametrize(
    "dtype", ["bfloat16", *(pytest.param(one, marks=pytest.mark.tier("all")) for one in ("float32", "float16"))]
)
@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_refused_by_the_layer(load_model, load_faulty, tmp_path, fault, dtype):
    model = faulty_model(fault, tmp_path / "model")
    usual = load_model(model, "torch" if fault == "wrong_expert" else "mlx", dtype)  # mlx-lm renames experts
    check_refused(probed(usual), probed(load_faulty(fault, model, "torch", dtype)), fault, dtype)


def real_batch():
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(REAL / "model")
    rows = (json.loads(line)["messages"] for line in (REAL / "rows.jsonl").read_text("utf-8").splitlines())
    tokens = (tokenizer.apply_chat_template(row, tokenize=True, return_dict=False) for row in rows)
    long = [row[:33] for row in tokens if len(row) >= 33]
    return whole_rows(long[:2])


def real_model(folder):
    """SmolLM2's weights as a Qwen2, which is a Llama with biases in attention."""
    shutil.copytree(REAL / "model", folder)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config |= {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    tensors = load_file(folder / "model.safetensors")
    values = np.random.default_rng(5)
    for name in [name for name in tensors if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
        weight = tensors[name]
        tensors[name.replace("weight", "bias")] = weight.new_tensor(values.normal(0, 0.1, len(weight)))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("base", "dtype"),
    [
        pytest.param(*case, marks=real)
        for case in itertools.product(("whole", "mlx-4bit", "nvfp4"), ("float32", "bfloat16", "float16"))
    ],
)
def test_a_real_model_differs_by_rounding(load_model, tmp_path, base, dtype):
    from trainctl.trainer.exports.quantize_model import quantize

    model, adapter = REAL / "model", {"kind": "lora", "rank": 8}
    if base != "whole":
        quantize(str(model), base, None, tmp_path / base)
        model = tmp_path / base
    tokens = real_batch()
    one, other = (probed(load_model(model, kind, dtype, adapter=adapter), tokens) for kind in ("torch", "mlx"))
    refused, largest, limit = judged(one, other, dtype)
    assert not refused, (largest, limit)
    assert 1e-6 < one.noise < 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", [pytest.param(fault, marks=real) for fault in FAULTS if fault != "wrong_expert"])
def test_each_fault_of_a_real_model_is_refused(load_model, load_faulty, tmp_path, fault, dtype):
    """By another torch rank, which costs a minute less than MLX on a CPU."""
    model, tokens, adapter = real_model(tmp_path / "model"), real_batch(), {"kind": "lora", "rank": 8}
    usual = probed(load_model(model, "torch", dtype, adapter=adapter), tokens)
    faulty = probed(load_faulty(fault, model, "torch", dtype, adapter=adapter), tokens)
    check_refused(usual, faulty, fault, dtype)


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=real) for kind in ("torch", "mlx")])
def test_packed_documents_of_a_real_model_are_kept_apart_in_bfloat16(load_model, kind):
    """Loading checks it, by a change that rounding to bfloat16 alone would make twice as large as a crossed border."""
    adapter = {"kind": "lora", "rank": 8}
    data = {"path": str(REAL / "rows.jsonl"), "kind": "rows", "sequence_length": 64, "packing": "best-fit"}
    loaded = load_model(REAL / "model", kind, "bfloat16", adapter=adapter, data=data)
    assert loaded.compute.dtype == "bfloat16"
