"""`python -m trainctl.tui.demo_supervisor`: keeps a demo's agent alive in a session of its own, and ends with the demo.

It makes the model and the text, starts the agent and says on standard output, one JSON object a line, how far it is.
Its standard input is a line to the program that started it: end of file means that nobody there watches any more. It
ends once the run has ended and nobody watches; on SIGTERM it stops the run first. It leaves no process. Should it be
killed itself, the agent ends with the run, for its standard input is a line to this program.
"""

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from trainctl.protocol import messages as m
from trainctl.protocol.client import Client, Connection
from trainctl.protocol.errors import TrainctlError
from trainctl.tui.demo_folder import Session

START_SECONDS = 30.0
STOP_SECONDS = 30.0
LEAVE_SECONDS = 10.0
STEADY_SECONDS = 5.0
"""An agent that lived this long ended for a reason of its own; one that didn't gets a pause before the next."""
RESTART_SECONDS = 1.0
MAX_QUICK_ENDS = 5


class StartError(Exception):
    """The demo can't begin; the text is one line for the person."""


class AgentProcess:
    """The agent as a child, started again on the same addresses whenever it ends unasked."""

    def __init__(self, session: Session, node: str, listen: str) -> None:
        self._session, self._node = session, node
        self._addresses = ["--listen", listen]
        self._process: asyncio.subprocess.Process | None = None
        self.leaving = False

    async def start(self) -> str:
        """Start it and give the address it listens at. Raises StartError with what it said instead."""
        command = [sys.executable, "-m", "trainctl.node_agent.cli", "run", "--leash", "--name", self._node]
        state = ["--state", str(self._session.state)]
        with self._session.agent_log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command, *self._addresses, *state,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log, start_new_session=True,
                pass_fds=self._session.lock_descriptors(),
            )  # fmt: skip
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(START_SECONDS):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise StartError(f"the agent said nothing for {START_SECONDS:g} s; see {self._session.agent_log}") from None
        if not line:
            await self._process.wait()
            raise StartError(_last_line(self._session.agent_log) or "the agent ended at once")
        bound = json.loads(line)
        self._addresses = ["--listen", bound["listen"], "--live", bound["live"]]
        address: str = bound["listen"]
        return address

    async def keep(self) -> None:
        """Start it again within two seconds each time it ends; returns when that is of no use."""
        quick_ends = 0
        while True:
            assert self._process is not None
            began = time.monotonic()
            status = await self._process.wait()
            if self.leaving:
                return
            quick_ends = quick_ends + 1 if time.monotonic() - began < STEADY_SECONDS else 0
            _log(f"the agent ended with {status}; starting it again")
            if quick_ends:
                await asyncio.sleep(RESTART_SECONDS)
            try:
                await self.start()
            except StartError as error:
                _log(f"the agent doesn't start: {error}")
                quick_ends += 1
            if quick_ends > MAX_QUICK_ENDS:
                return

    async def end(self) -> None:
        """SIGTERM, and SIGKILL to one that doesn't heed it."""
        self.leaving = True
        if self._process is None or self._process.returncode is not None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_SECONDS):
                    await self._process.wait()
                    return


class Watch:
    """What the supervisor knows of the run, and when it is time to end."""

    def __init__(self) -> None:
        self.view: m.RunView | None = None
        self.nobody_watches = False
        self.asked_to_end = False
        self.agent_lost = False
        self.changed = asyncio.Event()

    @property
    def running(self) -> bool:
        return self.view is not None and self.view.state in m.ACTIVE_RUN_STATES

    def see(self, view: m.RunView | None) -> None:
        self.view = view
        self.changed.set()

    def note(self, **flags: bool) -> None:
        for name, value in flags.items():
            setattr(self, name, value)
        self.changed.set()

    @property
    def over(self) -> bool:
        """Whether there is nothing left to keep the agent for: an ended run is kept for as long as somebody watches."""
        return self.asked_to_end or self.agent_lost or (self.nobody_watches and not self.running)

    async def until_over(self) -> None:
        while not self.over:
            self.changed.clear()
            await self.changed.wait()


