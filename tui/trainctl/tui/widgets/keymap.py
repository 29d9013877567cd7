"""The keys by name: what each action is called in the configuration, and whether keys that were chosen there can be."""

import difflib
import re
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from textual.binding import Binding, BindingType, InvalidBinding
from textual.keys import Keys

Tables = Mapping[str, Sequence[Binding]]
"""Bindings by screen; those under "" are everywhere."""

_RESERVED = {"ctrl+c": "always leaves", "escape": "always closes what is open"}
_BY_ARGUMENT = re.compile(r"(?:show|dialog)\('([a-z0-9-]+)'\)")


class KeyRow(NamedTuple):
    """One row of the table of keys: the action's name, its keys as they are typed, what it does, and where."""

    name: str
    keys: str
    words: str
    where: str  # "" is everywhere


def name_of(binding: Binding) -> str:
    """`events` of show('events'), `set-lr` of dialog('set-lr'), `filter` of filter, and of choose(1) its words."""
    found = _BY_ARGUMENT.fullmatch(binding.action)
    if found:
        return found[1]
    text = binding.description if "(" in binding.action else binding.action.removeprefix("app.")
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def named(bindings: Iterable[BindingType], where: str = "") -> list[BindingType]:
    """The bindings with their names as ids, by which Textual lays another key over them, those of a screen after its
    name (`events-filter`); reserved keys stay fixed."""
    before = f"{where}-" if where else ""
    return [
        replace(binding, id=before + name_of(binding))
        if isinstance(binding, Binding) and binding.id is None and binding.key not in _RESERVED
        else binding
        for binding in bindings
    ]


def checked(wanted: Mapping[str, str], tables: Tables) -> tuple[dict[str, str], dict[str, str]]:
    """Of the `wanted` keys ("a" or "a,b") by action those that can be, and why the others can't.

    Of two actions with one key on one screen, the later one in the file keeps what it had before.
    """
    good: dict[str, str] = {}
    bad: dict[str, str] = {}
    usual = {binding.id: binding.key for bindings in tables.values() for binding in bindings if binding.id}
    for name, keys in wanted.items():
        problem = _no_action(name, usual) or _no_key(keys)
        if problem:
            bad[name] = problem
        elif set(_normal(keys)) != set(_normal(usual[name])):
            good[name] = ",".join(_normal(keys))
    while clash := _clash(good, tables):
        name, problem = clash
        del good[name]
        bad[name] = problem
    return good, bad


def table(tables: Tables, keymap: Mapping[str, str]) -> list[KeyRow]:
    """Every action that has a name, with the keys it has after `keymap`."""
    made = []
    for where, bindings in tables.items():
        for binding in bindings:
            if binding.id:
                keys = keymap.get(binding.id, binding.key)
                made.append(KeyRow(binding.id, spoken(keys), binding.tooltip or binding.description, where))
    return made


def spoken(keys: str) -> str:
    """Keys as a person types them: `?` for question_mark."""
    return " ".join(_CHARACTERS.get(key, key) for key in keys.split(","))


def _no_action(name: str, known: Iterable[str]) -> str:
    if name in known:
        return ""
    near = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.0)
    return f"no such action; the nearest are {', '.join(near)}; trainctl config has all"


def _no_key(keys: str) -> str:
    try:
        names = _normal(keys)
    except InvalidBinding:
        names = []
    if not names:
        return f"{keys!r} names no key"
    for key in names:
        if key in _RESERVED:
            return f"{key} {_RESERVED[key]}"
        if "alt+" in key:
            return f"{key} reaches the program as escape and the key after it"
        base = key.rpartition("+")[2]
        if base not in _NAMES:
            return f"no key {key!r}; a character, or a name such as f5, home, pagedown, ctrl+e"
    return ""


def _normal(keys: str) -> list[str]:
    """As Textual names them: `question_mark` for `?`."""
    if not keys.strip():
        return []
    return [binding.key for binding in Binding.make_bindings([Binding(keys, "none", "")])]


def _clash(keymap: Mapping[str, str], tables: Tables) -> tuple[str, str] | None:
    """The last action of the keymap that shares a key with another one of the same screen, and what to say of it."""
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
                    return name, f"{spoken(min(both))} is taken by {other.id or other.description}{on}"
    return None


def _characters() -> dict[str, str]:
    """Printable characters by Textual's names for them."""
    return {_normal(char)[0]: char for char in string.printable if char.isprintable() and char not in ", "}


_CHARACTERS = _characters()
_NAMES = {*_CHARACTERS, "comma", "space", *(key.value.rpartition("+")[2] for key in Keys)}
