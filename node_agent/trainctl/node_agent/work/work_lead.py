"""Separate work that this agent leads: takes the rows, has nodes start workers, deals slices and merges the results."""

import asyncio
import os
import shutil
import time
from collections.abc import Callable

from trainctl.node_agent.roles.role import AgentRole
from trainctl.node_agent.runs import preflight
from trainctl.node_agent.runs.context import AgentContext
from trainctl.node_agent.work import checkpoint_files
from trainctl.node_agent.work.dealer import Dealer
from trainctl.node_agent.work.journal import JOURNAL_NAME, Journal, Opened, OpenedWork, WorkingNode
from trainctl.node_agent.work.worker_host import WorkerHost, work_directory
from trainctl.protocol import messages
from trainctl.protocol.config import run_file
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.errors import InvalidInputError, RefusedError, TrainctlError
from trainctl.protocol.messages.requests import SLICE_ROWS
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.security import received_names

LOOK_SECONDS = 0.5
"""Time between looks at which nodes are silent."""
SILENT_SECONDS = 8.0
"""Silence after which a node's slice is dealt again; a node reports every second."""
AGAIN_SECONDS = 2.0
"""Time between requests to a node to start its worker."""
NOBODY_SECONDS = 60.0
"""Time without any worker after which the work fails."""
HOST_SECONDS = 3.0
"""Time that another node has to answer."""
RESULTS_BYTES = 768 * 1024
"""Size of the results in one reply."""
KEPT_WORKS = 3
"""Newest works whose files are kept."""


