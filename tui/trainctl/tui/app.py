"""The full-screen program: follows an agent, repaints at most twice a second, and sends what a person decides."""

import asyncio
import contextlib
import dataclasses
import datetime
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

from rich.console import RenderableType
from textual import events
from textual._compositor import ChopsUpdate
from textual.app import App
from textual.binding import Binding, BindingType
from textual.dom import DOMNode
from textual.screen import Screen
from textual.widgets import Input

from trainctl.protocol.errors import InvalidInputError, TrainctlError, UnreachableError
from trainctl.tui import (
    control,
    copying,
    events_panel,
    keymap,
    picture,
    settings,
    split,
    themes,
    undo,
    undo_dialog,
)
from trainctl.tui import model as md
from trainctl.tui.bottom import Bottom, KeyHint
from trainctl.tui.calls import DEFAULT_ADDRESS, Order
from trainctl.tui.clock import Clock
from trainctl.tui.dialogs import CommandDialog
from trainctl.tui.feed import SNAPSHOT_COLUMNS, Feed
from trainctl.tui.glyphs import ASCII, UNICODE, Glyphs, for_locale
from trainctl.tui.keymap import named
from trainctl.tui.lines import clean, plain, shorten
from trainctl.tui.log_feed import LogFeed
from trainctl.tui.palette import ActionProvider, VerbProvider
from trainctl.tui.popups import Chooser
from trainctl.tui.rhythm import Rhythm
from trainctl.tui.ringer import Ringer
from trainctl.tui.screens.alerts import AlertsScreen
from trainctl.tui.screens.base import Bar, BaseScreen
from trainctl.tui.screens.charts import ChartsScreen
from trainctl.tui.screens.events import EventsScreen
from trainctl.tui.screens.help import HelpScreen
from trainctl.tui.screens.log_screen import LogScreen
from trainctl.tui.screens.logs import LogsScreen
from trainctl.tui.screens.node import NodeScreen
from trainctl.tui.screens.overview import OverviewScreen
from trainctl.tui.screens.runs import RunsScreen
from trainctl.tui.screens.why import WhyScreen
from trainctl.tui.source import ClusterSource, Connect, Source
from trainctl.tui.spans import SpanUpdate
from trainctl.tui.split_dialog import SplitDialog
from trainctl.tui.themes import THEMES

REPAINT_SECONDS = 0.5
HANGUP_SECONDS = 2.0

_OWN_ACTIONS = frozenset(
    ("show", "node", "dialog", "command_line", "help", "theme", "picture", "detach", "why", "undo", "copy")
) | {"command_palette", "read_only"}


class Follower(Protocol):
    """What shows how far a command has come."""

    @property
    def watching(self) -> bool:
        """Whether a person still sees it."""
        ...

    def follow(self, progress: control.Progress) -> None: ...


