"""The notation of types on the protocol's pages, from the shapes that msgspec gives."""

import functools
import sys
import typing
from typing import Any

import msgspec
from msgspec import inspect as shape

from trainctl.protocol.messages.events import EventData

MOST = 2**63 - 1
NAME, METRIC = "str[1..200]", r"str matching `^[a-z][a-z0-9_.:/-]{0,63}$`"
"""Texts that the page calls `name` and `metric`."""


def portable(pattern: str) -> str:
    """Return a pattern whose end is written as other languages do."""
    return pattern.replace(r"\Z", "$")


def words(kind: shape.Type) -> str:
    """Return a field's type in the notation that the page explains."""
    match kind:
        case shape.Metadata(type=within):
            return words(within)
        case shape.UnionType(types):
            if all(isinstance(part, shape.StructType) and issubclass(part.cls, EventData) for part in types):
                return "a [kind of event](#kinds-of-event)"
            some = " or ".join(words(part) for part in types if not isinstance(part, shape.NoneType))
            return f"{some}?" if kind.includes_none else some
        case shape.BoolType():
            return "bool"
        case shape.IntType():
            return _int(kind)
        case shape.FloatType():
            return _float(kind)
        case shape.StrType():
            text = f"str{_length(kind)}" + (f" matching `{portable(kind.pattern)}`" if kind.pattern else "")
            return {NAME: "name", METRIC: "metric"}.get(text, text)
        case shape.BytesType():
            return "bytes"
        case shape.LiteralType(values):
            return enumerations().get(frozenset(values)) or "/".join(sorted(map(str, values)))
        case shape.VarTupleType(item_type=item) | shape.ListType(item_type=item):
            return f"array({words(item)}){_length(kind)}"
        case shape.TupleType(item_types=items):
            return f"({', '.join(words(item) for item in items)})"
        case shape.DictType(key_type=key, value_type=value):
            return f"map({words(key)}→{words(value)})"
        case shape.StructType(cls=cls):
            return f"[{cls.__name__}](#{cls.__name__.lower()})"
        case shape.AnyType():
            return "any"
        case _:
            raise TypeError(f"no words for {kind}")


@functools.cache
def enumerations() -> dict[frozenset[Any], str]:
    """Return the enumerations of four or more values that the source names, by their values."""
    modules = [module for name, module in sorted(sys.modules.items()) if name.startswith("trainctl.protocol.")]
    return {
        frozenset(typing.get_args(value)): name
        for module in modules
        for name, value in vars(module).items()
        if typing.get_origin(value) is typing.Literal and len(typing.get_args(value)) > 3 and name[0] != "_"
    }


def _int(kind: shape.IntType) -> str:
    """Return an integer's limits, where they are narrower than those of 64 bits."""
    low, high = ("" if limit in (None, -MOST, MOST) else _power(limit) for limit in (kind.ge, kind.le))
    return "uint" if (low, high) == ("0", "") else f"{low}..{high}" if low or high else "int"


def _float(kind: shape.FloatType) -> str:
    below = [f"{_power(limit)}{sign}" for limit, sign in ((kind.gt, "<"), (kind.ge, "≤")) if limit is not None]
    above = [f"{sign}{_power(limit)}" for limit, sign in ((kind.lt, "<"), (kind.le, "≤")) if limit is not None]
    return "".join([*below, "float", *above])


def _power(limit: float) -> str:
    """Return a limit as text, the large ones as powers."""
    if limit >= 2**20 and not int(limit) & (int(limit) - 1):
        return f"2^{int(limit).bit_length() - 1}"
    return f"{limit:g}".replace("e+0", "e").replace("e+", "e") if isinstance(limit, float) else str(limit)


def _length(kind: shape.StrType | shape.VarTupleType | shape.ListType) -> str:
    if kind.min_length is None and kind.max_length is None:
        return ""
    return f"[{kind.min_length or 0}..{'' if kind.max_length is None else kind.max_length}]"


def typed(field: shape.Field) -> str:
    """Return a field's type with its default, as one cell of a table."""
    if field.required:
        return words(field.type)
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    plain_value = msgspec.json.encode(msgspec.to_builtins(value)).decode()
    return f"{words(field.type)}={'its defaults' if isinstance(value, msgspec.Struct) else plain_value}"
