"""Checks of the files that a run file names: what is missing is named with the file and the field."""

import os
from pathlib import Path

import pytest
import tomli_w
from tests.protocol.support.run_files import good, with_value

from trainctl.protocol.config import data_files, run_file
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.machine.file_digests import data_digests

HEADER = b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'
GOOD_LINE = '{"tokens": [1, 2, 3], "mask": [0, 1, true]}\n'


def safetensors(header: bytes = HEADER, data: int = 8) -> bytes:
    return len(header).to_bytes(8, "little") + header + bytes(data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a run file, and the model and text that it names."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_bytes(safetensors())
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("text " * 200)
    (tmp_path / "run.toml").write_text(tomli_w.dumps(with_value(good(), "data.tokenizer", "bytes")))
    return tmp_path


def config(folder: Path, overrides: dict[str, str] | None = None) -> RunFile:
    return run_file.read(folder / "run.toml", overrides)


def problem(folder: Path, overrides: dict[str, str] | None = None, node: str | None = None) -> str:
    """Return what is wrong with what the run file names, or ""."""
    try:
        run_file.check_paths(config(folder, overrides), "run.toml", *([node] if node else []))
    except InvalidInputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("name", "raw", "says"),
    [
        ("model/config.json", None, "no Hugging Face model"),
        ("model/model.safetensors", None, "no weights"),
        ("data/a.txt", None, "contains no *.txt"),
        ("data/a.txt", b"", "contains no *.txt"),
        ("model/config.json", b"{", "config.json is not a JSON object"),
        ("model/config.json", b'{"quantization_config": {"bits": 4}}', "quantization_config: its format isn't MLX's; "),
        ("model/config.json", b'{"quantization": {"bits": 4, "group_size": 64}}', "only whole weights can be trained"),
        ("model/model.safetensors", b"", "model.safetensors is not a safetensors file: its first 8"),
        ("model/model.safetensors", b"x" * 99, "its first 8 bytes are not a valid header length"),
        ("model/model.safetensors", safetensors(b"{not"), "is not a safetensors file: "),
        ("model/model.safetensors", safetensors(b"[1]"), "its top level is not an object"),
        ("model/model.safetensors", safetensors(b'{"a": {"data_offsets": 7}}'), "data_offsets"),
        ("model/model.safetensors", safetensors(data=7), "is truncated: it has 76 bytes"),
        ("data/a.txt", b"x" * 511, "the text has 512 tokens; one block needs 513"),
    ],
)
def test_what_is_missing_or_damaged_is_named(folder: Path, name: str, raw: bytes | None, says: str) -> None:
    (folder / "data" / "a.txt").write_bytes(b"x" * 512)  # a block, with the end token
    assert problem(folder) == ""
    (folder / name).unlink() if raw is None else (folder / name).write_bytes(raw)
    text = problem(folder)
    assert text.startswith(f"run.toml: {name.partition('/')[0]}.path: ")
    assert says in text


def test_what_does_not_fit_is_named(folder: Path) -> None:
    (folder / "data" / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 99)
    no_text = 'not plain text: set data.kind = "rows" (or "samples")'
    for overrides, says in (
        ({"data.path": "nowhere"}, "data.path: no such file or folder"),
        ({"data.kind": "samples"}, "is a folder"),
        ({"data.kind": "samples", "data.path": "data/*"}, "is a glob"),
        ({"data.path": "data/b*.txt"}, "matches no *.txt file with text"),
        ({"data.path": "data/rows.jsonl"}, no_text),
        ({"data.path": "data/a*", "data.kind": "rows"}, "matches no *.jsonl or *.ndjson or *.parquet"),
        ({"data.tokenizer": "model"}, "tokenizer.json"),
    ):
        text = problem(folder, overrides)
        assert text.startswith(f"run.toml: {'data.tokenizer' if 'data.tokenizer' in overrides else 'data.path'}: ")
        assert says in text


def test_what_does_not_go_with_a_growing_file_is_named() -> None:
    for changes, says in (
        ({"kind": "text"}, 'a growing file has a row or sample per line: set data.kind = "rows"'),
        ({"packing": "best-fit"}, "can't be combined with packing"),
        ({"held_out": 0.1}, "samples of a growing file can't be held out: set data.held_out = 0"),
        ({"path": "rows.parquet"}, "a growing file must be one JSON-lines file;"),
    ):
        with pytest.raises(InvalidInputError) as caught:
            run_file.parse(good() | {"data": {"path": "rows.jsonl", "kind": "rows", "growing": True} | changes})
        assert f"data.growing: {says}" in str(caught.value)