class TrainctlApp(App[int]):
    """`connect` makes the client to follow and command through, of the agent at `address`; `clock` is what ages and
    times of day are read from."""

    TITLE = "trainctl"
    CSS = """
    Screen { layers: base; }
    CommandDialog, SplitDialog, HelpScreen, WhyScreen { align: center middle; background: $background 55%; }
    #dialog, #split, #help, #why { width: 68; max-width: 100%; height: auto; max-height: 100%; padding: 0 2;
      border: round $accent; border-title-color: $accent; border-title-style: bold; background: $surface; }
    #split, #help, #why { width: 76; }
    #help VerticalScroll { height: auto; max-height: 100%; }
    .ascii #dialog, .ascii #split, .ascii #help, .ascii #why { border: ascii $accent; }
    .field { height: 1; }
    .field .name { width: 18; color: $foreground 70%; }
    .field Input, #command, #filter { width: 1fr; background: $panel; }
    #command, #filter { height: 1; }
    """
    # Priority: a key acts before the next one of the same burst is handed out, so that `:` and what is typed after it,
    # or `b` and a number, never end up in different places on a slow line. `check_action` keeps them out of text.
    BINDINGS: ClassVar[list[BindingType]] = named([
        Binding("0", "show('runs')", "runs", tooltip="every run the agent knows", priority=True),
        Binding("1", "show('overview')", "view", tooltip="the run on one page", priority=True),
        Binding("2", "node", "node", tooltip="one node in full", priority=True),
        Binding("3", "show('charts')", "charts", tooltip="metrics, zoomed and read", priority=True),
        Binding("4", "show('events')", "events", tooltip="all events, / filters", priority=True),
        Binding("5", "show('logs')", "logs", tooltip="all nodes' logs, merged", priority=True),
        Binding("b", "dialog('resize-batch')", "batch", tooltip="micro-batch of a node", priority=True),
        Binding("s", "dialog('rebalance')", "split", tooltip="samples of each node", priority=True),
        Binding("l", "dialog('set-lr')", "lr", tooltip="learning rate", priority=True),
        Binding("c", "dialog('checkpoint')", "ckpt", tooltip="write a checkpoint", priority=True),
        Binding("p", "dialog('pause')", "pause", tooltip="pause or resume", priority=True),
        Binding("a", "show('alerts')", "alerts", tooltip="what is wrong now", priority=True),
        Binding("w", "why", "why", show=False, tooltip="why of the first alert", priority=True),
        Binding("x", "dialog('stop')", "stop", tooltip="stop the run", priority=True),
        Binding("n", "dialog('note')", "note", tooltip="write a note", priority=True),
        Binding("e", "dialog('evaluate')", "eval", tooltip="evaluate now", priority=True),
        Binding("g", "dialog('set-global-batch')", "global batch", show=False, tooltip="samples a step", priority=True),
        Binding("u", "undo", "undo", tooltip="undo a change", priority=True),
        Binding("y", "copy", "copy", show=False, tooltip="copy a value (OSC 52)", priority=True),
        Binding("colon", "command_line", "cmd", key_display=":", tooltip="any verb, as typed", priority=True),
        Binding("question_mark", "help", "help", key_display="?", tooltip="this", priority=True),
        Binding("t", "theme", "theme", show=False, tooltip="next theme", priority=True),
        Binding("S", "picture", "picture", show=False, tooltip="save the screen as SVG", priority=True),
        Binding("q", "detach", "detach", tooltip="leave; the run goes on", priority=True),
        Binding("ctrl+p", "command_palette", "palette", show=False, tooltip="all of it by name", priority=True),
        Binding("ctrl+c", "leave", "detach", show=False, tooltip="leave; the run goes on", priority=True),
    ])  # fmt: skip
    COMMANDS: ClassVar[set[Any]] = {VerbProvider, ActionProvider}
    ENABLE_COMMAND_PALETTE = True

    def __init__(
        self, connect: Connect, *, clock: Clock | None = None, read_only: bool = False, glyphs: Glyphs | None = None,
        pictures: Path | None = None, theme: str | None = None, address: str = DEFAULT_ADDRESS, bell: bool = True,
        config: settings.Found | None = None,
    ) -> None:  # fmt: skip
        no_color = os.environ.get("NO_COLOR") is not None
        super().__init__(ansi_color=True if no_color else None)
        self._config_problems = config.problems if config is not None else ()
        self.set_keymap(dict(config.settings.keys) if config is not None else {})
        self.address = address
        self.clock, self.read_only, self._started_read_only = clock or Clock(), read_only, read_only
        self.feed = Feed(connect, self.clock, self._arrived)
        self.glyphs = glyphs or for_locale()
        if no_color:
            self.glyphs = dataclasses.replace(self.glyphs, letters=True)
        self._pictures = pictures or Path()
        self.ringer = Ringer(on=bell)
        self._pinned: md.ViewState | None = None
        self.selected: int | None = None
        self.logs = LogFeed(lambda: self.feed.client, self.clock, self.paint)
        self.compare_runs: tuple[str, ...] = ()  # that Charts is to overlay
        self._opened = False
        self._rhythm = Rhythm(REPAINT_SECONDS)
        self.hung_up = threading.Event()
        self.animation_level = "none"
        for item in THEMES:
            self.register_theme(item)
        self.theme = theme or themes.fitting(os.environ)

    @classmethod
    def key_tables(cls) -> keymap.Tables:
        """The bindings that are everywhere, and those of each screen."""
        kinds = sorted(_leaves(BaseScreen), key=lambda kind: kind.__name__)
        screens = {kind.__name__.removesuffix("Screen").lower(): _all_bindings(kind) for kind in kinds}
        return {"": _bindings(cls), **{name: bindings for name, bindings in screens.items() if bindings}}

    # ------------------------------------------------------------ what is shown

    @property
    def live(self) -> md.ViewState:
        """What is known of the live run."""
        return self.feed.live

    @property
    def client(self) -> Source | None:
        """What to ask; None while nobody answers."""
        return self.feed.client

    @property
    def shown(self) -> md.ViewState:
        """The run on screen: the live one, or one opened from the record."""
        if self._pinned is None:
            return self.live
        return dataclasses.replace(self._pinned, connection=self.live.connection, heard_at=self.live.heard_at)

    @property
    def badge(self) -> str:
        """Words about the screen itself, for its upper right corner."""
        words = ["RECORDING"] if self.shown.run is not None and self.shown.run.recording else []
        words += ["FROM RECORD"] if self._pinned is not None else []
        return " ".join([*words, "READ-ONLY"] if self.read_only else words)

    def key_hints(self) -> list[KeyHint]:
        """The live bindings that are to be seen, in the order of their declaration."""
        paused = self.shown.run is not None and self.shown.run.state in ("pausing", "paused")
        made = []
        for binding in self._active():
            here = binding.action in (f"show('{self.screen.name}')", self.screen.name)
            if binding.show and binding.description and not here:
                words = "resume" if paused and binding.action == "dialog('pause')" else binding.description
                made.append(KeyHint(self.get_key_display(binding), words, binding.action, binding.key))
        return made

    def above_bottom(self) -> list[Bar]:
        """Lines of this program's own that each screen has above its bottom line."""
        return []

    def _active(self) -> list[Binding]:
        """The live bindings as they are declared, whatever keys they have."""
        found = [binding for _, binding, enabled, _ in self.screen.active_bindings.values() if enabled]
        kinds = [kind for last in (type(self.screen), type(self)) for kind in last.__mro__ if issubclass(kind, DOMNode)]
        order = [binding.action for kind in kinds for binding in _bindings(kind)]
        return sorted(found, key=lambda binding: order.index(binding.action) if binding.action in order else len(order))

    # ------------------------------------------------------------ following the agent

    def on_mount(self) -> None:
        screens = (OverviewScreen(name="overview"), RunsScreen(name="runs"), ChartsScreen(name="charts"))
        for screen in (*screens, EventsScreen(name="events"), AlertsScreen(name="alerts")):
            self.install_screen(screen, screen.name or "")
        self.install_screen(NodeScreen(name="node"), "node")
        self.install_screen(LogsScreen(name="logs"), "logs")
        self.push_screen("overview")
        self.run_worker(self.feed.keep_up(), group="follow")
        self.run_worker(self.feed.attend(lambda: self.read_only), group="attend")
        self.set_timer(self._rhythm.seconds, self._repaint)
        self._leave_on_hangup()
        if self._config_problems:
            first, more = self._config_problems[0], len(self._config_problems) - 1
            rest = f"; {more} more, see trainctl config" if more else ""
            self.notify(f"{first}{rest}", severity="warning", timeout=15, markup=False)

    def _leave_on_hangup(self) -> None:
        """A terminal that went away ends the program; without this Textual would spin on a dead line."""
        with contextlib.suppress(ValueError, RuntimeError):  # not the main thread's loop: then it isn't ours to handle
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._hang_up)

    def _hang_up(self) -> None:
        """Leave in order, for the signal may come to a terminal that lives."""
        self.hung_up.set()
        self.exit(0)

    async def on_event(self, event: events.Event) -> None:
        """A terminal sends Escape and the key after it as one when they come close: to us they are two keys."""
        if isinstance(event, events.Key) and not event.is_forwarded and event.key.startswith("alt+"):
            await super().on_event(events.Key("escape", "\x1b"))
            await super().on_event(events.Key(event.key.removeprefix("alt+"), event.character))
        else:
            await super().on_event(event)

    def _arrived(self) -> None:
        """A snapshot is drawn at once; where no run is active, the first thing to see is the list of runs."""
        if not self._opened and not self.live.active:
            self.action_show("runs")
        elif isinstance(self.screen, RunsScreen):
            self.screen.action_reload()
        elif isinstance(self.screen, NodeScreen):
            self.screen.reload()
        self._opened = True
        self.paint()
        self.run_worker(self.feed.refine(), group="refine", exclusive=True)

    def _repaint(self) -> None:
        self.paint()
        self.set_timer(self._rhythm.after(time.process_time(), time.monotonic()), self._repaint)

    def paint(self) -> None:
        """Brings the screen up to date, also the one under a dialog, and rings for a new alert."""
        if self.ringer.rings(self.live):
            self.bell()
        for screen in self.screen_stack:
            if isinstance(screen, BaseScreen | SplitDialog) and screen.is_mounted:
                screen.paint()

    def _display(self, screen: Screen[Any], renderable: RenderableType | None) -> None:
        super()._display(screen, SpanUpdate(renderable) if isinstance(renderable, ChopsUpdate) else renderable)

    # ------------------------------------------------------------ actions

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """The program's own keys are text while something is typed, and rest while a dialog is open."""
        if action not in _OWN_ACTIONS:
            return True
        if parameters in (("rebalance",), ("checkpoint",)) and isinstance(self.screen, RunsScreen):
            return False  # there the keys are the screen's own
        if isinstance(self.screen, LogScreen) and self.screen.own_keys.intersection(map(str, parameters)):
            return False
        return isinstance(self.screen, BaseScreen) and not isinstance(self.focused, Input)

    def action_show(self, name: str) -> None:
        """Goes to another screen; the overview is that of the live run."""
        if name == "overview":
            self._pinned = None
        if self.screen is not self.get_screen(name):
            self.switch_screen(name)
        else:
            self.paint()

    async def open_run(self, run: str) -> None:
        """Shows a run on the Overview, from the record if it isn't the live one."""
        if self.live.run is None or self.live.run.run != run:
            if self.client is None:
                self.notify("no agent to ask", severity="error")
                return
            try:
                snapshot = await self.client.snapshot(SNAPSHOT_COLUMNS, run)
            except TrainctlError as error:
                self.notify(str(error), severity="error", markup=False)
                return
            self.action_show("overview")
            self._pinned = md.apply(md.ViewState(), snapshot, self.clock.monotonic())
        else:
            self.action_show("overview")
        self.paint()

    def choose(self, by: int) -> None:
        """Moves the choice among the ranks of the run shown."""
        ranks = sorted(view.rank for view in self.shown.run.ranks) if self.shown.run else []
        if not ranks:
            return
        place = ranks.index(self.selected) + by if self.selected in ranks else 0 if by > 0 else len(ranks) - 1
        self.selected = ranks[min(max(place, 0), len(ranks) - 1)]

    def action_why(self, id: str = "") -> None:
        """What is known of an alert; without one, of the first that calls for somebody."""
        open_alerts = self.shown.open_alerts
        alert = next((alert for alert in open_alerts if id in ("", alert.id)), None)
        if alert is None:
            self.notify("no alert is open")
        else:
            self.push_screen(WhyScreen(alert, self.glyphs))

    def action_select(self, rank: int) -> None:
        self.selected = rank
        self.paint()

    def action_node(self, rank: int | None = None) -> None:
        """Opens the node of a rank (None: of the one chosen, else the first)."""
        if rank is not None:
            self.selected = rank
        elif self.selected is None:
            self.choose(1)
        self.action_show("node")

    def action_dialog(self, verb: str) -> None:
        run = self.shown.run
        if verb == "pause" and run is not None and run.state in ("pausing", "paused"):
            verb = "resume"
        self.open_dialog(verb)

    def open_dialog(self, verb: str, values: Mapping[str, str] | None = None) -> None:
        """The dialog of a verb, its fields filled from the run shown."""
        form = control.form(verb, self.shown, self.selected, values)
        if verb == "rebalance":
            self.push_screen(SplitDialog(form, split.opened(self.shown, self.selected), self.glyphs))
        else:
            self.push_screen(CommandDialog(form, self.glyphs))

    def send_order(self, order: Order, follower: Follower) -> None:
        """Sends a command; `follower` is told of each state it reaches, and the person if nothing shows it any more."""
        run = self.shown.run
        if order.run is None and order.verb != "start-run" and run is not None:
            order = dataclasses.replace(order, run=run.run)
        progress = control.Progress(order, self.clock.wall())
        if self.read_only:
            self.notify("read-only: commands are off for this screen", severity="warning")
            return
        follower.follow(progress)  # at once: the keys after this one must find it sent
        self.run_worker(self._carry(progress, follower), group="command")

    async def _carry(self, progress: control.Progress, follower: Follower) -> None:
        order = progress.order
        try:
            if self.client is None:
                raise UnreachableError("no agent")
            async for reply in self.client.command(order.verb, dict(order.args), **order.options):
                accepted = progress.accepted or reply.state == "accepted"
                progress = dataclasses.replace(progress, accepted=accepted, reply=reply)
                follower.follow(progress)
        except TrainctlError as error:
            progress = dataclasses.replace(progress, problem=str(error))
            follower.follow(progress)
        if not follower.watching:
            self._tell(progress)

    def _tell(self, progress: control.Progress) -> None:
        text = f"{progress.order.verb}: {plain(control.progress_line(progress, self.glyphs))}"
        failed = progress.reply is None or progress.reply.state != "applied"
        self.notify(text, severity="error" if failed else "information", markup=False)

    def action_undo(self) -> None:
        if isinstance(self.screen, BaseScreen):
            self.screen.undo()

    def offer_undo(self) -> None:
        """Lets a person choose among the newest changes that can be undone."""
        state = self.shown
        found = undo.newest(state.run, state.run_events)
        if not found:
            self.notify("nothing to undo: no change of this run has an inverse now", severity="warning")
            return
        words = [undo_dialog.line_of(inverse, self.clock) for inverse in found]
        numbers = events_panel.numbered(state)
        keys = [numbers.get(inverse.event.id, "") for inverse in found]
        chooser = Chooser("undo which change?", words, "opens its dialog", self.glyphs, keys=keys)
        self.push_screen(chooser, lambda index: self.open_undo(found[index]) if index is not None else None)

    def open_undo(self, inverse: undo.Inverse) -> None:
        """The dialog of the command that undoes an event, filled."""
        form = undo_dialog.form(inverse, self.shown)
        if form.verb == "rebalance":
            made = undo_dialog.split_of(inverse, split.opened(self.shown, self.selected))
            self.push_screen(SplitDialog(form, made, self.glyphs))
        else:
            self.push_screen(CommandDialog(form, self.glyphs))

    def action_copy(self) -> None:
        if isinstance(self.screen, BaseScreen):
            self.copy_value(self.screen.values())

    def copy_value(self, values: copying.Values) -> None:
        """Copies a value, or lets a person choose one of several."""
        if not values:
            self.notify("nothing to copy here", severity="warning")
        elif len(values) == 1:
            self._copy(*values[0])
        else:
            words = [f"{name:<11} {clean(value)}" for name, value in values]
            chooser = Chooser("copy what?", words, "copies it", self.glyphs)
            self.push_screen(chooser, lambda index: self._copy(*values[index]) if index is not None else None)

    def _copy(self, name: str, value: str) -> None:
        """By OSC 52, so that it reaches the clipboard of the terminal that a person sits at, over SSH too."""
        self.copy_to_clipboard(value)
        self.notify(f"copied {name}: {shorten(clean(value), 60, self.glyphs.ellipsis)}", markup=False)

    def action_command_line(self) -> None:
        if isinstance(self.screen, BaseScreen):
            self.screen.query_one(Bottom).start()
            self.paint()

    def action_help(self) -> None:
        own = {binding.action for kind in (type(self), type(self.screen)) for binding in _bindings(kind)}
        keys: dict[str, list[str]] = {}
        for binding in self._active():
            if binding.action in own:
                words = binding.tooltip or binding.description
                keys.setdefault(words, []).append(self.get_key_display(binding))
        self.push_screen(HelpScreen([(" ".join(names), words) for words, names in keys.items()], self.address))

    def action_press(self, key: str) -> None:
        """A click on a key's name at the bottom."""
        self.simulate_key(key)

    def action_theme(self) -> None:
        names = [item.name for item in THEMES]
        self.theme = names[(names.index(self.theme) + 1) % len(names)] if self.theme in names else names[0]

    def action_read_only(self) -> None:
        """Puts commands off, and on again unless the program was started without them."""
        if self._started_read_only:
            self.notify("it was started read-only: start it without that to send commands", severity="warning")
        else:
            self.read_only = not self.read_only
            self.paint()

    def action_picture(self) -> None:
        at = datetime.datetime.fromtimestamp(self.clock.wall(), self.clock.zone or datetime.UTC)
        try:
            path = picture.save(self, self._pictures / picture.file_name(at))
        except InvalidInputError as error:
            self.notify(str(error), severity="error", markup=False)
        else:
            self.notify(f"picture of this screen: {path}", markup=False)

    def action_detach(self) -> None:
        self.exit(0)

    def action_leave(self) -> None:
        """As detach, but from anywhere, a text field or a dialog too."""
        self.exit(0)


