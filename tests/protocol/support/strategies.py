"""Hypothesis strategies for any message, made from what msgspec knows of its type."""

import re
import uuid
from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect as shape

from trainctl.protocol.messages.kept import KeptDrifts

CHARACTERS = st.characters(exclude_categories=("Cs",))
TEXT = st.text(CHARACTERS, max_size=40)
METRIC_NAMES = st.from_regex(r"[a-z][a-z0-9_.:/-]{0,20}", fullmatch=True)
LARGE = 2**53


def of(kind: type[msgspec.Struct], *, finite: bool) -> st.SearchStrategy[Any]:
    """Messages of a type; floats are finite or anything but NaN (which equals nothing)."""
    return _struct(shape.type_info(kind), finite)


def _struct(info: Any, finite: bool) -> st.SearchStrategy[Any]:
    fields = {field.name: _value(field.type, finite) for field in info.fields if field.name != "v"}
    return (
        st.builds(_alike_in_length, st.just(info.cls), **fields)
        if info.cls is KeptDrifts
        else st.builds(info.cls, **fields)
    )


def _alike_in_length(kind: type[KeptDrifts], *, ranks: tuple[int, ...], drifts: tuple[float, ...], **rest: Any) -> Any:
    count = min(len(ranks), len(drifts))
    return kind(ranks=ranks[:count], drifts=drifts[:count], **rest)


def _value(kind: Any, finite: bool) -> st.SearchStrategy[Any]:
    match kind:
        case shape.UnionType(types):
            return st.one_of([_value(part, finite) for part in types])
        case shape.NoneType():
            return st.none()
        case shape.BoolType():
            return st.booleans()
        case shape.IntType(ge=low, le=high):
            return st.integers(-LARGE if low is None else low, LARGE if high is None else high)
        case shape.FloatType(gt=above, ge=low, le=high):
            bound = low if above is None else above
            bounded = bound is not None or high is not None
            return st.floats(
                bound, high, exclude_min=above is not None, allow_nan=False, allow_infinity=not (finite or bounded)
            )
        case shape.StrType(pattern=str(pattern)):
            fits = re.search(pattern, str(uuid.UUID(int=0)))
            return st.uuids().map(str) if fits else st.from_regex(pattern, fullmatch=True)
        case shape.StrType(min_length=low, max_length=high):
            return st.text(CHARACTERS, min_size=low or 0, max_size=min(high or 40, 40))
        case shape.BytesType():
            return st.binary(max_size=40)
        case shape.LiteralType(values):
            return st.sampled_from(values)
        case shape.VarTupleType(item_type=item, min_length=low):
            return st.lists(_value(item, finite), min_size=low or 0, max_size=3).map(tuple)
        case shape.TupleType(item_types=items):
            return st.tuples(*(_value(item, finite) for item in items))
        case shape.DictType(key_type=key, value_type=value):
            is_metric = isinstance(value, shape.FloatType) and key.pattern is None
            keys = METRIC_NAMES if is_metric else _value(key, finite)
            return st.dictionaries(keys, _value(value, finite), max_size=3)
        case shape.AnyType():
            return st.none() | st.booleans() | st.integers(-LARGE, LARGE) | TEXT
        case shape.StructType():
            return _struct(kind, finite)
    raise TypeError(f"no strategy for {kind}")
