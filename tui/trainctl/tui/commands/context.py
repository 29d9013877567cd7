"""What screens, dialogs and commands may ask of the full-screen program, so that none of them imports it."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from textual.dom import DOMNode
from textual.geometry import Size
from textual.screen import Screen
from textual.widget import Widget

from trainctl.tui.commands.command import Order
from trainctl.tui.commands.forms import Progress
from trainctl.tui.state.live_feed import LogFeed
from trainctl.tui.state.source import Source
from trainctl.tui.state.view_state import AlertBell, Clock, ViewState
from trainctl.tui.text.glyphs import Glyphs
from trainctl.tui.text.styled_line import Line

T = TypeVar("T")
READ_ONLY = "read-only: this screen sends no commands"


class KeyHint(NamedTuple):
    """A key as it is printed, what it does in a word, its action, and the key's name."""

    display: str
    words: str
    action: str
    key: str


class ProgressView(Protocol):
    """What shows how far a command has come."""

    @property
    def watching(self) -> bool:
        """Whether a person still sees it."""
        ...

    def follow(self, progress: Progress) -> None: ...


class AppContext(Protocol):
    """The full-screen program, as what it shows sees it."""

    glyphs: Glyphs
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
    """The program that a screen or a widget is shown by."""
    return cast(AppContext, node.app)