def _leaves(kind: type[Any]) -> list[type[Any]]:
    """The screens that there are, and not what some of them share."""
    found = kind.__subclasses__()
    return [leaf for sub in found for leaf in _leaves(sub)] if found else [kind]


def _all_bindings(kind: type[DOMNode]) -> list[Binding]:
    """A screen's own, and those it inherits from another one."""
    mine = kind.__mro__[: kind.__mro__.index(BaseScreen)]
    return [binding for part in mine if issubclass(part, DOMNode) for binding in _own_bindings(part)]


def _own_bindings(kind: type[DOMNode]) -> list[Binding]:
    return [binding for binding in kind.__dict__.get("BINDINGS", ()) if isinstance(binding, Binding)]


def configuration(path: Path | None = None) -> settings.Found:
    """The person's settings, their keys checked against the actions that there are. Raises as `settings.read`."""
    return settings.read(
        path, tuple(theme.name for theme in THEMES), lambda keys: keymap.checked(keys, TrainctlApp.key_tables())
    )


def _bindings(kind: type[DOMNode]) -> list[Binding]:
    return [binding for binding in kind.BINDINGS if isinstance(binding, Binding)]


def farewell(state: md.ViewState, address: str) -> str:
    """What is said when the program is left: that the run goes on, and how to come back."""
    again = f"come back with: trainctl attach --connect {address}"
    if not state.active or state.run is None:
        return f"detached; {again}"
    run = state.run
    return f"detached: {run.name} ({run.state}) goes on at step {run.step:,} of {run.steps:,}; {again}"


