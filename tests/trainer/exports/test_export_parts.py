"""The pure parts of exports: which file holds a weight, what a card says, when logits agree."""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from trainctl.protocol.config.run_tables import (
    BatchTable,
    DataTable,
    ModelTable,
    NodeTable,
    OptimizerTable,
    RunFile,
    RunTable,
)
from trainctl.protocol.errors import InvalidInputError
from trainctl.trainer import demo_assets
from trainctl.trainer.exports import trained_model
from trainctl.trainer.exports.export_model import base_name, loading_lines, read_data_files, read_history
from trainctl.trainer.exports.quantize_model import ORIGIN_FILE, original_of, write_origin
from trainctl.trainer.exports.verification import Reference, compare

NAN = float("nan")


def test_a_quantized_copy_knows_its_model_by_id_and_commit(tmp_path, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))  # read once, at import
    commit, copy = "a" * 40, tmp_path / "copy"
    whole = tmp_path / "models--org--name" / "snapshots" / commit
    for folder in (whole, copy):
        folder.mkdir(parents=True)
    (whole / "config.json").write_text("{}", "utf-8")
    (whole / "model.safetensors").write_bytes(b"weights")
    assert original_of(copy) is None
    write_origin(whole, copy)
    noted = json.loads((copy / ORIGIN_FILE).read_text("utf-8"))
    assert (noted["model"], noted["revision"], len(noted["weights"])) == ("org/name", commit, 64)
    assert original_of(copy) == whole
    (whole / "config.json").unlink()
    with pytest.raises(InvalidInputError, match=rf"org/name \(commit {commit}\), which isn.t .*: download it"):
        original_of(copy)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"model": "org/name"}'])
def test_a_damaged_note_of_a_quantized_copy_is_one_line(tmp_path, content):
    (tmp_path / ORIGIN_FILE).write_bytes(content)
    with pytest.raises(InvalidInputError, match=rf"{ORIGIN_FILE}: cannot read it: "):
        original_of(tmp_path)


@pytest.mark.parametrize(("path", "name"), [
    ("/models/Qwen3-0.6B", "Qwen3-0.6B"),
    ("/home/me/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de2", "Qwen/Qwen3-0.6B"),
])  # fmt: skip
def test_a_base_in_the_cache_has_its_name_on_the_hub(path, name):
    assert base_name(Path(path)) == name


def test_logits_agree_within_a_tolerance_that_grows_with_them_and_with_the_model_s_noise():
    logits, tokens = np.full((1, 2, 3), 0.5, np.float32), np.zeros((1, 2), np.int64)

    def agrees(by, *, times=1, noise=0.0):
        expected = logits * np.float32(times)
        return compare(Reference(tokens, expected, noise), expected + np.float32(by)).agrees

    assert agrees(8e-6) and not agrees(3e-5)
    assert agrees(1e-4, times=40)
    assert agrees(3e-5, noise=2e-6) and not agrees(5e-5, noise=2e-6)
    assert agrees(8e-4, noise=1.0) and not agrees(2e-3, noise=1.0), "no noise excuses everything"
    assert not agrees(NAN)


def test_a_curve_begins_at_step_1():
    """The first column of a series begins at 0, a step that there isn't."""
    series = SimpleNamespace(steps=[0, 64], mean=[2.0, 1.0])
    record: Any = SimpleNamespace(steps=lambda **_: ([], 0), evaluations=lambda: [], series=lambda *_, **__: series)
    assert [first for first, _ in read_history(record, 100).curve] == [1, 64]


def test_data_files_are_named_from_their_folder(tmp_path):
    (tmp_path / "data" / "b").mkdir(parents=True)
    for name in ("a.txt", "b/c.txt", "d.md"):
        (tmp_path / "data" / name).write_text(name, "utf-8")
    config = RunFile(
        run=RunTable(name="a", steps=1), model=ModelTable(path="m"), data=DataTable(path=str(tmp_path / "data")),
        batch=BatchTable(global_=1, micro=1), optimizer=OptimizerTable(learning_rate=1e-3),
    )  # fmt: skip
    sums = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("a.txt", "b/c.txt")}
    assert read_data_files(config) == sums
    gone = msgspec.structs.replace(config, data=DataTable(path=str(tmp_path / "none")))
    assert read_data_files(gone) == {}
    elsewhere = msgspec.structs.replace(gone, nodes={"b": NodeTable(data_path=config.data.path)})
    assert read_data_files(elsewhere) == sums


def test_the_lines_that_load_a_model_of_bytes_run_without_a_tokenizer(tmp_path):
    pytest.importorskip("mlx_lm")
    demo_assets.make_model(tmp_path / "model")
    config = RunFile(
        run=RunTable(name="a", steps=1), model=ModelTable(path=str(tmp_path / "model")),
        data=DataTable(path="d", tokenizer="bytes"),
        batch=BatchTable(global_=1, micro=1), optimizer=OptimizerTable(learning_rate=1e-3),
    )  # fmt: skip
    lines = loading_lines("mlx", tmp_path / "model", config)
    exec("\n".join(lines), {})
    whole = msgspec.structs.replace(config, data=DataTable(path="d"))
    assert loading_lines("mlx", tmp_path / "model", whole)[0].startswith("mlx_lm.generate ")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_weights_are_rounded_and_widened_as_torch_does(dtype):
    import torch

    bits = np.random.default_rng(1).integers(0, 2**32, 100_000, np.uint32)
    bits[:6] = 0x7F800000, 0xFF800000, 0x7FFFFFFF, 0x7F7FFFFF, 0x00000001, 0x3F808000
    values = bits.view(np.float32)
    cast = trained_model._cast(values, dtype)
    expected = torch.from_numpy(values).to(getattr(torch, dtype))
    np.testing.assert_array_equal(trained_model.widened(cast), expected.float().numpy())
    assert cast.nbytes == expected.nbytes
