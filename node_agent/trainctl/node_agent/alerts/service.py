"""The agent's alerts: about the run it leads, its lead's silence, or without a run its own machine."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from trainctl.node_agent.alerts.conditions import RunSnapshot
from trainctl.node_agent.alerts.evaluator import Change, Cleared, Evaluator, GuestAlerts, Raised
from trainctl.node_agent.alerts.hooks import HookCall, Hooks
from trainctl.node_agent.conductor.events import CommandEnded, Happened
from trainctl.node_agent.records.keys import ALERTS_KEY
from trainctl.node_agent.runs.session import Session
from trainctl.node_agent.transport.publisher import Publisher
from trainctl.protocol.analysis.curve import CurveLimits
from trainctl.protocol.config.alert_rules import AlertHooks, AlertsTable
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import (
    ACTIVE_RUN_STATES,
    Alerts,
    AlertView,
    Command,
    HookOutcome,
    HostReading,
    Live,
    MuteView,
    RankStep,
    RunState,
    RunView,
    Severity,
    StepCommitted,
    verbs,
)
from trainctl.protocol.messages.events import AlertCleared, AlertFailed, AlertRaised, AnyEvent, CommandApplied

log = logging.getLogger("trainctl.agent")
OF_MACHINE = frozenset({"disk", "record"})
"""Kinds that are watched on a machine without a run, by the default thresholds."""

REPLAYED_STEPS = 500
"""Newest steps of the record from which the loss's trend and best level are learned again."""


class Kept(msgspec.Struct, frozen=True):
    """State from which an agent that restarts, or is promoted, continues."""

    alerts: tuple[AlertView, ...] = ()
    mutes: tuple[MuteView, ...] = ()
    references: dict[str, tuple[float, ...]] = {}


