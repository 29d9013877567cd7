"""The agent: binds the sockets, passes the loop's events to its parts, and survives any input."""

import asyncio
import contextlib
import dataclasses
import re
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from trainctl.node_agent.alerts.service import AlertService
from trainctl.node_agent.auth.access_list import REQUESTS, Audit
from trainctl.node_agent.auth.authenticator import Authenticator, Revocation, new_live_socket
from trainctl.node_agent.calibration.calibration_host import CalibrationHost
from trainctl.node_agent.calibration.link_meter import LinkMeter
from trainctl.node_agent.calibration.stored_profiles import StoredProfiles
from trainctl.node_agent.clients.query_context import QueryContext
from trainctl.node_agent.clients.router import Replies, Router
from trainctl.node_agent.conductor.events import Happened
from trainctl.node_agent.copies.checkpoint_copies import CheckpointCopies
from trainctl.node_agent.guests.guest_runs import GuestRuns
from trainctl.node_agent.guests.guest_socket import GuestSocket
from trainctl.node_agent.readings import sleep_clock
from trainctl.node_agent.readings.host import HostReader, ProcessMeter
from trainctl.node_agent.records import run_folders
from trainctl.node_agent.records.agent_db import AgentDb
from trainctl.node_agent.roles.drains import NodeDrain
from trainctl.node_agent.roles.follower import Follower
from trainctl.node_agent.roles.lead import Lead
from trainctl.node_agent.roles.rank_hosting import RankHosting
from trainctl.node_agent.roles.role import AgentRole
from trainctl.node_agent.runs import preflight
from trainctl.node_agent.runs.context import AgentContext
from trainctl.node_agent.services.managed_service import GRACE_SECONDS
from trainctl.node_agent.services.supervision import SpotNotice
from trainctl.node_agent.trainers.ipc import TrainerLink
from trainctl.node_agent.trainers.supervisor import TrainerSupervisor
from trainctl.node_agent.transport import bind
from trainctl.node_agent.transport.publisher import Publisher
from trainctl.node_agent.work.reference import ReferenceLead
from trainctl.node_agent.work.work_lead import WorkLead
from trainctl.node_agent.work.worker_host import WorkerHost
from trainctl.protocol import messages
from trainctl.protocol.config import names
from trainctl.protocol.config.addresses import ListenAddress, live_beside
from trainctl.protocol.config.alert_rules import AlertHooks
from trainctl.protocol.config.cluster_file import Cluster
from trainctl.protocol.config.names import agent_address, node_directory, runtime_directory
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.errors import InvalidInputError, installing
from trainctl.protocol.machine.discovery import Advertisement
from trainctl.protocol.record.paths import runs_directory
from trainctl.protocol.security.keys import KeyFolder
from trainctl.protocol.wire import sockets
from trainctl.protocol.wire.sockets import end_tasks

BEAT_SECONDS = 1.0
PROCESSES_SECONDS = 5.0
"""Seconds between looks at which processes the agent's trainers have."""
WATCH_SECONDS = 0.25
"""Seconds between looks at whether trainers live and whether commands have expired."""
STEADY_LOOKS = 4
"""Looks of which all but one are left out while a run goes steadily and no trainer has ended."""
FAREWELL_SECONDS = 3.0
"""Seconds an agent that watches its parent still answers after its run has ended."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of an agent beside its work."""

    watches_parent: bool = False  # it ends with its standard input, and its run
    hooks: AlertHooks | None = None  # called about alerts in place of what the cluster file names
    metrics: ListenAddress | None = None  # where Prometheus is served
    advertise: bool = False  # on the local network
    keys: KeyFolder | None = None  # this machine's; None: the default folder's
    no_keys: bool = False  # over TCP on loopback too, so that every user of the machine may connect
    drain_on_term: bool = False  # SIGTERM has this node's rank leave its run first
    grace_seconds: float = GRACE_SECONDS  # for that
    trainers: TrainerSupervisor | None = None  # that host its ranks; None: processes of this machine
    reader: HostReader | None = None  # of its machine; None: of this one
    spot_notice: tuple[str, ...] = ()  # command whose exit status 0 has this node's rank leave its run; empty: none


