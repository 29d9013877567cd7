"""The full-screen program as its screens, dialogs and commands may ask of it, so that none of them imports it; and how
a command is sent from there and followed to its end."""

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar, cast

from textual.dom import DOMNode
from textual.geometry import Size
from textual.screen import Screen
from textual.widget import Widget

from trainctl.protocol.errors import TrainctlError, UnreachableError
from trainctl.protocol.messages import AlertView, DryRun, DryRunRequest, verbs
from trainctl.tui.commands import forms
from trainctl.tui.commands.command import Order, replies
from trainctl.tui.commands.forms import Progress, forecast
from trainctl.tui.commands.verbs import DESCRIPTIONS
from trainctl.tui.state.live_feed import LogFeed
from trainctl.tui.state.source import Source
from trainctl.tui.state.view_state import AlertBell, Clock, ViewState
from trainctl.tui.text.styled_line import Line, Piece, clean, line, plain

T = TypeVar("T")
Values = tuple[tuple[str, str], ...]
"""Texts that can be copied, each after its name, the most likely first."""
READ_ONLY = "read-only: this screen sends no commands"


@dataclass(frozen=True)
class KeyHint:
    """A key as it is printed, what it does in a word, its action, and the key's name."""

    display: str
    words: str
    action: str
    key: str


class ProgressView(Protocol):
    """A view of how far a command has come."""

    @property
    def watching(self) -> bool:
        """Return whether a person still sees it."""
        ...

    def follow(self, progress: Progress) -> None: ...


class AppContext(Protocol):
    """The full-screen program, as what it shows sees it."""

    clock: Clock
    address: str
    alert_bell: AlertBell
    read_only: bool
    selected: int | None
    compare_runs: tuple[str, ...]
    fleet_metrics: tuple[str, ...]

    @property
    def shown(self) -> ViewState: ...
    @property
    def live(self) -> ViewState: ...
    @property
    def client(self) -> Source | None: ...
    @property
    def badge(self) -> str: ...
    @property
    def outcome(self) -> Line: ...
    @property
    def logs(self) -> LogFeed: ...
    @property
    def size(self) -> Size: ...

    def key_hints(self) -> list[KeyHint]: ...
    def key_of(self, action: str) -> str: ...
    def above_bottom(self) -> Iterable[Widget]: ...
    def choose(self, by: int) -> None: ...
    async def open_run(self, run: str) -> None: ...
    def open_dialog(self, verb: str, values: Mapping[str, str] | None = None) -> None: ...
    def show_outcome(self, outcome: Line) -> None: ...
    def send_order(self, order: Order, follower: ProgressView) -> None: ...
    def action_show(self, name: str) -> None: ...
    def action_why(self, id: str = "") -> None: ...
    def paint(self) -> None: ...

    def copy_to_clipboard(self, text: str) -> None: ...
    def notify(self, message: str, *, severity: Any = "information", markup: bool = True) -> None: ...
    def push_screen(self, screen: Screen[T], callback: Callable[[T | None], None] | None = None) -> Awaitable[Any]: ...
    def run_worker(self, work: Any, *, group: str = "default", exclusive: bool = False) -> Any: ...


def context_of(node: DOMNode) -> AppContext:
    """Return the program that a screen or a widget is shown by."""
    return cast(AppContext, node.app)


MUTE_MINUTES = 60.0
REST_SECONDS = 0.05
"""Seconds after a key before the lead is asked: keys that come in bursts ask once."""


class _Unwatched:
    """Nothing on screen follows the command: the bottom line says that it was applied, a notification why not."""

    watching = False

    def follow(self, progress: forms.Progress) -> None:
        return None


UNWATCHED = _Unwatched()


def acknowledge(app: AppContext, alert: AlertView, follower: ProgressView = UNWATCHED) -> None:
    """Have an alert call nobody any more."""
    send(app, Order("acknowledge", {"id": alert.id}), follower)


def mute(app: AppContext, alert: AlertView, follower: ProgressView = UNWATCHED) -> None:
    """Mute an alert's kind on its node for an hour; one that is muted, no longer."""
    minutes = 0.0 if alert.muted else MUTE_MINUTES
    send(app, Order("mute", {"kind": alert.kind, "minutes": minutes}, alert.node or None), follower)


def send(app: AppContext, order: Order, follower: ProgressView) -> None:
    """Send a command of the run shown; `follower` is given each state, the person if nothing shows it any more."""
    run = app.shown.run
    if order.run is None and run is not None and DESCRIPTIONS[order.verb].acts_on != "new run":
        order = dataclasses.replace(order, run=run.run)
    progress = forms.Progress(order, app.clock.wall())
    if app.read_only:
        app.notify(READ_ONLY, severity="warning")
        return
    follower.follow(progress)  # at once: the keys after this one must find it sent
    app.run_worker(_carry(app, progress, follower), group="command")


def foresee(app: AppContext, order: Order, show: Callable[[Piece], None]) -> None:
    """Have the run's lead say what a command would do, or why it would refuse it; `show` is given that. Nothing is
    shown if no lead answers, or the command is about an alert, which another agent may have raised."""

    def say(found: DryRun | None) -> None:
        if found is not None and (found.refused or verbs.VERBS[order.verb].scope == "edit"):
            show(Piece(forecast(found), "bad" if found.refused else "strong"))

    ask_lead(app, order, say)


def ask_lead(app: AppContext, order: Order, take: Callable[[DryRun | None], None]) -> None:
    """Have the run's lead say what a command would do; `take` is given that, None if no lead answers."""
    run, verb = app.shown.run, verbs.VERBS[order.verb]
    is_of_lead = verb.scope != "agent" or verb.to_node  # the lead asks the node's own agent
    if run is not None and run.kind == "hosted" and app.shown.active and is_of_lead:
        asked = partial(_ask_lead, app, dataclasses.replace(order, run=run.run), take)
        app.run_worker(asked, group="forecast", exclusive=True)


async def _ask_lead(app: AppContext, order: Order, take: Callable[[DryRun | None], None]) -> None:
    await asyncio.sleep(REST_SECONDS)
    asked, found = (order.verb, order.run, dict(order.args), order.node, order.if_plan), None
    with contextlib.suppress(TrainctlError):
        found = await app.client.lead.ask(DryRunRequest, *asked) if app.client is not None else None
    take(found)


async def _carry(app: AppContext, progress: forms.Progress, follower: ProgressView) -> None:
    order = progress.order
    try:
        if app.client is None:
            raise UnreachableError("no agent")
        async for reply in replies(app.client, order):
            accepted = progress.accepted or reply.state == "accepted"
            progress = dataclasses.replace(progress, accepted=accepted, reply=reply)
            follower.follow(progress)
    except TrainctlError as error:
        progress = dataclasses.replace(progress, problem=str(error))
        follower.follow(progress)
    if not follower.watching:
        _report(app, progress)


def _report(app: AppContext, progress: forms.Progress) -> None:
    verb, node, reply = progress.order.verb, progress.order.node, progress.reply
    if reply is not None and progress.applied:
        name = f"{verb} {clean(node)}" if node else verb
        app.show_outcome(line(Piece(f"{name} ", "strong"), *forms.applied_line(reply)))
    else:
        app.notify(f"{verb}: {plain(forms.progress_line(progress))}", severity="error", markup=False)
