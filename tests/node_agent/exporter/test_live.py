"""The Prometheus endpoint of a running agent: scraped, checked by promtool, held open by bad scrapers, and missing."""

import asyncio
import contextlib
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import SHARED_PIDS
from tests.tui.support.simulated_cluster import SimulatedCluster, simulated_cluster
from tests.waiting import HANG_SECONDS, until

from trainctl.node_agent.agent import Agent, Options
from trainctl.node_agent.exporter import exporter
from trainctl.protocol.client.client import Client
from trainctl.protocol.config.addresses import ListenAddress
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import SnapshotRequest

DEADLINE_SECONDS = HANG_SECONDS
LOOPBACK = ListenAddress("127.0.0.1", 0)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedCluster]:
    with simulated_cluster(tmp_path_factory.mktemp("cluster"), 4, 100_000, "--metrics=127.0.0.1:0") as started:
        SHARED_PIDS.add(started.pid)
        assert started.metrics is not None
        until_counted(started.metrics)
        yield started


def get(url: str, seconds: float = HANG_SECONDS) -> str:
    with urllib.request.urlopen(url, timeout=seconds) as reply:
        text: str = reply.read().decode()
        return text


def until_counted(url: str) -> str:
    """A scrape that has counted steps."""
    text: str = until(lambda: text if "trainctl_rank_tokens_total{" in (text := get(url)) else "")
    return text


def test_a_scrape_has_the_run_its_ranks_and_the_machine(cluster: SimulatedCluster) -> None:
    text = until_counted(cluster.metrics)
    for name in ("loss", "step_duration_seconds_bucket", "agent_info"):
        assert f"\ntrainctl_{name}{{" in text
    assert sum(line.startswith("trainctl_share_samples{") for line in text.splitlines()) == 4


async def test_scrapers_that_hang_hold_up_nobody(cluster: SimulatedCluster) -> None:
    """Three times as many connections as it keeps, silent, half asked, or asked and never read."""
    at = (urllib.parse.urlsplit(cluster.metrics).hostname, urllib.parse.urlsplit(cluster.metrics).port)
    with contextlib.ExitStack() as stack:
        hanging = [stack.enter_context(socket.create_connection(at, 10)) for _ in range(3 * exporter.MOST_CONNECTIONS)]
        for number, one in enumerate(hanging):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            one.sendall((b"", b"GET /metr", b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")[number % 3])
        async with Client(cluster.address, timeout_seconds=HANG_SECONDS) as client:
            for _ in range(20):
                assert (await client.ask(SnapshotRequest, 0)).run is not None
        assert "trainctl_loss{" in await asyncio.to_thread(get, cluster.metrics)


@pytest.mark.needs("promtool")
def test_promtool_finds_nothing_to_blame(cluster: SimulatedCluster) -> None:
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=until_counted(cluster.metrics), capture_output=True, text=True,
        timeout=DEADLINE_SECONDS, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


async def test_an_agent_serves_itself_and_leaves_nothing_open(tmp_path: Path) -> None:
    async with Agent("a", state_root=tmp_path, options=Options(metrics=LOOPBACK)) as agent:
        assert agent.metrics_url is not None
        text = await asyncio.to_thread(get, agent.metrics_url)
        taken = urllib.parse.urlsplit(agent.metrics_url).port or 0
        other = Agent("b", state_root=tmp_path, options=Options(metrics=ListenAddress("127.0.0.1", taken)))
        with pytest.raises(InvalidInputError, match=f"--metrics: cannot listen at 127.0.0.1:{taken}"):
            await other.__aenter__()
    assert 'trainctl_agent_info{boot="' in text
    assert 'trainctl_active_runs{node="a"} 0.0' in text
    with pytest.raises(urllib.error.URLError):
        get(agent.metrics_url, 1)


def test_a_browser_that_was_led_here_by_a_foreign_name_is_refused(cluster: SimulatedCluster) -> None:
    port = urllib.parse.urlsplit(cluster.metrics).port
    for host, status in ((f"localhost:{port}", 200), (f"127.0.0.1:{port}", 200), ("attacker.example", 403)):
        asked = urllib.request.Request(cluster.metrics, headers={"Host": host})
        try:
            with urllib.request.urlopen(asked, timeout=HANG_SECONDS) as reply:
                assert reply.status == status
        except urllib.error.HTTPError as error:
            assert error.code == status
            error.close()
