"""Runs are opened here: on all their nodes or on none, again, from a checkpoint, or as another conductor left them."""

import asyncio
import os
import shutil
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

from trainctl.node_agent.conductor.conductor import Conductor
from trainctl.node_agent.planning import plans
from trainctl.node_agent.planning.durable import next_term
from trainctl.node_agent.records import run_folders
from trainctl.node_agent.records.agent_db import KnownRun
from trainctl.node_agent.records.replication import Copies
from trainctl.node_agent.runs import checkpoint_source, preflight, restore
from trainctl.node_agent.runs.checkpoint_source import Fork, Source
from trainctl.node_agent.runs.context import AgentContext
from trainctl.node_agent.runs.session import LedRun, RunListener, Session
from trainctl.node_agent.trainers.rank_ports import RankPort, RemoteRank
from trainctl.node_agent.trainers.supervisor import SIMULATED_NOTICE
from trainctl.node_agent.transport.peer_link import REACH_SECONDS, PeerLink
from trainctl.node_agent.transport.peer_pool import Peers
from trainctl.protocol.batch.split import Machine, share_cores
from trainctl.protocol.config import run_file, run_tables
from trainctl.protocol.config.cluster_file import check_growing
from trainctl.protocol.config.env_policy import omp_threads
from trainctl.protocol.errors import InvalidInputError, RefusedError
from trainctl.protocol.machine.cgroups import core_pool, usable_cores
from trainctl.protocol.machine.devices import read_devices, resolve
from trainctl.protocol.messages import (
    Command,
    Generation,
    HostedRank,
    KeptCommand,
    PeerAnswer,
    PeerConsent,
    PeerExit,
    PeerHost,
    RunState,
    verbs,
)
from trainctl.protocol.record.paths import RunPaths

QUERY_SECONDS = 3.0
"""Seconds another node may take to say which checkpoints it has."""
COMMANDS_HANDED_ON = 50
"""Newest commands of a run whose outcome its other nodes know."""


class RollbackGoneError(InvalidInputError):
    """The run can't go back as a rollback asked, and the rollback is called off."""


