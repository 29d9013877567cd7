"""Pictures of every screen and dialog, with the clock and the data held still."""

import dataclasses
from typing import Any

import msgspec
import pytest
from tests.tui.support.logs import logging_source
from tests.tui.support.pictures import SEVERAL, Compare, Typed, settled, still
from tests.tui.support.recorded import (
    BRANCHES,
    CLOCK,
    CONNECTED,
    NOW,
    RUNS,
    SCORING,
    Recorded,
    app_of,
    comings_and_goings,
    hung,
    leaving,
    run_view,
    shrunk,
    snapshot,
    source_of,
    under_way,
    writing,
)
from textual.pilot import Pilot

from trainctl.protocol import messages as m
from trainctl.protocol.client.client import Connection
from trainctl.tui.text.glyphs import ASCII

SIZES = [(80, 24), (120, 40), (200, 60)]


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("nodes", [1, 4])
def test_overview(snap_compare: Compare, nodes: int, size: tuple[int, int]) -> None:
    assert snap_compare(app_of(source_of(nodes)), terminal_size=size, run_before=still())


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_overview_of_a_mixed_group(snap_compare: Compare, size: tuple[int, int]) -> None:
    """One rank is waited for, one hangs."""
    assert snap_compare(app_of(mixed()), terminal_size=size, run_before=still())


@pytest.mark.parametrize("size", SIZES[:2], ids=lambda size: f"{size[0]}x{size[1]}")
def test_overview_of_a_group_in_motion(snap_compare: Compare, size: tuple[int, int]) -> None:
    """One rank is late, one is about to be drained."""
    assert snap_compare(app_of(Recorded(under_way(leaving(run_view(3))))), terminal_size=size, run_before=still())


@pytest.mark.parametrize("size", SIZES[:2], ids=lambda size: f"{size[0]}x{size[1]}")
def test_overview_while_a_checkpoint_is_written(snap_compare: Compare, size: tuple[int, int]) -> None:
    assert snap_compare(app_of(Recorded(under_way(writing(run_view(1))))), terminal_size=size, run_before=still())


def mixed() -> Recorded:
    view = hung(run_view(3), 1)
    return Recorded(under_way(view))


@pytest.mark.parametrize("size", SIZES[:2], ids=lambda size: f"{size[0]}x{size[1]}")
def test_overview_of_a_group_that_shrank(snap_compare: Compare, size: tuple[int, int]) -> None:
    """One rank is given up, and the selected one; one is on its way back."""
    assert snap_compare(app_of(shrinking()), terminal_size=size, run_before=still(("down", "down")))


def test_a_group_that_shrank_in_ascii(snap_compare: Compare) -> None:
    assert snap_compare(app_of(shrinking(), glyphs=ASCII), terminal_size=(80, 24), run_before=still())


def shrinking() -> Recorded:
    view = shrunk(run_view(3))
    before = msgspec.structs.replace(view, step=view.step - 3, generation=m.Generation(1, 4))
    connected, _, *news = under_way(view, steps=3)
    return Recorded([connected, snapshot(before), *news, *comings_and_goings(view, seq=100)])


