"""Pictures of the Overview, of the tables, of the Node and Logs screens and of what opens over them, with the clock
and the data held still."""

import dataclasses
from typing import Any

import msgspec
import pytest
from tests.tui.support.driving import dialog_text, hint, until
from tests.tui.support.logs import logging_source
from tests.tui.support.pictures import SEVERAL, Pictures, Typed, at_columns, settled, still
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
    predicted,
    run_view,
    shrunk,
    snapshot,
    source_of,
    splits,
    under_way,
    writing,
)
from textual.pilot import Pilot

from trainctl.protocol import messages as m
from trainctl.protocol.client.client import Connection
from trainctl.tui.app.app import TrainctlApp

# ---------------------------------------------------------------- the Overview


@at_columns(80, 120, 200)
async def test_overview(pictures: Pictures, columns: int) -> None:
    await pictures.compare(app_of(source_of(4)), columns)


@at_columns(80, 120)
async def test_overview_of_one_node(pictures: Pictures, columns: int) -> None:
    await pictures.compare(app_of(source_of(1)), columns)


@at_columns(80, 120)
async def test_overview_of_a_mixed_group(pictures: Pictures, columns: int) -> None:
    """One rank is waited for, one hangs."""
    await pictures.compare(app_of(Recorded(under_way(hung(run_view(3), 1)))), columns)


@at_columns(80)
async def test_overview_of_a_group_in_motion(pictures: Pictures, columns: int) -> None:
    """One rank is late, one is about to be drained."""
    await pictures.compare(app_of(Recorded(under_way(leaving(run_view(3))))), columns)


@at_columns(80)
async def test_overview_while_a_checkpoint_is_written(pictures: Pictures, columns: int) -> None:
    await pictures.compare(app_of(Recorded(under_way(writing(run_view(1))))), columns)


@at_columns(80, 120)
async def test_overview_of_a_group_that_shrank(pictures: Pictures, columns: int) -> None:
    """One rank is given up, and the selected one; one is on its way back."""
    await pictures.compare(app_of(shrinking()), columns, "down", "down")


async def test_a_group_that_shrank_in_ascii(pictures: Pictures) -> None:
    await pictures.compare(app_of(shrinking(), in_ascii=True), 80)


def shrinking() -> Recorded:
    view = shrunk(run_view(3))
    before = msgspec.structs.replace(view, step=view.step - 3, generation=m.Generation(1, 4))
    connected, _, *news = under_way(view, steps=3)
    return Recorded([connected, snapshot(before), *news, *comings_and_goings(view, seq=100)])


@at_columns(80, 120)
async def test_a_node_of_several_devices(pictures: Pictures, columns: int) -> None:
    await pictures.compare(app_of(Recorded(list(SEVERAL))), columns, "down", "right")