class WorkLead:
    """Leads at most one work at a time, which stays open after its end so that clients can get its results."""

    def __init__(
        self, context: AgentContext, role: AgentRole, host: WorkerHost, address_of: Callable[[str], str | None]
    ) -> None:
        """`address_of` returns the address of another node's agent, None if it isn't in the cluster."""
        self._context, self._role, self._host, self._address_of = context, role, host, address_of
        self._root = work_directory(context.directory)
        self._work: OpenedWork | None = None

    def take_up(self) -> None:
        """Continue the work that an earlier agent of this node led."""
        for folder in sorted(self._root.glob("*/")) if self._root.is_dir() and self._role.is_idle else ():
            if (folder / JOURNAL_NAME).is_file() and self._work is None:
                try:
                    journal = Journal(folder)
                    if journal.state not in ("receiving", "running"):
                        journal.close()
                        continue
                    self._use(journal)
                except (TrainctlError, OSError):
                    continue  # its files are damaged: the client that asks for it again gets the error

    def close(self) -> None:
        if self._work is not None:
            for node in self._work.nodes.values():
                if node.asking is not None:
                    node.asking.cancel()
            self._work.journal.close()

    # ------------------------------------------------------------ requests

    async def reply(self, request: messages.WorkRequest) -> messages.AgentReply:
        """Carry out a request. Raises InvalidInputError, RefusedError, OSError or sqlite3.Error."""
        match request:
            case messages.WorksRequest():
                return messages.Works(rid=request.rid, works=await self._works(led=request.led))
            case messages.OpenWork():
                return self._status(request, await self._open(request))
            case messages.WorkRows():
                return self._status(request, self._receive(request))
            case messages.WorkResultsRequest():
                work = self._known(request.work)
                results = work.journal.results(request.after_row, request.limit, RESULTS_BYTES)
                return messages.WorkStatus(rid=request.rid, view=work.view(), results=results)
            case messages.EndWork():
                return await self._end(request)
            case messages.HostWork():
                return messages.WorkHosted(rid=request.rid, problem=self._host.host(request))
            case messages.WorkFileRequest():
                work = self._known(request.work)
                if request.name not in work.chosen.files:
                    raise InvalidInputError("name", f"the checkpoint has no file {request.name}")
                read = checkpoint_files.read_part
                part = await asyncio.to_thread(read, work.chosen.folder, request.name, request.offset_bytes)
                return messages.WorkFilePart(rid=request.rid, data=part)
            case messages.SliceRequest():
                return await self.deal(request)

    def _status(self, request: messages.WorkRequest, work: OpenedWork) -> messages.WorkStatus:
        return messages.WorkStatus(rid=request.rid, view=work.view())

    async def _works(self, *, led: bool) -> tuple[messages.WorkSummary, ...]:
        """The work that this node leads, and unless `led` also that of another node for which it has a worker."""
        own = (self._work.summary(self._context.node),) if self._work is not None else ()
        order = self._host.order
        address = self._address_of(order.lead) if order is not None and order.lead != self._context.node else None
        if led or order is None or address is None:
            return own
        try:
            async with self._context.client(address, HOST_SECONDS) as client:
                works = (await client.ask(messages.WorksRequest, led=True)).works
        except TrainctlError:
            return own
        return *own, *(one for one in works if one.view.work == order.work)

    def _known(self, work: str) -> OpenedWork:
        if self._work is None or self._work.id != work:
            raise RefusedError(f"{self._context.node} has no work {work}; it may have been cancelled")
        return self._work

    # ------------------------------------------------------------ from opening to the end

    async def _open(self, request: messages.OpenWork) -> OpenedWork:
        """New work, or that with the same ID. Raises InvalidInputError or RefusedError; then nothing has changed."""
        folder = received_names.id_folder(self._root, request.work, "work")
        is_known = self._work is not None and self._work.id == request.work
        if not is_known:
            self._check_free()
            is_kept = (folder / JOURNAL_NAME).is_file()
            self._replace(Journal(folder, None if is_kept else self._opened(request)))
        work = self._known(request.work)
        if _body(work.journal.opened.request) != _body(request):
            raise RefusedError(f"work {request.work} was opened with other rows, options or another checkpoint")
        return work

    def _check_free(self) -> None:
        if not self._role.is_idle:
            raise RefusedError(f"{self._context.node} takes part in a run; wait until it ends, or stop it")
        if self._work is not None and self._work.is_active:
            raise RefusedError(f"{self._context.node} already leads work {self._work.id}; wait until it ends")

    def _opened(self, request: messages.OpenWork) -> Opened:
        paths, config = self._run(request.run)
        chosen = checkpoint_files.choose(paths, request.step, best=request.best)
        unknown = sorted(set(request.nodes) - config.nodes.keys())
        if unknown:
            there = ", ".join(config.nodes)
            raise InvalidInputError("--nodes", f"{unknown[0]} is not a node of {request.run}; its nodes are {there}")
        return Opened(request, chosen.step, request.nodes or tuple(config.nodes))

    def _run(self, run: str) -> tuple[RunPaths, RunFile]:
        known = self._context.db.known_run(run)
        if known is None or known.kind != "hosted":
            raise InvalidInputError("run", f"no run {run!r} with checkpoints on {self._context.node}")
        paths = RunPaths(known.directory)
        cluster = tuple(self._context.cluster.nodes)
        return paths, preflight.with_nodes(run_file.read(paths.run_file), self._context.node, cluster)

    def _replace(self, journal: Journal) -> None:
        if self._work is not None:
            self._work.journal.close()
            self._work = None
        self._use(journal)
        self._prune()

    def _use(self, journal: Journal) -> None:
        opened = journal.opened
        paths, config = self._run(opened.request.run)
        chosen = checkpoint_files.choose(paths, opened.step, best=False)
        self._work = OpenedWork(journal, config, chosen, {node: WorkingNode() for node in opened.nodes})
        if self._work.is_active:
            self._role.work = self._work.id
            if journal.is_whole:
                self._start(self._work)

    def _prune(self) -> None:
        folders = [folder for folder in self._root.iterdir() if (folder / JOURNAL_NAME).is_file()]
        newest = sorted(folders, key=lambda folder: (folder / JOURNAL_NAME).stat().st_mtime, reverse=True)
        for folder in newest[KEPT_WORKS:]:
            if self._work is None or folder.name != self._work.id:
                shutil.rmtree(folder, ignore_errors=True)

    def _receive(self, request: messages.WorkRows) -> OpenedWork:
        work = self._known(request.work)
        if work.journal.state == "receiving":
            work.journal.receive(request.offset_bytes, request.data)
            work.heard = time.monotonic()
            if work.journal.is_whole:
                self._start(work)
        return work

    def _start(self, work: OpenedWork) -> None:
        try:
            sizes = work.journal.seal()
        except InvalidInputError as error:
            self._finish(work, str(error))
            return
        kind = work.journal.opened.request.kind
        work.dealer = Dealer(sizes, SLICE_ROWS[kind], work.journal.slices(), alike=kind == "answers")
        work.heard = time.monotonic()
        work.journal.state = "running"
        if work.dealer.is_done:
            self._finish(work)

    def _finish(self, work: OpenedWork, failure: str = "") -> None:
        if failure:
            work.journal.fail(failure)
        else:
            work.journal.state = "finished"
        self._role.work = ""

    async def _end(self, request: messages.EndWork) -> messages.WorkStatus:
        """Cancel work, end this node's worker and remove the files; the other workers end when they next ask."""
        work = self._known(request.work)
        if work.is_active:
            work.journal.state = "cancelled"
        status = self._status(request, work)
        self._work, self._role.work = None, ""
        work.journal.close()
        await self._host.end(work.id)
        await asyncio.to_thread(shutil.rmtree, work.journal.folder, ignore_errors=True)
        return status

    # ------------------------------------------------------------ nodes and their workers

    async def serve(self) -> None:
        """Have a worker on every node while there is work, and deal the slices of silent nodes again."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            work = self._work
            if work is None or not work.is_active:
                continue
            if work.dealer is not None:
                self._look(work, work.dealer)
            elif time.monotonic() - work.heard > NOBODY_SECONDS:
                self._finish(work, f"no rows arrived for {NOBODY_SECONDS:.0f} s")

    def _look(self, work: OpenedWork, dealer: Dealer) -> None:
        now = time.monotonic()
        for name, node in work.nodes.items():
            if node.state == "working" and now - node.heard > SILENT_SECONDS:
                node.state, node.why = "silent", f"no message for {SILENT_SECONDS:.0f} s"
                dealer.lose(name)
            is_due = now - max(node.heard, node.asked) > AGAIN_SECONDS and not node.is_out
            if is_due and (node.asking is None or node.asking.done()):
                node.asked = now
                node.asking = asyncio.create_task(self._ask_for_worker(work, name, node))
        reasons = "; ".join(f"{name}: {node.why}" for name, node in work.nodes.items() if node.why)
        if lost := dealer.repeatedly_lost():
            rows = f"{lost.first + 1:,} to {lost.first + lost.rows:,}"
            self._finish(work, f"workers ended repeatedly while they processed rows {rows}; {reasons}")
        elif all(node.is_out for node in work.nodes.values()) or now - work.heard > NOBODY_SECONDS:
            self._finish(work, f"no node can process the rows; {reasons}")

    async def _ask_for_worker(self, work: OpenedWork, name: str, node: WorkingNode) -> None:
        opened, chosen = work.journal.opened, work.chosen
        order = messages.HostWork(
            rid=os.urandom(8).hex(),
            work=work.id,
            kind=opened.request.kind,
            run=opened.request.run,
            lead=self._context.node,
            config=run_file.to_message(work.config),
            checkpoint=chosen.step,
            files=chosen.files,
            options=opened.request.options,
        )
        try:
            if name == self._context.node:
                problem = self._host.host(order, self.deal, chosen.folder)
            else:
                problem = await self._ask_node(name, order)
        except TrainctlError as error:
            problem = str(error)
        if problem and node.state != "working":
            node.state, node.why = "silent", problem

    async def _ask_node(self, name: str, order: messages.HostWork) -> str:
        address = self._address_of(name)
        if address is None:
            return "not in the cluster file"
        async with self._context.client(address, HOST_SECONDS) as client:
            field, said, problem = (await client.reply_to(order)).problem.rpartition(": ")
            return f"{field}{said}{run_file.with_remedy(problem, field, name)}"

    async def deal(self, request: messages.SliceRequest) -> messages.SliceReply:
        """A node's report and its request for a slice. Raises sqlite3.Error if it can't be journaled; the node repeats
        it."""
        work, ended = self._work, messages.SliceReply(rid=request.rid, ended=True)
        if work is None or work.id != request.work or work.dealer is None or work.journal.state != "running":
            return ended
        node = work.nodes.get(request.node)
        if node is None:
            return ended
        node.heard = work.heard = time.monotonic()
        node.device = request.device or node.device
        if request.answered is not None:
            self._merge(work, work.dealer, request, node)
        if work.journal.state != "running":
            return ended
        if request.state == "gone":
            work.dealer.lose(request.node)
            node.failures += 1
            node.state, node.why = ("failed" if node.is_out else "silent"), request.problem
            return messages.SliceReply(rid=request.rid)
        node.state, node.why = ("starting" if request.state == "loading" else "working"), ""
        dealt = work.dealer.deal(request.node, node.heard) if request.state == "idle" else None
        if dealt is None:
            return messages.SliceReply(rid=request.rid)
        work.journal.dealt(dealt, request.node)
        rows = work.journal.rows(dealt)
        return messages.SliceReply(rid=request.rid, slice=dealt.id, first=dealt.first, rows=rows)

    def _merge(self, work: OpenedWork, dealer: Dealer, request: messages.SliceRequest, node: WorkingNode) -> None:
        assert request.answered is not None
        one = dealer.pending(request.answered)
        if one is not None:
            if len(request.results) != one.rows:
                count = f"{len(request.results)} results for {one.rows} rows"
                self._finish(work, f"{request.node} returned {count}; its trainctl version may differ")
                return
            work.journal.answered(one, request.node, request.results)
            node.failures = 0
        dealer.answer(request.node, request.answered, node.heard)
        if dealer.is_done:
            self._finish(work)


def _body(request: messages.OpenWork) -> tuple[object, ...]:
    """Return what work with the same ID must have in common."""
    same = (request.kind, request.run, request.rows, request.digest, request.step, request.best, request.nodes)
    return *same, request.options
