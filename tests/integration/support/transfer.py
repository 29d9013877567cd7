"""Helpers for tests of promotion and handover: requests to nodes, and what a client that watches receives."""

import contextlib
import itertools
import json
import signal
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
from tests.asking import run_of
from tests.integration.support.clusters import Cluster
from tests.tui.support.cli_calls import started
from tests.waiting import HANG_SECONDS

from trainctl.protocol import messages as m


def view_at(cluster: Cluster, node: str) -> m.RunView:
    with cluster.client(node) as client:
        view = run_of(client)
    assert view is not None
    return view


def power_off(cluster: Cluster, node: str) -> None:
    """All of a node's processes at once, as when its machine is gone."""
    process = cluster[node].process
    assert process is not None
    below = [p for pid in cluster[node].trainer_pids() for p in (psutil.Process(pid), *family(pid))]
    for one in [psutil.Process(process.pid), *below]:
        one.suspend()
    for one in below:
        one.send_signal(signal.SIGKILL)
    cluster[node].kill()


def family(pid: int) -> list[psutil.Process]:
    """A trainer's keeper and its reducers."""
    trainer = psutil.Process(pid)
    return [trainer.parent(), *trainer.children(recursive=True)]


def resume(cluster: Cluster, node: str) -> None:
    with cluster.client(node) as client:
        reply = client.send("resume", {})
        assert reply.state == "applied", reply


@contextlib.contextmanager
def watched(cluster: Cluster, node: str) -> Iterator[list[dict[str, Any]]]:
    """Yield what `trainctl watch --json` says of a run, begun at one node's agent, until it says that the run has
    ended. It is read as it comes."""
    lines: list[dict[str, Any]] = []
    command = started("watch", "--json", "--connect", cluster[node].address)
    with ThreadPoolExecutor(1) as thread, command as process:
        lines.append(json.loads(process.stdout.readline()))
        assert lines[0]["type"] == "run-view", lines
        reading = thread.submit(_read_to_the_end, process, lines)
        yield lines
        reading.result(HANG_SECONDS)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=HANG_SECONDS)[1] == ""


def _read_to_the_end(process: "subprocess.Popen[str]", lines: list[dict[str, Any]]) -> None:
    while lines[-1]["type"] != "run-view" or lines[-1]["state"] != "finished":
        line = process.stdout.readline()
        assert line, process.stderr.read()
        lines.append(json.loads(line))
        assert "type" in lines[-1], lines[-5:]


def steps_of(lines: Sequence[dict[str, Any]]) -> list[tuple[int, tuple[int, ...]]]:
    """The steps that were reported, each with its generation, in the order in which they came."""
    return [(line["step"], tuple(line["generation"])) for line in lines if line["type"] == "step-committed"]


def steps_around(lines: Sequence[dict[str, Any]], step: int) -> list[Any]:
    """Steps, connections and states near one that is missing."""
    shown = [(line["type"], line.get("step"), line.get("generation"), line.get("state")) for line in lines]
    after = next((place for place, line in enumerate(shown) if line[0] == "step-committed" and line[1] > step), 0)
    return [line for line in shown[max(0, after - 12) : after + 3] if line[0] != "event"]


def check_watched(lines: Sequence[dict[str, Any]], last: int) -> None:
    """Each step once, in order, to the last; one that was made again is of a later generation."""
    steps = steps_of(lines)
    missing = set(range(steps[0][0], last + 1)) - {step for step, _ in steps}
    assert not missing, f"steps {sorted(missing)} were not shown; around them: {steps_around(lines, min(missing))}"
    assert len(set(steps)) == len(steps)
    assert all(step > before or made > was for (before, was), (step, made) in itertools.pairwise(steps))
