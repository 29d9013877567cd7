"""The keys that work everywhere, those of each screen, and which keys of the configuration can be used."""

import difflib
import functools
import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from textual.binding import Binding, BindingType, InvalidBinding
from textual.command import DiscoveryHit, Hit, Hits, Provider
from textual.dom import DOMNode
from textual.keys import Keys

from trainctl.protocol.messages import verbs
from trainctl.tui.commands.context import context_of
from trainctl.tui.commands.verbs import DESCRIPTIONS
from trainctl.tui.screens import base
from trainctl.tui.screens.base import RESERVED_KEYS, BaseScreen, named
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.widgets.theme import THEMES

_ALERTS_PLACE = 55
"""The key of the alerts stands among those of the verbs, after the ones with a lower place."""


def _verb_keys(places: range) -> list[BindingType]:
    keyed = [(key, name) for name, described in DESCRIPTIONS.items() if (key := described.key) and key.place in places]
    return [
        Binding(key.key, f"dialog({name!r})", key.word, show=key.shown, tooltip=key.tooltip, priority=True)
        for key, name in sorted(keyed, key=lambda pair: pair[0].place)
    ]


# Priority: a key acts before the next one of the same burst is handed out, so that `:` and what is typed after it, or
# `b` and a number, never end up in different places on a slow line. The app's `check_action` keeps them out of text.
EVERYWHERE: Final[list[BindingType]] = named(
    [
        Binding("0", "show('runs')", "runs", tooltip="all runs the agent knows", priority=True),
        Binding("1", "show('overview')", "view", tooltip="the run on one page", priority=True),
        Binding("2", "node", "node", tooltip="one node in detail", priority=True),
        Binding("3", "show('charts')", "charts", tooltip="charts of all metrics", priority=True),
        Binding("4", "show('events')", "events", tooltip="all events; / filters", priority=True),
        Binding("5", "show('logs')", "logs", tooltip="all nodes' logs, merged", priority=True),
        Binding("6", "show('samples')", "samples", tooltip="the model's answers", priority=True),
        Binding("7", "show('step_profile')", "profile", show=False, tooltip="profiles of steps", priority=True),
        *_verb_keys(range(_ALERTS_PLACE)),
        Binding("a", "show('alerts')", "alerts", tooltip="open alerts", priority=True),
        Binding("w", "why", "why", show=False, tooltip="why an alert is open", priority=True),
        *_verb_keys(range(_ALERTS_PLACE, 1000)),
        Binding("P", "show('policies')", "policies", show=False, tooltip="what policies see and do", priority=True),
        Binding("D", "show('diagnosis')", "diagnosis", show=False, tooltip="why the run is slow", priority=True),
        Binding("u", "undo", "undo", tooltip="undo a change", priority=True),
        Binding("y", "copy", "copy", show=False, tooltip="copy a value (OSC 52)", priority=True),
        Binding("colon", "command_line", "cmd", key_display=":", tooltip="type any command", priority=True),
        Binding("question_mark", "help", "help", key_display="?", tooltip="this help", priority=True),
        Binding("t", "theme", "theme", show=False, tooltip="next theme", priority=True),
        Binding("S", "picture", "picture", show=False, tooltip="save the screen as SVG", priority=True),
        Binding("q", "detach", "detach", tooltip="quit; the run continues", priority=True),
        Binding("ctrl+p", "command_palette", "palette", show=False, tooltip="any key or verb by name", priority=True),
        Binding("ctrl+c", "leave", "detach", show=False, tooltip="quit; the run continues", priority=True),
    ]
)
OWN_ACTIONS: Final = frozenset(
    ("show", "node", "dialog", "command_line", "help", "theme", "picture", "detach", "why", "undo", "copy")
) | {"command_palette", "read_only"}
"""Actions that rest while something is typed or a dialog is open."""

