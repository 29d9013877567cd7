"""Local agents of one cluster in a folder of its own, for as long as a program needs them, and runs on them."""

import asyncio
import contextlib
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Self

from trainctl.protocol import messages as m
from trainctl.protocol.client.client import Client
from trainctl.protocol.config.cluster_file import Cluster
from trainctl.protocol.errors import RefusedError, TrainctlError
from trainctl.protocol.security.keyring import Keyring
from trainctl.protocol.security.keys import KeyFolder
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
        """Raises StartError if an agent doesn't start."""
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

    async def start(self, config: dict[str, Any]) -> m.RunView:
        """Start a run and return its view. Raises RefusedError with the agent's reason."""
        reply = await self.client.send("start-run", {"config": config}, timeout_seconds=_OUTCOME_SECONDS)
        view = (await self.client.snapshot(0)).run
        if reply.state != "applied" or view is None:
            raise RefusedError(f"the run didn't start: {reply.reason or reply.state}")
        return view

    async def until_end(self) -> m.RunView:
        """Wait until the run has finished, and return it. Raises RefusedError if it failed."""
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
