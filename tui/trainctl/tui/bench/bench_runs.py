"""The runs of a bench, one after another on an agent of their own, which ends with them."""

import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from trainctl.protocol import messages as m
from trainctl.protocol.config import run_file
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.errors import InvalidInputError, TrainctlError
from trainctl.protocol.record.paths import node_directory
from trainctl.protocol.record.reader import RecordReader
from trainctl.tui.bench.bench_rows import BenchRow, bench_config, measured_row
from trainctl.tui.bench.local_cluster import LocalCluster, cancelled_by_signals

MOST_READINGS: Final = 500
"""Newest readings of the machine that count."""


def readable(file: Path, overrides: Mapping[str, str], settings: Sequence[dict[str, str]]) -> RunFile:
    """Return the run file with the first of the settings that it can have. Raises InvalidInputError if it can have
    none of them."""
    problem: InvalidInputError | None = None
    for chosen in settings:
        try:
            return run_file.read(file, {**overrides, **chosen})
        except InvalidInputError as error:
            problem = problem or error
    assert problem is not None, "there is one combination at least"
    raise problem


def whole_steps(
    file: Path,
    overrides: Mapping[str, str],
    settings: Sequence[dict[str, str]],
    count: Callable[[Path, RunFile, Mapping[str, str]], int],
) -> list[int]:
    """Return the steps of the whole run with each of the settings, 0 of those that it can't have. `count` returns the
    samples of an epoch; it is called once for all settings that leave the data as they are. Raises
    InvalidInputError."""
    steps, counted = list[int](), dict[bytes, int]()
    for chosen in settings:
        pairs = {**overrides, **chosen}
        try:
            config = run_file.read(file, pairs)
        except InvalidInputError:  # its row says why
            steps.append(0)
            continue
        if config.run.epochs:
            paths = [(table.data_path, table.model_path) for table in config.nodes.values()]
            data = msgspec.json.encode([config.data, config.model.path, config.objective, paths])
            if data not in counted:
                counted[data] = count(file, config, pairs)
            config = run_file.with_steps(config, counted[data])
        steps.append(config.run.steps)
    return steps


class BenchPlan(NamedTuple):
    """The runs of a bench."""

    file: Path
    overrides: Mapping[str, str]  # of all runs
    settings: Sequence[dict[str, str]]  # of each run, laid over them
    node: str
    steps: int  # of each run


async def measured(plan: BenchPlan) -> AsyncIterator[BenchRow]:
    """Yield a row for each setting, also for one that fails. Cancelled, or by SIGTERM or SIGHUP, it ends the run and
    the agent first. Raises StartError if the agent doesn't start."""
    folder = Path(tempfile.mkdtemp(prefix="trainctl-bench-"))
    runtime = Path(tempfile.mkdtemp(prefix="tc-", dir="/tmp"))  # a short name, for sockets
    try:
        with cancelled_by_signals():
            async with LocalCluster(folder, [plan.node], runtime) as cluster:
                for settings in plan.settings:
                    yield await _row(cluster, plan, settings)
    finally:
        for temporary in (folder, runtime):
            shutil.rmtree(temporary, ignore_errors=True)


async def _row(cluster: LocalCluster, plan: BenchPlan, settings: dict[str, str]) -> BenchRow:
    try:
        config = run_file.read(plan.file, {**plan.overrides, **settings})
        own = node_directory(plan.node)  # of an agent that this node may have: what is tokenized stays
        caches = str(own / "data") if own.is_dir() else None
        wanted = bench_config(config, plan.node, plan.steps, settings, caches)
        await cluster.start(config=run_file.to_message(wanted))
        return _read(await cluster.until_end(), settings)
    except TrainctlError as error:
        await cluster.stop_run()
        return BenchRow(settings=settings, problem=" ".join(str(error).split()))


def _read(view: m.RunView, settings: dict[str, str]) -> BenchRow:
    device = next((rank.device for rank in view.ranks), None)
    with RecordReader(Path(view.directory)) as record:
        steps, _ = record.steps(limit=view.step)
        parts: Sequence[m.RankStep] = record.parts_between(1, view.step)
        began = steps[0].committed_at if steps else 0.0
        readings = [reading for reading in record.newest_host_readings(MOST_READINGS) if reading.read_at >= began]
    return measured_row(settings, steps, parts, readings, device)
