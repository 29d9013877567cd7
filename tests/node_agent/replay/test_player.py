"""A played recording over its real sockets: what clients get of it, and what it refuses."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from tests.conftest import SHARED_PIDS
from tests.waiting import HANG_SECONDS

from trainctl.protocol import messages as m
from trainctl.protocol.client.client import Client
from trainctl.protocol.client.cluster import attach_cluster
from trainctl.protocol.errors import RefusedError


@pytest.fixture(scope="module")
def played() -> Iterator[str]:
    """The address of four nodes that play the whole recording in a few seconds."""
    command = [sys.executable, "-m", "trainctl.node_agent.cli", "play", "--nodes=4", "--rate=40", "--begin=30"]
    with subprocess.Popen([*command, "--leash"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdin is not None
        SHARED_PIDS.add(process.pid)
        yield json.loads(process.stdout.readline())["listen"]
        process.stdin.close()
        assert process.wait(HANG_SECONDS) == 0


async def test_it_is_played_to_the_end(played: str) -> None:
    items: Any = attach_cluster(played, 100)
    async for _, item in items:
        view = item.run if isinstance(item, m.Snapshot) else item
        if isinstance(view, m.RunView):
            assert view.recording
            if view.state == "finished":
                break
    await items.aclose()
    async with Client(played) as client:
        steps = {step.step for step in (await client.steps(limit=1000)).steps}
        history = await client.history("demo-recording", ("loss", "busy_seconds"), columns=300)
        events = (await client.events(limit=200)).events
        log = await client.log(rank=3)
    missing = set(range(1, 301)) - steps
    assert missing and max(missing) - min(missing) + 1 == len(missing) < 20  # the lead was away once
    assert len(history.series) == 5 and "leaving" in log.text
    raised = {event.data.id for event in events if event.kind == "alert"}
    assert raised >= {"clock:torch-c:2", "node-lost:torch-d:3", "loss-spike"}


async def test_it_takes_no_commands_runs_or_work(played: str) -> None:
    async with Client(played) as client:
        reply = await client.send("pause", {})
        assert (reply.state, reply.reason) == ("rejected", "a recording accepts no commands")
        for request in (m.WorksRequest(rid="a"), m.ProfilesRequest(rid="b"), m.EndRun(rid="c", run="r")):
            with pytest.raises(RefusedError, match="plays a recording"):
                await client.ask(request, m.Refusal)
        with pytest.raises(RefusedError, match="is a played recording: policies see something only in a live run"):
            await client.policies()
