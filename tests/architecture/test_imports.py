"""Programs start without what only other commands need, and the rooms share one namespace."""

import json
import subprocess
import sys

import pytest
from tests.conftest import ROOT
from tests.waiting import HANG_SECONDS

ROOMS = ("protocol", "trainer", "node_agent", "tui")
HEAVY = (
    "textual",
    "torch",
    "mlx",
    "transformers",
    "zmq",
    "numpy",
    "sqlite3",
    "trainctl.trainer",
    "trainctl.node_agent",
)
BACKENDS = ("torch", "mlx", "transformers", "textual")
SCREENS = [f"trainctl.tui.screens.{name}" for name in ("runs", "charts", "events", "alerts", "node", "logs")]
DIALOGS = [f"trainctl.tui.dialogs.{name}" for name in ("help", "alert_details", "command_dialog")]
LS = ["ls", "--connect", "nonsense", "--json"]
SEND = ["send", "pause", "a=b", "--node", "x", "--timeout", "3", "--wait", "none"]
CALL = "trainctl.tui.cli.main as cli; assert cli.main({words!r}) == 2"


@pytest.mark.parametrize(
    ("module", "loads", "without"),
    [
        ("trainctl.tui.cli.main", "", HEAVY),
        (CALL.format(words=LS), "trainctl.tui.cli.runs", ("pydantic", "trainctl.tui.cli.run")),
        (CALL.format(words=SEND), "trainctl.tui.cli.send", ("pydantic", "trainctl.tui.cli.inspect")),
        (
            "trainctl.tui.app.launch",
            "trainctl.tui.screens.base",
            (*SCREENS, *DIALOGS, "trainctl.tui.charts.plots", "pydantic", "sqlite3"),
        ),
        ("trainctl.node_agent.cli", "", BACKENDS),
        ("trainctl.node_agent.agent", "", BACKENDS),
        ("trainctl.protocol.client.client", "", BACKENDS),
    ],
    ids=["program", "ls", "send", "screen", "agent's program", "agent", "client"],
)
def test_nothing_is_loaded_that_only_others_need(module: str, loads: str, without: tuple[str, ...]) -> None:
    paths = [str(ROOT / room) for room in ROOMS]
    code = f"import sys, json; sys.path[:0] = {paths!r}; import {module}; print(json.dumps(list(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_SECONDS, check=True
    )
    loaded = {*json.loads(done.stdout.splitlines()[-1])}
    assert not loads or loads in loaded
    assert not loaded & {*without}


@pytest.mark.parametrize("room", ROOMS)
def test_the_namespace_has_no_file_of_its_own(room: str) -> None:
    assert not (ROOT / room / "trainctl" / "__init__.py").exists()
    assert (ROOT / room / "trainctl" / room / "__init__.py").is_file()
    assert (ROOT / room / "trainctl" / room / "py.typed").is_file()
