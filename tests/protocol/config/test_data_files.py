"""The files that a run's data are read from, in folders as people and other programs leave them."""

from pathlib import Path

import pytest

from trainctl.protocol.config.data_files import check_form, data_files, hidden_files
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
