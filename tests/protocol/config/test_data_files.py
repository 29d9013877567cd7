"""The files of a run's data and of a model's weights, in folders as people and other programs leave them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from trainctl.protocol.config.data_files import check_form, data_files, hidden_files
from trainctl.protocol.config.model_facts import context_limit, has_own_head, stored_tensors, weight_files
from trainctl.protocol.errors import InvalidInputError


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")


def names_in(path: Path, root: Path) -> list[str]:
    return [file.relative_to(root).as_posix() for file in data_files(path, "rows")]


def test_a_folder_and_a_glob_agree(tmp_path: Path) -> None:
    touch(tmp_path / "data", "a.jsonl", "B.JSONL", "c/d.ndjson", "._a.jsonl", ".git/e.jsonl", "c/.f.jsonl", "g.txt")
    touch(tmp_path / "elsewhere", "h.jsonl")
    (tmp_path / "data" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data" / "z.jsonl").symlink_to(tmp_path / "data" / "a.jsonl")
    expected = ["B.JSONL", "a.jsonl", "c/d.ndjson", "linked/h.jsonl"]
    root = tmp_path / "data"
    assert names_in(root, root) == names_in(root / "**" / "*", root) == expected
    assert hidden_files(root, "rows") == 3


def test_a_folder_linked_into_itself_is_refused(tmp_path: Path) -> None:
    touch(tmp_path, "a.jsonl")
    (tmp_path / "loop").symlink_to(tmp_path)
    for path in (tmp_path, tmp_path / "**" / "*.jsonl"):
        with pytest.raises(InvalidInputError, match="is a link to"):
            data_files(path, "rows")


@pytest.mark.parametrize("pattern", ["", "*.jsonl"])
def test_a_link_to_nothing_or_to_a_device_is_refused_and_never_skipped(pattern: str, tmp_path: Path) -> None:
    touch(tmp_path, "a.jsonl")
    (tmp_path / "notes.txt").symlink_to(tmp_path / "gone")  # it would not be read
    assert data_files(tmp_path / pattern, "rows") == [tmp_path / "a.jsonl"]
    for target in (tmp_path / "gone", Path("/dev/zero")):
        (tmp_path / "b.jsonl").symlink_to(target)
        with pytest.raises(InvalidInputError, match=r"b\.jsonl.*is not a regular file"):
            data_files(tmp_path / pattern, "rows")
        (tmp_path / "b.jsonl").unlink()


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz", "a.tsv", "a.jsonl.gz", "a.jsonl.zst", "a.arrow"])
def test_other_forms_of_rows_are_refused_with_the_line_that_converts_them(name: str, tmp_path: Path) -> None:
    touch(tmp_path, name)
    with pytest.raises(InvalidInputError, match=r"to convert it: python -c .*to_parquet"):
        check_form(tmp_path / name, "rows", "run.toml: data.path")


def test_the_conversion_line_makes_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess
    import sys

    datasets = pytest.importorskip("datasets")
    import pyarrow.parquet

    datasets.Dataset.from_list([{"prompt": "a", "completion": "b"}]).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(InvalidInputError) as refused:
        check_form(tmp_path / "saved", "rows", "run.toml: data.path")
    code = refused.value.problem.partition('python -c "')[2].rstrip('"')
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=600)
    assert pyarrow.parquet.read_table(tmp_path / "rows.parquet").to_pylist() == [{"prompt": "a", "completion": "b"}]


ONE = np.arange(6, dtype=np.float32).reshape(2, 3)


def save(folder: Path, file: str, **tensors: np.ndarray) -> None:
    save_file({name.replace("__", "."): array for name, array in tensors.items()}, folder / file)


def index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_the_index_names_the_weights_and_what_else_lies_there_is_not_read(tmp_path: Path) -> None:
    save(tmp_path, "model-00001-of-00002.safetensors", a=ONE)
    save(tmp_path, "model-00002-of-00002.safetensors", b=ONE)
    save(tmp_path, "model-00001-of-00004.safetensors", a=ONE[:1])
    save(tmp_path, "consolidated.safetensors", a=ONE)
    assert weight_files(tmp_path) == []
    index(tmp_path, {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"})
    assert {name: tensor.shape for name, tensor in stored_tensors(tmp_path).items()} == {"a": (2, 3), "b": (2, 3)}


def test_a_single_file_is_read_without_an_index(tmp_path: Path) -> None:
    save(tmp_path, "model.safetensors", a=ONE)
    save(tmp_path, "adapter_model.safetensors", b=ONE)
    assert [*stored_tensors(tmp_path)] == ["a"]


@pytest.mark.parametrize(
    ("weight_map", "says"),
    [
        ({"a": "../other/model.safetensors"}, "not the name of a file beside it"),
        ({"a": "model-3.safetensors"}, "which is missing"),
        ({"a": "model-1.safetensors", "b": "model-2.safetensors"}, "is in both"),
        ({}, "has no weight_map"),
        ({"a": 1}, "has no weight_map"),
    ],
)
def test_an_index_that_misleads_is_refused(weight_map: dict[str, Any], says: str, tmp_path: Path) -> None:
    for number in (1, 2):
        save(tmp_path, f"model-{number}.safetensors", a=ONE)
    index(tmp_path, weight_map)
    with pytest.raises(InvalidInputError, match=says):
        stored_tensors(tmp_path)


def test_two_sets_of_weights_that_libraries_read_differently_are_refused(tmp_path: Path) -> None:
    save(tmp_path, "model.safetensors", a=ONE)
    save(tmp_path, "model-1.safetensors", a=ONE)
    index(tmp_path, {"a": "model-1.safetensors"})
    with pytest.raises(InvalidInputError, match="remove those that aren't the model"):
        weight_files(tmp_path)


@pytest.mark.parametrize(("head", "is_own"), [(ONE, False), (ONE + 1, True), (ONE.astype(np.float16), True)])
def test_a_head_that_equals_the_embeddings_is_no_head_of_its_own(
    head: np.ndarray, is_own: bool, tmp_path: Path
) -> None:
    save(tmp_path, "model.safetensors", model__embed_tokens__weight=ONE, lm_head__weight=head)
    assert has_own_head(stored_tensors(tmp_path)) == is_own


@pytest.mark.parametrize(
    ("config", "shapes", "limit"),
    [
        ({"max_position_embeddings": 64, "n_positions": 32}, {}, 32),
        ({"text_config": {"max_position_embeddings": 16}}, {}, 16),
        ({"max_position_embeddings": 64}, {"transformer.wpe.weight": (48, 8)}, 48),
        ({"model_type": "mpt", "max_seq_len": 32}, {}, 32),
        ({"model_type": "kimi_linear", "model_max_length": 32}, {}, 32),
        ({"n_positions": 512, "relative_attention_num_buckets": 32}, {}, None),
        ({}, {}, None),
    ],
)
def test_context_limits(config: dict[str, Any], shapes: dict[str, tuple[int, ...]], limit: int | None) -> None:
    assert context_limit(config, shapes) == limit
