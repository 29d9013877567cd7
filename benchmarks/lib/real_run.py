"""A real run of one calibrated rank with a small model, for comparison with its simulation."""

from pathlib import Path

from lib.sides import Cluster, run_config

from trainctl.protocol.record.reader import RecordReader
from trainctl.trainer import demo_assets

NODE = "n"
GLOBAL_BATCH, MICRO_BATCH = 16, 4
WARM_STEPS = 10
"""Steps at the start that are not counted."""


def calibrated_run(folder: Path, steps: int) -> tuple[list[float], Path, Path]:
    """Seconds of its steps, the file of its profile, which was measured before the first step, and its run file."""
    demo_assets.make_model(folder / "model")
    demo_assets.make_text(folder / "data")
    config = run_config(folder, [NODE], GLOBAL_BATCH, MICRO_BATCH) | {"calibration": {"at_start": "missing"}}
    with Cluster(folder, [NODE]) as cluster:
        cluster.start(config)
        cluster.measure(WARM_STEPS + steps)
        view = cluster.client.snapshot(0).run
    assert view is not None
    with RecordReader(Path(view.directory)) as reader:
        done, _ = reader.steps(WARM_STEPS, steps)
    (profile,) = (folder / "state" / NODE / "profiles").glob("*.toml")
    return [step.step_seconds for step in done], profile, Path(view.directory) / "run.toml"