class Launch:
    """Opens one run at a time; what its ranks on other nodes say before it is open is kept for then."""

    def __init__(self, context: AgentContext, peers: Peers, name: Callable[[str], None]) -> None:
        """`name` receives the id of the run before other nodes are asked to host its ranks."""
        self._context, self._db, self._peers, self._name = context, context.db, peers, name
        self.early: list[tuple[str, PeerAnswer | PeerExit]] = []  # what its ranks said before it was opened

    def done(self) -> list[tuple[str, PeerAnswer | PeerExit]]:
        """The run is open, or is not to be; what its ranks have said by now."""
        early, self.early = self.early, []
        return early

    def forget_exits(self, node: str) -> None:
        """It hosts its rank from here on; the trainers whose end it reported before were of an earlier life."""
        self.early = [(who, said) for who, said in self.early if who != node or isinstance(said, PeerAnswer)]

    async def branch(self, args: verbs.StartRun, command: Command) -> restore.Opening:
        """A new run from a checkpoint of another one on this node. Raises InvalidInputError or RefusedError; leaves
        nothing then, on any node."""
        run, step = verbs.branch_point(args.branch or "")
        known = self._db.known_run(run)
        if known is None:
            raise InvalidInputError("branch", f"no run {run!r} on {self._context.node}: choose a node that has a copy")
        if known.kind != "hosted":
            raise InvalidInputError("branch", f"{run} was trained by another program and has no checkpoint here")
        paths = RunPaths(known.directory)
        if args.config is not None:
            config = run_file.parse(args.config, "config")
        else:
            config = await asyncio.to_thread(run_file.read, paths.run_file, args.overrides)
        node = self._context.node
        if config.nodes and node not in config.nodes:
            problem = f"{node} has the checkpoint, but no rank in the run file; choose the node that leads with --node"
            raise InvalidInputError("config: nodes", problem)
        fork = await asyncio.to_thread(checkpoint_source.find_fork, paths, step, node)
        opening = await self.new(config, command, fork)
        followed = self._db.followed(run)
        if followed is not None:  # its lead numbers the events
            self._context.late_events.add(followed.lead, fork.late_event(opening.paths, node, command.by))
            return opening
        said = await asyncio.to_thread(fork.note, opening.paths, node, command.by)
        if said is not None:
            self._context.publisher.publish(said)
        return opening

    async def new(self, config: run_tables.RunFile, command: Command, fork: Fork | None = None) -> restore.Opening:
        """Raises InvalidInputError or RefusedError; leaves nothing then, on any node."""
        if not config.run.steps:
            problem = "only the command line counts an epoch's samples: run it by trainctl run, or give run.steps"
            raise InvalidInputError("config: run.epochs", problem)
        config = preflight.with_nodes(config, self._context.node, tuple(self._context.cluster.nodes))
        check_growing(config, self._context.cluster, "config")
        config, resolved = await self.resolved(config)
        opening = await asyncio.to_thread(
            restore.new_run,
            config,
            self._context.node,
            self._context.directory,
            command.id,
            command.by,
            term=max(1, self._db.term),
            placement=self._context.placement,
            fork=fork,
        )
        durable, run = opening.conductor.durable, opening.conductor.run
        ranks = {rank: setting.node for rank, setting in durable.settings.ranks.items()}
        try:
            await self._host(run, ranks, config, durable.generation, Source(), call_off="starting")
            self._db.add_run(run, config.run.name, time.time())
        except (InvalidInputError, RefusedError):
            opening.recorder.close()
            shutil.rmtree(opening.paths.directory, ignore_errors=True)
            raise
        finally:
            run_folders.unmark(opening.paths.directory)
        simulated = (SIMULATED_NOTICE,) if self._context.supervisor.is_simulated else ()
        return replace(opening, notices=(*simulated, *opening.notices), remarks=resolved)

    async def resolved(self, config: run_tables.RunFile) -> tuple[run_tables.RunFile, tuple[str, ...]]:
        """Return the run file with what depends on its nodes' machines, and why: the data type that suits all of them
        where it is "auto", and the threads of those that share cores. Raises InvalidInputError."""
        links = {node: self._peers.links[node] for node in config.nodes if node in self._peers.links}
        found = await asyncio.gather(*(link.welcome(REACH_SECONDS) for link in links.values()))
        welcomes = {node: welcome for node, welcome in zip(links, found, strict=True) if welcome is not None}
        devices = {node: welcome.devices for node, welcome in welcomes.items()}
        devices[self._context.node] = await asyncio.to_thread(read_devices)
        machines = {
            node: Machine(welcome.machine, welcome.cores, welcome.threads) for node, welcome in welcomes.items()
        }
        machines[self._context.node] = Machine(core_pool(), usable_cores(), omp_threads(os.environ))
        config, precision = resolve(config, devices, "config")
        config, shares = share_cores(config, machines)
        return config, (*((precision,) if precision else ()), *shares)

    async def old(
        self,
        run: str,
        starter: str | None,
        by: str = "auto",
        without: Collection[int] = (),
        *,
        from_step: int | None = None,
        steps: int | None = None,
        starting: KeptCommand | None = None,
    ) -> restore.Opening:
        """Open an old run from its newest checkpoint, or from that of `from_step`; 0 starts over. `without`: ranks that
        are lost from the beginning, and join when their nodes are reachable again. `steps`: where it ends, in place of
        its file's last step. `starting`: the command that started
        the run before it went back, which is open until a step commits. Raises InvalidInputError, also if
        no checkpoint is left of a run that has written some, or RefusedError."""
        known = self._db.known_run(run)
        if known is None:
            raise InvalidInputError("resume", f"no run {run!r} on this node")
        if known.kind != "hosted":
            raise InvalidInputError("resume", f"{run} was trained by another program; only that program can resume it")
        paths, cluster = RunPaths(known.directory), tuple(self._context.cluster.nodes)
        as_it_was = run_file.read(paths.run_file)
        extended = run_file.read(paths.run_file, {"run.steps": str(steps)}) if steps is not None else None
        config = preflight.with_nodes(extended or as_it_was, self._context.node, cluster)
        check_growing(config, self._context.cluster, str(paths.run_file))
        remade = await asyncio.to_thread(restore.make_usable, paths)
        ranks = await asyncio.to_thread(restore.kept_ranks, paths) or dict(enumerate(config.nodes))
        for rank, node in ranks.items():
            if node == self._context.node and self._context.supervisor.find(paths, rank) is not None:
                raise InvalidInputError("resume", f"a trainer of {run} is still running; wait until it ends")
        term = self._term(paths)
        generation = max(self._db.generation or restore.FIRST_GENERATION, Generation(term, 0))
        out = {ranks[rank] for rank in without}
        source = await asyncio.to_thread(_source, paths, self._context.node, out, from_step)
        hosted = {rank: node for rank, node in ranks.items() if rank not in without}
        newer = await self._newer(paths, {*hosted.values()}, source) if from_step is None else None
        if extended is not None:
            before, after, done = as_it_was.run.steps, extended.run.steps, (newer or source).step
            await asyncio.to_thread(plans.check_extension, run, config.optimizer, before, after, done)
        missing = ""
        if from_step is None:
            at_most = await asyncio.to_thread(restore.rollback_step, paths)
            missing = await asyncio.to_thread(checkpoint_source.missing, paths, newer or source, at_most)
        try:
            await self._host(run, hosted, config, generation, newer or source, call_off=known.state)
            source = newer or source
        except InvalidInputError:
            if newer is None:
                raise
            await self._host(run, hosted, config, generation, source, call_off=known.state)
        if from_step is not None:
            await asyncio.to_thread(restore.call_rollback_off, paths)
        try:
            if extended is not None:
                await asyncio.to_thread(restore.write_run_file, paths, extended)
            opening = await asyncio.to_thread(
                restore.old_run,
                paths,
                self._context.node,
                cluster,
                source,
                starter,
                by,
                without=without,
                term=term,
                placement=self._context.placement,
                seen=self._db.generation,
                starting=starting,
            )
            return replace(opening, notices=(*filter(None, (remade, *opening.notices, missing)),))
        except (InvalidInputError, RefusedError) as error:
            if extended is not None:
                await asyncio.to_thread(restore.write_run_file, paths, as_it_was)
            for rank, other in hosted.items():
                if other in self._peers.links:
                    await self._peers.links[other].end_rank(known.run, rank, known.state, str(error))
            raise

    async def _newer(self, paths: RunPaths, nodes: Collection[str], source: Source) -> Source | None:
        """A newer checkpoint than `source` that another of these nodes has. A rollback names its own."""
        if await asyncio.to_thread(restore.rollback_step, paths) is not None:
            return None
        links = {node: link for node, link in self._peers.links.items() if node in nodes}
        query = HostedRank(paths.directory.name, 0, None)

        async def ask(link: PeerLink) -> PeerConsent | None:
            await link.welcome(REACH_SECONDS)
            return await link.claim(0, query, QUERY_SECONDS)

        said = await asyncio.gather(*map(ask, links.values()))
        answers = {node: answer for node, answer in zip(links, said, strict=True) if answer is not None}
        return await asyncio.to_thread(checkpoint_source.newer, paths, source, answers)

    def _term(self, paths: RunPaths) -> int:
        """In which a run is resumed: the one that it was led in here, or a newer one of this node's own if nodes
        have been heard of newer ones since. It counts as seen from here on."""
        kept = restore.kept_term(paths)
        if not kept or kept < self._db.term:
            kept = next_term(self._db.term, self._context.node, self._peers.links)
        self._db.saw(Generation(kept, 0))
        return kept

    async def _host(
        self,
        run: str,
        ranks: dict[int, str],
        config: run_tables.RunFile,
        generation: Generation,
        source: Source,
        *,
        call_off: RunState,
    ) -> None:
        self._name(run)
        self.early = []  # what was said before was of an earlier life of the run
        await self._peers.host(run, ranks, config, generation, source.step_for, call_off=call_off)

    def session(self, opening: restore.Opening, started_at: float, listener: RunListener) -> Session:
        """Return the session of a run that has been opened, with its ranks wherever they are."""
        conductor, links = opening.conductor, self._peers.links
        run, ranks = conductor.run, conductor.durable.settings.ranks
        ports: dict[int, RankPort] = {}
        for rank, setting in ranks.items():
            link = links.get(setting.node)
            if link is None:
                ports[rank] = self._context.rank(opening.paths, rank)
            else:
                ports[rank] = RemoteRank(link, run, rank, partial(_hosting_order, conductor, rank))
        nodes = {setting.node for setting in ranks.values()}
        copies = Copies(
            opening.recorder,
            {node: link for node, link in links.items() if node in nodes},
            lambda: self._db.commands_of(run, COMMANDS_HANDED_ON),
        )
        led = LedRun(
            conductor=conductor,
            paths=opening.paths,
            recorder=opening.recorder,
            copies=copies,
            ports=ports,
            lead=self._context.node,
            publisher=self._context.publisher,
            started_at=started_at,
            prices=self._context.cluster.prices,
            simulated=self._context.supervisor.is_simulated,
        )
        return Session(led, listener)

    def surviving(self, known: KnownRun, term: int = 0) -> restore.Opening:
        """A run whose trainers live, from `term` on. It is opened without a wait: a trainer that is heard while nobody
        leads it is told to leave. Raises InvalidInputError if its record doesn't allow it."""
        carried, paths = frozenset(row.id for row in self._db.open_commands()), RunPaths(known.directory)
        notice = restore.make_usable(paths)
        opening = restore.surviving_run(paths, carried, term, self._gone(paths), self._db.generation)
        return replace(opening, notices=(*opening.notices, notice)) if notice else opening

    def _gone(self, paths: RunPaths) -> set[str]:
        """This node, if it has ranks in the run and none of their trainers lives, as after a power cut."""
        node, find = self._context.node, self._context.supervisor.find
        own = [rank for rank, where in restore.kept_ranks(paths).items() if where == node]
        try:
            return {node} if own and not any(find(paths, rank) for rank in own) else set()
        except OSError:  # too many open files to tell
            return set()

    def check_nodes(self, opening: restore.Opening) -> None:
        """Raises InvalidInputError if it has a rank on a node that this agent's cluster hasn't; it is closed then."""
        for setting in opening.conductor.durable.settings.ranks.values():
            if setting.node != self._context.node and setting.node not in self._peers.links:
                run = opening.conductor.run
                opening.recorder.close()
                raise InvalidInputError(
                    "--cluster", f"{run} has a rank on {setting.node}, but this cluster has no such node"
                )

    def check_take_over(self, paths: RunPaths) -> None:
        """Raises InvalidInputError if a run in whose record this is can't be led here."""
        run_file.read(paths.run_file)
        for node in restore.kept_ranks(paths).values():
            if node != self._context.node and node not in self._peers.links:
                raise InvalidInputError(
                    "--cluster", f"{paths.directory.name} has a rank on {node}, but this cluster has no such node"
                )