async def supervise(session: Session, assets: Path, node: str, listen: str) -> int:
    """The whole of a demo but its client; returns the exit status."""
    watch = Watch()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, _log, "the terminal was closed; the demo goes on")
    agent = AgentProcess(session, node, listen)
    tasks = [asyncio.create_task(_until_nobody_watches(watch))]
    preparing = asyncio.create_task(_prepare(agent, assets))
    # Until the run has begun there is nothing to save: being asked to end, or being left, just ends it.
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: watch.note(asked_to_end=True))
    leaving = asyncio.create_task(watch.until_over())
    try:
        await asyncio.wait({preparing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not preparing.done():
            return 130
        address = preparing.result()
        async with Client(address, by="demo") as client:
            tasks += [asyncio.create_task(_follow(client, watch)), asyncio.create_task(_keep(agent, watch))]
            say(state="ready", address=address)
            await leaving
            while await _goes_on(client, watch):
                await watch.until_over()
            await _stop_run(client, watch)
        return 0
    except StartError as error:
        say(state="failed", error=str(error))
        return 1
    finally:
        for task in (preparing, leaving, *tasks):
            task.cancel()
        await asyncio.gather(preparing, leaving, *tasks, return_exceptions=True)
        await agent.end()


async def _prepare(agent: AgentProcess, assets: Path) -> str:
    say(state="making", what=f"model and text in {assets}")
    await _make_assets(assets)
    say(state="starting", what="agent")
    return await agent.start()


async def _make_assets(folder: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "trainctl.trainer.demo_assets", str(folder),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        _, said = await process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            if process.returncode is None:
                process.kill()
    if process.returncode != 0:
        raise StartError(_last(said.decode("utf-8", "replace")) or f"demo_assets ended with {process.returncode}")


async def _until_nobody_watches(watch: Watch) -> None:
    """Read standard input to its end: the other side is closed however its program ends."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
    while await reader.read(4096):
        pass
    watch.note(nobody_watches=True)


async def _follow(client: Client, watch: Watch) -> None:
    attachment: AsyncIterator[m.Snapshot | m.Live | m.Heartbeat | Connection] = client.attach(0)
    async for item in attachment:
        if isinstance(item, m.Snapshot):
            watch.see(item.run)
        elif isinstance(item, m.RunView):
            watch.see(item)


async def _keep(agent: AgentProcess, watch: Watch) -> None:
    await agent.keep()
    watch.note(agent_lost=not agent.leaving)


async def _goes_on(client: Client, watch: Watch) -> bool:
    """Whether a run begun in the last moment, or taken up again, keeps a demo going that seemed over."""
    if watch.asked_to_end or watch.agent_lost:
        return False
    with contextlib.suppress(TrainctlError):
        watch.see((await client.snapshot(0)).run)
    return watch.running


async def _stop_run(client: Client, watch: Watch) -> None:
    """End a run that still goes, so that no trainer is left waiting for an agent."""
    try:
        snapshot = await client.snapshot(0)
        watch.see(snapshot.run)
        if not watch.running:
            return
        await client.send("stop", {"checkpoint": False}, wait="accepted", timeout_seconds=STOP_SECONDS)
        async with asyncio.timeout(STOP_SECONDS):
            while watch.running:
                watch.changed.clear()
                await watch.changed.wait()
    except (TrainctlError, TimeoutError) as error:
        # Its trainers end by themselves when no agent has come back for run.orphan_seconds.
        _log(f"the run could not be stopped: {error or 'it took too long'}")


# ---------------------------------------------------------------- the edge


def say(**fields: Any) -> None:
    """One object for the program that started this one; it may have gone."""
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(json.dumps(fields) + "\n")
        sys.stdout.flush()


def _log(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def _last_line(path: Path) -> str:
    return _last(path.read_text("utf-8", "replace")) if path.is_file() else ""


def _last(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def main() -> int:
    """Parse the arguments, take the session's lock and supervise."""
    parser = argparse.ArgumentParser(prog="python -m trainctl.tui.demo_supervisor")
    parser.add_argument("--session", type=Path, required=True)
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--node", required=True)
    parser.add_argument("--listen", default="tcp://127.0.0.1:0")
    given = parser.parse_args()
    with Session(given.session).locked() as session:
        return asyncio.run(supervise(session, given.assets, given.node, given.listen))


if __name__ == "__main__":
    sys.exit(main())
