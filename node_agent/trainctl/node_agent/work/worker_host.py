"""The worker that this node runs for separate work: started with the checkpoint, given slices, and ended.

The worker asks this agent, and this agent asks the lead's. All requests can be repeated, so a lost message, an agent
that restarts or a worker that dies only costs time.
"""

import asyncio
import contextlib
import os
import shutil
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal

import msgspec
import tomli_w

from trainctl.node_agent.roles.role import AgentRole
from trainctl.node_agent.runs.context import AgentContext
from trainctl.node_agent.trainers.rank_ports import last_words
from trainctl.node_agent.work.checkpoint_files import copy
from trainctl.node_agent.work.journal import JOURNAL_NAME
from trainctl.protocol.client.client import Client
from trainctl.protocol.config import env_policy, run_file
from trainctl.protocol.config.run_tables import NodeTable, RunFile
from trainctl.protocol.errors import InvalidInputError, TrainctlError
from trainctl.protocol.files.durable_files import make_folder, write_file
from trainctl.protocol.messages import HostWork, Leave, SliceReply, SliceRequest, WorkAsk, WorkFileRequest, WorkSlice
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.security import received_names

LEAD_SECONDS = 60.0
"""Time that a worker is kept while the lead's agent is unreachable."""
ASK_SECONDS = 5.0
"""Time that the lead's agent has to answer."""
REPORT_SECONDS = 1.0
"""Time between requests to the lead while the worker computes."""
IDLE_SECONDS = 0.2
"""Time between requests for a slice while there is none."""
LEAVE_SECONDS = 10.0
"""Time that a worker has to exit after it was asked to."""
RANK = 0
"""Number under which the worker's process and log are kept; a node has one worker."""

_State = Literal["loading", "busy", "idle", "gone"]
AskLead = Callable[[SliceRequest], Awaitable[SliceReply]]


def work_directory(directory: Path) -> Path:
    """Folder of a node that has a folder for each separate work."""
    return directory / "work"


