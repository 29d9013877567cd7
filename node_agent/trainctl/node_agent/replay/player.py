"""Plays a recording as a cluster: an agent for each node, the steps at a chosen pace into a real record.

There is no trainer behind it and it changes nothing. Every RunView it sends says that it is a recording.
"""

import asyncio
import contextlib
import secrets
import signal
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import zmq
import zmq.asyncio

from trainctl.node_agent.clients.query_source import LiveRun
from trainctl.node_agent.conductor.views import same_but_progress
from trainctl.node_agent.exporter.exporter import Exporter
from trainctl.node_agent.exporter.listen_address import ListenAddress
from trainctl.node_agent.records.run_db import RunDb
from trainctl.node_agent.replay import readings as played_machine
from trainctl.node_agent.replay.agent import PlayedAgent
from trainctl.node_agent.replay.alerts import PlayedAlerts
from trainctl.node_agent.replay.format import RecordedEvent, Recording
from trainctl.node_agent.replay.timeline import PlayedStep, Timeline
from trainctl.node_agent.transport import parent_watch
from trainctl.protocol import messages as m
from trainctl.protocol.config import addresses
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import events as e
from trainctl.protocol.record import log_format
from trainctl.protocol.record.paths import RunPaths, runtime_directory
from trainctl.protocol.record.reader import VIEW_KEY
from trainctl.protocol.wire import sockets
from trainctl.protocol.wire.json_text import encode_json

MOST_NODES = 64


class Pace(NamedTuple):
    """How fast, and how far: `rate` steps a second, or as recorded times `speed` where it is None."""

    rate: float | None = None
    speed: float = 1.0
    steps: int | None = None  # None: as many as were recorded
    begin: int = 0  # steps that are there at once
    readings: float = 1.0  # of each machine, a second