class Agent:
    """One node's agent. `async with` binds it; `serve` runs until `stop` is called or a signal comes.

    One that watches its parent also leaves once its standard input has ended and no run is active.
    """

    def __init__(
        self,
        node: str,
        listen: str | None = None,
        live: str | None = None,
        state_root: Path | None = None,
        cluster: Cluster = Cluster(),  # noqa: B008  frozen
        options: Options = Options(),
    ) -> None:
        """`listen`: by default a Unix socket in the node's runtime folder. Raises InvalidInputError for what can't be
        had, and then nothing is made."""
        if not re.fullmatch(names.NAME_PATTERN, node):
            raise InvalidInputError(
                "--name", f"{node!r} is not a node name: use lower-case letters, digits, '.', '_' and '-'"
            )
        if options.watches_parent:
            bind.check_parent()
        self._options = options
        self.directory = node_directory(node, state_root)
        listen = bind.numeric(listen if listen is not None else agent_address(self.directory))
        live = bind.numeric(live) if live is not None else live_beside(listen)
        self._keys = options.keys or KeyFolder()
        self._uses_keys = bind.needs_keys(node, listen, live, cluster, self._keys, no_keys=options.no_keys)
        self.node, self._cluster, self._wanted = node, cluster, (listen, live)
        self._authenticator: Authenticator | None = None
        self._exporter: Any = None
        self._runtime = partial(runtime_directory, self.directory)
        self._files = bind.SocketFiles(self._runtime)
        self._stopping = asyncio.Event()
        self.looks: list[Callable[[str, str], None]] = []
        """Called every second with the address at which this agent can be reached now, and with its guests' socket."""

    # ------------------------------------------------------------ life

    async def __aenter__(self) -> "Agent":
        self._lock = bind.FolderLock(self.directory)
        runs = runs_directory(self.directory)
        self._db = AgentDb(self.directory / "agent.db", partial(run_folders.add_runs, self.node, runs))
        self._context = zmq.asyncio.Context()
        self._audit = Audit(self._db)
        try:
            live = self._bind()
        except InvalidInputError:
            self._close()
            raise
        self._assemble(live)
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self.stop)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._terminate)
        return self

    def _terminate(self) -> None:
        """The first SIGTERM may drain the node; a second one ends the agent at once."""
        if self._options.drain_on_term and not self._drain.exits:
            self._drain.begin("its agent was terminated", exits=True)
        else:
            self.stop()

    def _bind(self) -> zmq.asyncio.Socket:
        if self._uses_keys:
            self._authenticator = Authenticator(self._keys, self._cluster, self.node, self._audit)
            self._authenticator.open(self._context)
        self._control = sockets.new_socket(self._context, zmq.ROUTER, control=True)
        if self._authenticator is not None:
            sockets.secure_server(self._control, self._authenticator.pair, REQUESTS)
            self._authenticator.watch(self._context, self._control, REQUESTS)
        self.address = bind.bind(self._control, self._wanted[0])
        live: zmq.asyncio.Socket = new_live_socket(self._context, self._authenticator)
        self.live_address = bind.bind(live, self._wanted[1])
        self._link = TrainerLink(self._context, self._runtime)
        self._files.keep(self.address, lambda: self._control)
        self._files.keep(self.live_address, lambda: self.publisher.socket)
        self._exporter = _exporter(self._options.metrics)
        return live

    def _assemble(self, live: zmq.asyncio.Socket) -> None:
        boot = secrets.token_hex(8)
        self.publisher = Publisher(live, boot)
        self._supervisor = self._options.trainers or TrainerSupervisor()
        context = AgentContext(
            self.node,
            boot,
            self.address,
            self.live_address,
            self.directory,
            self._cluster,
            self._context,
            self._db,
            self._supervisor,
            self._link,
            self.publisher,
            self._authenticator,
        )
        hooks = self._cluster.alerts if self._options.hooks is None else self._options.hooks
        self._alerts = AlertService(self.node, hooks, self.publisher, self._note_of_guest)
        replies = Replies(self._control, self._authenticator)
        self._role = AgentRole()
        self._drain = NodeDrain(self._role, self._options.grace_seconds, lambda: self._copies.is_busy)
        self._copies = CheckpointCopies(runs_directory(self.directory), self._heard)
        self._hosting = RankHosting(context, self._role)
        self._guests = GuestRuns(
            self.node,
            self.directory,
            self._db,
            self.publisher.publish,
            is_calibrating=lambda: self._role.is_calibrating,
            leaves=self._alerts.guest_left,
        )
        self._guest_socket = GuestSocket(self._runtime, self.directory.parent, self._guests)
        self._lead = Lead(
            context,
            self._role,
            self._hosting,
            self._alerts,
            replies.reply,
            guests=self._guests,
            references=ReferenceLead(self.node),
        )
        self._follower = Follower(context, self._role, self._hosting, self._lead, replies.reply)
        self._query_context = QueryContext(context, self._lead, self._follower, self._guests, self._alerts)
        self._worker_host = WorkerHost(context, self._role, self._query_context.address_of)
        self._work_lead = WorkLead(context, self._role, self._worker_host, self._query_context.address_of)
        self._profiles = StoredProfiles(self.node, self.directory)
        links = LinkMeter(context, self._role, self._query_context.address_of)
        self._calibrations = CalibrationHost(
            context, self._role, self._profiles, links, self._guests.training, self._resolved
        )
        self._router = Router(replies, self._query_context, self._work_lead, self._calibrations)
        self._reader = self._options.reader or HostReader(self.node, self.directory)
        self._processes = ProcessMeter()
        self._advertisement = Advertisement(self.node, self.address, context.version, self.public_key)
        if self._exporter is not None:
            self._exporter.attend(self._query_context, self.publisher)

    @property
    def public_key(self) -> str:
        """Return the agent's public key as clients know it; empty: it uses none."""
        return self._authenticator.pair.public if self._authenticator is not None else ""

    @property
    def guest_socket(self) -> str:
        """Return the path of the socket for training loops of this machine; empty while it can't listen there."""
        return self._guest_socket.path

    @property
    def metrics_url(self) -> str | None:
        """The address at which Prometheus is served, None if it isn't."""
        return self._exporter.url if self._exporter is not None else None

    async def __aexit__(self, *_: object) -> None:
        self._query_context.doctor.close()
        self._query_context.record_copies.close()
        await self._calibrations.close()
        await self._worker_host.close()
        self._work_lead.close()
        self._lead.close()
        self._hosting.close()
        self._guests.close()
        self._link.close()
        if self._role.is_idle or self._lock.is_taken:  # the latter: the other agent listens there from now on
            self._link.files.remove()
        self._reader.close()
        self._close()

    def _close(self) -> None:
        if self._exporter is not None:
            self._exporter.close()
        self._audit.flush(force=True)
        self._db.close()
        if self._authenticator is not None:
            self._authenticator.close()
        self._context.destroy(linger=0)
        self._files.remove()
        self._lock.close()

    @property
    def doing(self) -> str:
        """A line for the agent's supervisor."""
        session, followed = self._lead.session, self._follower.followed
        run = f"conducts {session.view.run} ({session.view.state})" if session is not None else "idle"
        if session is None and followed is not None:
            run = f"hosts a rank of {followed.run} for {followed.known.lead}"
        return f"{self.node} at {self.address}: {run}"

    def stop(self) -> None:
        """Leave `serve`. Trainers stay as they are, for the next agent of this node."""
        self._stopping.set()

    async def serve(self) -> None:
        """Answer, lead and publish until asked to stop; an error in one of these ends the agent and is raised."""
        await self._take_up_run()
        workers = [self._router.serve, self._router.serve_commands]
        workers += [self._serve_trainers, self._beat, self._watch]
        workers += [self._work_lead.serve, self._drain.serve, self._copies.serve, self._guest_socket.serve]
        workers += [self._lead.serve, self._follower.serve, self._lead.peers.serve, self._alerts.hooks.serve]
        workers += [self._watch_parent] if self._options.watches_parent else []
        workers += [SpotNotice(spot, self._drain).serve] if (spot := self._options.spot_notice) else []
        workers += [self._advertisement.serve] if self._options.advertise else []
        workers += [self._authenticator.serve, self._guard] if self._authenticator is not None else []
        tasks = [asyncio.create_task(worker(), name=worker.__name__) for worker in workers]
        stopping = asyncio.create_task(self._stopping.wait(), name="stopping")
        try:
            done, _ = await asyncio.wait([*tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await end_tasks([*tasks, stopping])

    async def _take_up_run(self) -> None:
        """Go on with the runs that were active when the last agent of this node ended: one hosted, any of others."""
        run_folders.remove_unstarted(runs_directory(self.directory), lambda run: self._db.known_run(run) is not None)
        for known in reversed(self._db.runs()):
            if known.state in messages.ACTIVE_RUN_STATES and known.kind != "hosted":
                self._guests.take_up(known)
        for known in self._db.runs():
            if known.state not in messages.ACTIVE_RUN_STATES or known.kind != "hosted" or not self._role.is_idle:
                continue
            followed = self._db.followed(known.run)
            if followed is None:
                await self._lead.take_up(known)
                continue
            try:
                self._hosting.adopt(known, followed)
            except InvalidInputError as error:
                self._db.set_run_state(known.run, "failed", str(error))
        if self._lead.session is None and not self._role.is_starting:
            await self._lead.journal.fail_open()
        self._worker_host.clean_up()
        self._work_lead.take_up()

    async def _resolved(self, config: RunFile) -> RunFile:
        """Return a run file as a run of all its nodes would have it. Raises InvalidInputError."""
        config = preflight.with_nodes(config, self.node, tuple(self._cluster.nodes))
        resolved, _ = await self._lead.launch.resolved(config)
        return resolved

    async def _guard(self) -> None:
        assert self._authenticator is not None
        revocation = Revocation(self._authenticator, self._audit, self.publisher, self._context, self._lead.peers.renew)
        await revocation.serve(self.live_address)

    # ------------------------------------------------------------ trainers

    async def _serve_trainers(self) -> None:
        while True:
            received = await self._link.receive()
            if received is None:
                continue
            message, returned = received
            if isinstance(message, messages.WorkAsk):
                if not self._worker_host.heard(message):
                    await self._link.send(message.rank, messages.Leave(run=message.run, reason="this work has ended"))
                continue
            if isinstance(message, messages.Report):
                self._profiles.show(message)
            else:
                message = self._with_profile(message)
            if isinstance(message, messages.Checkpointed | messages.Report) and message.checkpoint is not None:
                self._copies.look()
            if not await self._heard(message, returned=returned):
                # A trainer of a run that no one leads any more: it would wait forever.
                await self._link.send(
                    message.rank, messages.Leave(run=message.run, reason="this agent does not lead the run")
                )

    async def _heard(self, message: messages.FromTrainer, *, returned: bool = False) -> bool:
        """Take what a trainer of this node said, or what is said in its place, to its run; False if no one leads it."""
        for hear in (self._lead.heard, self._follower.heard, self._lead.heard):  # again: it may have taken over
            if await hear(message, returned=returned):
                return True
        return False

    def _with_profile(self, message: messages.FromTrainer) -> messages.FromTrainer:
        session, followed = self._lead.session, self._follower.followed
        config = session.conductor.config if session is not None else followed.config if followed is not None else None
        return message if config is None else self._profiles.with_profile(message, config)

    def _learn(self) -> None:
        with contextlib.suppress(OSError):  # of a full disk, say: the profile stays as it was
            self._profiles.learn()

    async def _watch(self) -> None:
        left_out = 0
        async for _ in _every(WATCH_SECONDS):
            sleep = self._follower.sleep_clock.look(sleep_clock.read())
            if sleep is not None:
                self._lead.slept(sleep.seconds, sleep.woke_at)
            if left_out < STEADY_LOOKS - 1 and self._is_steady and not self._supervisor.may_have_ended():
                left_out += 1
                continue
            left_out = 0
            with contextlib.suppress(OSError):  # too many files are open: at the next look
                self._supervisor.force_overdue()
            await self._lead.watch()
            await self._follower.watch()
            await self._lead.journal.give_up_left()
            await self._guests.watch()
            if self._role.is_idle:
                self._learn()
            self._watch_for_alerts()

    @property
    def _is_steady(self) -> bool:
        """Return whether a run goes on of which nothing ends, begins or waits."""
        return self._role.own_drain is None and (self._lead.is_steady or self._follower.is_steady)

    def _watch_for_alerts(self) -> None:
        followed = self._follower.followed
        if self._lead.session is None and followed is not None:
            run, seconds = followed.config.run, self._follower.lead_silent_seconds(followed)
            self._alerts.follow(
                followed.run, run.name, followed.config.alerts, followed.known.lead, seconds, self._problem
            )
        else:
            self._alerts.watch(self._lead.session, self._lead.peers.silent, self._problem)
        self._alerts.watch_guests([guest.view for guest in self._guests.live])

    def _note_of_guest(self, run: str, happened: Happened) -> None:
        if (guest := self._guests.find(run)) is not None:
            self._guests.note(guest, happened)

    @property
    def _problem(self) -> str | None:
        """Return a line on what is wrong with this node's folder or one of its databases."""
        led, followed = self._lead.session, self._follower.followed
        records = [part.recorder for part in (led, followed, *self._guests.live) if part is not None]
        found = (self._lock.problem, self._db.problem, self._lead.awaits, *(record.problem for record in records))
        return next(filter(None, found), None)

    async def _watch_parent(self) -> None:
        """Leave a while after the run has ended, so that its watchers hear how."""
        await bind.parent_gone()
        idle_since: float | None = None
        async for _ in _every(WATCH_SECONDS):
            if not self._role.is_idle:
                idle_since = None
                continue
            idle_since = idle_since or time.monotonic()
            if time.monotonic() - idle_since >= FAREWELL_SECONDS:
                return

    # ------------------------------------------------------------ telemetry

    async def _beat(self) -> None:
        look_at = 0.0
        async for lag_seconds in _every(BEAT_SECONDS):
            with contextlib.suppress(OSError):  # no descriptor is free: the next one may tell again
                if time.monotonic() >= look_at:
                    directory = self._query_context.run_directory(None)  # here: the db is this thread's
                    await asyncio.to_thread(self._processes.find, directory)
                    look_at = time.monotonic() + PROCESSES_SECONDS
                self._tell_reading(self._read_host(time.time()))
            session, age = self._lead.session, None
            self._follower.loop_lag_seconds = lag_seconds
            if session is not None and session.view.state == "running":
                age = time.monotonic() - session.last_commit_monotonic
            beat = messages.Heartbeat(
                node=self.node, at=time.time(), step_age_seconds=age, loop_lag_seconds=lag_seconds
            )
            self.publisher.beat(beat)
            self._look_at_files()
            if self._exporter is not None:
                self._exporter.look(lag_seconds)

    def _look_at_files(self) -> None:
        """Make again what was made at the start and is gone since. Raises TakenError."""
        self._lock.look()
        self._files.look()
        self._link.look_at_files()
        self._query_context.doctor.lost_sockets = tuple(self._files.gone + self._link.files.gone)
        for look in self.looks:
            look(self._files.current(self.address), self.guest_socket)

    def _read_host(self, at: float) -> messages.HostReading:
        of_a_run = self._lead.session or self._follower.followed
        if of_a_run is None:
            self._reader.count_for(None, at)
        else:
            self._reader.count_for(of_a_run.run, at, of_a_run.paths)
        trainer = next(iter(self._processes.trainers), None)
        reading, seconds = self._reader.read(at, self._processes.pids, trainer), self._follower.round_trip_seconds
        if seconds is None:
            return reading
        return msgspec.structs.replace(reading, values={**reading.values, "round_trip_seconds": seconds})

    def _tell_reading(self, reading: messages.HostReading) -> None:
        self._query_context.host_reading = msgspec.structs.replace(reading, processes=self._processes.read())
        self.publisher.publish(self._query_context.host_reading)
        self._follower.host_reading = reading
        self._guests.read(reading)
        if self._lead.session is not None:
            self._lead.session.read(reading)
        elif self._follower.followed is not None:
            self._follower.followed.recorder.host(reading)


def _exporter(address: ListenAddress | None) -> Any:
    """Return the agent's exporter, whose library may be missing; None without an address. Raises InvalidInputError."""
    if address is None:
        return None
    try:
        from trainctl.node_agent.exporter.exporter import Exporter
    except ImportError:
        problem = f"needs prometheus-client; {installing('prometheus')}"
        raise InvalidInputError("--metrics", problem) from None
    return Exporter(address)


async def _every(seconds: float) -> AsyncIterator[float]:
    """Ticks at a steady pace; yields by how many seconds each came late."""
    due = time.monotonic()
    while True:
        yield max(0.0, time.monotonic() - due)
        due = max(due + seconds, time.monotonic())
        await asyncio.sleep(due - time.monotonic())
