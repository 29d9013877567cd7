"""A played recording over its real sockets: what clients get of it, and that a record of it is made."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.conftest import SHARED_PIDS
from tests.waiting import HANG_SECONDS, slowness

from trainctl.protocol import messages as m
from trainctl.protocol.client.client import Client
from trainctl.protocol.client.cluster import attach_cluster
from trainctl.protocol.errors import RefusedError
from trainctl.protocol.record import log_format

DEADLINE_SECONDS = HANG_SECONDS


@pytest.fixture(scope="module")
def played() -> Iterator[str]:
    """The address of four nodes that play the whole recording in a few seconds."""
    rate = 40 / slowness()  # or what lasts for a second may be over before it is looked for
    command = [sys.executable, "-m", "trainctl.node_agent.cli", "play", "--nodes=4", f"--rate={rate:.2f}", "--begin=30"]
    with subprocess.Popen([*command, "--leash"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        SHARED_PIDS.add(process.pid)
        said = json.loads(process.stdout.readline())
        assert psutil.Process(said["pid"]).cmdline()[0].startswith("trainctl: player of ")
        yield said["listen"]
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(DEADLINE_SECONDS) == 0


async def test_it_is_played_to_the_end_with_its_faults(played: str) -> None:
    states: set[str] = set()
    boots: set[str] = set()
    told: dict[str, m.AlertView] = {}
    others: list[m.Alerts | None] = []
    peers: list[str] = []
    async with asyncio.timeout(DEADLINE_SECONDS):
        items: Any = attach_cluster(played, 100)
        async for _, item in items:
            alerts = item.alerts if isinstance(item, m.Snapshot) else item if isinstance(item, m.Alerts) else None
            if alerts is not None:
                if alerts.alerts and not told:
                    others = [await _alerts_of(address) for address in peers]
                told |= {alert.id: alert for alert in alerts.alerts}
            view = item.run if isinstance(item, m.Snapshot) else item if isinstance(item, m.RunView) else None
            if isinstance(item, m.Snapshot):
                boots.add(item.boot)
                peers = [peer.address for peer in item.peers]
            if view is not None:
                assert view.recording
                states |= {rank.state for rank in view.ranks}
                if view.state == "finished":
                    break
        await items.aclose()
    assert states >= {"run", "lost"}
    assert boots
    assert [(alerts.node, alerts.alerts) for alerts in others if alerts] == [(f"torch-{name}", ()) for name in "bcd"]
    assert told.keys() >= {"clock:torch-c:2", "node-lost:torch-d:3", "loss-spike"}
    assert told["clock:torch-c:2"].text == "+295 ms in backward: 92 °C, 1.61→1.16 GHz"
    async with Client(played) as client:
        steps = [step.step for step in (await client.steps(limit=1000)).steps]
        history = await client.history("demo-recording", ("loss", "busy_seconds"), columns=300)
        texts = " ".join(event.text for event in (await client.events(limit=200)).events)
        log = await client.log(rank=3)
    missing = set(range(1, 301)) - set(steps)
    assert missing and max(missing) - min(missing) + 1 == len(missing) < 20  # the lead was away once
    assert len(history.series) == 5
    assert "scripted" in texts and "lost" in texts
    lines = log.text.splitlines()
    assert all(log_format.read(text).at for text in lines)
    assert ["leaving" in line for line in lines] == [False] * (len(lines) - 1) + [True], "said at the end, not at first"


async def _alerts_of(address: str) -> m.Alerts | None:
    async with Client(address) as client:
        return (await client.snapshot(0)).alerts


async def test_it_takes_no_commands(played: str) -> None:
    async with Client(played) as client:
        reply = await client.send("pause", {})
    assert (reply.state, reply.reason) == ("rejected", "a recording accepts no commands")


async def test_it_takes_no_runs_and_no_work(played: str) -> None:
    async with Client(played) as client:
        for request in (m.WorksRequest(rid="a"), m.ProfilesRequest(rid="b"), m.EndRun(rid="c", run="r")):
            with pytest.raises(RefusedError, match="plays a recording"):
                await client.ask(request, m.Refusal)


async def test_its_policies_need_a_live_run(played: str) -> None:
    async with Client(played) as client:
        with pytest.raises(RefusedError, match="is a played recording: policies see something only in a live run"):
            await client.policies()


def test_a_file_that_is_no_recording_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("x")
    command = [sys.executable, "-m", "trainctl.node_agent.cli", "play", str(tmp_path / "x")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "not a recording" in done.stderr
