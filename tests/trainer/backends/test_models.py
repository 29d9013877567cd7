"""Both backends read the same Hugging Face directory, and say in a line why one cannot."""

import json
import subprocess
import sys
from importlib.metadata import version
from typing import Any

import numpy as np
import pytest
from tests.trainer.support.curves import TOLERANCES, UNEVEN, group_losses, losses, worst
from tests.waiting import HANG_SECONDS

from trainctl.protocol.config import run_file as runfile
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.machine import file_digests
from trainctl.protocol.messages import Compute
from trainctl.trainer import demo_assets
from trainctl.trainer.backends.load import choose
from trainctl.trainer.collective.shared_buffer import layout_digest
from trainctl.trainer.data.batch import collate

BACKENDS = pytest.mark.parametrize("backend", ["torch", "mlx"])


@pytest.fixture
def broken_model(assets, tmp_path):
    """The small model with its weights or its configuration changed."""
    import safetensors.numpy as safetensors

    def make(change):
        source, model = assets / "model", tmp_path / "model"
        weights = safetensors.load_file(source / "model.safetensors")
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        change(weights, config)
        model.mkdir()
        safetensors.save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
        (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return model

    return make


def test_each_says_what_it_computes_in(load_backend):
    torch_says, mlx_says = (load_backend(name).compute for name in ("torch", "mlx"))
    assert torch_says == Compute("float32", None, "off", "sdpa", "float32", versions=torch_says.versions)
    assert mlx_says == Compute("float32", None, "off", "mx.fast", "float32", versions=mlx_says.versions)
    versions = dict(torch_says.versions)
    assert versions["torch"] == version("torch") and ("mlx-lm", version("mlx-lm")) in mlx_says.versions
    assert "cuda" not in versions and "driver" not in versions
    for backend in ("torch", "mlx"):
        compute = load_backend(backend, model__dtype="bfloat16").compute
        assert (compute.dtype, compute.weights) == ("bfloat16", "float32")


GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_head": 2, "n_layer": 1, "n_positions": 64, "activation_function": "relu"}


@pytest.mark.parametrize(
    ("change", "name"), [({"attention_dropout": 0.3}, "attention_dropout"), (GPT2, "resid_pdrop, embd_pdrop")],
    ids=["stated", "by default"],
)  # fmt: skip
def test_the_librarys_own_dropout_is_off(assets, tmp_path, change, name, caplog):
    import torch

    from trainctl.trainer.model import torch_model

    stated = json.loads((assets / "model" / "config.json").read_text("utf-8")) | change
    (tmp_path / "config.json").write_text(json.dumps(stated), encoding="utf-8")
    model: Any = torch_model.read_model(tmp_path, "run.toml", with_weights=False).train()
    one, other = (model(input_ids=torch.arange(32)[None]).logits for _ in range(2))
    assert torch.equal(one, other)
    (said,) = caplog.messages
    assert name in said
    assert json.loads((tmp_path / "config.json").read_text("utf-8")) == stated


@BACKENDS
@pytest.mark.parametrize("adapter", [{}, {"kind": "lora"}], ids=["full", "lora"])
def test_a_model_that_does_not_train_has_no_optimizer(load_backend, backend, adapter):
    changes = {"model__dtype": "bfloat16", "adapter": adapter}
    trains, reads = (load_backend(backend, trains=trains, **changes) for trains in (True, False))
    own: Any = reads
    assert (trains.slots, reads.slots) == (("exp_avg", "exp_avg_sq"), ())
    assert not own._moments if backend == "mlx" else own._optimizer is None
    masters = own._weights.computed.values() if backend == "mlx" else own._weights.masters
    assert {str(held.dtype).split(".")[-1] for held in masters} == {"float32" if adapter else "bfloat16"}
    batch = collate([(np.arange(start, start + 32, dtype=np.int32), np.ones(31, np.bool_)) for start in (0, 64)])
    assert np.array_equal(trains.token_log_probabilities(batch), reads.token_log_probabilities(batch))


@pytest.mark.parametrize("tied", [True, False])
def test_names_shapes_and_layout_are_the_same_in_both(load_backend, tmp_path, tied):
    config = demo_assets.llama_config(hidden=16, layers=1, heads=2, intermediate=24, tied=tied)
    demo_assets.make_model(tmp_path / "model", config)
    torch, mlx = (load_backend(name, model__path=str(tmp_path / "model")) for name in ("torch", "mlx"))
    assert dict(torch.shapes) == dict(mlx.shapes)
    assert list(torch.shapes) == list(mlx.shapes) == sorted(torch.shapes)
    assert ("lm_head.weight" in torch.shapes) == (not tied)
    assert layout_digest(torch.shapes) == layout_digest(mlx.shapes)
    one, other = torch.export_state().weights, mlx.export_state().weights
    assert all(np.array_equal(one[name], other[name]) for name in one)


def test_the_layout_digest_sees_a_swap_of_equal_sizes():
    one = {"a": (2, 3), "b": (3, 2)}
    assert layout_digest(one) == layout_digest(dict(reversed(one.items())))
    assert layout_digest(one) != layout_digest({"a": (3, 2), "b": (2, 3)})


@BACKENDS
@pytest.mark.parametrize(
    ("change", "garble"),
    [
        (lambda weights, config: weights.pop("model.layers.1.mlp.up_proj.weight"), None),
        (lambda weights, config: config.update(hidden_size=48), None),
        (lambda weights, config: config.update(model_type="no-such-model", architectures=["NoSuchModel"]), None),
        (lambda weights, config: config.pop("model_type"), None),
        (lambda weights, config: None, "config.json"),
        (lambda weights, config: None, "model.safetensors"),
    ],
    ids=["missing weight", "shape", "architecture", "type", "garbled config", "garbled weights"],
)
def test_a_model_that_cannot_be_read_is_one_line(load_backend, broken_model, backend, change, garble):
    model = broken_model(change)
    if garble is not None:
        (model / garble).write_bytes(b"{garbled")
    with pytest.raises(InvalidInputError) as refusal:
        load_backend(backend, model__path=str(model))
    assert str(model) in str(refusal.value) or garble is None
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("backend", "device"), [("torch", "cuda:9"), ("mlx", "cuda"), ("mlx", "mps")])
def test_a_device_that_isnt_there_is_named(load_backend, backend, device):
    with pytest.raises(InvalidInputError, match=rf"^run\.toml: nodes\.device: .*'{device}'"):
        load_backend(nodes__here={"backend": backend, "device": device})