async def test_overview_without_colours(pictures: Pictures, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    await pictures.compare(app_of(source_of(4)), 120)


async def test_overview_in_ascii(pictures: Pictures) -> None:
    await pictures.compare(app_of(source_of(4), in_ascii=True), 80)


@pytest.mark.parametrize("theme", ["day", "contrast", "terminal"])
async def test_overview_by_theme(pictures: Pictures, theme: str) -> None:
    await pictures.compare(seen_by_two(theme), 120, play=attended())


def seen_by_two(theme: str = "night") -> TrainctlApp:
    source = source_of(4)
    source.viewers = (m.Viewer(by="anna", since_at=0.0), m.Viewer(by="cron", since_at=1.0, read_only=True))
    source.dry_runs = predicted
    app = app_of(source)
    app.theme = theme
    return app


def attended(*keys: str) -> Any:
    """Others are known to be attached, then the keys."""

    async def play(pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: bool(pilot.app.live.viewers))  # type: ignore[attr-defined]
        await still(*keys)(pilot)

    return play


async def test_before_the_first_step(pictures: Pictures) -> None:
    source = source_of(1, state="starting", step=0, eval_loss=None, eval_step=None, samples=None)
    await pictures.compare(app_of(source), 80)


async def test_a_finished_run(pictures: Pictures) -> None:
    await pictures.compare(app_of(source_of(1, state="finished", step=150)), 80, "1")


async def test_no_run(pictures: Pictures) -> None:
    await pictures.compare(app_of(Recorded([CONNECTED, snapshot(None)], runs=RUNS[1:])), 80)


async def test_a_lost_agent(pictures: Pictures) -> None:
    silent = Connection("silent", CLOCK.at_monotonic - 12, "no message")
    beat = m.Heartbeat(node="atlas", at=NOW, step_age_seconds=0.1, loop_lag_seconds=0.001, boot="boot-1", seq=0)
    app = app_of(Recorded([CONNECTED, snapshot(run_view(1)), beat, silent]))

    async def play(pilot: Pilot[Any]) -> None:
        await settled(pilot)
        app.clock = dataclasses.replace(CLOCK, at_monotonic=CLOCK.at_monotonic + 12, at_wall=NOW + 12)
        app.paint()
        await settled(pilot)

    await pictures.compare(app, 80, play=play)


async def test_too_small(pictures: Pictures) -> None:
    await pictures.compare(app_of(source_of(1)), 50)


async def test_a_simulated_run(pictures: Pictures) -> None:
    """A badge says what it is."""
    await pictures.compare(app_of(source_of(4, simulated=True)), 200)


# ---------------------------------------------------------------- Events, Runs, Node and Logs


@at_columns(80, 120)
@pytest.mark.parametrize("keys", [("4", "j", "j", "j"), ("0", "space", "j")], ids=["events", "runs"])
async def test_tables(pictures: Pictures, keys: tuple[str, ...], columns: int) -> None:
    await pictures.compare(app_of(source_of(4)), columns, *keys)


@at_columns(80)
async def test_runs_with_branches(pictures: Pictures, columns: int) -> None:
    await pictures.compare(app_of(Recorded([CONNECTED, snapshot(None)], runs=BRANCHES)), columns, "0", "j")


@at_columns(80)
async def test_runs_with_separate_work(pictures: Pictures, columns: int) -> None:
    source = Recorded([CONNECTED, snapshot(None)], runs=RUNS[1:])
    source.known_works = (SCORING,)
    await pictures.compare(app_of(source), columns, "0")


@at_columns(80, 120)
async def test_logs(pictures: Pictures, columns: int) -> None:
    await pictures.compare(app_of(logging_source()), columns, "5", "slash", Typed("evaluated"), "enter")


@at_columns(80, 120, 200)
async def test_node(pictures: Pictures, columns: int) -> None:
    await pictures.compare(app_of(logging_source()), columns, "2", "right")


@at_columns(80, 120)
async def test_a_node_with_a_gpu(pictures: Pictures, columns: int) -> None:
    await pictures.compare(app_of(logging_source()), columns, "2", "right", "right")


async def test_a_lost_node(pictures: Pictures) -> None:
    await pictures.compare(app_of(logging_source()), 80, "2", "left")


@pytest.mark.parametrize("key", ["2", "5"], ids=["node", "logs"])
async def test_node_and_logs_in_ascii(pictures: Pictures, key: str) -> None:
    await pictures.compare(app_of(logging_source(), in_ascii=True), 120, key)


# ---------------------------------------------------------------- what opens over a screen


OVER = {
    "batch": ("b",),
    "batch_with_a_mistake": ("b", "0"),
    "batch_applied": ("b", "4", "enter"),
    "learning_rate": ("l",),
    "stop": ("x",),
    "note": ("n",),
    "filtered": ("slash", Typed("tok/s<2k or state:out"), "enter", "o"),
    "filter_with_a_mistake": ("slash", Typed("tok/s<2k age<3x")),
    "filter_of_events": ("4", "slash", Typed("by:anna")),
    "event": ("4", "j", "j", "j", "enter"),
    "undo_which": ("u",),
    "undo": ("u", "1"),
    "copy": ("y",),
    "start": ("0", "N"),
    "palette": ("ctrl+p",),
}


@pytest.mark.parametrize("name", OVER)
async def test_over_a_table(pictures: Pictures, name: str) -> None:
    await pictures.compare(app_of(source_of(4)), 80, *OVER[name])


@at_columns(80, 120)
async def test_help(pictures: Pictures, columns: int) -> None:
    await pictures.compare(app_of(source_of(4)), columns, "question_mark")


@pytest.mark.parametrize(
    "keys",
    [("s",), ("s", "down", "1"), ("s", "a")],
    ids=["plan", "typing", "auto"],
)
async def test_split_dialog(pictures: Pictures, keys: tuple[str, ...]) -> None:
    await pictures.compare(app_of(source_of(3)), 80, *keys)


async def test_split_dialog_in_ascii(pictures: Pictures) -> None:
    source = source_of(4)
    source.dry_runs = splits(run_view(4))
    await pictures.compare(app_of(source, in_ascii=True), 80, "s", "9", "9")


async def test_command_line(pictures: Pictures) -> None:
    await pictures.compare(app_of(source_of(1)), 80, "colon", Typed("resize-batch micro=6"))


@at_columns(80, 120)
async def test_prediction_of_the_command_line(pictures: Pictures, columns: int) -> None:
    keys, app = ("colon", Typed("rebalance studio=17 mbp=8 forge=39")), seen_by_two()

    async def play(pilot: Pilot[Any]) -> None:
        await attended(*keys)(pilot)
        await until(pilot, lambda: "predicted 3.06" in hint(app))
        await settled(pilot)

    await pictures.compare(app, columns, play=play)


PREDICTED = {"resize-batch": "4", "set-global-batch": "128", "drain": "", "promote": ""}


@pytest.mark.parametrize("verb", PREDICTED)
async def test_dialog_with_its_prediction(pictures: Pictures, verb: str) -> None:
    source = source_of(4)
    source.dry_runs = predicted
    app = app_of(source)

    async def play(pilot: Pilot[Any]) -> None:
        await settled(pilot)
        app.selected = 2
        app.open_dialog(verb)
        await still(*PREDICTED[verb])(pilot)
        await until(pilot, lambda: "curve" in dialog_text(app))
        await settled(pilot)

    await pictures.compare(app, 80, play=play)


async def test_dialog_in_the_terminal_s_own_colours(pictures: Pictures) -> None:
    """The screen under it stays in sight: half transparent there would be wholly blank."""
    await pictures.compare(seen_by_two("terminal"), 80, play=attended("l"))


async def test_dialog_read_only(pictures: Pictures) -> None:
    await pictures.compare(app_of(source_of(4), read_only=True), 80, "l")
