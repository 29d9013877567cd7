"""`python -m trainctl.tui.demo.supervisor`: keeps a demo's agents alive in a session of its own, ends with the demo.

It makes the model and the text, starts an agent for each node and says on standard output, one JSON object a line, how
far it is. Its standard input is a line to the program that started it: end of file means that nobody there watches any
more. It ends once the run has ended and nobody watches; on SIGTERM it stops the run first. It leaves no process. Should
it be killed itself, the agents end with the run, for their standard inputs are lines to this program.
"""

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from trainctl.protocol.client.client import Client, Connection
from trainctl.protocol.errors import TrainctlError
from trainctl.protocol.machine.process_title import set_title
from trainctl.protocol.messages import (
    ACTIVE_RUN_STATES,
    Alerts,
    Event,
    Heartbeat,
    HostReading,
    Live,
    NodeView,
    RankStep,
    RunView,
    Sample,
    Snapshot,
    SnapshotRequest,
    StepCommitted,
)
from trainctl.tui.demo.agents import Agents, StartError, last_line
from trainctl.tui.demo.folder import Session

STOP_SECONDS = 30.0


class Watch:
    """The supervisor's knowledge of the run, which says when it is time to end."""

    def __init__(self) -> None:
        self.view: RunView | None = None
        self.nobody_watches = False
        self.asked_to_end = False
        self.agent_lost = False
        self.changed = asyncio.Event()

    @property
    def running(self) -> bool:
        return self.view is not None and self.view.state in ACTIVE_RUN_STATES

    def see(self, view: RunView | None) -> None:
        self.view = view
        self.changed.set()

    def note(self, **flags: bool) -> None:
        for name, value in flags.items():
            setattr(self, name, value)
        self.changed.set()

    @property
    def over(self) -> bool:
        """Return whether there is nothing left to keep the agent for: an ended run is kept for as long as somebody
        watches."""
        return self.asked_to_end or self.agent_lost or (self.nobody_watches and not self.running)

    async def until_over(self) -> None:
        while not self.over:
            self.changed.clear()
            await self.changed.wait()


async def supervise(session: Session, assets: Path, objective: str, nodes: Sequence[str]) -> int:
    """Run the whole of a demo but its client, and return the exit status."""
    watch = Watch()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, _log, "the terminal was closed; the demo continues")
    agents = Agents(session, session.write_cluster(nodes), _log)
    tasks = [asyncio.create_task(_until_nobody_watches(watch))]
    preparing = asyncio.create_task(_prepare(agents, assets, objective))
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
            tasks += [asyncio.create_task(_follow(client, watch)), asyncio.create_task(_keep(agents, watch))]
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
        await agents.end()


async def _prepare(agents: Agents, assets: Path, objective: str) -> str:
    say(state="making", what=f"model and text in {assets}")
    await make_assets(assets, objective)
    say(state="starting", what=f"agents of {', '.join(agents.nodes)}")
    return await agents.start()


async def make_assets(folder: Path, objective: str) -> None:
    """Make the demo's model and text in a folder, where they aren't there yet. Raises StartError."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "trainctl.trainer.demo_assets",
        str(folder),
        "--objective",
        objective,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        _, said = await process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            if process.returncode is None:
                process.kill()
    if process.returncode != 0:
        raise StartError(last_line(said.decode("utf-8", "replace")) or f"demo_assets exited with {process.returncode}")


async def _until_nobody_watches(watch: Watch) -> None:
    """Read standard input to its end: the other side is closed however its program ends."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
    while await reader.read(4096):
        pass
    watch.note(nobody_watches=True)


async def _follow(client: Client, watch: Watch) -> None:
    attachment: AsyncIterator[Snapshot | Live | Heartbeat | Connection] = client.attach(0)
    async for item in attachment:
        match item:
            case Snapshot(run=view):
                watch.see(view)
            case RunView():
                watch.see(item)
            case (
                StepCommitted()
                | RankStep()
                | Event()
                | Sample()
                | HostReading()
                | NodeView()
                | Alerts()
                | Heartbeat()
                | Connection()
            ):
                pass


async def _keep(agents: Agents, watch: Watch) -> None:
    await agents.keep()
    watch.note(agent_lost=not agents.leaving)


async def _goes_on(client: Client, watch: Watch) -> bool:
    """Return whether a run begun in the last moment, or taken up again, keeps a demo going that seemed over."""
    if watch.asked_to_end or watch.agent_lost:
        return False
    with contextlib.suppress(TrainctlError):
        watch.see((await client.ask(SnapshotRequest, 0)).run)
    return watch.running


async def _stop_run(client: Client, watch: Watch) -> None:
    """End a run that still goes, so that no trainer is left waiting for an agent."""
    try:
        snapshot = await client.ask(SnapshotRequest, 0)
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
        _log(f"the run couldn't be stopped: {error or 'it took too long'}")


def say(**fields: Any) -> None:
    """One object for the program that started this one; it may have gone."""
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(json.dumps(fields) + "\n")
        sys.stdout.flush()


def _log(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def main() -> int:
    """Parse the arguments, take the session's lock and supervise."""
    parser = argparse.ArgumentParser(prog="python -m trainctl.tui.demo.supervisor")
    parser.add_argument("--session", type=Path, required=True)
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--objective", default="pretrain")
    parser.add_argument("--node", required=True, action="append", help="give it once for each node, the lead first")
    given = parser.parse_args()
    set_title("demo supervisor", f"of {given.session.name}")
    with Session(given.session).locked() as session:
        return asyncio.run(supervise(session, given.assets, given.objective, given.node))


if __name__ == "__main__":
    sys.exit(main())
