"""The arguments of each verb as people meet them: type, bounds, unit, default, meaning, and how they are typed."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import inspect as shape

from trainctl.protocol.messages.verbs import Verb


@dataclass(frozen=True)
class Argument:
    """One argument of a verb."""

    name: str
    kind: str  # its type and bounds in words
    unit: str
    meaning: str
    default: str | None  # as it is typed; None: it must be given
    typed: str  # the word that begins it
    choices: tuple[str, ...] = ()  # what it may be, where that is few


@functools.cache
def arguments_of(verb: Verb) -> tuple[Argument, ...]:
    """A verb's arguments, in their order."""
    info = shape.type_info(verb.args)
    assert isinstance(info, shape.StructType)
    return tuple(map(_argument, info.fields))


def _argument(field: shape.Field) -> Argument:
    said: dict[str, Any] = {}
    kind = field.type
    if isinstance(kind, shape.Metadata):
        said = {**(kind.extra or {}), "meaning": (kind.extra_json_schema or {}).get("description", "")}
        kind = kind.type
    kind = _without_null(kind)
    default = None if field.required else _typed_value(field.default)
    name = field.encode_name
    typed = said.get("typed") or f"{name}="
    return Argument(name, _words(kind), said.get("unit", ""), said.get("meaning", ""), default, typed, _choices(kind))


def _without_null(kind: shape.Type) -> shape.Type:
    if isinstance(kind, shape.UnionType):
        others = [part for part in kind.types if not isinstance(part, shape.NoneType)]
        return others[0] if len(others) == 1 else kind
    return kind


def _typed_value(value: Any) -> str:
    """A default as it would be typed; empty where that is nothing at all."""
    if value is None or value is msgspec.NODEFAULT:
        return ""
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _choices(kind: shape.Type) -> tuple[str, ...]:
    match kind:
        case shape.BoolType():
            return "true", "false"
        case shape.LiteralType(values):
            return tuple(map(str, values))
        case _:
            return ()


def _words(kind: shape.Type) -> str:
    match kind:
        case shape.BoolType() | shape.LiteralType():
            return " or ".join(_choices(kind)) if len(_choices(kind)) < 3 else f"one of {', '.join(_choices(kind))}"
        case shape.IntType():
            return f"whole number{_range(kind.ge, kind.le)}"
        case shape.FloatType():
            return f"number{_range(kind.ge, kind.le)}"
        case shape.StrType(min_length=low, max_length=high):
            return f"text{_range(low, high)}{' characters' if high is not None else ''}"
        case _:
            return ""


def _range(low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return ""
    return f" from {low:,g} to {high:,.0f}"


def completions(verb: Verb, before: Iterable[str], word: str) -> list[str]:
    """Return what the next word may be that begins with `word`, after the words `before` it: arguments that aren't
    there yet, and the values of one that has few."""
    given = {other.partition("=")[0] for other in before}
    left = [argument for argument in arguments_of(verb) if argument.name not in given]
    if "=" not in word:
        names = [argument.typed for argument in left if argument.typed.startswith(argument.name)]
        bare = [choice for argument in left if argument.name == verb.first and not given for choice in argument.choices]
        return [name for name in (*names, *(bare if word else ())) if name.startswith(word)]
    name, _, value = word.partition("=")
    values = next((argument.choices for argument in left if argument.name == name), ())
    return [f"{name}={choice}" for choice in values if choice.startswith(value)]
