"""The demo's own decisions: when it is over, what it leaves, what it says, and which folders it drops."""

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.tui.recorded import CLOCK, CONNECTED, run_view, snapshot

from trainctl.protocol import examples
from trainctl.protocol import messages as m
from trainctl.protocol.errors import InvalidInputError
from trainctl.tui import demo, demo_folder, demo_supervisor
from trainctl.tui import model as md


def view(state: str) -> Any:
    return msgspec.structs.replace(examples.EXAMPLES["published by an agent"]["run-view"], state=state)


def test_a_demo_is_over_once_its_run_has_ended_and_nobody_watches() -> None:
    watch = demo_supervisor.Watch()
    assert not watch.over
    watch.see(view("running"))
    watch.note(nobody_watches=True)
    assert not watch.over, "a run outlives its watchers"
    watch.see(view("finished"))
    assert watch.over
    watch.see(view("running"))
    assert not watch.over, "taken up again"


def test_a_finished_demo_is_kept_while_somebody_watches() -> None:
    watch = demo_supervisor.Watch()
    watch.see(view("finished"))
    assert not watch.over
    watch.note(nobody_watches=True)
    assert watch.over


@pytest.mark.parametrize("flag", ["asked_to_end", "agent_lost"])
def test_what_ends_a_demo_at_once(flag: str) -> None:
    watch = demo_supervisor.Watch()
    watch.see(view("running"))
    watch.note(**{flag: True})
    assert watch.over


def test_folders_of_demos_that_are_over_are_dropped(tmp_path: Path) -> None:
    old = [demo_folder.Session(tmp_path / f"demo-{name}") for name in ("over", "kept", "live", "young")]
    for session in old:
        session.folder.mkdir()
        (session.folder / "demo.lock").touch()
        os.utime(session.folder / "demo.lock", (0, 0))
    (tmp_path / "demo-kept" / "keep").touch()
    os.utime(tmp_path / "demo-young" / "demo.lock")
    (tmp_path / "demo-foreign").mkdir()
    (tmp_path / "model").mkdir()
    with old[2].locked():
        os.utime(old[2].folder / "demo.lock", (0, 0))
        demo_folder.drop_ended(tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"demo-kept", "demo-live", "demo-young", "demo-foreign", "model"}


def test_a_backend_that_is_not_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(demo.NEEDED, "mlx", ("no_such_module",))
    with pytest.raises(InvalidInputError, match=r"mlx not installed: pip install 'trainctl\[mlx\]'"):
        demo.check_backend("mlx")
    monkeypatch.setitem(demo.NEEDED, "torch", ("no_such_module",))
    with pytest.raises(InvalidInputError, match=r"trainctl\[torch\]' or pip install 'trainctl\[mlx\]'"):
        demo.check_backend("auto")


@pytest.mark.parametrize("state", ["finished", "stopped", "failed"])
def test_who_leaves_an_ended_demo_is_told_where_its_record_is(state: m.RunState) -> None:
    run = run_view(1, state)
    shown = md.apply(md.apply(md.ViewState(), CONNECTED, 0.0), snapshot(run), CLOCK.at_monotonic)
    said = demo._farewell(shown, "tcp://127.0.0.1:7")
    assert said == f"the demo is over ({state} at step {run.step:,}); its record is in {run.directory}"


def test_who_leaves_a_live_demo_is_told_how_to_come_back_and_how_to_end_it() -> None:
    shown = md.apply(md.apply(md.ViewState(), CONNECTED, 0.0), snapshot(run_view(1)), CLOCK.at_monotonic)
    said = demo._farewell(shown, "tcp://127.0.0.1:7")
    assert "trainctl attach --connect tcp://127.0.0.1:7" in said
    assert said.endswith("end it with: trainctl send stop --connect tcp://127.0.0.1:7")
