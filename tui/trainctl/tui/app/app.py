"""The full-screen program: follows an agent, repaints at most twice a second, and sends what a person decides."""

import asyncio
import contextlib
import datetime
import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from textual import events
from textual.binding import Binding, BindingType
from textual.filter import LineFilter
from textual.screen import Screen
from textual.widgets import Input
from textual.worker import Worker

from trainctl.protocol.errors import InvalidInputError, TrainctlError
from trainctl.tui.app import config as settings
from trainctl.tui.app import keymap
from trainctl.tui.app.keymap import PaletteProvider
from trainctl.tui.commands.command import Order
from trainctl.tui.commands.context import KeyHint, ProgressView
from trainctl.tui.screens import base
from trainctl.tui.screens.base import BaseScreen, StatusBar
from trainctl.tui.state.live_feed import LiveFeed, LogFeed
from trainctl.tui.state.source import Connect, Source
from trainctl.tui.state.view_state import AlertBell, Clock, ViewState
from trainctl.tui.terminal import terminal_app
from trainctl.tui.terminal.repaint_scheduler import RepaintScheduler
from trainctl.tui.terminal.terminal_app import AsciiFilter, TerminalApp, TypeAhead
from trainctl.tui.text.ascii import key_in_ascii, locale_is_ascii
from trainctl.tui.text.styled_line import Line
from trainctl.tui.widgets import theme as themes
from trainctl.tui.widgets.command_bar import CommandBar
from trainctl.tui.widgets.line_view import Repaintable
from trainctl.tui.widgets.theme import THEMES

COLLECT_SECONDS = 30.0
"""Seconds between two returns of what screens and dialogs left behind: as that is in cycles, it would grow for many
minutes."""
OUTCOME_SECONDS = 15.0
"""Seconds for which the bottom line says what a command has done, unless a key comes before."""
WORD_KEYS = {"alt+b": "ctrl+left", "alt+f": "ctrl+right", "alt+backspace": "ctrl+w"}
"""Keys that go by words in a text, with alt, and Textual's keys for that."""


