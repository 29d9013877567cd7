"""A control group's memory limit put on a trainer in the middle of a run, or in its first step, and lifted again."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.asking import events_of, run_of
from tests.cluster.waits import all_steps, wait_for_end, wait_for_step
from tests.integration.conftest import AgentProcess
from tests.lacking import memory_groups
from tests.waiting import until

from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.messages import HistoryRequest
from trainctl.protocol.record.reader import RecordReader
from trainctl.protocol.record.status_page import read_status
from trainctl.trainer import demo_assets

BATCH = MICRO = 8
CAP_PARTS = 1.04
"""The limit put on the trainer, by its peak memory: above 90 % of it are used, but none is refused."""


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group without a limit."""
    folder = memory_groups() / f"tc{os.getpid()}-run"
    folder.mkdir()
    yield folder
    for pid in (folder / "cgroup.procs").read_text().split():
        (memory_groups() / "cgroup.procs").write_text(pid)
    folder.rmdir()


def limit(group: Path, size: int) -> None:
    """In bytes; of version 1 or 2."""
    version_1 = group / "memory.limit_in_bytes"
    (version_1 if version_1.exists() else group / "memory.max").write_text(str(size))


def used(group: Path) -> int:
    """In bytes."""
    version_1 = group / "memory.usage_in_bytes"
    return int((version_1 if version_1.exists() else group / "memory.current").read_text())


def micro(client: BlockingClient) -> int:
    view = run_of(client)
    assert view is not None
    return view.ranks[0].micro_batch


def values(client: BlockingClient, run: str, name: str) -> list[float]:
    """The newest values of a metric."""
    last = run_of(client).step  # type: ignore[union-attr]
    (series,) = client.ask(HistoryRequest, run, (name,), max(1, last - 4), last, 100).series
    return [*series.mean]


@pytest.fixture
def assets(tmp_path: Path) -> dict[str, Any]:
    """Fields of a run file, with a model whose activations take memory."""
    shape = demo_assets.llama_config(hidden=128, layers=3, heads=2, intermediate=256)
    demo_assets.make_model(tmp_path / "model", shape, seed=1)
    demo_assets.make_text(tmp_path / "text")
    found = {"model__path": str(tmp_path / "model"), "data__path": str(tmp_path / "text")}
    return {**found, "data__sequence_length": 512}


@pytest.mark.needs("cgroups")
def test_the_micro_batch_shrinks_under_a_cap_and_grows_when_it_is_lifted(
    agent: AgentProcess, assets: dict[str, Any], run_config: Any, group: Path
) -> None:
    config = run_config(
        run__steps=100_000, **assets, batch={"global": BATCH, "micro": MICRO},
        policy={"micro-batch": {"up": "on", "window": 3, "barred_steps": 5}},
    )  # fmt: skip
    with agent.client() as client:
        run = client.send("start-run", {"config": config}).run
        assert run is not None
        wait_for_step(client, 5)
        (trainer,) = agent.trainer_pids()
        for process in (psutil.Process(trainer), *psutil.Process(trainer).children(recursive=True)):
            (group / "cgroup.procs").write_text(str(process.pid))
        limit(group, int(CAP_PARTS * max(values(client, run, "memory_peak_bytes"))))
        until(lambda: micro(client) < MICRO, what="a smaller micro-batch under the cap")
        limit(group, psutil.virtual_memory().total)
        until(lambda: micro(client) >= MICRO, what="the micro-batch before once the cap is lifted")
        assert client.send("stop", {"checkpoint": False}).state == "applied"
        wait_for_end(client)
        told = events_of(client, run)
        steps = all_steps(client, run)
    assert not [event for event in told if event.severity == "error"]
    cursor = 0
    for number, step in enumerate(steps, 1):
        assert (step.step, step.cursor, step.samples) == (number, cursor + BATCH, BATCH)
        cursor = step.cursor
    assert {event.by for event in told if event.verb == "resize-batch"} == {"auto:micro-batch"}


@pytest.mark.needs("cgroups")
def test_a_lone_rank_that_the_kernel_kills_for_memory_in_its_first_step_tries_the_half(
    agent: AgentProcess, assets: dict[str, Any], run_config: Any, group: Path
) -> None:
    config = run_config(
        run__steps=4, **assets, batch={"global": 16, "micro": 16},
    )  # fmt: skip
    assert agent.process is not None
    (group / "cgroup.procs").write_text(str(agent.process.pid))  # its trainers are in it too
    with agent.client() as client:
        started = client.send("start-run", {"config": config}, wait="accepted")
        assert started.state == "accepted", started.reason
        run = until(lambda: run_of(client), what="the run").run
        pages = agent.run_paths(run).status_page(0)
        (trainer,) = until(agent.trainer_pids, what="the trainer")
        until(lambda: (page := read_status(pages)) and page.phase == "forward", what="the first step")
        limit(group, used(group) + (1 << 20))
        until(lambda: trainer not in agent.trainer_pids(), what="the kernel's kill")
        limit(group, psutil.virtual_memory().total)
        assert wait_for_end(client).state == "finished"
        first = client.send("start-run", {"config": config}, id=started.id)
        told = events_of(client, run)
        steps = all_steps(client, run)
    halved = [event.text for event in told if event.verb == "resize-batch"]
    assert len(halved) == 1 and "16 → 8 (out of memory, the kernel killed it for memory" in halved[0], halved
    assert (first.state, first.step) == ("applied", 1)
    assert [(step.step, step.cursor, step.samples) for step in steps] == [(n, 16 * n, 16) for n in range(1, 5)]
    with RecordReader(agent.run_paths(run)) as reader:
        assert [row.micro_batch for step in steps for row in reader.rank_steps(step.step)] == [8, 8, 8, 8]
