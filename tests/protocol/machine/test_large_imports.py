"""A large module is imported without garbage collections, and later ones skip it."""

import gc
import sys
from pathlib import Path

import pytest

from trainctl.protocol.machine.large_imports import import_large


def test_a_module_is_imported_without_collections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "large_on.py").write_text("import gc\ncollects = gc.isenabled()\nmade = [[] for _ in range(1000)]\n")
    (tmp_path / "large_bad.py").write_text("1 / 0\n")
    gc.unfreeze()
    import_large("large_on")
    assert gc.isenabled() and not sys.modules["large_on"].collects
    assert gc.get_freeze_count() > 1000, "later collections skip what it made"
    with pytest.raises(ZeroDivisionError):
        import_large("large_bad")
    assert gc.isenabled()
    (tmp_path / "large_off.py").write_text("")
    gc.disable()
    try:
        import_large("large_off")
        assert not gc.isenabled()
    finally:
        gc.enable()
