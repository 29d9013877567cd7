"""A large module is imported without garbage collections, and later ones skip it."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import HANG_SECONDS

SCRIPT = """
import gc, sys

from trainctl.protocol.machine.large_imports import import_large

sys.path.insert(0, sys.argv[1])
if sys.argv[2] == "off":
    gc.disable()
try:
    import_large("large")
except ZeroDivisionError:
    print("raised")
print(gc.isenabled())
import large
print(large.collects, any(one is large.made for one in gc.get_objects()), gc.get_freeze_count() > len(large.made))
new = []
import_large("large")
print(any(one is new for one in gc.get_objects()))
"""


@pytest.mark.parametrize(("state", "end"), [("on", ""), ("off", ""), ("on", "if first: 1 / 0")])
def test_a_module_is_imported_once_without_collections(tmp_path: Path, state: str, end: str) -> None:
    lines = ["import gc, sys", "first = not hasattr(sys, 'again')", "sys.again = True", "collects = gc.isenabled()"]
    (tmp_path / "large.py").write_text("\n".join([*lines, "made = [[] for _ in range(1000)]", end]), "utf-8")
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), state]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=True)
    on = str(state == "on")
    if end:
        assert done.stdout.split()[:2] == ["raised", on]
    else:
        assert done.stdout.split() == [on, "False", "False", "True", "True"]