class Player:
    """`async with` binds the agents; `serve` plays until `stop`, a signal, or its parent ends."""

    def __init__(
        self, recording: Recording, folder: Path, nodes: int, pace: Pace, *, listen: str | None = None,
        seed: int = 0, faults: bool = True, watches_parent: bool = False, metrics: ListenAddress | None = None,
    ) -> None:  # fmt: skip
        """`folder` becomes the run directory, or is one whose record is continued. `listen`: of the first node; by
        default a Unix socket, as of the others. Raises InvalidInputError."""
        if not 1 <= nodes <= MOST_NODES:
            raise InvalidInputError("--nodes", f"must be from 1 to {MOST_NODES}, not {nodes}")
        if listen is not None:
            addresses.check_bind(listen, keys=False, no_keys=True)  # it shows a recording and obeys nobody
        if watches_parent:
            parent_watch.check()
        self.paths = RunPaths(folder.absolute())
        self.timeline = Timeline(recording, self.paths.directory.name, nodes, seed=seed, faults=faults)
        self._alerts = PlayedAlerts(self.timeline)
        self._pace, self._listen, self._watches_parent = pace, listen, watches_parent
        self._metrics = metrics
        self._exporter: Exporter | None = None
        self._stopping = asyncio.Event()
        self._readings = 0
        self._known: dict[int, m.RankView] = {}  # as they were last shown

    # ------------------------------------------------------------ life

    async def __aenter__(self) -> "Player":
        self.paths.logs.mkdir(parents=True, exist_ok=True)
        for rank in range(len(self.timeline.nodes)):
            self.paths.log(rank).write_text("")
            for text in self._said(rank)[:-1]:
                self._log(rank, time.time(), text)
        self._recorder = RunDb(self.paths, resumable=False)
        self._runtime = runtime_directory(self.paths.directory)
        self._context, self._plain = zmq.asyncio.Context(), zmq.Context()
        for context in (self._context, self._plain):
            context.set(zmq.MAX_SOCKETS, 4096)
        try:
            self._exporter = Exporter(self._metrics) if self._metrics is not None else None
            self.agents = [self._agent(number, node) for number, node in enumerate(self.timeline.nodes)]
        except InvalidInputError:
            self._close()
            raise
        self._begin()
        if self._exporter is not None:
            self._exporter.attend(self.agents[0], self.agents[0].publisher)
        return self

    @property
    def metrics_url(self) -> str | None:
        """Where Prometheus is served for the first node, None if it isn't."""
        return self._exporter.url if self._exporter is not None else None

    def _agent(self, number: int, node: str) -> PlayedAgent:
        control = sockets.new_socket(self._context, zmq.ROUTER, control=True)
        live = sockets.new_socket(self._plain, zmq.XPUB)
        listen = self._listen if number == 0 and self._listen else f"ipc://{self._runtime}/{node}.sock"
        return PlayedAgent(node, self, control, live, listen, secrets.token_hex(8), version("trainctl"))

    async def __aexit__(self, *_: object) -> None:
        self._close()

    def _said(self, rank: int) -> list[str]:
        """What the recorded trainer wrote; its last line is of its end."""
        known = self.timeline.recording.ranks
        return known[rank % len(known)].log.splitlines()

    def _log(self, rank: int, at: float, text: str) -> None:
        """A line more in a rank's log, in their form if it isn't."""
        with self.paths.log(rank).open("a") as log:
            log.write(f"{text if log_format.read(text).level else log_format.write(at, 'INFO', text)}\n")

    def _close(self) -> None:
        if self._exporter is not None:
            self._exporter.close()
        self._recorder.close()
        self._context.destroy(linger=0)
        self._plain.destroy(linger=0)
        with contextlib.suppress(OSError):
            self._runtime.rmdir()

    def stop(self) -> None:
        self._stopping.set()

    async def serve(self) -> None:
        """Play, and answer until asked to stop; an error in one of these ends it and is raised."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.stop)
        work: list[Any] = [agent.serve() for agent in self.agents]
        work += [self._beat(), self._stopping.wait()] + ([parent_watch.let_go()] if self._watches_parent else [])
        tasks = [asyncio.ensure_future(item) for item in work]
        playing = asyncio.ensure_future(self._play())
        try:
            done, _ = await asyncio.wait([*tasks, playing], return_when=asyncio.FIRST_COMPLETED)
            if done == {playing} and playing.exception() is None:  # the end was played: what there is stays to be seen
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (*tasks, playing):
                task.cancel()
            await asyncio.gather(*tasks, playing, return_exceptions=True)

    # ------------------------------------------------------------ the run

    @property
    def live(self) -> LiveRun:
        return LiveRun(self._view, self._last, self._parts, self._alerts.view)

    def peers_of(self, node: str) -> tuple[m.PeerView, ...]:
        return tuple(
            m.PeerView(
                node=agent.node, address=agent.address, live_address=agent.live_address,
                state="silent" if agent.mute else "connected", since_at=self.started_at,
                why="unreachable" if agent.mute else "",
            )
            for agent in self.agents
            if agent.node != node
        )  # fmt: skip

    def _begin(self) -> None:
        """The state before the first step that is played: that of the record, with the steps that are there at once."""
        last = self._recorder.last_state()
        self._last, self._parts = last.step, last.rank_steps
        first = last.step.step if last.step is not None else 0
        ahead = [self._seconds(step) for step in range(first + 1, self._pace.begin + 1)]
        self.started_at = at = time.time() - sum(ahead)
        self._view = self._make_view(first, at)
        for step, seconds in enumerate(ahead, first + 1):
            at += seconds
            self._take(self.timeline.played_step(step, at), at)
        self._keep_view()
        self._read()

    def _seconds(self, step: int) -> float:
        """How long a step is played."""
        if self._pace.rate is not None:
            return 1 / self._pace.rate
        return self.timeline.step_seconds(step) / self._pace.speed

    @property
    def _steps(self) -> int:
        return self._pace.steps or self.timeline.length

    async def _play(self) -> None:
        due = time.monotonic()
        for step in range(self._view.step + 1, self._steps + 1):
            due = max(due + self._seconds(step), time.monotonic() - 1.0)
            await asyncio.sleep(due - time.monotonic())
            self._turn(step)
        for rank in range(len(self.agents)):
            for line in self._said(rank)[-1:]:
                self._log(rank, time.time(), line)
        ended = e.RunStateChanged("", "finished", f"all {self._steps:,} steps of the recording were played")
        self._happen(RecordedEvent(self._steps, "good", "player", ended), time.time())
        self._show(msgspec.structs.replace(self._view, state="finished"))

    def _turn(self, step: int) -> None:
        """One step: who can be reached, what is kept, and what is published."""
        script, lead, at = self.timeline.script, self.agents[0], time.time()
        for rank, agent in enumerate(self.agents):
            agent.mute = script.is_lost(rank, step) or (rank == 0 and script.is_away(step))
        if step == script.away[1] + 1:
            lead.restart(secrets.token_hex(8))
        if not lead.mute:
            self._take(self.timeline.played_step(step, at), at)

    def _take(self, played_step: PlayedStep, at: float) -> None:
        """Keep and publish a step."""
        self._recorder.commit(played_step.step, played_step.parts, at)
        self._last, self._parts = played_step.step, played_step.parts
        if played_step.held_out is not None:
            self._recorder.evaluation(
                played_step.step.step, at, played_step.held_out, played_step.step.weight or 0.0, 0.5
            )
        before, after = self._view, self._make_view(played_step.step.step, at)
        self.agents[0].publish(played_step.step)
        for part in played_step.parts:
            self.agents[0].publish(part)
        for event in played_step.events:
            self._happen(event, at)
        for rank, text in self.timeline.script.log_lines(played_step.step.step):
            self._log(rank, at, text)
        self._watch(played_step, after, at)
        self._view = after
        if not same_but_progress(before, after):
            self._show(after)

    def _watch(self, played_step: PlayedStep, view: m.RunView, at: float) -> None:
        """What the step raises and clears of alerts."""
        silent = {agent.node: "unreachable" for agent in self.agents if agent.mute}
        before = self._alerts.view
        for event in self._alerts.take(played_step, view, silent, at):
            self._happen(event, at)
        if self._alerts.view != before:
            self.agents[0].publish(self._alerts.view)

    def _show(self, view: m.RunView) -> None:
        self._view = view
        self._keep_view()
        self.agents[0].publish(view)

    def _keep_view(self) -> None:
        self._recorder.set_meta(VIEW_KEY, encode_json(self._view), own=True)

    def _happen(self, event: RecordedEvent, at: float) -> None:
        kept = self._recorder.event(
            at, event.data, event.severity, event.by, step=event.step or None,
            generation=self.timeline.generation(max(event.step, 1)), verb=event.verb, outcome=event.outcome,
        )  # fmt: skip
        self.agents[0].publish(kept)

    def _make_view(self, step: int, at: float) -> m.RunView:
        timeline, recording = self.timeline, self.timeline.recording
        now = timeline.recorded(max(step, 1))
        batch = timeline.global_batch
        held = timeline.held_out(step)
        return m.RunView(
            run=timeline.run, name=recording.name, state="running", lead=timeline.nodes[0], engine=recording.engine,
            generation=timeline.generation(max(step, 1)), step=step, steps=self._steps, plan_version=now.plan_version,
            global_batch=batch, samples=recording.samples, cursor=step * batch, learning_rate=now.learning_rate,
            started_at=self.started_at, ranks=self._ranks(step, at), directory=str(self.paths.directory),
            eval_step=held[0] if held else None, eval_loss=held[1] if held else None, mixed=recording.mixed,
            recording=True,
        )  # fmt: skip

    def _ranks(self, step: int, at: float) -> tuple[m.RankView, ...]:
        """A rank that is in the state it was in came to it when it did."""
        known = self._known
        self._known = {
            rank.rank: msgspec.structs.replace(rank, since_at=known[rank.rank].since_at)
            if rank.rank in known and known[rank.rank].state == rank.state
            else rank
            for rank in self.timeline.ranks(step, at)
        }
        return tuple(self._known.values())

    # ------------------------------------------------------------ telemetry

    async def _beat(self) -> None:
        period = 1 / max(self._pace.readings, 0.1)
        due = time.monotonic()
        while True:
            due = max(due + period, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            self._read()
            for rank, agent in enumerate(self.agents):
                age = time.time() - self._last.committed_at if rank == 0 and self._last is not None else None
                agent.beat(m.Heartbeat(node=agent.node, at=time.time(), step_age_seconds=age, loop_lag_seconds=0.0))
            if self._exporter is not None:
                self._exporter.look(None)

    def _read(self) -> None:
        """A reading of every machine."""
        self._readings += 1
        for rank, agent in enumerate(self.agents):
            step, timeline = self._view.step, self.timeline
            agent.host = played_machine.reading(
                timeline.recording, timeline.script, agent.node, rank, self._readings, step, time.time()
            )
            agent.publish(agent.host)
            if rank == 0 or not agent.mute:
                self._recorder.host(agent.host)


@contextlib.contextmanager
def passing_folder(name: str) -> Iterator[Path]:
    """A run directory that goes when the recording has been played."""
    with tempfile.TemporaryDirectory(prefix="trainctl-recording-") as made:
        yield Path(made) / f"{name}-recording"
