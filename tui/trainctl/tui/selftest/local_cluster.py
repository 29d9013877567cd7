"""Two agents of one cluster in a temporary home, and runs on them."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

import tomli_w

from trainctl.protocol import messages as m
from trainctl.protocol.client.client import Client
from trainctl.protocol.config.cluster_file import Cluster
from trainctl.protocol.errors import RefusedError, TrainctlError
from trainctl.protocol.record.reader import RecordReader
from trainctl.protocol.security.keyring import Keyring
from trainctl.protocol.security.keys import KeyFolder
from trainctl.tui.demo.agents import Agents
from trainctl.tui.demo.folder import Session
from trainctl.tui.selftest.temporary_home import TemporaryHome

NODES: Final = ("a", "b")
SAMPLES: Final = 12
"""Samples of a step."""
POLL_SECONDS: Final = 0.05
STOP_SECONDS: Final = 20.0
"""Time that a run gets to stop."""
MOST_STEPS: Final = 10_000
"""Steps of a run that is stopped long before; it ends by itself if this program is killed."""
_ANSWER_SECONDS: Final = 120.0
_OUTCOME_SECONDS: Final = 3600.0
"""Longer than any check's limit, which ends the wait."""


def run_tables(
    assets: Path, nodes: Mapping[str, dict[str, Any]], steps: int, checkpoint_every: int = 0
) -> dict[str, Any]:  # fmt: skip
    """A run file of the self-test's model and text. Ranks keep their shares, and the learning rate doesn't depend on
    the number of steps, so that runs of different lengths have the same losses."""
    return {
        "run": {"name": "selftest", "steps": steps, "orphan_seconds": 20.0},
        "model": {"path": str(assets / "model")},
        "data": {"path": str(assets / "data"), "tokenizer": "bytes", "sequence_length": 64, "held_out": 0.0},
        "batch": {"global": SAMPLES, "micro": 4},
        "optimizer": {"learning_rate": 1e-3, "schedule": "constant", "warmup_steps": 0, "clip_norm": 1.0},
        "checkpoint": {"every_steps": checkpoint_every, "keep_last": 100, "at_end": False},
        "calibration": {"at_start": "never"},
        "policy": {"rebalance": {"mode": "off"}},
        "nodes": {name: {"threads": 1, **table} for name, table in nodes.items()},
    }


def backend_table(backend: str) -> dict[str, Any]:
    """The [nodes.NAME] table of a rank, with the same bits each time."""
    return {"backend": backend, **({"deterministic": True} if backend == "torch" else {})}


class LocalCluster:
    """Use it as an asynchronous context manager: it starts the agents, and ends their run and them."""

    def __init__(self, home: TemporaryHome) -> None:
        self._session = Session(home.folder / "cluster")
        self._session.folder.mkdir(exist_ok=True)
        addresses = self._session.write_cluster(NODES, home.runtime)
        self._agents = Agents(self._session, addresses, lambda _: None, home.environment)
        self._keys = Keyring(KeyFolder(home.folder / "keys"), Cluster())
        for address in addresses.values():
            self._keys.learn(address, None)  # no key, whatever this program's environment says
        self._stack = contextlib.AsyncExitStack()
        self.client: Client

    async def __aenter__(self) -> Self:
        """Raises StartError if an agent doesn't start."""
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self._agents.end)
            address = await self._agents.start()
            client = Client(address, by="selftest", timeout_seconds=_ANSWER_SECONDS, keys=self._keys)
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

    async def start(self, **args: Any) -> m.RunView:
        """Start a run (`config` or `branch`); its view. Raises RefusedError with the agent's reason."""
        reply = await self.send("start-run", args)
        view = (await self.client.snapshot(0)).run
        if reply.state != "applied" or view is None:
            raise RefusedError(f"the run didn't start: {reply.reason or reply.state}")
        return view

    async def send(self, verb: str, args: dict[str, Any]) -> m.CommandReply:
        """The outcome of a command."""
        return await self.client.send(verb, args, timeout_seconds=_OUTCOME_SECONDS)

    async def until_step(self, step: int) -> m.RunView:
        """The active run once it has committed a step. Raises RefusedError if it ends before."""
        while True:
            view = await self._view()
            if view.step >= step:
                return view
            if view.state not in m.ACTIVE_RUN_STATES:
                raise RefusedError(f"the run {view.state} at step {view.step}: {view.reason or 'no reason given'}")
            await asyncio.sleep(POLL_SECONDS)

    async def until_end(self) -> m.RunView:
        """The run once it has finished. Raises RefusedError if it failed."""
        view = await self._ended()
        if view.state != "finished":
            raise RefusedError(f"the run {view.state} at step {view.step}: {view.reason or 'no reason given'}")
        return view

    async def stop_run(self) -> None:
        """Stop the active run, if there is one, and wait for its end."""
        with contextlib.suppress(TrainctlError, TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                run = (await self.client.snapshot(0)).run
                if run is not None and run.state in m.ACTIVE_RUN_STATES:
                    await self.client.send("stop", {"checkpoint": False}, timeout_seconds=STOP_SECONDS)
                    await self._ended()

    async def _ended(self) -> m.RunView:
        while True:
            view = await self._view()
            if view.state not in m.ACTIVE_RUN_STATES:
                return view
            await asyncio.sleep(POLL_SECONDS)

    async def _view(self) -> m.RunView:
        view = (await self.client.snapshot(0)).run
        if view is None:
            raise RefusedError("the agent has forgotten the run")
        return view


def losses(view: m.RunView, first: int = 1, last: int = MOST_STEPS) -> dict[int, float | None]:
    """The loss of each recorded step of a run, from `first` to `last`."""
    with RecordReader(Path(view.directory)) as record:
        steps, _ = record.steps(first - 1, 500)
    return {one.step: one.loss for one in steps if one.step <= last}


def parts(view: m.RunView, first: int, last: int) -> Sequence[m.RankStep]:
    """Each rank's part of the steps from `first` to `last`."""
    with RecordReader(Path(view.directory)) as record:
        return record.parts_between(first, last)


def write_tables(path: Path, tables: dict[str, Any]) -> None:
    """Write a run file."""
    path.write_bytes(tomli_w.dumps(tables).encode())
