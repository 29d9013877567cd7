"""One run on this agent: carries the conductor's decisions out to the record, the trainers and the clients."""

import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from trainctl.node_agent import decisions as d
from trainctl.node_agent import views
from trainctl.node_agent.conductor import Conductor
from trainctl.node_agent.host import TrainerHost
from trainctl.node_agent.publisher import Publisher
from trainctl.node_agent.recorder import RunRecorder
from trainctl.node_agent.settings import Durable
from trainctl.node_agent.trainer_link import TrainerLink
from trainctl.protocol import messages as m
from trainctl.protocol.paths import RunPaths
from trainctl.protocol.statuspage import read_status

DURABLE_KEY, VIEW_KEY = "conductor", "view"
AWAY_SECONDS = 5.0
"""A trainer says a word every second, also while it computes; after this long without one it is shown as away."""


def settings_key(plan_version: int) -> str:
    """Where the record keeps the settings of a plan version."""
    return f"settings-{plan_version}"


CommandEnding = Callable[[d.CommandEnded], Awaitable[None]]


class Session:
    """The thin edge around one Conductor. Everything happens on the agent's event loop, one event at a time."""

    def __init__(
        self,
        conductor: Conductor,
        paths: RunPaths,
        recorder: RunRecorder,
        host: TrainerHost,
        link: TrainerLink,
        publisher: Publisher,
        started_at: float,
        on_command_end: CommandEnding,
        saw: Callable[[m.Generation], object],
    ) -> None:
        """`saw` is told each generation before it is used; `on_command_end` each command's outcome."""
        self.conductor, self.paths, self.recorder, self.started_at = conductor, paths, recorder, started_at
        self._host, self._link, self._publisher, self._on_command_end = host, link, publisher, on_command_end
        state = recorder.last_state()
        self.last_step: m.StepCommitted | None = state.step
        self.rank_steps: dict[int, m.RankStep] = {part.rank: part for part in state.rank_steps}
        self.last_commit_monotonic = time.monotonic()
        self.ended: d.Ended | None = None
        self._kept_durable: Durable | None = None
        self._problem: str | None = None
        self._saw = saw
        self._pids: dict[int, int | None] = {}
        self._heard: dict[int, float] = {}  # by time.monotonic
        self._away: dict[int, str] = {}  # why, for ranks that have not been heard of lately
        self.view = self._look()
        self._keep_view()

    @property
    def run(self) -> str:
        return self.conductor.run

    # ------------------------------------------------------------ trainers

    def start_trainers(self, resume_from: Path | None) -> None:
        """Start every rank of this node under its keeper."""
        for rank, setting in self.conductor.durable.settings.ranks.items():
            argv = [
                sys.executable, "-m", "trainctl.trainer", "--run-directory", str(self.paths.directory),
                "--run", self.run, "--node", setting.node, "--rank", str(rank), "--endpoint", self._link.endpoint,
            ]  # fmt: skip
            if resume_from is not None:
                argv += ["--resume-from", str(resume_from)]
            env = {**os.environ, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
            self._host.start(self.paths, rank, argv, env)

    async def watch_trainers(self) -> None:
        """Notice the ranks whose process has ended."""
        for rank, state in self.conductor.ranks.items():
            if state.ended:
                continue
            hosted = self._host.find(self.paths, rank)
            self._pids[rank] = hosted.pid if hosted is not None else None
            if hosted is None:
                status = self._host.exit_status(self.paths, rank)
                await self.feed(d.RankEnded(rank, status == 0, self._describe(rank, status)))
            else:
                self._look_away(rank)

    def _look_away(self, rank: int) -> None:
        """Notice a trainer that lives and says nothing, and where it was by its status page."""
        heard = self._heard.setdefault(rank, time.monotonic())
        if time.monotonic() - heard < AWAY_SECONDS or self.conductor.ready(rank) is None:
            self._away.pop(rank, None)
        elif rank not in self._away:
            page = read_status(self.paths.status_page(rank))
            self._away[rank] = f"silent in {page.phase} of step {page.step}" if page else "silent"

    def _describe(self, rank: int, status: int | None) -> str:
        how = (
            "is gone" if status is None else f"was ended by signal {-status}" if status < 0 else f"exited with {status}"
        )
        tail = [line for line in self._host.log_tail(self.paths, rank, 20) if line.strip()]
        return f"{how}: {tail[-1].strip()[:300]}" if tail else how

    # ------------------------------------------------------------ events and decisions

    async def feed(self, event: d.Input) -> None:
        """Give the conductor an event and carry out what it decides."""
        if isinstance(event, m.Message):
            self._heard[event.rank] = time.monotonic()
            self._away.pop(event.rank, None)
        for decision in self.conductor.handle(event, time.monotonic()):
            await self._carry_out(decision)
        self._publish_view()

    async def _carry_out(self, decision: d.Decision) -> None:
        match decision:
            case d.Issue(plan, durable, held):
                self._keep_durable(durable)
                self.recorder.plan(plan, time.time(), durable=bool(plan.commands))
                if not held:
                    await self._send_plan(plan)
            case d.Persist(durable):
                self._keep_durable(durable)
            case d.Tell(rank, message):
                await self._tell(rank, message)
            case d.Commit(step, first):
                self._commit(step, first)
            case d.RankDone(part):
                self._add_part(part)
            case d.Evaluated(step, loss, weight, seconds):
                self.recorder.evaluation(step, time.time(), loss, weight, seconds)
            case d.CommandEnded():
                await self._on_command_end(decision)
            case d.Happened():
                self.note(decision)
            case d.Ended():
                self.ended = decision

    async def _send_plan(self, plan: m.StepPlan) -> None:
        for work in plan.work:
            await self._link.send(work.rank, plan)  # a trainer that is away is fenced when it is back

    async def _tell(self, rank: int, message: m.Form | m.Fence | m.Leave) -> None:
        if not await self._link.send(rank, message) and isinstance(message, m.Leave):
            self._host.kill(self.paths, rank)  # it has not attached yet, so there is nothing in it to save

    def _commit(self, step: m.StepCommitted, first: m.RankStep) -> None:
        self.recorder.commit(step, [first], step.committed_at)
        self.last_step, self.rank_steps[first.rank] = step, first
        self.last_commit_monotonic = time.monotonic()
        self._publisher.publish(step)
        self._publisher.publish(first)

    def _add_part(self, part: m.RankStep) -> None:
        assert self.last_step is not None
        self.recorder.commit(self.last_step, [part], self.last_step.committed_at)
        self.rank_steps[part.rank] = part
        self._publisher.publish(part)

    def note(self, happened: d.Happened) -> None:
        """Keep and publish an event of this run."""
        event = self.recorder.event(
            time.time(),
            happened.kind,
            happened.severity,
            happened.by,
            happened.text,
            step=happened.step,
            generation=self.conductor.durable.generation,
            command=happened.command,
            verb=happened.verb,
            before=happened.before,
            after=happened.after,
            outcome=happened.outcome,
        )
        self._publisher.publish(event)

    # ------------------------------------------------------------ keeping

    def _keep_durable(self, durable: Durable) -> None:
        """Every plan has a seq of its own in the journal, so what differs by no more than that is already kept."""
        durable = msgspec.structs.replace(durable, seq=0)
        before = self._kept_durable
        if before is None or durable.settings != before.settings:
            key = settings_key(durable.settings.plan_version)
            self.recorder.set_meta(key, msgspec.json.encode(durable.settings).decode())
        if before is None or durable.generation != before.generation:
            self._saw(durable.generation)
        if durable != before:
            self.recorder.set_meta(DURABLE_KEY, msgspec.json.encode(durable).decode())
            self._kept_durable = durable

    def _look(self) -> m.RunView:
        before = {view.rank: view for view in self.view.ranks} if hasattr(self, "view") else {}
        ranks = tuple(
            views.rank_view(
                self.conductor, rank, self._pids.get(rank), self._away.get(rank, ""), before.get(rank), time.time()
            )
            for rank in sorted(self.conductor.ranks)
        )
        return views.run_view(self.conductor, self.started_at, str(self.paths.directory), ranks)

    def _publish_view(self) -> None:
        before, self.view = self.view, self._look()
        if not views.same_but_progress(before, self.view):
            self._keep_view()
            self._publisher.publish(self.view)

    def _keep_view(self) -> None:
        self.recorder.set_meta(VIEW_KEY, msgspec.json.encode(self.view).decode())

    def check_record(self) -> None:
        """Try again what the disk refused, and say once when its state changes."""
        self.recorder.retry()
        problem = self.recorder.problem
        if problem != self._problem:
            self._problem = problem
            text, severity = (problem, "error") if problem else ("the record is being written again", "good")
            self.note(d.Happened("record", severity, "auto", text, self.conductor.progress.step))  # type: ignore[arg-type]

    def close(self) -> None:
        self._keep_view()
        self.recorder.close()
        self._link.forget(self.run)