_FIRST_KEYS: Final = {
    "help": "all keys for this screen",
    "node": "one node in detail",
    "rebalance": "split the batch between nodes",
    "undo": "undo a change",
    "detach": "quit; the run continues",
}
"""Words for the keys that the first start shows, by action."""
Tables = Mapping[str, Sequence[Binding]]
"""Bindings by screen; those under "" are everywhere."""


def verb_of(verb: str, state: ViewState) -> str:
    """Return the verb that a verb's key stands for now."""
    key = DESCRIPTIONS[verb].key
    return key.stands_for(state) if key is not None and key.stands_for is not None else verb


def words_of(binding: Binding, state: ViewState) -> str:
    """Return what a key does now, in a word: that of its binding, or the verb that it stands for."""
    match = re.fullmatch(r"dialog\('([a-z-]+)'\)", binding.action)
    verb = verb_of(match[1], state) if match else ""
    return verb if match and verb != match[1] else binding.description


@dataclass(frozen=True)
class KeyRow:
    """One row of the table of keys: the action's name, its keys as they are typed, what it does, and where."""

    name: str
    keys: str
    words: str
    where: str  # "" is everywhere


def tables() -> Tables:
    """Return the bindings of the program, and those of each screen that there is."""
    base.load_all()
    kinds = sorted(_leaves(BaseScreen), key=lambda kind: kind.__name__)
    screens = {kind.__name__.removesuffix("Screen").lower(): _own_bindings(kind) for kind in kinds}
    return {"": _bindings(EVERYWHERE), **{name: bindings for name, bindings in screens.items() if bindings}}


def _leaves(kind: type[Any]) -> list[type[Any]]:
    """Return the screens that there are, and not what some of them share."""
    found = kind.__subclasses__()
    return [leaf for sub in found for leaf in _leaves(sub)] if found else [kind]


def _own_bindings(kind: type[DOMNode]) -> list[Binding]:
    """Return a screen's own, and those it inherits from another one."""
    mine = kind.__mro__[: kind.__mro__.index(BaseScreen)]
    return [binding for part in mine for binding in _bindings(part.__dict__.get("BINDINGS", ()))]


def bindings_of(kind: type[DOMNode]) -> list[Binding]:
    """Return the bindings that a kind declares, or inherits whole."""
    return _bindings(kind.BINDINGS)


@functools.cache
def declared_order(*kinds: type[DOMNode]) -> dict[str, int]:
    """Return where each action is first declared, by these kinds and those they inherit from."""
    bases = [base for kind in kinds for base in kind.__mro__ if issubclass(base, DOMNode)]
    actions = dict.fromkeys(binding.action for base in bases for binding in bindings_of(base))
    return {action: at for at, action in enumerate(actions)}


def _bindings(made: Iterable[BindingType]) -> list[Binding]:
    return [binding for binding in made if isinstance(binding, Binding)]


def checked(wanted: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return of the `wanted` keys ("a" or "a,b"), by action, those that can be, and why the others can't.

    Of two actions with one key on one screen, the later one in the file keeps what it had before.
    """
    good: dict[str, str] = {}
    bad: dict[str, str] = {}
    if not wanted:  # then no screen has to be loaded
        return good, bad
    known = tables()
    usual = {binding.id: binding.key for bindings in known.values() for binding in bindings if binding.id}
    for name, keys in wanted.items():
        problem = _no_action(name, usual) or _no_key(keys)
        if problem:
            bad[name] = problem
        elif set(_normal(keys)) != set(_normal(usual[name])):
            good[name] = ",".join(_normal(keys))
    while clash := _clash(good, known):
        name, bad[name] = clash
        del good[name]
    return good, bad


def rows(keymap: Mapping[str, str]) -> list[KeyRow]:
    """Return every action that has a name, with the keys it has after `keymap`."""
    return [
        KeyRow(binding.id, spoken(keymap.get(binding.id, binding.key)), binding.tooltip or binding.description, where)
        for where, bindings in tables().items()
        for binding in bindings
        if binding.id
    ]


def first_keys(keymap: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the keys that the first start shows, each with what it does."""
    keys = {row.name: row.keys for row in rows(keymap) if not row.where}
    return [(keys[name], words) for name, words in _FIRST_KEYS.items()]


def spoken(keys: str) -> str:
    """Return keys as a person types them: `?` for question_mark."""
    return " ".join(_CHARACTERS.get(key, key) for key in keys.split(","))


def _no_action(name: str, known: Iterable[str]) -> str:
    if name in known:
        return ""
    near = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.0)
    return f"no such action; the closest are {', '.join(near)}; trainctl config lists all"