def test_what_only_torch_has_is_trained_with_torch(run_file, load_backend, monkeypatch):
    lora = {"kind": "lora", "rank": 4}
    assert not runfile.needs_torch(run_file(adapter=lora))
    assert runfile.needs_torch(run_file(adapter=lora, model__base="nf4"))
    paged = {"optimizer__kind": "paged-adamw", "nodes__here": {"backend": "auto", "device": "cpu"}}
    assert runfile.needs_torch(run_file(**paged))
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "torch" else sys)
    with pytest.raises(InvalidInputError, match=r"nodes\.backend: 'torch' is not installed here"):
        load_backend(**paged)


def test_a_backend_that_isnt_installed_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        InvalidInputError, match=r"nodes\.backend: 'mlx' is not installed here; in a trainctl checkout, .*'\.\[mlx\]'"
    ):
        choose("mlx", "run.toml")
    with pytest.raises(InvalidInputError, match=r"pip install '\.\[torch\]' or '\.\[mlx\]'"):
        choose("auto", "run.toml")


def make_demo(folder):
    command = [sys.executable, "-m", "trainctl.trainer.demo_assets", str(folder)]
    environment = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)


def test_the_demo_assets_are_made_once_and_say_so(tmp_path):
    found = []
    for _ in range(2):
        made = make_demo(tmp_path / "demo")
        assert made.returncode == 0, made.stderr
        found.append((json.loads(made.stdout), {one: one.stat().st_mtime_ns for one in tmp_path.rglob("*.*")}))
    assert found[0] == found[1]
    assert 700_000 < found[0][0]["parameters"] < 900_000
    assert file_digests.model_digests(tmp_path / "demo" / "model").whole == (
        "64d94bef2a45de4c91f76a190b6cd7bd1a763fafe879a5238f49275fd17cde3b"
    ), "the demo's model is the same bits on every machine"
    (tmp_path / "file").write_text("", encoding="utf-8")
    refused = make_demo(tmp_path / "file")
    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (1, "", 1)


@pytest.mark.parametrize(
    "dtype", [pytest.param(name, marks=[] if name == "bfloat16" else [pytest.mark.tier("all")]) for name in TOLERANCES]
)
def test_mixed_ranks_keep_to_the_tolerance(new_rig, new_ranks, dtype):
    alone = losses(new_rig("torch", model__dtype=dtype), False, len(UNEVEN))
    apart = worst(group_losses(new_ranks("ring", ("torch", "mlx"), model__dtype=dtype), UNEVEN), alone)
    print(f"{dtype}: {apart:.2g}")
    assert alone[-1] < 0.9 * alone[0], "it has to learn for this to mean anything"
    assert 0 < apart < TOLERANCES[dtype]


SCRIPT = """
    import gc
    import sys
    from pathlib import Path

    import msgspec

    from trainctl.protocol.config.run_tables import RunFile
    from trainctl.trainer.backends.load import import_library
    from trainctl.trainer.backends.load import load

    folder = Path(sys.argv[1])
    config = msgspec.convert({
        "run": {"name": "t", "steps": 1}, "model": {"path": str(folder / "model")}, "batch": {"global": 2},
        "data": {"path": str(folder / "text"), "tokenizer": "bytes", "sequence_length": 16},
        "optimizer": {"learning_rate": 1e-3}, "nodes": {"here": {"backend": "mlx"}},
    }, RunFile)
    import_library(config, "here", "run file")
    backend = load(config, config.nodes["here"], "run file")
    print(backend.name, "transformers" in sys.modules, "torch" in sys.modules)
    print(gc.get_freeze_count() > 5 * len(gc.get_objects()))
    import torch
    print(torch.ones(3).sum().item())
"""


def test_mlx_is_loaded_without_torch_which_can_still_be_imported(run_python):
    assert run_python(SCRIPT).splitlines() == ["mlx True False", "True", "3.0"]