def test_a_growing_file_is_checked_as_far_as_it_is_written(folder: Path) -> None:
    rows = folder / "rows.jsonl"
    rows.write_text("")
    changes = {"data.path": "rows.jsonl", "data.kind": "rows", "data.growing": "true"}
    assert problem(folder, changes) == ""
    rows.write_text('{"text": "a"}\n{"te')
    assert problem(folder, changes) == ""
    run_file.end_mark(rows).touch()
    assert "line 2: not a JSON object" in problem(folder, changes)
    rows.write_text("")
    assert "rows.jsonl is empty" in problem(folder, changes)
    assert "a growing file must be one JSON-lines file" in problem(folder, changes | {"data.path": "."})
    said = problem(folder, changes | {"data.path": "-"})
    assert said.startswith('run.toml: data.path: "-" is standard input, which only trainctl run reads')


def test_held_out_files_take_the_place_of_a_fraction(folder: Path) -> None:
    (folder / "more.txt").write_text("more " * 200)
    more = {"data.held_out_path": "more.txt"}
    assert problem(folder, more) == ""
    whole = config(folder, more)
    held_out = run_file.held_out_data(whole)
    assert held_out is not None and held_out.data.path == str(folder / "more.txt")
    assert (whole.data.held_out_fraction, run_file.held_out_data(held_out)) == (0.0, None)
    assert config(folder).data.held_out_fraction == 0.01
    both = problem(folder, more | {"data.held_out": "0.1"})
    assert "data.held_out_path: can't be combined with data.held_out" in both
    own = problem(folder, more | {"nodes.a.held_out_path": "/none"}, "a")
    assert "held_out_path: no such file or folder: /none" in own


def test_a_folder_for_token_caches_is_tried(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cached(path: Path) -> str:
        overrides = {"nodes.a.cache_path": str(path)}
        assert run_file.cache_folder(config(folder, overrides), "a", folder) == path
        assert run_file.cache_folder(config(folder, overrides), "b", folder) == folder
        return problem(folder, overrides, "a").removeprefix("run.toml: nodes.a.cache_path: ")

    assert cached(folder) == cached(folder / "new") == ""
    assert cached(folder / "no" / "new") == f"no such folder: {folder / 'no'}; create it on that machine"
    assert cached(folder / "run.toml") == f"{folder / 'run.toml'} is not a folder"
    monkeypatch.setattr(os, "access", lambda *_: False)  # tests may run as root, who may write anywhere
    assert cached(folder / "new") == f"no permission to write in {folder}; change its owner or mode"


def test_a_glob_takes_the_files_of_the_kind_in_order(folder: Path) -> None:
    (folder / "data" / "b").mkdir()
    for name in ("c.txt", "b/d.txt", "e.md", "f[1].txt"):
        (folder / "data" / name).write_text("text " * 200)
    for pattern, names in (
        ("data/*", ["data/a.txt", "data/c.txt", "data/f[1].txt"]),
        ("data/**/[a-d].txt", ["data/a.txt", "data/b/d.txt", "data/c.txt"]),
        ("data/f[1].txt", ["data/f[1].txt"]),
        ("data/**/**/d*", ["data/b/d.txt"]),
    ):
        assert problem(folder, {"data.path": pattern}) == ""
        path = Path(config(folder, {"data.path": pattern}).data.path)
        assert [file.relative_to(folder).as_posix() for file in data_files.data_files(path, "text")] == names
        assert [f"data/{file.name}" for file in data_digests(path, "text").files] == names


def test_a_sample_that_is_none_is_named_by_its_line(folder: Path) -> None:
    path = folder / "samples.jsonl"
    for text, says in (
        ('{"tokens": [1, 2]}\n\n' + GOOD_LINE, ""),
        (GOOD_LINE * 8 + "not looked at", ""),
        ('{"tokens": [1], "mask": null}', ""),
        (GOOD_LINE + "{", "not a JSON object"),
        (GOOD_LINE + "[" * 99_999, "not a JSON object: nested too deeply"),
        (GOOD_LINE + "{}", '"tokens" must be a list of whole numbers'),
        (GOOD_LINE + '{"tokens": [1, 2.5], "mask": [1, 1]}', '"tokens" must be a list of whole numbers'),
        (GOOD_LINE + '{"tokens": [1, 2], "mask": 1}', '"mask" must be a list'),
        (GOOD_LINE + '{"tokens": [1, 2], "mask": [1]}', "2 tokens but 1 mask values; give one per token"),
    ):
        path.write_text(text + "\n")
        said = problem(folder, {"data.path": "samples.jsonl", "data.kind": "samples"})
        assert said.startswith(f"run.toml: data.path: {path}: line 2: ") and says in said if says else said == ""
