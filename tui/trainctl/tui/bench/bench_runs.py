"""The runs of a bench, one after another on an agent of their own, which ends with them."""

import asyncio
import contextlib
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from trainctl.protocol.client.client import Client
from trainctl.protocol.config import run_file
from trainctl.protocol.config.cluster_file import Cluster
from trainctl.protocol.config.names import node_directory
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.errors import InvalidInputError, RefusedError, TrainctlError
from trainctl.protocol.messages import ACTIVE_RUN_STATES, RankStep, RunView, SnapshotRequest
from trainctl.protocol.record.reader import RecordReader
from trainctl.protocol.security.keyring import Keyring
from trainctl.protocol.security.keys import KeyFolder
from trainctl.tui.bench.bench_rows import BenchRow, bench_config, measured_row
from trainctl.tui.demo.agents import Agents
from trainctl.tui.demo.folder import Session

POLL_SECONDS: Final = 0.05
STOP_SECONDS: Final = 20.0
"""Time that a run gets to stop."""
_ANSWER_SECONDS: Final = 120.0
_OUTCOME_SECONDS: Final = 3600.0
"""Time that a start may take, with a calibration."""


class LocalCluster:
    """Use it as an asynchronous context manager: it starts the agents, and ends their run and them."""

    def __init__(self, folder: Path, nodes: Sequence[str], runtime: Path) -> None:
        """`folder`: gets a new folder `cluster`; `runtime`: one with a short name, for sockets."""
        self._session = Session(folder / "cluster")
        self._session.folder.mkdir(exist_ok=True)
        addresses = self._session.write_cluster(nodes, runtime)
        self._agents = Agents(self._session, addresses, lambda _: None)
        self._keys = Keyring(KeyFolder(folder / "keys"), Cluster())
        for address in addresses.values():
            self._keys.learn(address, None)  # no key, whatever this program's environment says
        self._stack = contextlib.AsyncExitStack()
        self.client: Client

    async def __aenter__(self) -> Self:
        """Start the agent. Raises StartError if it doesn't start."""
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self._agents.end)
            address = await self._agents.start()
            client = Client(address, by="bench", timeout_seconds=_ANSWER_SECONDS, keys=self._keys)
            self.client = await stack.enter_async_context(client)
            stack.push_async_callback(self.stop_run)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        closing = asyncio.ensure_future(self._stack.aclose())
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            await closing
            raise

    async def start(self, config: dict[str, Any]) -> RunView:
        """Start a run and return its view. Raises RefusedError with the agent's reason."""
        reply = await self.client.send("start-run", {"config": config}, timeout_seconds=_OUTCOME_SECONDS)
        view = (await self.client.ask(SnapshotRequest, 0)).run
        if reply.state != "applied" or view is None:
            raise RefusedError(f"the run didn't start: {reply.reason or reply.state}")
        return view

    async def until_end(self) -> RunView:
        """Wait until the run has finished, and return it. Raises RefusedError if it failed."""
        view = await self._ended()
        if view.state != "finished":
            raise RefusedError(f"the run {view.state} at step {view.step}: {view.reason or 'no reason given'}")
        return view

    async def stop_run(self) -> None:
        """Stop the active run, if there is one, and wait for its end."""
        with contextlib.suppress(TrainctlError, TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                run = (await self.client.ask(SnapshotRequest, 0)).run
                if run is not None and run.state in ACTIVE_RUN_STATES:
                    await self.client.send("stop", {"checkpoint": False}, timeout_seconds=STOP_SECONDS)
                    await self._ended()

    async def _ended(self) -> RunView:
        while True:
            view = await self._view()
            if view.state not in ACTIVE_RUN_STATES:
                return view
            await asyncio.sleep(POLL_SECONDS)

    async def _view(self) -> RunView:
        view = (await self.client.ask(SnapshotRequest, 0)).run
        if view is None:
            raise RefusedError("the agent has forgotten the run")
        return view


@contextlib.contextmanager
def cancelled_by_signals() -> Iterator[None]:
    """Within, SIGTERM and SIGHUP cancel this task, as Ctrl-C does, so that its agents and runs end."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    numbers = (signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, task.cancel)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


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


@dataclass(frozen=True)
class BenchPlan:
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


def _read(view: RunView, settings: dict[str, str]) -> BenchRow:
    device = next((rank.device for rank in view.ranks), None)
    with RecordReader(Path(view.directory)) as record:
        steps, _ = record.steps(limit=view.step)
        parts: Sequence[RankStep] = record.parts_between(1, view.step)
        began = steps[0].committed_at if steps else 0.0
        readings = [reading for reading in record.newest_host_readings(MOST_READINGS) if reading.read_at >= began]
    return measured_row(settings, steps, parts, readings, device)
