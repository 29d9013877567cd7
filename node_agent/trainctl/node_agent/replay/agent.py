"""One node of a played recording: real sockets and the real handlers of requests over the record that is played."""

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any, Protocol

import zmq

from trainctl.node_agent.clients import queries
from trainctl.node_agent.clients.doctor import Doctor
from trainctl.node_agent.clients.presence import Presence
from trainctl.node_agent.clients.query_source import LiveRun
from trainctl.node_agent.transport import bind
from trainctl.node_agent.transport.publisher import Publisher
from trainctl.protocol import messages as m
from trainctl.protocol.config.addresses import live_beside
from trainctl.protocol.errors import InvalidInputError, ProtocolError, VersionError
from trainctl.protocol.record.paths import RunPaths, state_root
from trainctl.protocol.security.keys import default_folder
from trainctl.protocol.wire import codec, sockets

NO_RUNS = "an agent that plays a recording cannot start runs"


class Played(Protocol):
    """What a node sees of the recording that is played."""

    paths: RunPaths
    started_at: float

    @property
    def live(self) -> LiveRun: ...
    def peers_of(self, node: str) -> tuple[m.PeerView, ...]: ...


class PlayedAgent:
    """Answers and publishes as an agent does, but for commands, which it refuses. While `mute` it does neither."""

    def __init__(
        self, node: str, played: Played, control: Any, live: Any, listen: str, boot: str, version: str
    ) -> None:  # fmt: skip
        """Binds both sockets. Raises InvalidInputError if `listen` can't be."""
        self.node, self._played, self._control, self._live = node, played, control, live
        self.address = bind.bind(control, listen)
        self.live_address = bind.bind(live, live_beside(listen))
        self.publisher, self.presence = Publisher(live, boot), Presence()
        self.doctor = Doctor(node, default_folder(), state_root())
        self.mute = False
        self.host: m.HostReading | None = None
        self._version = version

    def restart(self, boot: str) -> None:
        """As an agent that was started again: its messages are numbered from 1."""
        self.publisher = Publisher(self._live, boot, self.publisher.listeners)

    def publish(self, message: m.Live) -> None:
        if not self.mute:
            self.publisher.publish(message)

    def beat(self, beat: m.Heartbeat) -> None:
        if not self.mute:
            self.publisher.beat(beat)

    async def serve(self) -> None:
        """Answer until cancelled."""
        pending: set[asyncio.Task[None]] = set()
        while True:
            frames = await sockets.receive(self._control)
            if self.mute or len(frames) != 2:
                continue
            task = asyncio.create_task(self._take(*frames))
            pending.add(task)
            task.add_done_callback(pending.discard)

    async def _take(self, identity: bytes, frame: bytes) -> None:
        try:
            reply = await self._answer(codec.decode_request(frame))
        except ProtocolError as error:
            code: Any = "version" if isinstance(error, VersionError) else "malformed"
            reply = m.Refusal(rid=codec.peek_rid(frame), code=code, text=str(error))
        with contextlib.suppress(zmq.Again, zmq.ZMQError):  # who asked has gone
            await self._control.send_multipart([identity, codec.encode(reply)], zmq.DONTWAIT)

    async def _answer(self, request: m.ClientRequest) -> m.AgentReply:
        if isinstance(request, m.Command):
            view = self._played.live.view
            why = view.why_not(request.verb) or NO_RUNS
            return m.CommandReply(rid=request.rid, id=request.id, state="rejected", reason=why, run=view.run)
        if not isinstance(request, m.Query):
            return m.Refusal(rid=request.rid, code="busy", text=NO_RUNS)
        return await queries.reply(request, self)

    # ------------------------------------------------------------ what the handlers see

    keys = None
    """Played agents are on this machine only."""

    def policy_statuses(self, directory: Path) -> None:
        """A recording has no policies."""

    def live_facts(self, directory: Path) -> None:
        """A recording is judged by its record alone."""

    def refusals(self, limit: int) -> tuple[m.Refused, ...]:
        return ()

    def now(self) -> float:
        return time.time()

    def node_view(self) -> m.NodeView:
        return m.NodeView(
            node=self.node, boot=self.publisher.boot, address=self.address, live_address=self.live_address,
            host=self.host, version=self._version,
        )  # fmt: skip

    def peer_views(self) -> tuple[m.PeerView, ...]:
        return self._played.peers_of(self.node)

    def address_of(self, node: str) -> str | None:
        return next((peer.address for peer in self.peer_views() if peer.node == node), None)

    def live_run(self, directory: Path) -> LiveRun | None:
        return self.live_runs()[0] if directory == self._played.paths.directory else None

    def live_runs(self) -> tuple[LiveRun, ...]:
        return (self._played.live._replace(alerts=self.alerts()),)

    def run_directory(self, run: str | None) -> Path | None:
        directory = self._played.paths.directory
        return directory if run in (None, directory.name) else None

    def run_summaries(self) -> list[tuple[str, str, str, m.RunState, float]]:
        view = self._played.live.view
        return [(view.run, view.name, view.directory, view.state, self._played.started_at)]

    async def rename_run(self, run: str, name: str) -> None:
        raise InvalidInputError("run", "it is a recording, which has the name that it was recorded with")

    async def remove_run(self, run: str) -> int:
        raise InvalidInputError("run", "it is a recording: remove its file")

    async def test_hooks(self, rid: str) -> tuple[m.HookOutcome, ...]:
        return ()

    def alerts(self) -> m.Alerts:
        """What the lead reports is its own: a follower has raised nothing."""
        told = self._played.live.alerts
        return told if told is not None and told.node == self.node else m.Alerts(node=self.node)

    def led_elsewhere(self, run: str) -> str | None:
        return None

    def ended_as(self, run: str) -> tuple[m.RunState, str]:
        view = self._played.live.view
        return view.state, view.reason
