"""Who imports whom: the rooms keep apart, and the command line starts without what only other commands need."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import HANG_SECONDS

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("protocol", "trainer", "node_agent", "tui")
PATHS = [str(ROOT / room) for room in ROOMS]
HEAVY = ("textual", "torch", "mlx", "transformers", "zmq", "numpy", "sqlite3")


def loaded_by(module: str) -> set[str]:
    """Top-level names that a fresh interpreter has loaded after importing `module`."""
    code = f"import sys, json; sys.path[:0] = {PATHS!r}; import {module}; print(json.dumps(list(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_SECONDS, check=True
    )
    return {*(names := json.loads(done.stdout.splitlines()[-1])), *(name.split(".")[0] for name in names)}


@pytest.mark.parametrize("room", ROOMS)
def test_the_namespace_has_no_file_of_its_own(room: str) -> None:
    assert not (ROOT / room / "trainctl" / "__init__.py").exists()
    assert (ROOT / room / "trainctl" / room / "__init__.py").is_file()
    assert (ROOT / room / "trainctl" / room / "py.typed").is_file()


def test_the_command_line_starts_light() -> None:
    loaded = loaded_by("trainctl.tui.cli.main")
    assert not loaded & set(HEAVY)
    assert not {name for name in loaded if name.startswith(("trainctl.trainer", "trainctl.node_agent"))}


@pytest.mark.parametrize(
    ("words", "file", "other"),
    [
        (["ls", "--connect", "nonsense", "--json"], "inspect", "run"),
        (["send", "pause", "a=b", "--node", "x", "--timeout", "3", "--wait", "none"], "send", "inspect"),
    ],
    ids=["ls", "send"],
)
def test_a_command_of_plain_values_loads_no_validator_and_no_other_command(
    words: list[str], file: str, other: str
) -> None:
    loaded = loaded_by(f"trainctl.tui.cli.main as cli; assert cli.main({words!r}) == 2")
    assert f"trainctl.tui.cli.{file}" in loaded
    assert not loaded & {"pydantic", f"trainctl.tui.cli.{other}"}


def test_the_full_screen_starts_without_the_screens_it_does_not_show() -> None:
    loaded = loaded_by("trainctl.tui.app.launch")
    assert "trainctl.tui.screens.base" in loaded
    shown_later = ("runs", "charts", "events", "alerts", "node", "logs")
    assert not loaded & {f"trainctl.tui.screens.{name}" for name in shown_later}
    assert not loaded & {f"trainctl.tui.dialogs.{name}" for name in ("help", "alert_details")}
    assert not loaded & {"trainctl.tui.dialogs.command_dialog", "trainctl.tui.charts.plots", "pydantic", "sqlite3"}


@pytest.mark.parametrize(
    "module", ["trainctl.node_agent.cli", "trainctl.node_agent.agent", "trainctl.protocol.client.client"]
)
def test_what_does_not_compute_loads_no_backend(module: str) -> None:
    assert not loaded_by(module) & {"torch", "mlx", "transformers", "textual"}


def test_the_protocol_loads_none_of_the_rooms() -> None:
    names = ", ".join(
        ".".join(file.relative_to(ROOT / "protocol").with_suffix("").parts).removesuffix(".__init__")
        for file in sorted((ROOT / "protocol" / "trainctl" / "protocol").rglob("*.py"))
    )
    loaded = loaded_by(names)
    assert not {name for name in loaded if name.startswith(tuple(f"trainctl.{room}" for room in ROOMS[1:]))}
    assert not loaded & {"torch", "mlx", "textual"}
