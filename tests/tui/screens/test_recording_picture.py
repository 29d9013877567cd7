"""The scripted demonstration's Overview: eight nodes of which one runs hot, and a badge that says what it is."""

import dataclasses
from pathlib import Path

import msgspec
import pytest
from tests.tui.support import run_directory
from tests.tui.support.driving import body, until
from tests.tui.support.recorded import CLOCK, CONNECTED, Recorded, app_of
from textual.pilot import Pilot

from trainctl.node_agent.replay import format as recordings
from trainctl.node_agent.replay import readings
from trainctl.node_agent.replay.alerts import PlayedAlerts
from trainctl.node_agent.replay.timeline import Timeline
from trainctl.protocol import messages as m
from trainctl.tui.app.app import TrainctlApp
from trainctl.tui.replay.replay_source import ReplaySource

STEP = 95


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)], ids=lambda size: f"{size[0]}x{size[1]}")
def test_picture(tmp_path: Path, snap_compare: object, size: tuple[int, int]) -> None:
    async def arrived(pilot: Pilot[int]) -> None:
        await until(pilot, lambda: app.live.run is not None and len(app.live.hosts) == 8)
        await pilot.pause()
        assert "RECORDING" in body(app)
        rows = [line.split() for line in body(app).splitlines()]
        assert ["torch-c", "HOT"] in [row[:2] for row in rows], "one runs hot, and its row says so"
        assert "ALERT torch-c +295 ms in backward: 92 °C, 1.61→1.16 GHz" in body(app)
        assert size[0] < 200 or "W scripted" in body(app), "no machine drew it"

    import asyncio

    app = asyncio.run(_app(tmp_path))
    assert snap_compare(app, terminal_size=size, run_before=arrived)  # type: ignore[operator]


async def _app(tmp_path: Path) -> TrainctlApp:
    """At a step of a record that was made of the recording, as its player would send it."""
    directory = run_directory.make(tmp_path / "demo-recording", 8, faults=True)
    source = ReplaySource(directory)
    source.seek(STEP)
    snapshot = await source.snapshot(200)
    source.close()
    assert snapshot.run is not None
    run = msgspec.structs.replace(snapshot.run, recording=True, directory="/runs/demo-recording", steps=300)
    timeline = Timeline(recordings.read(recordings.shipped()), run.run, 8)
    hosts: list[m.HostReading] = [
        readings.reading(timeline.recording, timeline.script, node, rank, STEP, STEP, snapshot.at)
        for rank, node in enumerate(timeline.nodes)
    ]
    seen = msgspec.structs.replace(snapshot, run=run, alerts=_alerts(timeline, run, snapshot.at))
    clock = dataclasses.replace(CLOCK, at_wall=snapshot.at)
    numbered = [msgspec.structs.replace(host, boot=seen.boot, seq=seen.seq + 1 + i) for i, host in enumerate(hosts)]
    return app_of(Recorded([CONNECTED, seen, *numbered]), clock=clock)


def _alerts(timeline: Timeline, run: m.RunView, at: float) -> m.Alerts:
    """What the player's rules have open at the step."""
    played = PlayedAlerts(timeline)
    for step in range(1, STEP + 1):
        then = at - STEP + step
        played.take(timeline.played_step(step, then), run, {}, then)
    return played.view
