"""Models named by their Hugging Face id, found in a cache with the layout of huggingface_hub."""

from pathlib import Path
from typing import Any

import pytest

from trainctl.protocol.config import hub_models, run_file
from trainctl.protocol.errors import InvalidInputError

RUN = """
[run]
name = "r"
steps = 10
[model]
path = "org/tiny-1.5"
[data]
path = "data.txt"
tokenizer = "bytes"
sequence_length = 8
[batch]
global = 4
micro = 4
[optimizer]
learning_rate = 1e-3
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; HF_HUB_CACHE is read once, when the library is imported."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def download(cache: Path, model: str) -> Path:
    """As `hf download` leaves it."""
    repo = cache / f"models--{model.replace('/', '--')}"
    folder = repo / "snapshots" / ("a" * 40)
    folder.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("a" * 40)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder


def test_a_cached_folder_is_known_by_id_and_commit(cache: Path) -> None:
    folder = download(cache, "org/tiny-1.5")
    assert hub_models.reference(folder) == ("org/tiny-1.5", "a" * 40)
    assert hub_models.model_folder(*hub_models.reference(folder)) == folder
    (folder.parents[1] / "refs" / "main").write_text("b" * 40)
    assert hub_models.model_folder("org/tiny-1.5", "a" * 40) == folder, "though it isn't the newest any more"
    assert hub_models.reference(folder.with_name("main")) == ("org/tiny-1.5", None)
    assert hub_models.reference(Path("/models/tiny")) == ("/models/tiny", None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "data.txt").write_text("text " * 9)
    (tmp_path / "run.toml").write_text(RUN)
    return tmp_path / "run.toml"


@pytest.mark.parametrize(
    ("name", "is_id"),
    [
        ("org/name", True), ("Qwen/Qwen2.5-0.5B", True), ("name", False), ("/org/name", False), ("../name", False),
        ("./name", False), ("~/name", False), ("a/b/c", False), ("org/", False), ("org/a--b", False),
        ("org/a..b", False), ("org/name\n", False), ("", False),
    ],
)  # fmt: skip
def test_the_form_of_an_id(name: str, is_id: bool) -> None:
    assert hub_models.is_hub_id(name) is is_id


def test_a_missing_folder_beside_others_is_no_id(path: Path, cache: Path) -> None:
    (path.parent / "org").mkdir()
    with pytest.raises(InvalidInputError, match=f"model.path: no such folder: {path.parent}/org/tiny-1.5"):
        run_file.check_paths(run_file.read(path), "run.toml")
    download(cache, "org/tiny-1.5")
    assert run_file.read(path).model.path == "org/tiny-1.5"


def test_an_id_stays_in_the_run_file_and_is_found_where_the_files_are_read(path: Path, cache: Path) -> None:
    folder = download(cache, "org/tiny-1.5")
    config = run_file.read(path)
    assert config.model.path == run_file.on_node(config, "a").model.path == "org/tiny-1.5"
    here = run_file.on_this_machine(config, "a")
    assert here.model.path == str(folder)
    assert run_file.on_this_machine(here, "a") == here
    run_file.check_paths(config)


def test_a_model_that_is_not_cached_gets_one_line_with_the_command(path: Path, cache: Path) -> None:
    with pytest.raises(InvalidInputError) as caught:
        run_file.check_paths(run_file.read(path), "run.toml")
    assert str(caught.value) == (
        "run.toml: model.path: no such folder, and org/tiny-1.5 isn't in the Hugging Face cache here; "
        "run: hf download org/tiny-1.5"
    )


def test_without_the_library_its_installation_is_named(
    path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> Any:
        return None

    monkeypatch.setattr("importlib.util.find_spec", absent)
    with pytest.raises(InvalidInputError, match=r"needs huggingface_hub here; in a trainctl checkout, run: pip"):
        run_file.check_paths(run_file.read(path), "run.toml")


def test_a_folder_of_that_name_takes_precedence(path: Path, cache: Path) -> None:
    download(cache, "org/tiny-1.5")
    (path.parent / "org" / "tiny-1.5").mkdir(parents=True)
    assert run_file.read(path).model.path == str(path.parent / "org" / "tiny-1.5")


def test_part_of_a_download_is_not_a_model(path: Path, cache: Path) -> None:
    (download(cache, "org/tiny-1.5") / "model.safetensors").unlink()
    with pytest.raises(InvalidInputError, match=r"run\.toml: model\.path: .* has a config\.json but no weights"):
        run_file.check_paths(run_file.read(path), "run.toml")
