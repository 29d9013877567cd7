"""Commands: journaled before they are obeyed, obeyed once, answered twice (accepted, and how they ended)."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Awaitable, Callable
from typing import assert_never

import msgspec

from trainctl.node_agent.conductor.events import Commanded, CommandEnded, Happened, Proposed
from trainctl.node_agent.guests.guest_runs import GuestRuns
from trainctl.node_agent.records.agent_db import AgentDb, JournaledCommand, digest_of
from trainctl.node_agent.records.run_folders import UNKNOWN_DIGEST
from trainctl.node_agent.runs.session import Conducting, Session
from trainctl.protocol.errors import InvalidInputError, RefusedError
from trainctl.protocol.messages import FINAL_COMMAND_STATES, Command, CommandReply, KeptCommand, RunView, verbs
from trainctl.protocol.messages.events import CommandApplied, CommandFailed, RunStateChanged
from trainctl.protocol.messages.guests import Order

Answer = Callable[[bytes, CommandReply], Awaitable[None]]
BUSY_SECONDS, BUSY_RETRY_SECONDS = 5.0, 0.1
"""Seconds for which a command and its outcome wait for agent.db, if another process has it locked."""
RESTARTED = "the agent restarted before the command took effect"
LEFT_SECONDS = 30.0
"""Seconds after a command's time is up within which another node's agent, which now leads its run, may report it."""


@dataclasses.dataclass(frozen=True)
class _Asker:
    identity: bytes
    rid: str


@dataclasses.dataclass(frozen=True)
class Handlers:
    """Handlers of commands that aren't for the conductor of an active run. Each raises InvalidInputError or
    RefusedError."""

    start_run: Callable[[Command, verbs.StartRun], Awaitable[str]]
    stop_waiting: Callable[[Command], int | None]
    """Stops a run that waits to go back to its checkpoint. Returns its last step; None if there is none, or not that
    one."""
    promote: Callable[[Command, verbs.Promote], Awaitable[CommandEnded]]
    """Makes this node lead the run that it follows."""
    note_ended: Callable[[JournaledCommand], CommandEnded]
    """Writes a note on a run that has ended."""
    alerts: Callable[[Command, "verbs.Acknowledge | verbs.Mute"], CommandEnded]


class CommandJournal:
    """Takes commands from clients, keeps the db, and answers."""

    def __init__(
        self, db: AgentDb, answer: Answer, conducting: Conducting, handlers: Handlers, guests: GuestRuns
    ) -> None:
        self._db, self._answer, self._guests = db, answer, guests
        self._conducting, self._handlers = conducting, handlers
        self._askers: dict[str, list[_Asker]] = {}
        self._reasons: dict[str, str] = {}  # of commands that policies have sent, until they are handed on
        self._proposing: set[asyncio.Task[None]] = set()
        guests.settle = self.end

    @property
    def session(self) -> Session | None:
        """The run that is led."""
        return self._conducting.session

    def propose(self, proposed: Proposed) -> None:
        """Take a policy's command as if a client had sent it, once what it follows from has been carried out."""
        self._reasons[proposed.id] = proposed.reason
        command = Command(
            rid=proposed.by,
            id=proposed.id,
            verb=proposed.verb,
            args=msgspec.to_builtins(proposed.args),
            by=proposed.by,
            node=proposed.node,
            run=self.session.run if self.session is not None else None,
            if_plan=proposed.if_plan,
            issued_at=time.time(),
        )
        task = asyncio.get_running_loop().create_task(self._take_proposed(command))
        self._proposing.add(task)
        task.add_done_callback(self._proposing.discard)

    async def _take_proposed(self, command: Command) -> None:
        """A command that the disk doesn't take is proposed again, if it is still wanted."""
        with contextlib.suppress(RefusedError):
            await self.take(b"", command)
        self._reasons.pop(command.id, None)

    async def take(self, identity: bytes, command: Command) -> None:
        """One command from one client; of a policy's, whose identity is empty, no one receives how it ended. The same
        id again gets the outcome that the first one had or will have."""
        if identity and command.by.startswith("auto"):  # only the program itself goes by that
            command = msgspec.structs.replace(command, by=f"user {command.by}")
        digest = digest_of(command)
        asker = _Asker(identity, command.rid)
        known = self._db.find(command.id)
        if known is not None:
            await self._take_again(asker, known, digest)
            return
        starts = verbs.args_type(command.verb) is verbs.StartRun
        about = self.session.run if self.session is not None and not starts else None
        await self._accept(msgspec.structs.replace(command, run=command.run or about), digest)
        self._askers[command.id] = [asker]
        self._hand_on(command.id)
        try:
            args = verbs.check(command.verb, command.args, command.node)
            if isinstance(args, verbs.AgentArgs):
                await self._obey(command, args)
            else:
                await self._conduct(command, args)
        except InvalidInputError as error:
            await self.end(CommandEnded(command.id, "rejected", reason=error.problem, field=error.where))
        except (RefusedError, OSError) as error:  # the latter: no descriptor is free, say
            await self.end(CommandEnded(command.id, "failed", reason=str(error)))
        row = self._db.find(command.id)
        if row is not None and row.is_open:
            await self._say(identity, row.reply(command.rid))

    async def _accept(self, command: Command, digest: str) -> None:
        """Journal a command; another process's lock is waited for. Raises RefusedError."""
        until = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                self._db.accept(command, digest, time.time())
                return
            except RefusedError:
                if not self._db.is_busy or time.monotonic() > until:
                    raise
            await asyncio.sleep(BUSY_RETRY_SECONDS)

    async def _obey(self, command: Command, args: verbs.AgentArgs) -> None:
        """Carry out what is for this agent itself."""
        match args:
            case verbs.StartRun():
                self._db.set_run(command.id, await self._handlers.start_run(command, args))
            case verbs.Promote():
                await self.end(await self._handlers.promote(command, args))
            case verbs.Acknowledge() | verbs.Mute():
                await self.end(self._handlers.alerts(command, args))
            case _ as missing:
                assert_never(missing)

    async def _take_again(self, asker: _Asker, known: JournaledCommand, digest: str) -> None:
        if known.digest not in (digest, UNKNOWN_DIGEST):
            reason = f"id {known.id} was already used for a different command ({known.verb})"
            reply = CommandReply(rid=asker.rid, id=known.id, state="conflict", reason=reason, field="id")
            await self._say(asker.identity, reply)
            return
        if known.is_open:
            self._askers.setdefault(known.id, []).append(asker)
        await self._say(asker.identity, known.reply(asker.rid))

    async def _conduct(self, command: Command, args: verbs.AnyArgs) -> None:
        session = self.session
        if session is None and isinstance(args, verbs.Stop):
            step = self._handlers.stop_waiting(command)
            if step is not None:
                made = RunStateChanged("going back", "stopped")
                await self.end(CommandEnded(command.id, "applied", step, made=made))
                await self.fail_open("the run was stopped before the command took effect", command.run)
                return
        other = session is None or command.run not in (None, session.run)
        if isinstance(args, verbs.Note) and other and (row := self._db.find(command.id)):
            await self.end(self._handlers.note_ended(row))
            return
        if other and (guest := self._guests.find(command.run)) is not None:
            self._db.set_run(command.id, guest.view.run)
            if (row := self._db.find(command.id)) is not None:
                self._order(row, guest.view)
            return
        if self._is_of_guest(command.run):
            raise InvalidInputError("run", f"{command.run} has ended, so {command.verb} can't act on it")
        if session is None:
            raise InvalidInputError("run", "no run is active")
        if command.run is not None and command.run != session.run:
            raise InvalidInputError("run", f"{command.run!r} is not active; the active run is {session.run}")
        expires = time.monotonic() + command.ttl_seconds
        given = (command.id, command.verb, args, command.by, command.node, command.if_plan)
        await session.feed(Commanded(*given, expires, reason=self._reasons.get(command.id, "")))

    def _is_of_guest(self, run: str | None) -> bool:
        """Return whether a different program trains or trained the run."""
        known = self._db.known_run(run) if run is not None else None
        return known is not None and known.kind != "hosted"

    def _order(self, row: JournaledCommand, view: RunView) -> None:
        """Have the loop of a live run carry out a command. Raises InvalidInputError or RefusedError."""
        if why := view.why_not(row.verb):
            raise InvalidInputError("run", f"{view.run} does not support {row.verb}: {why}")
        if row.if_plan not in (None, view.plan_version):
            raise InvalidInputError("if_plan", f"{view.run} has no plans")
        if row.node not in (None, *(rank.node for rank in view.ranks)):
            raise InvalidInputError("node", f"no rank of {view.run} is on {row.node}")
        args = msgspec.to_builtins(verbs.check(row.verb, row.args, row.node))
        named = {name: value for name, value in args.items() if value is not None}
        self._guests.give(view.run, Order(row.id, row.verb, named, row.received_at + row.ttl_seconds))

    async def _order_again(self, row: JournaledCommand) -> bool:
        """After a restart: send a command to the loop of a live run again; return whether it is of one."""
        guest = self._guests.find(row.run) if row.run is not None and not _is_note(row) else None
        if guest is None:
            return False
        try:
            self._order(row, guest.view)
        except InvalidInputError as error:
            await self.end(CommandEnded(row.id, "rejected", reason=error.problem, field=error.where))
        except RefusedError as error:
            await self.end(CommandEnded(row.id, "failed", reason=str(error)))
        return True

    async def conduct_again(self, session: Session, why: str = RESTARTED) -> None:
        """After a restart, or once a run has gone back: what was accepted and is on no plan yet goes to the conductor
        once more."""
        for row in self._db.open_commands():
            under_way = (
                verbs.args_type(row.verb) is verbs.Promote and row.id in self._askers
            )  # it is by this that the run is led here
            if row.id in session.conductor.durable.carried or under_way:
                continue
            if row.run != session.run and (await self._note_again(row) or await self._order_again(row)):
                continue
            left_seconds = row.received_at + row.ttl_seconds - time.time()
            try:
                args = verbs.check(row.verb, row.args, row.node)
            except InvalidInputError as error:  # killed before the refusal was journaled
                await self.end(CommandEnded(row.id, "rejected", reason=error.problem, field=error.where))
                continue
            if row.run != session.run or isinstance(args, verbs.AgentArgs):
                await self.end(CommandEnded(row.id, "failed", reason=why))
                continue
            noted = session.recorder.note_of(row.id) if isinstance(args, verbs.Note) else None
            if noted is not None:  # killed before the outcome was journaled
                await self.end(CommandEnded(row.id, "applied", noted))
                continue
            expires = time.monotonic() + left_seconds
            await session.feed(Commanded(row.id, row.verb, args, row.by, row.node, row.if_plan, expires, again=True))

    async def fail_open(self, why: str = RESTARTED, run: str | None = None) -> None:
        """End what was accepted, of one run or of all, since no run is left in which it could take effect, unless
        elsewhere; but for notes, which are made once however often they are asked for."""
        for row in self._db.open_commands():
            if (run is not None and row.run != run) or (row.run is not None and self._db.followed(row.run) is not None):
                continue
            if not await self._note_again(row) and not await self._order_again(row):
                await self.end(CommandEnded(row.id, "failed", reason=why))

    async def _note_again(self, row: JournaledCommand) -> bool:
        """Make a note that was accepted, on a run that has ended, if it isn't made yet; whether that could be."""
        if _is_note(row):
            with contextlib.suppress(InvalidInputError, RefusedError):
                await self.end(self._handlers.note_ended(row))
                return True
        return False

    async def end(self, ended: CommandEnded) -> None:
        """Keep a command's outcome, put it into the run's events, and tell those who wait for it."""
        row = self._db.find(ended.id)
        if row is None or not row.is_open:
            return
        about = row.run if _is_note(row) or self._is_of_guest(row.run) else None
        about = about or (self.session.run if self.session is not None else None)
        outcome = msgspec.structs.replace(
            row,
            state=ended.state,
            step=ended.step,
            reason=ended.reason,
            field=ended.field,
            before=ended.before,
            after=ended.after,
            plan_version=ended.plan_version,
            ended_at=time.time(),
            run=about,
        )
        self._db.outcome(outcome)
        if not _is_note(row) or ended.state != "applied":
            self._note(row, ended)
        self._hand_on(ended.id)
        until = time.monotonic() + BUSY_SECONDS
        while self._db.is_busy and time.monotonic() < until:
            await asyncio.sleep(BUSY_RETRY_SECONDS)
            self._db.retry()
        if self.session is not None:  # a lead that takes over must know an outcome that the client knows
            await self.session.announce()
            await self.session.copies.flush()
        await self._tell(ended.id)

    def _note(self, row: JournaledCommand, ended: CommandEnded) -> None:
        """Put an outcome into the events of the live run that the command is about."""
        guest = self._guests.find(row.run) if row.run is not None else None
        if guest is not None:
            self._guests.note(guest, _event(row, ended))
        elif self.session is not None and not self._is_of_guest(row.run):
            self.session.note(_event(row, ended))

    async def _tell(self, id: str) -> None:
        settled = self._db.find(id)
        if settled is None:  # the disk has refused it so far
            return
        for asker in self._askers.pop(id, ()):
            await self._say(asker.identity, settled.reply(asker.rid))

    async def _say(self, identity: bytes, reply: CommandReply) -> None:
        if identity:
            await self._answer(identity, reply)

    def _hand_on(self, id: str) -> None:
        """Have the run's other nodes keep the command as it is now: one of them may lead the run after this one."""
        row = self._db.find(id)
        if self.session is not None and row is not None and row.run == self.session.run:
            self.session.copies.add(row)

    # ------------------------------------------------------------ of a run that another node's agent leads

    async def settle(self, kept: KeptCommand) -> None:
        """Keep a command as the run's lead has it; a client that had asked this agent before gets its outcome."""
        if self._db.problem is not None:
            return  # it arrives again when its lead greets this agent the next time
        self._db.keep_command(kept)
        if kept.state in FINAL_COMMAND_STATES:
            await self._tell(kept.id)

    async def give_up_left(self) -> None:
        """End what this agent had accepted before another one led the run, and what that one never received."""
        if self.session is not None or not self._askers:
            return
        for row in self._db.open_commands():
            if row.id in self._askers and time.time() > row.received_at + row.ttl_seconds + LEFT_SECONDS:
                reason = "another node leads the run and has not reported the outcome"
                await self.end(CommandEnded(row.id, "failed", reason=reason))


def _is_note(row: JournaledCommand) -> bool:
    return verbs.args_type(row.verb) is verbs.Note


def _event(row: JournaledCommand, ended: CommandEnded) -> Happened:
    node, is_applied = row.node or "", ended.state == "applied"
    failed = CommandFailed(ended.reason, ended.field or "", node)
    made = (ended.made or CommandApplied(node)) if is_applied else failed
    return Happened(
        made,
        "info" if is_applied else "warning",
        row.by or "unknown",
        ended.step,
        row.verb,
        row.id,
        ended.state,
        row.undoes,
    )
