"""The Node and Logs screens driven by keys and mouse over a recorded cluster."""

import asyncio

import pytest
from tests.tui.support.driving import body, hint, running, until
from tests.tui.support.logs import logging_source
from tests.tui.support.recorded import CONNECTED, NOW, Recorded, snapshot
from textual.events import MouseScrollDown
from textual.pilot import Pilot

from trainctl.protocol.record.log_format import write
from trainctl.tui.app.app import TrainctlApp
from trainctl.tui.dialogs.command_dialog import CommandDialog
from trainctl.tui.screens.logs import LogsScreen
from trainctl.tui.state import live_feed


def rows(app: TrainctlApp) -> list[str]:
    return body(app).splitlines()


async def opened(pilot: Pilot[int], app: TrainctlApp, key: str, says: str) -> None:
    await pilot.press(key)
    await until(pilot, lambda: says in body(app))


async def test_all_logs_are_merged_searched_and_walked_through() -> None:
    source = logging_source()

    async with running(source) as (pilot, app):
        await opened(pilot, app, "5", "28 lines")
        screen = app.screen
        assert isinstance(screen, LogsScreen)
        await until(pilot, lambda: "mini: no answer from mini" in rows(app)[1])
        assert "live" in rows(app)[1] and "OSError" in rows(app)[-1]
        await pilot.press("slash", *"evaluated")  # as one types: the newest match is jumped to
        assert "'evaluated' in 3" in rows(app)[1]
        assert screen.view.at is not None and screen.view.at[1] == 2
        await pilot.press("enter", "N")
        assert screen.view.at[1] == 1
        await pilot.press("n")  # next, and no note while there is a search
        assert screen.view.at[1] == 2 and "n next" in hint(app)
        await pilot.press("m")
        assert "3 lines" in rows(app)[1] and sum("evaluated" in row for row in rows(app)[2:]) == 3
        await pilot.press("escape")
        assert "28 lines" in rows(app)[1] and not screen.view.query.text
        await pilot.press("slash", *"node:forge", "enter", "m")
        assert "13 lines" in rows(app)[1] and not any(" mbp " in row for row in rows(app)[2:])
        await pilot.press("slash", "escape")
        await pilot.press("n")
        assert isinstance(app.screen, CommandDialog)


async def test_the_log_is_scrolled_held_and_followed() -> None:
    source = logging_source()

    async with running(source) as (pilot, app):
        await opened(pilot, app, "5", "28 lines")
        for pauses, follows in (("up", "down"), ("pageup", "pagedown"), ("home", "end"), ("F", "F"), ("k", "j")):
            await pilot.press(pauses)
            assert "paused" in rows(app)[1], pauses
            await pilot.press(follows)
            assert "live" in rows(app)[1], follows
        await pilot.press("home")
        assert "ready: mlx on gpu Apple M2" in rows(app)[2]
        await pilot.press("right")
        assert "ready: mlx" not in rows(app)[2] and "1,235,814,400" in rows(app)[2]
        await pilot.press("left")
        assert "ready: mlx" in rows(app)[2]
        await pilot._post_mouse_events([MouseScrollDown], widget="#body", offset=(5, 5))
        await until(pilot, lambda: "ready: mlx" not in rows(app)[2])


async def test_logs_are_read_by_offset_and_only_while_they_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_feed, "LOG_POLL_SECONDS", 0.02)
    source = logging_source()

    async with running(source) as (pilot, app):
        assert source.asked_logs == []
        await opened(pilot, app, "5", "28 lines")
        size = len(source.logs[0].encode())
        source.logs[0] += write(NOW, "INFO", "newly written") + "\n"
        await until(pilot, lambda: any("newly written" in entry.text for entry in app.logs.tail.entries))
        offsets = {at for _, rank, at in source.asked_logs if rank == 0}
        assert offsets <= {-131_072, size, len(source.logs[0].encode())}
        await pilot.press("1")
        await pilot.pause()
        known = len(source.asked_logs)
        await asyncio.sleep(0.1)
        assert len(source.asked_logs) == known
        await pilot.press("2")
        await until(pilot, lambda: len(source.asked_logs) > known)
        assert {rank for _, rank, _ in source.asked_logs[known:]} == {0}
        assert -131_072 not in [at for _, _, at in source.asked_logs[known:]]


@pytest.mark.parametrize("size", [(60, 15), (79, 20), (400, 120)])
async def test_every_row_of_logs_and_of_a_node_is_as_wide_as_the_screen(size: tuple[int, int]) -> None:
    async with running(logging_source(), size=size) as (pilot, app):
        for key in ("2", "5"):
            await opened(pilot, app, key, "log")
            assert {len(row) for row in rows(app)} == {size[0]} and len(rows(app)) == size[1] - 1


@pytest.mark.parametrize("key", ["2", "5"])
async def test_without_a_run_the_screen_says_so(key: str) -> None:
    async with running(Recorded([CONNECTED, snapshot(None)])) as (pilot, app):
        await opened(pilot, app, key, "no run")
