"""A run replayed from its directory: only what had happened by then is shown, and the keys and the slider move it."""

import contextlib
import dataclasses
import datetime
import gc
import os
import shutil
import sqlite3
import time
import warnings
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.tui.support import run_directory
from tests.tui.support.driving import body, until
from tests.tui.support.pictures import Pictures, at_columns
from textual.pilot import Pilot

from trainctl.node_agent.records.run_db import RunDb
from trainctl.protocol import messages as m
from trainctl.protocol.errors import InvalidInputError, RefusedError
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader
from trainctl.tui.cli import runs as cli_runs
from trainctl.tui.export.mirror.run_source import DirectorySource
from trainctl.tui.replay.replay_app import ReplayApp, ReplayClock
from trainctl.tui.replay.replay_source import Playhead, ReplaySource
from trainctl.tui.screens.events import EventsScreen
from trainctl.tui.screens.logs import LogsScreen
from trainctl.tui.screens.overview import OverviewScreen
from trainctl.tui.screens.policies import PoliciesScreen
from trainctl.tui.state import reducer
from trainctl.tui.state import view_state as md


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_directory.make(tmp_path_factory.mktemp("state") / "node" / "runs" / "demo-1")


@pytest.fixture
def source(directory: Path) -> Iterator[ReplaySource]:
    made = ReplaySource(directory)
    made.turn(Playhead(made.head.first, made.head.last, playing=False))
    yield made
    made.close()


@pytest.mark.parametrize("step", [1, 99, 130])
async def test_nothing_is_shown_that_came_later(source: ReplaySource, step: int) -> None:
    source.seek(step)
    seen = await source.ask(m.SnapshotRequest, 120)
    assert seen.run.step == seen.last_step.step == step
    assert seen.run.state == "running"
    assert all((event.step or 0) <= step for event in seen.events)
    assert all(max(series.steps, default=0) <= step for series in seen.series)
    assert (seen.run.eval_step or 0) <= step
    history = await source.ask(m.HistoryRequest, "demo-1", ("loss", "busy_seconds"), columns=400)
    assert {max(series.steps) for series in history.series} == {step}
    assert all((event.step or 0) <= step for event in (await source.ask(m.EventsRequest)).events)


async def test_the_cost_is_that_of_the_step(directory: Path, tmp_path: Path) -> None:
    copy = tmp_path / "demo-1"
    shutil.copytree(directory, copy)
    with RunDb(RunPaths(copy), resumable=False) as recorder, RecordReader(RunPaths(copy)) as reader:
        view = msgspec.json.decode(reader.meta("view") or "", type=m.RunView)
        cost = m.RunCost(currency="EUR", spent=9.0, at=view.started_at + 3600, per_hour=0.0, unpriced=("b",))
        recorder.set_meta("view", msgspec.json.encode(msgspec.structs.replace(view, cost=cost)).decode(), own=True)
        last = reader.last_step()
        for number in (1, 2):
            made = msgspec.structs.replace(
                last, step=last.step + number, values={"cost": 4.0 * number, "cost_per_hour": 2.0}
            )
            recorder.commit(made, [], made.committed_at)
    with contextlib.closing(ReplaySource(copy)) as source:
        found = []
        for step in (last.step, last.step + 1, last.step + 2):
            source.seek(step)
            seen = (await source.ask(m.SnapshotRequest, 0)).run
            found.append(seen.cost)
    then = msgspec.structs.replace(cost, spent=4.0, at=last.committed_at, per_hour=2.0)
    assert found == [None, then, cost]


async def test_shares_are_those_of_the_step(source: ReplaySource) -> None:
    shares = []
    for step in (90, 130):
        source.seek(step)
        seen = await source.ask(m.SnapshotRequest, 0)
        shares.append([(rank.share, rank.micro_batch) for rank in seen.run.ranks])
        assert [(part.samples, part.micro_batch) for part in seen.rank_steps] == shares[-1]
    assert shares[0] != shares[1]