def _source(paths: RunPaths, node: str, out: Collection[str], from_step: int | None = None) -> Source:
    """Return the checkpoint that a run begins with again. Raises InvalidInputError if there is none of `from_step`, or
    if a rollback is pending and can't be done; RollbackGoneError if no node has such a checkpoint, and then the run
    goes back no more."""
    if from_step is not None:
        chosen = checkpoint_source.find(paths, node, out, at_most=from_step) if from_step else Source()
        if chosen.step != from_step:
            problem = f"{paths.directory.name} has no whole checkpoint of step {from_step}"
            older = f"; the newest before it is of step {chosen.step}" if chosen.step else ""
            raise InvalidInputError("from_step", problem + older)
        return chosen
    at_most = restore.rollback_step(paths)
    source = checkpoint_source.find(paths, node, out, at_most=at_most)
    if at_most is None or source.step:
        return source
    there = checkpoint_source.find(paths, node, at_most=at_most)
    if there.step:
        problem = f"the run is to go back to step {at_most}, and only {there.node} (unreachable) has a checkpoint"
        raise InvalidInputError("resume", f"{problem}; resume when {there.node} is back")
    newest = checkpoint_source.find(paths, node)
    restore.call_rollback_off(paths)
    text = f"the checkpoint of step {at_most} is gone, and there is no older one: the rollback is called off"
    where = f"step {newest.step}, on {newest.node}" if newest.step else "the start, for no checkpoint is left"
    raise RollbackGoneError("resume", f"{text}; resume the run to continue from {where}")


def _hosting_order(conductor: Conductor, rank: int) -> PeerHost:
    config, generation = run_file.to_message(conductor.config), conductor.durable.generation
    return PeerHost(link="", seq=0, run=conductor.run, rank=rank, config=config, generation=generation)
