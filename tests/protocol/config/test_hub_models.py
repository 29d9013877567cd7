"""Models named by their Hugging Face id, found in a cache with the layout of huggingface_hub."""

from pathlib import Path

import pytest
import tomli_w
from tests.protocol.support.run_files import good, with_value

from trainctl.protocol.config import model_facts, run_file
from trainctl.protocol.errors import InvalidInputError


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
    assert model_facts.reference(folder) == model_facts.Reference("org/tiny-1.5", "a" * 40)
    assert model_facts.model_folder("org/tiny-1.5", "a" * 40) == folder
    (folder.parents[1] / "refs" / "main").write_text("b" * 40)
    assert model_facts.model_folder("org/tiny-1.5", "a" * 40) == folder, "though it isn't the newest any more"
    assert model_facts.reference(folder.with_name("main")) == model_facts.Reference("org/tiny-1.5", None)
    assert model_facts.reference(Path("/models/tiny")) == model_facts.Reference("/models/tiny", None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "data").write_text("text " * 200)
    raw = with_value(with_value(good(), "model.path", "org/tiny-1.5"), "data.tokenizer", "bytes")
    (tmp_path / "run.toml").write_text(tomli_w.dumps(raw))
    return tmp_path / "run.toml"


def test_the_form_of_an_id() -> None:
    assert model_facts.is_hub_id("Qwen/Qwen2.5-0.5B")
    for name in ("name", "/org/name", "../name", "~/name", "a/b/c", "org/", "org/a--b", "org/a..b", "org/name\n", ""):
        assert not model_facts.is_hub_id(name)


def test_an_id_stays_in_the_run_file_and_is_found_where_the_files_are_read(path: Path, cache: Path) -> None:
    folder = download(cache, "org/tiny-1.5")
    config = run_file.read(path)
    assert config.model.path == run_file.on_node(config, "a").model.path == "org/tiny-1.5"
    here = run_file.on_this_machine(config, "a")
    assert here.model.path == str(folder)
    assert run_file.on_this_machine(here, "a") == here
    run_file.check_paths(config)


def test_a_model_that_is_not_cached_and_a_library_that_is_missing_are_named_with_a_command(
    path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidInputError, match=r"^run\.toml: model\.path: .*; run: hf download org/tiny-1\.5$"):
        run_file.check_paths(run_file.read(path), "run.toml")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InvalidInputError, match=r"needs huggingface_hub here; in a trainctl checkout, run: pip"):
        run_file.check_paths(run_file.read(path), "run.toml")


def test_a_folder_of_that_name_takes_precedence(path: Path, cache: Path) -> None:
    (path.parent / "org").mkdir()
    with pytest.raises(InvalidInputError, match=f"model.path: no such folder: {path.parent}/org/tiny-1.5"):
        run_file.check_paths(run_file.read(path), "run.toml")
    download(cache, "org/tiny-1.5")
    assert run_file.read(path).model.path == "org/tiny-1.5"
    (path.parent / "org" / "tiny-1.5").mkdir()
    assert run_file.read(path).model.path == str(path.parent / "org" / "tiny-1.5")


def test_a_folder_that_is_named_like_an_id_is_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert model_facts.model_folder("org/name") == Path("org/name")
    model_facts.check_cached("org/name", "MODEL")