def _no_key(keys: str) -> str:
    try:
        names = _normal(keys)
    except InvalidBinding:
        names = []
    if not names:
        return f"{keys!r} is not a key"
    for key in names:
        if key in RESERVED_KEYS:
            return f"{key} {RESERVED_KEYS[key]}"
        if "alt+" in key:
            return f"terminals send {key} as escape plus the key: choose a different key"
        base = key.rpartition("+")[2]
        if base not in _NAMES:
            return f"unknown key {key!r}; use a character or a name such as f5, home, pagedown, ctrl+e"
    return ""


def _normal(keys: str) -> list[str]:
    if not keys.strip():
        return []
    return [binding.key for binding in Binding.make_bindings([Binding(keys, "none", "")])]


def _clash(keymap: Mapping[str, str], tables: Tables) -> tuple[str, str] | None:
    """Return the last action of the keymap that shares a key with another one of the same screen, and what to say about
    it."""
    everywhere = tables.get("", ())
    for name in reversed(list(keymap)):
        for where, bindings in tables.items():
            here = [*everywhere, *bindings] if where else [*everywhere]
            if all(binding.id != name for binding in here):
                continue
            for other in here:
                taken = set(keymap.get(other.id or "", other.key).split(",")) if other.id != name else set()
                both = taken & set(keymap[name].split(","))
                if both:
                    on = f" on {where}" if where else ""
                    return name, f"{spoken(min(both))} is already used by {other.id or other.description}{on}"
    return None


_CHARACTERS = {_normal(char)[0]: char for char in string.printable if char.isprintable() and char not in ", "}
"""Printable characters by Textual's names for them."""
_NAMES = {*_CHARACTERS, "comma", "space", *(key.value.rpartition("+")[2] for key in Keys)}


@dataclass(frozen=True)
class PaletteEntry:
    """An entry of the palette: its name, its explanation, and the function that it runs."""

    name: str
    words: str
    run: Callable[[], Any]


class PaletteProvider(Provider):
    """All entries at first, then those that match, by name before by words. It is one provider: of two Textual takes
    the one first that chance has first."""

    def entries(self) -> Iterator[PaletteEntry]:
        """Return verbs, then all else that a key does, by its name in the configuration, and the themes."""
        owner = context_of(self.screen)
        for verb in verbs.VERBS.values():
            yield PaletteEntry(verb.name, verb.summary, partial(owner.open_dialog, verb.name))
        for binding in type(self.app).BINDINGS:
            if (
                isinstance(binding, Binding)
                and binding.id
                and not binding.action.startswith(("dialog(", "command_pal"))
            ):
                words = binding.tooltip or binding.description
                yield PaletteEntry(binding.id, words, partial(self.app.run_action, binding.action))
        for theme in THEMES:
            chosen = partial(setattr, self.app, "theme", theme.name)
            yield PaletteEntry(f"theme {theme.name}", "change how the screen looks", chosen)
        words = "commands are off: turn them on" if owner.read_only else "turn commands off for this screen"
        yield PaletteEntry("read-only", words, partial(self.app.run_action, "read_only"))

    async def discover(self) -> Hits:
        for entry in self.entries():
            yield DiscoveryHit(entry.name, entry.run, help=entry.words)

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for entry in self.entries():
            score = max(matcher.match(entry.name), 0.5 * matcher.match(entry.words))
            if score > 0:
                yield Hit(score, matcher.highlight(entry.name), entry.run, help=entry.words)