class WorkerHost:
    """At most one worker. It is there as long as its task runs."""

    def __init__(self, context: AgentContext, role: AgentRole, address_of: Callable[[str], str | None]) -> None:
        """`address_of` returns the address of another node's agent, None if it isn't in the cluster."""
        self._context, self._role, self._address_of = context, role, address_of
        self._work: HostWork | None = None
        self._task: asyncio.Task[None] | None = None
        self._asked: asyncio.Queue[WorkAsk] = asyncio.Queue()

    @property
    def order(self) -> HostWork | None:
        """Return what this node's worker works for; None if there is no worker."""
        return self._work if self._task is not None and not self._task.done() else None

    def host(self, order: HostWork, ask_lead: AskLead | None = None, checkpoint: Path | None = None) -> str:
        """Start a worker for another node's work, or for this node's own (`ask_lead`, `checkpoint`); the reason if
        that isn't possible. If the worker is there, nothing changes."""
        if self._task is not None and not self._task.done():
            is_same = self._work is not None and self._work.work == order.work
            return "" if is_same else f"{self._context.node} is still busy with other work"
        if problem := self._objection(order, is_own=ask_lead is not None):
            return problem
        try:
            received_names.check(*order.files)
            directory = received_names.id_folder(work_directory(self._context.directory), order.work, "work")
            config = run_file.parse(order.config, "config")
            env = config.nodes.get(self._context.node, NodeTable()).env
            env_policy.check_allowed(env, os.environ, f"config: nodes.{self._context.node}.env")
        except InvalidInputError as error:
            return str(error)
        self._work, self._asked = order, asyncio.Queue()
        self._role.worker = order.work
        serving = self._serve(order, config, RunPaths(directory), ask_lead, checkpoint)
        self._task = asyncio.create_task(serving, name="worker")
        return ""

    def _objection(self, order: HostWork, *, is_own: bool) -> str:
        node = self._context.node
        if not self._role.is_idle:
            return f"{node} takes part in a run"
        if self._role.is_calibrating:
            return f"{node} is being calibrated"
        if not is_own and self._address_of(order.lead) is None:
            return f"{node} does not know the node {order.lead}: add it to its cluster file"
        return ""

    def heard(self, message: WorkAsk) -> bool:
        """Return what the worker says; False if it is not this agent's worker of now."""
        if self._work is None or self._work.work != message.run or self._task is None or self._task.done():
            return False
        self._asked.put_nowait(message)
        return True

    def clean_up(self) -> None:
        """End workers of an earlier agent of this node, and remove their files unless they belong to the lead."""
        root = work_directory(self._context.directory)
        for folder in [*root.iterdir()] if root.is_dir() else []:
            self._context.supervisor.kill(RunPaths(folder), RANK)
            if not (folder / JOURNAL_NAME).exists():
                shutil.rmtree(folder, ignore_errors=True)

    async def end(self, work: str) -> None:
        """End the worker if it is one for this work."""
        if self._work is not None and self._work.work == work:
            await self.close()

    async def close(self) -> None:
        """End the worker; the lead deals its slice to another one."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    # ------------------------------------------------------------ the worker's life

    async def _serve(
        self, order: HostWork, config: RunFile, paths: RunPaths, ask_lead: AskLead | None, checkpoint: Path | None
    ) -> None:
        try:
            if ask_lead is not None and checkpoint is not None:
                await self._run(order, config, paths, checkpoint, ask_lead)
                return
            address = self._address_of(order.lead)
            assert address is not None
            async with self._context.client(address, ASK_SECONDS) as client:
                folder = received_names.below(paths.directory, "checkpoint")
                ask: AskLead = client.reply_to
                await self._fetch(order, folder, client, ask)
                if await self._run(order, config, paths, folder, ask):
                    await asyncio.to_thread(shutil.rmtree, paths.directory, ignore_errors=True)
        except (OSError, TrainctlError) as error:
            # The lead notices that this node is silent, and asks for a worker again.
            print(f"work {order.work}: {error}", file=sys.stderr)
        finally:
            self._role.worker = ""
            self._context.link.forget(order.work)
            with contextlib.suppress(OSError):
                self._context.supervisor.kill(paths, RANK)

    async def _fetch(self, order: HostWork, folder: Path, client: Client, ask: AskLead) -> None:
        """Copy the checkpoint from the lead, which hears every second that this node is at it."""

        async def read(name: str, offset: int) -> bytes:
            part = await client.ask(WorkFileRequest, work=order.work, name=name, offset_bytes=offset)
            return part.data

        copying = asyncio.create_task(copy(order.files, folder, order.checkpoint, order.run, read))
        try:
            while not (await asyncio.wait([copying], timeout=REPORT_SECONDS))[0]:
                await ask(self._request("loading"))
            await copying
        finally:
            copying.cancel()

    async def _run(self, order: HostWork, config: RunFile, paths: RunPaths, checkpoint: Path, ask: AskLead) -> bool:
        """Start the worker and pass on what it and the lead say; True if the work has ended, False if only the worker
        has."""
        run = tomli_w.dumps(run_file.to_dict(config)).encode()
        await asyncio.to_thread(make_folder, paths.logs)
        await asyncio.to_thread(write_file, paths.run_file, run)
        self._start(order, config, paths, checkpoint)
        state: _State = "loading"
        since, device = time.monotonic(), ""
        pending: WorkAsk | None = None  # what the worker said last, until the lead has answered it
        while True:
            if pending is None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(REPORT_SECONDS):
                        pending = await self._asked.get()
            try:
                if pending is None and self._context.supervisor.find(paths, RANK) is None:
                    await ask(self._request("gone", problem=self._how_it_ended(paths)))
                    return False
                if pending is not None:
                    device, state = pending.device, "idle"
                reply = await ask(self._request(state, device, pending))
                since = time.monotonic()
            except TrainctlError:
                if time.monotonic() - since > LEAD_SECONDS:
                    return False
                await asyncio.sleep(IDLE_SECONDS)
                continue
            if reply.ended:
                await self._leave(order.work, paths)
                return True
            if reply.slice is not None:
                pending, state = None, "busy"
                while not self._asked.empty():
                    self._asked.get_nowait()  # repeated while the lead was asked
                made = WorkSlice(run=order.work, slice=reply.slice, first=reply.first, rows=reply.rows)
                await self._context.link.send(RANK, made)
            elif pending is not None:
                await asyncio.sleep(IDLE_SECONDS)
                pending = WorkAsk(run=pending.run, rank=RANK, device=device)  # its results are with the lead

    def _request(self, state: _State, device: str = "", said: WorkAsk | None = None, problem: str = "") -> SliceRequest:
        assert self._work is not None
        answered, results = (said.answered, said.results) if said is not None else (None, ())
        return SliceRequest(
            rid=os.urandom(8).hex(),
            work=self._work.work,
            node=self._context.node,
            state=state,
            device=device,
            answered=answered,
            results=results,
            problem=problem,
        )

    def _start(self, order: HostWork, config: RunFile, paths: RunPaths, checkpoint: Path) -> None:
        """Raises RefusedError if no process can be started."""
        table = config.nodes.get(self._context.node, NodeTable())
        options = {
            "work-directory": str(paths.directory),
            "work": order.work,
            "kind": order.kind,
            "node": self._context.node,
            "endpoint": self._context.link.endpoint,
            "checkpoint": str(checkpoint),
            "agent": str(os.getpid()),
            "options": msgspec.json.encode(order.options).decode(),
        }
        argv = [sys.executable, "-m", "trainctl.trainer.worker"]
        argv += [word for name, value in options.items() for word in (f"--{name}", value)]
        env = env_policy.of_trainers(os.environ, table.env, threads=table.rank_threads)
        self._context.supervisor.start(paths, RANK, argv, env, table.priority)

    def _how_it_ended(self, paths: RunPaths) -> str:
        supervisor = self._context.supervisor
        status = supervisor.exit_status(paths, RANK)
        how = "is gone" if status is None else f"exited with {status}" if status >= 0 else f"got signal {-status}"
        said = last_words(supervisor.log_tail(paths, RANK, 20)) if status is not None and status > 0 else ""
        return f"the worker {how}: {said}"[:500] if said else f"the worker {how}"

    async def _leave(self, work: str, paths: RunPaths) -> None:
        await self._context.link.send(RANK, Leave(run=work, reason="the work has ended"))
        for _ in range(int(LEAVE_SECONDS / IDLE_SECONDS)):
            if self._context.supervisor.find(paths, RANK) is None:
                return
            await asyncio.sleep(IDLE_SECONDS)