@pytest.mark.parametrize("step", [90, 10_000])
async def test_a_follower_s_copy_has_every_rank(directory: Path, tmp_path: Path, step: int) -> None:
    """The view there is of its own rank alone; the parts of the others are in the record."""
    copy = tmp_path / "follower" / "runs" / "demo-1"
    shutil.copytree(directory, copy)
    whole, record = ReplaySource(directory), sqlite3.connect(copy / "record.db")
    (text,) = record.execute("SELECT value FROM meta WHERE key = 'view'").fetchone()
    view = msgspec.json.decode(text, type=m.RunView)
    own = msgspec.json.encode(msgspec.structs.replace(view, ranks=view.ranks[1:2])).decode()
    with record:
        record.execute("UPDATE meta SET value = ? WHERE key = 'view'", (own,))
    record.close()
    source = ReplaySource(copy)
    for item in (source, whole):
        item.seek(step)
    seen, expected = await source.ask(m.SnapshotRequest, 0), await whole.ask(m.SnapshotRequest, 0)
    source.close()
    whole.close()
    assert seen.run is not None and expected.run is not None
    told = [[(rank.node, rank.share, rank.micro_batch) for rank in view.ranks] for view in (seen.run, expected.run)]
    assert told[0] == told[1]
    assert len(seen.run.ranks) == 3


async def test_a_copy_of_another_name_is_the_run_that_it_was(directory: Path, tmp_path: Path) -> None:
    """Its record says whose it is: steps and events of it are the shown run's."""
    copy = tmp_path / "kept for the paper"
    shutil.copytree(directory, copy)
    with contextlib.closing(ReplaySource(copy)) as source:
        source.turn(Playhead(1, run_directory.STEPS, playing=False))
        state = reducer.apply(md.ViewState(), await source.ask(m.SnapshotRequest, 40), 0.0)
        source.turn(dataclasses.replace(source.head, playing=True, speed=16.0))
        while source.head.playing:
            for message in source._advance(0.25):
                state = reducer.apply(state, message, 0.0)
    assert state.run is not None and (state.run.run, state.run.step) == ("demo-1", run_directory.STEPS)
    assert state.last_step is not None and state.last_step.value.step == run_directory.STEPS
    assert state.run_events[-1].text.startswith("finished")
    with contextlib.closing(DirectorySource(copy)) as mirrored:
        assert mirrored.run == "demo-1"


async def test_played_through_it_gives_each_step_once(source: ReplaySource) -> None:
    await source.ask(m.SnapshotRequest, 0)
    source.turn(Playhead(source.head.first, source.head.last, speed=16.0))
    steps: list[int] = []
    events: list[int] = []
    while source.head.playing:
        for message in source._advance(0.25):
            steps += [message.step] if isinstance(message, m.StepCommitted) else []
            events += [message.id] if isinstance(message, m.Event) else []
    assert steps == [step for step in range(2, run_directory.STEPS + 1) if not 100 <= step < 103]
    assert events == sorted(set(events))
    seen = await source.ask(m.SnapshotRequest, 0)
    assert seen.run is not None and seen.run.state == "finished" and seen.events[-1].text.startswith("finished")
    assert events[-1] == seen.events[-1].id


async def test_it_takes_no_commands_and_knows_one_run(source: ReplaySource) -> None:
    with pytest.raises(RefusedError, match="takes no commands"):
        await anext(source.command("pause", {}))
    with pytest.raises(RefusedError, match="no run"):
        await source.ask(m.SnapshotRequest, 0, "other")
    assert [run.run for run in (await source.runs()).runs] == ["demo-1"]
    assert (await source.log("studio", "", 2)).text.startswith("rank 2")


def test_a_run_is_found_by_its_path_and_by_its_id(directory: Path, tmp_path: Path) -> None:
    root = directory.parent.parent.parent
    for given in (str(directory), str(directory / "record.db"), "demo-1"):
        assert cli_runs.find(given, root) == directory
    for given, words in ((str(tmp_path), "no record.db"), ("demo-2", "no run with that id"), ("./x/y", "no such")):
        with pytest.raises(InvalidInputError, match=words):
            cli_runs.find(given, root)


