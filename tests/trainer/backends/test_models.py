"""Both backends read the same Hugging Face directory, and say in a line why one cannot be trained."""

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.waiting import HANG_SECONDS

from trainctl.protocol.config import run_file as runfile
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.machine import file_digests
from trainctl.protocol.messages import Compute
from trainctl.trainer import demo_assets
from trainctl.trainer.backends.base import Backend
from trainctl.trainer.backends.load import choose, load
from trainctl.trainer.collective.shared_buffer import layout_digest
from trainctl.trainer.data.batch import collate

RunFileWriter = Callable[..., runfile.RunFile]
Loader = Callable[[Path, str], Backend]


@pytest.fixture
def load_model(run_file: RunFileWriter) -> Loader:
    def make(model: Path, backend: str) -> Backend:
        config = run_file(model__path=str(model), nodes__here={"backend": backend, "device": "cpu"})
        return load(config, config.nodes["here"], "run.toml")

    return make


@pytest.fixture
def broken_model(assets: Path, tmp_path: Path) -> Callable[..., Path]:
    """The small model with its weights or its configuration changed."""
    safetensors = pytest.importorskip("safetensors.numpy")

    def make(change: Callable[[dict[str, Any], dict[str, Any]], None]) -> Path:
        source, model = assets / "model", tmp_path / "model"
        weights = safetensors.load_file(source / "model.safetensors")
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        change(weights, config)
        model.mkdir()
        safetensors.save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
        (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return model

    return make


def test_each_says_what_it_computes_in(load_model: Loader, assets: Path) -> None:
    torch_says, mlx_says = (load_model(assets / "model", name).compute for name in ("torch", "mlx"))
    assert torch_says == Compute("float32", None, "off", "sdpa", "float32", versions=torch_says.versions)
    assert mlx_says == Compute("float32", None, "off", "mx.fast", "float32", versions=mlx_says.versions)
    versions = dict(torch_says.versions)
    assert versions["torch"] == version("torch") and ("mlx-lm", version("mlx-lm")) in mlx_says.versions
    assert "cuda" not in versions and "driver" not in versions


def test_at_16_bits_it_says_so(run_file: RunFileWriter, assets: Path) -> None:
    for backend in ("torch", "mlx"):
        config = run_file(model__dtype="bfloat16", nodes__here={"backend": backend, "device": "cpu"})
        compute = load(config, config.nodes["here"], "run.toml").compute
        assert (compute.dtype, compute.weights) == ("bfloat16", "float32")


GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_head": 2, "n_layer": 1, "n_positions": 64, "activation_function": "relu"}


@pytest.mark.parametrize(
    ("change", "name"), [({"attention_dropout": 0.3}, "attention_dropout"), (GPT2, "resid_pdrop, embd_pdrop")],
    ids=["stated", "by default"],
)  # fmt: skip
def test_the_librarys_own_dropout_is_off(
    assets: Path, tmp_path: Path, change: dict[str, Any], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The same batch has the same loss in training. One line says so, and config.json stays."""
    import torch

    from trainctl.trainer.backends import torch_model

    stated = json.loads((assets / "model" / "config.json").read_text("utf-8")) | change
    (tmp_path / "config.json").write_text(json.dumps(stated), encoding="utf-8")
    model: Any = torch_model.read_model(tmp_path, "run.toml", with_weights=False).train()
    one, other = (model(input_ids=torch.arange(32)[None]).logits for _ in range(2))
    assert torch.equal(one, other)
    (said,) = caplog.messages
    assert name in said
    assert json.loads((tmp_path / "config.json").read_text("utf-8")) == stated


@pytest.mark.parametrize("backend", ["torch", "mlx"])
@pytest.mark.parametrize("adapter", [{}, {"kind": "lora"}], ids=["full", "lora"])
def test_a_model_that_does_not_train_has_no_optimizer(
    run_file: RunFileWriter, backend: str, adapter: dict[str, Any]
) -> None:
    """Nor float32 masters; its log-probabilities are those of one that does."""
    node = {"backend": backend, "device": "cpu"}
    config = run_file(model__dtype="bfloat16", adapter=adapter, nodes__here=node)
    trains, reads = (load(config, config.nodes["here"], "run.toml", trains=trains) for trains in (True, False))
    own: Any = reads
    assert (trains.slots, reads.slots) == (("exp_avg", "exp_avg_sq"), ())
    assert not own._slots if backend == "mlx" else own._optimizer is None
    assert {str(held.dtype).split(".")[-1] for held in _masters(own)} == {"float32" if adapter else "bfloat16"}
    batch = collate([(np.arange(start, start + 32, dtype=np.int32), np.ones(31, np.bool_)) for start in (0, 64)])
    assert np.array_equal(trains.token_log_probabilities(batch), reads.token_log_probabilities(batch))


def _masters(backend: Any) -> list[Any]:
    return [*backend._weights.computed.values()] if backend.name == "mlx" else backend._weights.masters


@pytest.mark.parametrize("tied", [True, False])
def test_names_shapes_and_layout_are_the_same_in_both(load_model: Loader, tmp_path: Path, tied: bool) -> None:
    config = demo_assets.llama_config(hidden=16, layers=1, heads=2, intermediate=24, tied=tied)
    demo_assets.make_model(tmp_path / "model", config)
    torch, mlx = (load_model(tmp_path / "model", name) for name in ("torch", "mlx"))
    assert dict(torch.shapes) == dict(mlx.shapes)
    assert list(torch.shapes) == list(mlx.shapes) == sorted(torch.shapes)
    assert ("lm_head.weight" in torch.shapes) == (not tied)
    assert layout_digest(torch.shapes) == layout_digest(mlx.shapes)
    one, other = torch.export_state().weights, mlx.export_state().weights
    assert all(np.array_equal(one[name], other[name]) for name in one)


def test_the_layout_digest_sees_a_swap_of_equal_sizes() -> None:
    one = {"a": (2, 3), "b": (3, 2)}
    assert layout_digest(one) == layout_digest(dict(reversed(one.items())))
    assert layout_digest(one) != layout_digest({"a": (3, 2), "b": (2, 3)})


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_a_missing_weight_is_refused_not_invented(
    load_model: Loader, broken_model: Callable[..., Path], backend: str
) -> None:
    model = broken_model(lambda weights, config: weights.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(InvalidInputError, match=r"^run\.toml: model\.path: ") as refusal:
        load_model(model, backend)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("backend", ["torch", "mlx"])
@pytest.mark.parametrize(
    "change",
    [
        lambda weights, config: config.update(hidden_size=48),
        lambda weights, config: config.update(model_type="no-such-model", architectures=["NoSuchModel"]),
        lambda weights, config: config.pop("model_type"),
    ],
    ids=["shape", "architecture", "type"],
)
def test_a_model_that_cannot_be_read_is_one_line(
    load_model: Loader, broken_model: Callable[..., Path], backend: str, change: Callable[..., None]
) -> None:
    model = broken_model(change)
    with pytest.raises(InvalidInputError) as refusal:
        load_model(model, backend)
    assert str(model) in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("backend", ["torch", "mlx"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_garbled_file_is_one_line(
    load_model: Loader, broken_model: Callable[..., Path], backend: str, name: str
) -> None:
    model = broken_model(lambda weights, config: None)
    (model / name).write_bytes(b"{garbled")
    with pytest.raises(InvalidInputError) as refusal:
        load_model(model, backend)
    assert str(model) in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("backend", "device"), [("torch", "cuda:9"), ("mlx", "cuda"), ("mlx", "mps")])
def test_a_device_that_isnt_there_is_named(run_file: RunFileWriter, backend: str, device: str) -> None:
    config = run_file(nodes__here={"backend": backend, "device": device})
    with pytest.raises(InvalidInputError, match=rf"^run\.toml: nodes\.device: .*'{device}'"):
        load(config, config.nodes["here"], "run.toml")


def test_the_backend_chosen() -> None:
    assert choose("torch", "run.toml") == "torch"
    assert choose("mlx", "run.toml") == "mlx"
    assert choose("auto", "run.toml") == ("mlx" if sys.platform == "darwin" else "torch")


def test_what_only_torch_has_is_trained_with_torch(run_file: RunFileWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on macOS, where MLX comes first."""
    lora = {"kind": "lora", "rank": 4}
    assert not runfile.needs_torch(run_file(adapter=lora))
    assert runfile.needs_torch(run_file(adapter=lora, model__base="nf4"))
    config = run_file(optimizer__kind="paged-adamw", nodes__here={"backend": "auto", "device": "cpu"})
    assert runfile.needs_torch(config)
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "torch" else sys)
    with pytest.raises(InvalidInputError, match=r"nodes\.backend: 'torch' is not installed here"):
        load(config, config.nodes["here"], "run.toml")


def test_a_backend_that_isnt_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        InvalidInputError, match=r"nodes\.backend: 'mlx' is not installed here; in a trainctl checkout, .*'\.\[mlx\]'"
    ):
        choose("mlx", "run.toml")
    with pytest.raises(InvalidInputError, match=r"pip install \./protocol '\.\[torch\]' or '\.\[mlx\]'"):
        choose("auto", "run.toml")


def test_the_demo_assets_are_made_once_and_say_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trainctl.trainer.demo_assets", str(tmp_path / "demo")]
    environment = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    outs = []
    for _ in range(2):
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True, timeout=HANG_SECONDS
        )
        outs.append(json.loads(done.stdout))
        stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "demo").rglob("*")}
        outs.append(stamps)
    assert outs[:2] == outs[2:]
    assert 700_000 < outs[0]["parameters"] < 900_000
    assert outs[0]["bytes"] > 1_000_000
    assert sorted(path.name for path in (tmp_path / "demo").iterdir()) == ["data", "model"]
    assert file_digests.model_digests(tmp_path / "demo" / "model").whole == (
        "64d94bef2a45de4c91f76a190b6cd7bd1a763fafe879a5238f49275fd17cde3b"
    ), "the demo's model is the same bits on every machine"


def test_demo_assets_that_cannot_be_written_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    command = [sys.executable, "-m", "trainctl.trainer.demo_assets", str(tmp_path / "file")]
    environment = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=HANG_SECONDS)
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
