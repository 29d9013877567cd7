"""Real runs of one calibrated rank with a small model, for comparison with their simulations."""

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lib.quota import Quota
from lib.sides import Cluster, run_config, until

from trainctl.protocol.messages import ACTIVE_RUN_STATES, CalibrateRequest, SnapshotRequest
from trainctl.protocol.record.reader import RecordReader
from trainctl.trainer import demo_assets

NODE = "n"
GLOBAL_BATCH, MICRO_BATCH = 16, 4
WARM_STEPS = 10
"""Steps at the start that are not counted."""


class RealRun(NamedTuple):
    """Record of a run."""

    steps: list[float]  # seconds of each
    profile: Path  # measured just before its first step
    run_file: Path


def calibrated_runs(folder: Path, steps: int, rounds: int) -> Iterator[RealRun]:
    """One after another, each with a calibration of its own, because the machine's other work changes. Where cgroups
    can be made, they come before other programs."""
    demo_assets.make_model(folder / "model")
    demo_assets.make_text(folder / "data")
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            quota = Quota(os.cpu_count() or 1)
            stack.callback(quota.remove)
            quota.hold(os.getpid())
        cluster = stack.enter_context(Cluster(folder, [NODE]))
        for _ in range(rounds):
            yield _run(cluster, folder, steps)


def _run(cluster: Cluster, folder: Path, steps: int) -> RealRun:
    profiles = folder / "state" / NODE / "profiles"
    shutil.rmtree(profiles, ignore_errors=True)
    config, id = run_config(folder, [NODE], GLOBAL_BATCH, MICRO_BATCH), uuid.uuid4().hex
    client = cluster.client
    until(
        lambda: client._run(client._client.ask(CalibrateRequest, id, config)).state != "running",
        "the calibration's end",
    )
    cluster.start(config)
    cluster.measure(WARM_STEPS + steps)
    view = cluster.client.ask(SnapshotRequest, 0).run
    assert view is not None
    cluster.client.send("stop", {"checkpoint": False}, timeout_seconds=60)
    until(lambda: cluster.client.ask(SnapshotRequest, 0).run.state not in ACTIVE_RUN_STATES, "the run's end")  # type: ignore[union-attr]
    with RecordReader(Path(view.directory)) as reader:
        done, _ = reader.steps(WARM_STEPS, steps)
    (profile,) = profiles.glob("*.toml")
    return RealRun([step.step_seconds for step in done], profile, Path(view.directory) / "run.toml")