def test_a_run_is_meant_by_its_id_its_beginning_its_name_or_as_the_last() -> None:
    names = ["fine", "fine", "fine-2", "best"]
    ids = ["fine-20261128-101010-aaaa", "fine-20261129-101010-bbbb", "fine-2-20261127-101010-cccc", "b-1"]
    runs = dict(zip(ids, names, strict=True))
    meant = {ids[0]: 0, "last": 3, "fine": 1, "fine-2": 2, "fine-20261128": 0, "fine-2-2026": 2, "best": 3, "b-": 3}
    for given, index in meant.items():
        assert cli_runs.match(given, runs) == ids[index]
    assert cli_runs.match("x", runs) is cli_runs.match("", runs) is cli_runs.match("last", {}) is None
    with pytest.raises(InvalidInputError, match="several runs begin like that"):
        cli_runs.match("fi", runs)


def test_the_last_run_of_a_demo_is_found(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINCTL_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(cli_runs, "default_folder", lambda: tmp_path / "demos")
    copy = tmp_path / "demos" / "demo-1" / "state" / "studio" / "runs" / directory.name
    shutil.copytree(directory, copy)
    assert cli_runs.find("last") == cli_runs.find("demo-1") == copy
    own = tmp_path / "state" / "studio" / "runs" / "mine-1"
    shutil.copytree(directory, own)
    for name, at in (("run.toml", 2e9), ("record.db", 2e9)):
        if (own / name).exists():
            os.utime(own / name, (at, at))
    assert cli_runs.find("last") == own, "a demo is older"


@pytest.mark.parametrize("place", ["runs/demo-1", "other", "link/demo-1", "runs/../runs", "", "."])
def test_an_agent_leads_to_no_other_directory(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """An agent may name any path: only a directory with the run's ID for a name is opened, and no link."""
    node = directory.parent.parent
    (tmp_path / "other").symlink_to(node)
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "demo-1").symlink_to(directory)
    path = tmp_path / place if place.startswith("link") else node / place
    row = m.RunSummary(
        run="demo-1", name="demo", state="finished", step=1, steps=None, last_loss=None, started_at=0.0,
        directory=str(path) if place else place, lead="a", nodes=(),
    )  # fmt: skip
    monkeypatch.setenv("TRAINCTL_CONNECT", "tcp://127.0.0.1:1")
    monkeypatch.setenv("TRAINCTL_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(cli_runs, "at_agent", lambda *_: cli_runs.RunAt("tcp://127.0.0.1:1", "demo-1"))
    monkeypatch.setattr(cli_runs.agent_call, "call", lambda *_, **__: m.Runs(rid="r", runs=(row,)))
    context: Any = SimpleNamespace()
    if place == "runs/demo-1":
        assert cli_runs.find_or_ask(context, "demo-1", None, None) == directory
        return
    with pytest.raises(InvalidInputError):
        cli_runs.find_or_ask(context, "demo-1", None, None)


def test_the_playhead_stops_at_the_end_and_begins_again() -> None:
    head, passed = Playhead(1, 3, speed=2.0).after(1.0, [0.5, 0.5, 9.0])
    assert (head.playing, passed, head.rest) == (True, 2, 1.0)
    assert not head.at(3, playing=True).after(5.0, [])[0].playing
    assert head.at(3).toggled().toggled().step == 1
    assert head.faster(0.001).speed == 0.25


async def played(
    source: ReplaySource, play: Callable[[Pilot[int], ReplayApp], Awaitable[None]], size: tuple[int, int] = (80, 24)
) -> None:
    app = ReplayApp(source, clock=StandingClock(datetime.UTC, source=source), theme="night", in_ascii=False)
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: app.live.run is not None)
        await play(pilot, app)


class StandingClock(ReplayClock):
    """Its ages stand."""

    def monotonic(self) -> float:
        return 1000.0


async def test_keys_and_the_mouse_move_it(source: ReplaySource) -> None:
    async def play(pilot: Pilot[int], app: ReplayApp) -> None:
        def step() -> int:
            return app.live.run.step if app.live.run is not None else 0

        assert isinstance(app.screen, OverviewScreen)
        for key, wanted in (("end", 160), ("left", 159), ("home", 1), ("right", 2), ("shift+right", 9), ("[", 8)):
            await pilot.press(key)
            await until(pilot, lambda wanted=wanted: step() == wanted)  # type: ignore[misc]
        assert "REPLAY" in body(app) and not source.head.playing
        await pilot.click("#replay", offset=(60, 0))
        await until(pilot, lambda: 100 < step() < 160)
        before = source.head.speed
        await pilot.press("+", "+", "-")
        assert source.head.speed == 2 * before
        await pilot.press("4")
        assert isinstance(app.screen, EventsScreen)
        await pilot.press("space")
        await until(pilot, lambda: source.head.step == 160 and not source.head.playing)
        await until(pilot, lambda: "finished" in body(app))

    source.turn(Playhead(1, 160, playing=False, speed=1024.0))
    await played(source, play)


def test_ages_stand_while_the_replay_does(source: ReplaySource, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 50.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    clock, seen = ReplayClock(source=source), []
    for seconds, playing in ((5.0, False), (2.0, True), (1.0, True), (9.0, False)):
        now += seconds
        source.turn(dataclasses.replace(source.head, playing=playing))
        seen.append(clock.monotonic())
    assert seen == [50.0, 52.0, 53.0, 53.0]
    assert clock.wall() == source.at


async def test_fast_seeks_leave_no_coroutine_behind(source: ReplaySource) -> None:
    """Each snapshot, and each look at other logs, ends what the one before began, maybe before it has begun."""

    async def play(pilot: Pilot[int], app: ReplayApp) -> None:
        for _ in range(3):
            app._arrived()
        await pilot.press("5")
        assert isinstance(app.screen, LogsScreen)
        for _ in range(3):
            app.screen._reading = None
            app.screen.paint()
        await pilot.pause()
        gc.collect()

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        await played(source, play)
    assert [str(item.message) for item in found if "never awaited" in str(item.message)] == []


async def test_the_diagnosis_is_of_the_record_up_to_the_place_and_nothing_that_changes_a_run_is_offered(
    source: ReplaySource,
) -> None:
    async def play(pilot: Pilot[int], app: ReplayApp) -> None:
        actions = {hint.action for hint in app.key_hints()}
        assert "replay_play" in actions and "undo" not in actions
        assert not any(action.startswith("dialog") for action in actions)
        await pilot.press("b", ":", "p")
        assert isinstance(app.screen, OverviewScreen)
        await pilot.press("D")
        await until(pilot, lambda: f"to {source.head.step:,}" in body(app) and "causes were checked" in body(app))
        await pilot.press("P")
        await until(pilot, lambda: "policies see something only in a live run" in body(app))
        await pilot.press("down", "enter", "o", "u")
        assert isinstance(app.screen, PoliciesScreen)

    await played(source, play)


@at_columns(80, 120)
async def test_picture(source: ReplaySource, columns: int, pictures: Pictures) -> None:
    source.seek(112)
    app = ReplayApp(source, clock=StandingClock(datetime.UTC, source=source), theme="night", in_ascii=False)
    app.address = "/runs/demo-1"
    source._view = msgspec.structs.replace(source._view, directory="/runs/demo-1")

    async def arrived(pilot: Pilot[int]) -> None:
        await until(pilot, lambda: app.live.run is not None)
        await until(pilot, lambda: app.live.heartbeat is not None)
        await until(pilot, lambda: not any(work.group == "refine" and work.is_running for work in app.workers))
        app.paint()
        await pilot.pause()

    await pictures.compare(app, columns, play=arrived)