class AlertService:
    """One an agent. Everything happens on its event loop."""

    def __init__(
        self,
        node: str,
        hooks: AlertHooks,
        publisher: Publisher,
        note_of_guest: Callable[[str, Happened], None] = lambda *_: None,
    ) -> None:
        """`note_of_guest` keeps what happens to an attached run, by its id."""
        self._node, self._publisher = node, publisher
        self.hooks = Hooks(hooks, self._hook_turned)
        self._watched: Session | None = None
        self._run = ("", "")  # id and name of the run that is watched
        self._evaluator, self._is_idle = _of_machine(()), True
        self._guests: dict[str, GuestAlerts] = {}
        self._states: dict[str, RunState] = {}  # of the runs that are active
        self._test: tuple[str, asyncio.Task[tuple[HookOutcome, ...]]] | None = None
        self._note_of_guest = note_of_guest
        self._mutes: tuple[MuteView, ...] = ()
        self._shown = Alerts(node=node)
        self._kept = Kept()
        publisher.listeners.append(self.heard)

    @property
    def view(self) -> Alerts:
        """Return the open alerts."""
        return self._shown

    def view_of_guest(self, run: str) -> Alerts:
        """Return the open alerts of an attached run and of this machine."""
        own = {alert.id for alert in self._guests[run].open} if run in self._guests else set()
        alerts = tuple(
            alert
            for alert in self._shown.alerts
            if alert.id in own or (alert.kind in OF_MACHINE and alert.node == self._node)
        )
        return msgspec.structs.replace(self._shown, alerts=alerts)

    @property
    def _session(self) -> Session | None:
        """The run that is led. Since the last look at it another agent may have taken it over."""
        return None if self._watched is None or self._watched.is_closed else self._watched

    # ------------------------------------------------------------ what is watched

    def heard(self, message: Live) -> None:
        """Take a message that this agent publishes; readings of other nodes come by `read`. About a run that it
        follows, the lead says all but its own silence."""
        if self._is_idle and isinstance(message, HostReading) and message.node == self._node:
            self._evaluator.heard(message, time.monotonic())
        if isinstance(message, RunView):
            self._call_about_run(message)
        if isinstance(message, StepCommitted) and (guest := self._guests.get(message.run)) is not None:
            guest.heard(message, time.monotonic())
        if self._session is None or self._is_idle:
            return
        if isinstance(message, HostReading) or (
            isinstance(message, StepCommitted | RankStep)
            and message.run == self._run[0]
            and not self._is_profiled(message)
        ):
            self._evaluator.heard(message, time.monotonic())

    def _call_about_run(self, view: RunView) -> None:
        """Have the hooks called when a run that is led here has been paused, or has ended by itself."""
        before = self._states.pop(view.run, None)
        if view.state in ACTIVE_RUN_STATES:
            self._states[view.run] = view.state
        if before is None or view.state == before or view.lead != self._node:
            return
        if view.state == "finished" or view.state == "failed" or view.state == "paused":
            steps = f" of {view.steps:,}" if view.steps else ""
            why = f": {view.reason}" if view.reason else ""
            text = f"{view.name} {view.state} at step {view.step:,}{steps}{why}"
            self.hooks.call(HookCall(view.state, time.time(), self._node, view.run, view.name, text))

    def _is_profiled(self, message: StepCommitted | RankStep) -> bool:
        """Return whether a profiler ran on some rank, so that this rank's step says nothing of its speed and memory."""
        session = self._session
        is_part = isinstance(message, RankStep)
        return is_part and session is not None and session.conductor.durable.is_profiled(message.step)

    def read(self, reading: HostReading) -> None:
        """Another node's reading, which its agent has reported; kept in the record too."""
        if self._session is not None and not self._is_idle:
            self._session.read(reading)
            self._evaluator.heard(reading, time.monotonic())

    def watch(self, session: Session | None, silent: dict[str, str], problem: str | None = None) -> None:
        """Look at the run that is led; `silent` are nodes whose agents aren't heard, and `problem` is what is wrong
        with this node's databases. A few times a second."""
        if session is not self._watched or (session is None and not self._is_idle):
            self._turn_to(session)
        self._evaluator.record(self._node, problem, time.monotonic())
        if session is None or self._is_idle:  # the latter: it has ended, and is being closed
            self._settle(self._evaluator.turned(time.monotonic(), time.time()))
            return
        ours = {view.node for view in session.view.ranks}
        away = {node: why for node, why in silent.items() if node in ours}
        snapshot = RunSnapshot(session.view, away, session.doing, session.profiles)
        self._settle(self._evaluator.look(snapshot, time.monotonic(), time.time()))

    def watch_guests(self, views: Sequence[RunView]) -> None:
        """Look at the attached runs that are live. A few times a second."""
        is_changed = False
        for view in views:
            if view.run not in self._guests:
                self._guests[view.run] = GuestAlerts(view, time.monotonic())
            for change in self._guests[view.run].look(view, time.monotonic(), time.time()):
                is_changed = True
                self._tell_of_guest(change, view)
        if is_changed:
            self._show()

    def guest_left(self, view: RunView) -> None:
        """Look at an attached run no longer. Call it while its record is still open."""
        if (guest := self._guests.pop(view.run, None)) is not None:
            for alert in guest.open:
                self._tell_of_guest(Cleared(alert), view)
            self._show()

    def _tell_of_guest(self, change: Change, view: RunView) -> None:
        alert = change.alert
        is_raised = isinstance(change, Raised)
        data: AnyEvent = (
            AlertRaised(alert.id, alert.node, alert.text)
            if is_raised
            else AlertCleared(alert.id, alert.node, alert.kind, time.time() - alert.raised_at)
        )
        self._note_of_guest(view.run, Happened(data, alert.severity if is_raised else "good", "auto", view.step))
        self._call("raised" if is_raised else "cleared", alert, view.run, view.name)

    def _turn_to(self, session: Session | None) -> None:
        """Another run is led, or none any more: what is open stays in the old one's record, and what is wrong
        with this machine continues."""
        of_machine, mutes = self._of_machine if self._is_idle or session is None else (), self._mutes
        self._watched, self._is_idle, self._kept = session, session is None, Kept()
        if session is None:
            self._run, self._evaluator = ("", ""), _of_machine(of_machine)
            self._mutes = tuple(mute for mute in mutes if mute.kind in OF_MACHINE)
        else:
            self._run = session.run, session.conductor.config.run.name
            self._kept = _decoded(session.recorder.meta(ALERTS_KEY))
            self._mutes = self._kept.mutes
            known = {alert.id for alert in self._kept.alerts}
            new = tuple(alert for alert in of_machine if alert.id not in known)
            config = session.conductor.config
            self._evaluator = Evaluator(
                config.alerts,
                time.monotonic(),
                (*self._kept.alerts, *new),
                self._kept.references,
                CurveLimits.of(config),
            )
            self._evaluator.replay(session.recorder.newest_steps(REPLAYED_STEPS))
            for alert in new:
                self._note(alert.severity, AlertRaised(alert.id, alert.node, alert.text))
        self._show()

    @property
    def _of_machine(self) -> tuple[AlertView, ...]:
        """Return the open alerts about this machine, whatever it takes part in."""
        every = self._evaluator.open.values()
        return tuple(alert for alert in every if alert.kind in OF_MACHINE and alert.node == self._node)

    def follow(
        self, run: str, name: str, table: AlertsTable, lead: str, silent_seconds: float, problem: str | None = None
    ) -> None:
        """Look whether the lead of a run that is followed is heard. A few times a second, instead of `watch`."""
        if self._watched is not None or self._run[0] != run:
            if self._is_idle:  # from here on it is the lead that watches this machine
                for alert in self._of_machine:
                    self._call("cleared", alert)
            self._watched, self._run, self._mutes, self._kept = None, (run, name), (), Kept()
            self._evaluator, self._is_idle = Evaluator(table, time.monotonic()), False
            self._show()
        self._evaluator.record(self._node, problem, time.monotonic())
        changes = self._evaluator.lead_silent(self._node, lead, silent_seconds, time.monotonic(), time.time())
        self._settle(changes)

    def ended(self, session: Session) -> None:
        """The run is over, for good or until it is resumed: nothing of it calls for anybody any more. The event
        of its end says so for all of its alerts; a hook that was called about one is called once more."""
        if session is not self._session or self._is_idle:
            return
        goes_on = self._of_machine
        for alert in self._evaluator.open.values():
            if alert in goes_on:
                text = f"{alert.node} {alert.kind} was still active when the run ended".strip()
                self._note("warning", AlertFailed(text, alert.id))
            else:
                self._call("cleared", alert)
        session.recorder.set_meta(ALERTS_KEY, msgspec.json.encode(Kept()).decode())
        self._turn_to(None)
        self._watched = session  # until it is closed

    # ------------------------------------------------------------ what follows

    def _settle(self, changes: Sequence[Change]) -> None:
        before = self._mutes
        self._mutes = tuple(mute for mute in before if mute.until_at > time.time())
        for change in changes:
            self._tell(change)
        if changes or self._mutes != before:
            self._keep()
            self._show()

    def _tell(self, change: Change) -> None:
        match change:
            case Raised(alert):
                self._note(alert.severity, AlertRaised(alert.id, alert.node, alert.text))
                self._call("raised", alert)
            case Cleared(alert):
                seconds = time.time() - alert.raised_at
                self._note("good", AlertCleared(alert.id, alert.node, alert.kind, seconds))
                self._call("cleared", alert)

    def _call(
        self, event: Literal["raised", "cleared"], alert: AlertView, run: str | None = None, name: str = ""
    ) -> None:
        """`run` and its `name`: of an attached run; None: the run that is watched."""
        if not self._is_muted(alert):
            of = self._run if run is None else (run, name)
            self.hooks.call(HookCall(event, time.time(), self._node, *of, alert.text, alert))

    def _note(self, severity: Severity, data: AnyEvent) -> None:
        """Into the run's record, by its lead: a follower's own would collide with its lead's."""
        if self._session is not None and not self._is_idle:
            step = self._session.conductor.progress.step
            self._session.note(Happened(data, severity, "auto", step))

    def _hook_turned(self, problem: str) -> None:
        """Take what has begun to go wrong with a hook; empty: another thing about them has changed."""
        if problem:
            log.warning("%s", problem)
            self._note("warning", AlertFailed(problem))
        self._show()

    def _keep(self) -> None:
        if self._session is None or self._is_idle:
            return
        kept = Kept(tuple(self._evaluator.open.values()), self._mutes, self._evaluator.references)
        if kept != self._kept:
            self._kept = kept
            self._session.recorder.set_meta(ALERTS_KEY, msgspec.json.encode(kept).decode())

    def _show(self) -> None:
        of_guests = (alert for guest in self._guests.values() for alert in guest.open)
        found = (*self._evaluator.open.values(), *of_guests)
        alerts = tuple(msgspec.structs.replace(alert, muted=self._is_muted(alert)) for alert in found)
        shown = Alerts(node=self._node, alerts=alerts, mutes=self._mutes, hook_problem=self.hooks.problem)
        if shown != self._shown:
            self._shown = shown
            self._publisher.publish(shown)

    def _is_muted(self, alert: AlertView) -> bool:
        return any(mute.kind == alert.kind and mute.node in (None, alert.node) for mute in self._mutes)

    async def test_hooks(self, rid: str) -> tuple[HookOutcome, ...]:
        """Call each hook once, and return how that went. A request that is repeated has the outcome of its first."""
        if self._test is None or self._test[0] != rid:
            alert = AlertView("test", "record", "warning", "a test of the alert hooks", time.time(), self._node)
            call = HookCall("test", time.time(), self._node, *self._run, alert.text, alert)
            self._test = rid, asyncio.create_task(self.hooks.make(call), name="trainctl-hook-test")
        return await asyncio.shield(self._test[1])

    # ------------------------------------------------------------ commands

    def knows(self, command: Command) -> bool:
        """Return whether a command is about an alert that this agent itself has raised."""
        is_about_one = verbs.args_type(command.verb) is verbs.Acknowledge
        return is_about_one and command.args.get("id") in {alert.id for alert in self._shown.alerts}

    def obey(self, command: Command, args: verbs.Acknowledge | verbs.Mute) -> CommandEnded:
        """Carry out a command about alerts. Raises InvalidInputError naming the argument at fault."""
        made = self.foresee(command, args)
        if isinstance(args, verbs.Acknowledge):
            self._acknowledge(args.id, command.by or "unknown")
        else:
            self._mute(command, args)
        self._keep()
        self._show()
        step = self._session.conductor.progress.step if self._session is not None else None
        return CommandEnded(command.id, "applied", step, made=made)

    def foresee(self, command: Command, args: verbs.Acknowledge | verbs.Mute) -> CommandApplied:
        """Return what a command about alerts would do. Raises InvalidInputError naming the argument at fault."""
        if command.run is not None and command.run != self._run[0]:
            active = f"the active run is {self._run[0]}" if self._run[0] else "no run is active"
            raise InvalidInputError("run", f"{command.run!r} is not active; {active}")
        if isinstance(args, verbs.Acknowledge):
            known = [alert.id for alert in self._shown.alerts]
            if args.id not in known:
                there = f"the open alerts are {', '.join(known) or 'none'}"
                raise InvalidInputError("id", f"no open alert {args.id!r}; {there}")
            return CommandApplied(command.node or "", args.id)
        nodes = {view.node for view in self._session.view.ranks} if self._session is not None else {self._node}
        if command.node is not None and command.node not in nodes:
            raise InvalidInputError("node", f"no node {command.node!r} in this run; the nodes are {', '.join(nodes)}")
        after = f"{args.kind} for {args.minutes:g} min" if args.minutes else f"{args.kind} unmuted"
        return CommandApplied(command.node or "", after)

    def _acknowledge(self, id: str, by: str) -> None:
        if not any(guest.acknowledge(id, by) for guest in self._guests.values()):
            self._evaluator.acknowledge(id, by)

    def _mute(self, command: Command, args: verbs.Mute) -> None:
        others = [mute for mute in self._mutes if (mute.kind, mute.node) != (args.kind, command.node)]
        if args.minutes:
            until_at = time.time() + 60 * args.minutes
            others.append(MuteView(args.kind, command.node, until_at, command.by or "unknown"))
        self._mutes = tuple(others)


def _of_machine(open_alerts: Sequence[AlertView]) -> Evaluator:
    """Return the evaluator that belongs to no run: it observes this machine alone."""
    return Evaluator(AlertsTable(), time.monotonic(), open_alerts)


def _decoded(text: str | None) -> Kept:
    """Return the state that was kept; none of another version's: alerts that still hold are then raised again."""
    try:
        return msgspec.json.decode(text, type=Kept) if text is not None else Kept()
    except msgspec.MsgspecError:
        return Kept()