def _leave_after_hangup(hung_up: threading.Event) -> None:
    """A terminal that died can block for ever what is written to it on the way out."""
    hung_up.wait()
    time.sleep(HANGUP_SECONDS)
    os._exit(128 + signal.SIGHUP)


def run_app(
    address: str, *, by: str, read_only: bool = False, config: Path | None = None,
    say: Callable[[md.ViewState, str], str] = farewell,
) -> int:  # fmt: skip
    """The full-screen program until it is left; gives the exit status. Raises InvalidInputError for a bad address, and
    for a configuration file that was named and can't be read.

    `say` makes the line that is printed at the end from what was last known and the address.
    """
    ClusterSource(address, by=by)
    found = configuration(config)
    own = found.settings
    app = TrainctlApp(
        lambda: ClusterSource(address, by=by), read_only=read_only or own.read_only, address=address, theme=own.theme,
        glyphs=None if own.ascii is None else ASCII if own.ascii else UNICODE, bell=own.bell, config=found,
    )  # fmt: skip
    for name in ("COLUMNS", "LINES"):  # exported by a shell, they would stand for the terminal's size for ever
        os.environ.pop(name, None)
    threading.Thread(target=_leave_after_hangup, args=(app.hung_up,), name="hang-up", daemon=True).start()
    app.run(mouse=own.mouse)
    if app.return_code == 0:
        with contextlib.suppress(OSError):
            print(clean(say(app.live, address)))
    return app.return_code or 0
