"""Names from other machines stand for files below a folder, or for none."""

import os
from pathlib import Path

import pytest

from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.security import received_names

BAD = (
    "", ".", "..", "/", "/etc/passwd", "a/b", "../a", "a/../b", "a\0", "\0", "a\n", "a\x1b[2J", ".hidden", "-rf", "~",
    " a", "a b", "é", "a\\b", "x" * 129,
)  # fmt: skip
GOOD = ("a", "model.safetensors", "model-00001-of-00002.safetensors", "rank-0.steps-3-4.trace.json.gz", "r_1", "A.B")


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_name_is_refused_in_any_place(name: str, tmp_path: Path) -> None:
    for names in ((name, "b"), ("a", name)):
        with pytest.raises(InvalidInputError, match="is not a name"):
            received_names.below(tmp_path, *names)
        assert_not_opened(InvalidInputError, tmp_path, *names)
    assert list(tmp_path.iterdir()) == []


def assert_not_opened(error: type[Exception], folder: Path, *names: str) -> None:
    with pytest.raises(error), received_names.opened(folder, *names):
        pass
    with pytest.raises(error), received_names.opened(folder, *names, to="write"):
        pass


@pytest.mark.parametrize("name", GOOD)
def test_a_file_is_written_and_read(name: str, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    assert received_names.below(tmp_path, "b", name) == tmp_path / "b" / name
    for content in (b"longer content", b"content"):
        with received_names.opened(tmp_path, "b", name, to="write") as file:
            file.write(content)
    with received_names.opened(tmp_path, "b", name) as file:
        assert file.read() == b"content"


@pytest.mark.parametrize("id", ["R-1", "r-A", *BAD])
def test_ids_of_runs_and_work_are_of_lower_case(id: str, tmp_path: Path) -> None:
    """A disk that takes `R-1` for `r-1` would give the folder of another run."""
    with pytest.raises(InvalidInputError, match="is not an ID"):
        received_names.id_folder(tmp_path, id)
    assert received_names.id_folder(tmp_path, "r-20261128-120000-0a1b") == tmp_path / "r-20261128-120000-0a1b"


def test_no_link_is_followed_below_the_folder(tmp_path: Path) -> None:
    root, outside = tmp_path / "link to root", tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    (tmp_path / "real").mkdir()
    root.symlink_to(tmp_path / "real")
    (root / "folder").symlink_to(outside)
    (root / "file").symlink_to(outside / "secret")
    (root / "dangling").symlink_to(outside / "new")
    for names in (("folder", "secret"), ("file",), ("dangling",)):
        with pytest.raises(InvalidInputError, match="is a link"):
            received_names.below(root, *names)
        assert_not_opened(OSError, root, *names)
    assert [path.name for path in outside.iterdir()] == ["secret"]
    assert (outside / "secret").read_text() == "secret"
    # Only regular files are opened, and nothing is waited for.
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        assert_not_opened(OSError, tmp_path, name)
    with pytest.raises(FileNotFoundError), received_names.opened(tmp_path, "none"):
        pass
