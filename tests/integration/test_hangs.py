"""A rank whose main thread hangs while its heartbeats go on: named, ended and replaced, and no step is lost by it."""

import contextlib
import os
import shutil
from pathlib import Path

import pytest
from tests.integration.clusters import FOREVER, on
from tests.integration.conftest import until, wait_for_end, wait_for_step
from tests.integration.exactness import check_ledger

NODES = ("alpha", "beta")
STEP = 100
"""Of the checkpoint that hangs: late enough to be set up in time."""


@contextlib.contextmanager
def unreadable(folder: Path):
    """In the place of a checkpoint that is to be written there is one whose manifest is a FIFO that nobody writes to:
    whoever looks into it waits for ever, as for a disk across a network that doesn't answer."""
    folder.mkdir(parents=True)
    os.mkfifo(folder / "manifest.json")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.close(os.open(folder / "manifest.json", os.O_WRONLY | os.O_NONBLOCK))
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.timeout(240)
def test_a_rank_that_hangs_in_its_checkpoint_is_named_and_replaced(cluster, run_config):
    config = run_config(
        run__steps=FOREVER, nodes=on(*NODES), batch__micro=2, checkpoint={"every_steps": STEP // 2, "at_end": False},
        group={"hung_seconds": 1.0},
    )  # fmt: skip

    def texts() -> list[str]:
        return [event.text for event in client.events(newest=True).events]

    with cluster.client() as client:
        begun = client.send("start-run", {"config": config}, timeout_seconds=120)
        assert begun.state == "applied", begun.reason
        folder = cluster.run_paths("beta", begun.run).checkpoints / f"step-{STEP}"
        with unreadable(folder):
            assert client.snapshot(0).run.step < STEP
            lost = until(lambda: [text for text in texts() if "beta is lost" in text], 120, "its loss")
            assert lost[0].startswith(f"beta is lost: hung, no progress in checkpoint of step {STEP} for "), lost
        until(lambda: any("beta joins again" in text for text in texts()), 120, "its return")
        wait_for_step(client, client.snapshot(0).run.step + 3)
        client.send("stop", {"checkpoint": False})
        view = wait_for_end(client)
    check_ledger(cluster, begun.run, view.step, was_lost={"beta"})
