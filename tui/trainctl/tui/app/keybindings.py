"""The keys that work everywhere, those of each screen, and how what lies over the screens is laid out."""

import functools
from typing import Any, Final

from textual.binding import Binding, BindingType
from textual.dom import DOMNode

from trainctl.tui.screens.base import BaseScreen
from trainctl.tui.widgets.keymap import Tables, named

# Priority: a key acts before the next one of the same burst is handed out, so that `:` and what is typed after it, or
# `b` and a number, never end up in different places on a slow line. The app's `check_action` keeps them out of text.
EVERYWHERE: Final[list[BindingType]] = named([
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
    Binding("ctrl+p", "command_palette", "palette", show=False, tooltip="any key or verb by name", priority=True),
    Binding("ctrl+c", "leave", "detach", show=False, tooltip="leave; the run goes on", priority=True),
])  # fmt: skip
OWN_ACTIONS: Final = frozenset(
    ("show", "node", "dialog", "command_line", "help", "theme", "picture", "detach", "why", "undo", "copy")
) | {"command_palette", "read_only"}
"""Actions that rest while something is typed or a dialog is open."""

LOOK: Final = """
Screen { layers: base; }
.field { height: auto; }
.field .name { width: 19; height: 1; color: $foreground 70%; }
.field Input, #command, #filter { width: 1fr; background: $panel; }
#command, #filter { height: 1; }
Toast { width: auto; max-width: 100%; margin-top: 0; padding: 0 1; }
"""


def tables(everywhere: type[DOMNode]) -> Tables:
    """The bindings of the program, and those of each screen that there is."""
    kinds = sorted(_leaves(BaseScreen), key=lambda kind: kind.__name__)
    screens = {kind.__name__.removesuffix("Screen").lower(): _all_bindings(kind) for kind in kinds}
    return {"": bindings_of(everywhere), **{name: bindings for name, bindings in screens.items() if bindings}}


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


def bindings_of(kind: type[DOMNode]) -> list[Binding]:
    """Those that a kind declares, or inherits whole."""
    return [binding for binding in kind.BINDINGS if isinstance(binding, Binding)]


@functools.cache
def declared_order(*kinds: type[DOMNode]) -> dict[str, int]:
    """Where each action is first declared, by these kinds and those they inherit from."""
    bases = [base for kind in kinds for base in kind.__mro__ if issubclass(base, DOMNode)]
    actions = dict.fromkeys(binding.action for base in bases for binding in bindings_of(base))
    return {action: at for at, action in enumerate(actions)}