class TrainctlApp(TerminalApp):
    """`connect` makes the client to follow and command through, of the agent at `address`; `clock` is what ages and
    times of day are read from."""

    TITLE = "trainctl"
    CSS = """
    Screen { layers: base; }
    .field { height: auto; }
    .field .name { width: 19; height: 1; color: $foreground 70%; }
    .field Input, #command, #filter { width: 1fr; background: $panel; }
    #command, #filter { height: 1; }
    Toast { width: auto; max-width: 100%; margin-top: 0; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = keymap.EVERYWHERE
    SCREENS: ClassVar[Mapping[str, Callable[[], Screen[Any]]]] = base.makers()  # type: ignore[assignment]
    COMMANDS: ClassVar[set[Any]] = {PaletteProvider}
    ENABLE_COMMAND_PALETTE = True

    def __init__(
        self,
        connect: Connect,
        *,
        clock: Clock | None = None,
        read_only: bool = False,
        in_ascii: bool | None = None,
        pictures: Path | None = None,
        theme: str | None = None,
        address: str = "",
        bell: bool = True,
        config: settings.Found | None = None,
        opens_runs: bool = False,
        first_keys: Callable[[], Sequence[tuple[str, str]]] = tuple,
    ) -> None:
        no_color = os.environ.get("NO_COLOR") is not None
        super().__init__(ansi_color=True if no_color else None)
        self._config_problems = config.problems if config is not None else ()
        self.set_keymap(dict(config.settings.keys) if config is not None else {})
        self.address = address
        self.clock, self.read_only, self._started_read_only = clock or Clock(), read_only, read_only
        self._ascii_filters = [AsciiFilter()] if (locale_is_ascii() if in_ascii is None else in_ascii) else []
        unread = ViewState(lettered=no_color or bool(self._ascii_filters))
        self.feed = LiveFeed(connect, self.clock, self._arrived, lambda message: self._repainting.told(message), unread)
        self._pictures = pictures or Path()
        self.alert_bell = AlertBell(on=bell)
        self.fleet_metrics = config.settings.columns if config is not None else ()
        self.selected: int | None = None
        self.compare_runs: tuple[str, ...] = ()  # that Charts is to overlay
        self._outcome: Line = ()
        self._outcome_until = 0.0
        self._opened, self._opens_runs, self._first_keys = False, opens_runs, first_keys
        self._repainting = RepaintScheduler(self, self._painting)
        self._type_ahead = TypeAhead(self, self._press)
        self.hung_up = threading.Event()
        self._handlers: dict[signal.Signals, Any] = {}  # of signals, before this program's
        self.animation_level = "none"
        for item in THEMES:
            self.register_theme(item)
        self.theme = theme or themes.fitting(os.environ)

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Return Textual's filters, and in ASCII the one that translates all that is drawn."""
        return [*super().get_line_filters(), *self._ascii_filters]

    def get_key_display(self, binding: Binding) -> str:
        """Return a key as it is printed; in ASCII by its name."""
        display = super().get_key_display(binding)
        return key_in_ascii(display) if self._ascii_filters else display

    # ------------------------------------------------------------ what is shown

    @property
    def live(self) -> ViewState:
        """Return what is known of the live run."""
        return self.feed.live

    @property
    def client(self) -> Source | None:
        """Return what to ask; None while nobody answers."""
        return self.feed.client

    @property
    def shown(self) -> ViewState:
        """Return the run on screen: the live one, or one opened from the record."""
        opened = self.feed.opened
        if opened is None:
            return self.live
        return msgspec.structs.replace(opened, connection=self.live.connection, heard_at=self.live.heard_at)

    @property
    def badge(self) -> str:
        """Return words about the screen itself, for its upper right corner."""
        run = self.shown.run
        words = ["SIMULATED"] if run is not None and run.simulated else []
        words += ["FROM RECORD"] if self.feed.opened is not None and not self.feed.opened.active else []
        return " ".join([*words, "READ-ONLY"] if self.read_only else words)

    @functools.cached_property
    def logs(self) -> LogFeed:
        """Return what reads the logs on screen."""
        return LogFeed(lambda: self.feed.client, self.clock, self.paint)

    def key_hints(self) -> list[KeyHint]:
        """Return the live bindings that are to be seen, in the order of their declaration."""
        own: Callable[[], list[KeyHint]] | None = getattr(self.screen, "hints", None)
        if own is not None:
            return own()
        made = []
        for binding in self._active():
            here = binding.action in (f"show('{self.screen.name}')", self.screen.name)
            if binding.show and binding.description and not here:
                words = keymap.words_of(binding, self.shown)
                made.append(KeyHint(self.get_key_display(binding), words, binding.action, binding.key))
        return self.screen.arranged(made) if isinstance(self.screen, BaseScreen) else made

    def key_of(self, action: str) -> str:
        """Return the key of an action as it is printed; empty while it has none."""
        return next((self.get_key_display(binding) for binding in self._active() if binding.action == action), "")

    def above_bottom(self) -> list[StatusBar]:
        """Return lines of this program's own that each screen has above its bottom line."""
        return []

    def _active(self) -> list[Binding]:
        found = [binding for _, binding, enabled, _ in self.screen.active_bindings.values() if enabled]
        order = keymap.declared_order(type(self.screen), type(self))
        return sorted(found, key=lambda binding: order.get(binding.action, len(order)))

    # ------------------------------------------------------------ following the agent

    def on_mount(self) -> None:
        self.push_screen("overview")
        self.run_worker(self.feed.keep_up(), group="follow")
        self.run_worker(self.feed.attend(lambda: self.read_only), group="attend")
        self._repainting.start()
        self.set_interval(COLLECT_SECONDS, terminal_app.give_back)
        self._leave_on_signals()
        if self._config_problems:
            first, more = self._config_problems[0], len(self._config_problems) - 1
            rest = f"; {more} more: run trainctl config" if more else ""
            self.notify(f"{first}{rest}", severity="warning", timeout=15, markup=False)

    def _leave_on_signals(self) -> None:
        """End in order on SIGTERM, or the terminal would stay in raw mode; and on SIGHUP, or Textual would spin on a
        dead line."""
        loop = asyncio.get_running_loop()

        def leave(number: int, _: object) -> None:
            self.hung_up.set()  # at once: the loop may wait for ever for a dead terminal to take what is drawn
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self.hang_up, 128 + number if number == signal.SIGTERM else 0)

        with contextlib.suppress(ValueError):  # not the main thread: then signals are handled elsewhere
            self._handlers = {number: signal.signal(number, leave) for number in (signal.SIGHUP, signal.SIGTERM)}

    def on_unmount(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def hang_up(self, return_code: int = 0) -> None:
        """Leave in order, for the signal may come to a terminal that lives."""
        self.hung_up.set()
        self.exit(return_code=return_code)

    async def on_event(self, event: events.Event) -> None:
        """Take Escape and the key after it as two keys, which a terminal sends as one when they come close."""
        if not isinstance(event, events.Key) or event.is_forwarded:
            await super().on_event(event)
        elif not event.key.startswith("alt+"):
            await self._press(event)
        elif event.key in WORD_KEYS and isinstance(self.focused, Input):
            await self._press(events.Key(WORD_KEYS[event.key], None))
        else:
            await self._press(events.Key("escape", "\x1b"))
            await self._press(events.Key(event.key.removeprefix("alt+"), event.character))

    async def _press(self, key: events.Key) -> None:
        """Hand a key on, once an Escape before it has led where it leads and the screen to take it is there."""
        self._repainting.pressed()
        if self._outcome:
            self.show_outcome(())
        if not self._type_ahead.holds(key):
            focus = self.focused or self.screen
            await super().on_event(key)
            if key.key == "escape":
                self._type_ahead.wait_for(focus)

    def _arrived(self) -> None:
        """Draw a snapshot at once; where no run is active, show the list of runs first."""
        if not self._opened and (self._opens_runs or not self.live.active):
            self.action_show("runs")
        elif isinstance(self.screen, BaseScreen):
            self.screen.arrived()
        if not self._opened and (keys := self._first_keys()):
            from trainctl.tui.dialogs.help import FirstKeysScreen

            self.push_screen(FirstKeysScreen(keys))
        self._opened = True
        self.paint()
        # The function, not its coroutine: the next snapshot may end this before it has begun.
        _: Worker[None] = self.run_worker(self.feed.refine, group="refine", exclusive=True)
        if self.feed.opened is not None and self.feed.opened.active:
            _ = self.run_worker(self._reopen, group="open", exclusive=True)

    async def _reopen(self) -> None:
        """Ask again for a live run beside the one that is followed: it missed what the snapshot stands for."""
        with contextlib.suppress(TrainctlError):
            await self.feed.reopen()
        self.paint()

    def paint(self) -> None:
        """Bring the screen up to date, also the one under a dialog, and ring for a new alert."""
        self._ring()
        for screen in self.screen_stack:
            if isinstance(screen, Repaintable) and screen.is_mounted:
                screen.paint()

    def _painting(self) -> Iterator[None]:
        self._ring()
        yield
        for screen in tuple(self.screen_stack):
            if isinstance(screen, Repaintable) and screen.is_mounted:
                yield from screen.painting()

    def _ring(self) -> None:
        if self.alert_bell.rings(self.live):
            self.bell()

    @property
    def outcome(self) -> Line:
        """Return the last command's outcome for the bottom line; empty once a key has come, or after a while."""
        return self._outcome if self.clock.monotonic() < self._outcome_until else ()

    def show_outcome(self, outcome: Line) -> None:
        """Show in the bottom line what a command has done, in place of the keys."""
        self._outcome, self._outcome_until = outcome, self.clock.monotonic() + OUTCOME_SECONDS
        self.paint()

    # ------------------------------------------------------------ actions

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Return whether an action may run: the program's own keys are text while something is typed, and rest under a
        dialog."""
        if action not in keymap.OWN_ACTIONS:
            return True
        if not isinstance(self.screen, BaseScreen) or isinstance(self.focused, Input):
            return False
        return self.screen.own_keys.isdisjoint(map(str, parameters))

    def action_show(self, name: str) -> None:
        """Go to another screen; the overview is that of the live run."""
        if name == "overview":
            self.feed.show_beside(None)
        if self.screen is not self.get_screen(name):
            self.switch_screen(name)
        else:
            self.paint()

    async def open_run(self, run: str) -> None:
        """Show a run on the Overview: the live one, another one by following its lead, or one from the record."""
        snapshot = None
        if self.live.run is None or self.live.run.run != run:
            try:
                if not await self.feed.follow_run(run):
                    snapshot = await self.feed.snapshot_of(run)
            except TrainctlError as error:
                self.notify(str(error), severity="error", markup=False)
                return
        self.action_show("overview")
        self.feed.show_beside(snapshot)
        self.paint()

    def choose(self, by: int) -> None:
        """Move the choice among the ranks of the run shown."""
        ranks = sorted(view.rank for view in self.shown.run.ranks) if self.shown.run else []
        if not ranks:
            return
        place = ranks.index(self.selected) + by if self.selected in ranks else 0 if by > 0 else len(ranks) - 1
        self.selected = ranks[min(max(place, 0), len(ranks) - 1)]

    def action_why(self, id: str = "") -> None:
        """Show an alert; without an id, the first that calls for somebody."""
        alert = next((alert for alert in self.shown.open_alerts if id in ("", alert.id)), None)
        if alert is None:
            self.notify("no open alerts")
        else:
            from trainctl.tui.screens.alerts import WhyScreen

            self.push_screen(WhyScreen(alert))

    def action_select(self, rank: int) -> None:
        self.selected = rank
        self.paint()

    def action_node(self, rank: int | None = None) -> None:
        """Open the node of a rank (None: of the one chosen, else the first)."""
        if rank is not None:
            self.selected = rank
        elif self.selected is None:
            self.choose(1)
        self.action_show("node")

    def action_dialog(self, verb: str) -> None:
        self.open_dialog(keymap.verb_of(verb, self.shown))

    def open_dialog(self, verb: str, values: Mapping[str, str] | None = None) -> None:
        """Open the dialog of a verb, its fields filled from the run shown."""
        from trainctl.tui.commands import forms
        from trainctl.tui.dialogs.split_dialog import dialog_of

        form = forms.form(verb, self.shown, self.selected, values)
        self.push_screen(dialog_of(form, self.shown, self.selected))

    def send_order(self, order: Order, follower: ProgressView) -> None:
        """Send a command; `follower` is given each state it reaches, and the person if nothing shows it any more."""
        from trainctl.tui.commands import context

        context.send(self, order, follower)

    def action_undo(self) -> None:
        if isinstance(self.screen, BaseScreen):
            self.screen.undo()

    def action_copy(self) -> None:
        if isinstance(self.screen, BaseScreen):
            from trainctl.tui.dialogs import undo_picker

            undo_picker.copy_value(self, self.screen.values())

    def action_command_line(self) -> None:
        if isinstance(self.screen, BaseScreen):
            self.screen.query_one(CommandBar).start()
            self.paint()

    def action_help(self) -> None:
        from trainctl.tui.dialogs.help import HelpScreen

        own = {binding.action for kind in (type(self), type(self.screen)) for binding in keymap.bindings_of(kind)}
        keys: dict[str, list[str]] = {}
        for binding in self._active():
            if binding.action in own:
                words = binding.tooltip or binding.description
                keys.setdefault(words, []).append(self.get_key_display(binding))
        self.push_screen(HelpScreen([(" ".join(names), words) for words, names in keys.items()], self.address))

    def action_press(self, key: str) -> None:
        """Press a key whose name at the bottom was clicked."""
        self.simulate_key(key)

    def action_theme(self) -> None:
        names = [item.name for item in THEMES]
        self.theme = names[(names.index(self.theme) + 1) % len(names)] if self.theme in names else names[0]
        self.notify(f"theme {self.theme} for this session only; set it in config.toml to keep it", timeout=3)

    def action_read_only(self) -> None:
        """Put commands off, and on again unless the program was started without them."""
        if self._started_read_only:
            self.notify(
                "trainctl was started read-only: restart it without --read-only to send commands", severity="warning"
            )
        else:
            self.read_only = not self.read_only
            self.paint()

    def action_picture(self) -> None:
        from trainctl.tui.app import screenshot

        at = datetime.datetime.fromtimestamp(self.clock.wall(), self.clock.zone or datetime.UTC)
        try:
            path = screenshot.save(self, self._pictures / f"trainctl-{at:%Y%m%d-%H%M%S}.svg")
        except InvalidInputError as error:
            self.notify(str(error), severity="error", markup=False)
        else:
            self.notify(f"screenshot saved: {path}", markup=False)

    def action_detach(self) -> None:
        self.exit(0)

    action_leave = action_detach
    """Leave from anywhere, also from a text field or a dialog."""