def test_overview_without_colours(snap_compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert snap_compare(app_of(source_of(4)), terminal_size=(120, 40), run_before=still())


@pytest.mark.parametrize("keys", [("s",), ("s", "down", "1"), ("s", "a"), ("s", "a", "enter")],
                         ids=["plan", "typing", "auto", "applied"])  # fmt: skip
def test_split_dialog(snap_compare: Compare, keys: tuple[str, ...]) -> None:
    assert snap_compare(app_of(source_of(3)), terminal_size=(80, 24), run_before=still(keys))


def test_split_dialog_in_ascii(snap_compare: Compare) -> None:
    assert snap_compare(app_of(source_of(4), glyphs=ASCII), terminal_size=(80, 24), run_before=still(("s", "9", "9")))


def test_overview_in_ascii(snap_compare: Compare) -> None:
    assert snap_compare(app_of(source_of(4), glyphs=ASCII), terminal_size=(80, 24), run_before=still())


def test_before_the_first_step(snap_compare: Compare) -> None:
    source = source_of(1, state="starting", step=0, eval_loss=None, eval_step=None, samples=None)
    assert snap_compare(app_of(source), terminal_size=(80, 24), run_before=still())


def test_a_finished_run(snap_compare: Compare) -> None:
    source = source_of(1, state="finished", step=150)
    assert snap_compare(app_of(source), terminal_size=(80, 24), run_before=still(("1",)))


def test_no_run(snap_compare: Compare) -> None:
    source = Recorded([CONNECTED, snapshot(None)], runs=RUNS[1:])
    assert snap_compare(app_of(source), terminal_size=(80, 24), run_before=still())


def test_a_lost_agent(snap_compare: Compare) -> None:
    silent = Connection("silent", CLOCK.at_monotonic - 12, "no message")
    beat = m.Heartbeat(node="atlas", at=NOW, step_age_seconds=0.1, loop_lag_seconds=0.001, boot="boot-1", seq=0)
    source = Recorded([CONNECTED, snapshot(run_view(1)), beat, silent])
    app = app_of(source, clock=CLOCK)

    async def play(pilot: Pilot[Any]) -> None:
        await settled(pilot)
        app.clock = dataclasses.replace(CLOCK, at_monotonic=CLOCK.at_monotonic + 12, at_wall=NOW + 12)
        app.paint()
        await settled(pilot)

    assert snap_compare(app, terminal_size=(80, 24), run_before=play)


def test_too_small(snap_compare: Compare) -> None:
    assert snap_compare(app_of(source_of(1)), terminal_size=(50, 12), run_before=still())


@pytest.mark.parametrize("key", ["b", "l", "c", "p", "x", "n"])
def test_dialog(snap_compare: Compare, key: str) -> None:
    assert snap_compare(app_of(source_of(4)), terminal_size=(80, 24), run_before=still((key,)))


def test_dialog_with_a_mistake(snap_compare: Compare) -> None:
    assert snap_compare(app_of(source_of(1)), terminal_size=(80, 24), run_before=still(("b", "0")))


def test_dialog_applied(snap_compare: Compare) -> None:
    assert snap_compare(app_of(source_of(1)), terminal_size=(80, 24), run_before=still(("b", "4", "enter")))


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("keys", [("4", "j", "j", "j"), ("0", "space", "j")], ids=["events", "runs"])
def test_tables(snap_compare: Compare, keys: tuple[str, ...], size: tuple[int, int]) -> None:
    assert snap_compare(app_of(source_of(4)), terminal_size=size, run_before=still(keys))


@pytest.mark.parametrize("size", SIZES[:2], ids=lambda size: f"{size[0]}x{size[1]}")
def test_runs_with_branches(snap_compare: Compare, size: tuple[int, int]) -> None:
    source = Recorded([CONNECTED, snapshot(None)], runs=BRANCHES)
    assert snap_compare(app_of(source), terminal_size=size, run_before=still(("0", "j")))


@pytest.mark.parametrize("size", SIZES[:2], ids=lambda size: f"{size[0]}x{size[1]}")
def test_runs_with_separate_work(snap_compare: Compare, size: tuple[int, int]) -> None:
    source = Recorded([CONNECTED, snapshot(None)], runs=RUNS[1:])
    source.known_works = (SCORING,)
    assert snap_compare(app_of(source), terminal_size=size, run_before=still(("0",)))


@pytest.mark.parametrize(
    "keys",
    [
        ("slash", Typed("tok/s<2k or state:out"), "enter", "o"), ("slash", Typed("tok/s<2k age<3x")),
        ("4", "slash", Typed("by:anna")),
        ("4", "j", "j", "j", "enter"), ("u",), ("u", "1"), ("y",), ("0", "N"),
    ],
    ids=["filtered", "mistake", "filter_of_events", "event", "undo_which", "undo", "copy", "start"],
)  # fmt: skip
def test_over_a_table(snap_compare: Compare, keys: tuple[str, ...]) -> None:
    assert snap_compare(app_of(source_of(4)), terminal_size=(80, 24), run_before=still(keys))


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_a_node_of_several_devices(snap_compare: Compare, size: tuple[int, int]) -> None:
    assert snap_compare(app_of(Recorded(list(SEVERAL))), terminal_size=size, run_before=still(("down", "right")))


@pytest.mark.parametrize(
    "keys",
    [("0",), ("4",), ("colon", Typed("resize-batch micro=6"))],
    ids=["runs", "events", "command"],
)
def test_other_screens(snap_compare: Compare, keys: tuple[str, ...]) -> None:
    assert snap_compare(app_of(source_of(1)), terminal_size=(80, 24), run_before=still(keys))


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("key", ["question_mark", "ctrl+p"], ids=["help", "palette"])
def test_over_any_screen(snap_compare: Compare, key: str, size: tuple[int, int]) -> None:
    assert snap_compare(app_of(source_of(4)), terminal_size=size, run_before=still((key,)))


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_logs(snap_compare: Compare, size: tuple[int, int]) -> None:
    keys = ("5", "slash", Typed("evaluated"), "enter")
    assert snap_compare(app_of(logging_source()), terminal_size=size, run_before=still(keys))


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_node(snap_compare: Compare, size: tuple[int, int]) -> None:
    assert snap_compare(app_of(logging_source()), terminal_size=size, run_before=still(("2", "right")))


@pytest.mark.parametrize("size", SIZES[:2], ids=lambda size: f"{size[0]}x{size[1]}")
def test_a_node_with_a_gpu(snap_compare: Compare, size: tuple[int, int]) -> None:
    assert snap_compare(app_of(logging_source()), terminal_size=size, run_before=still(("2", "right", "right")))


def test_a_lost_node(snap_compare: Compare) -> None:
    assert snap_compare(app_of(logging_source()), terminal_size=(80, 24), run_before=still(("2", "left")))


@pytest.mark.parametrize("key", ["2", "5"], ids=["node", "logs"])
def test_node_and_logs_in_ascii(snap_compare: Compare, key: str) -> None:
    source = logging_source()
    assert snap_compare(app_of(source, glyphs=ASCII), terminal_size=(120, 40), run_before=still((key,)))
