"""Validation errors of msgspec, in the words of the person who typed the value."""

import json
import re
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

_TYPES = {
    "int": "a whole number", "float": "a number", "bool": "true or false", "str": "text", "object": "a table",
    "array": "a list", "null": "nothing",
}  # fmt: skip
UNKNOWN_FIELD, NO_CHOICE = "unknown field", " is not one of "
REFUSED = "refused"
"""Key of a type's `msgspec.Meta.extra`: values that it doesn't have, each with the reason."""
_BOUNDS = {">=": "of at least", "<=": "of at most", ">": "above", "<": "below"}


def split(text: str) -> tuple[str, str]:
    """The field's path (empty at the root) and the problem: "Expected `int` >= 1 - at `$.micro`" becomes
    ("micro", "must be a whole number of at least 1")."""
    problem, _, path = text.partition(" - at `$")
    field = path.rstrip("`").lstrip(".")
    missing = re.fullmatch(r"Object missing required field `(.+)`", problem)
    unknown = re.fullmatch(r"Object contains unknown field `(.+)`", problem)
    if missing:
        return f"{field}.{missing[1]}".lstrip("."), "is required but missing"
    if unknown:
        return f"{field}.{unknown[1]}".lstrip("."), UNKNOWN_FIELD
    return field, in_words(problem)


def found(value: Any, kind: Any, path: str = "", *, strict: bool = True) -> Iterator[tuple[str, str]]:
    """Everything that keeps plain values from being a `kind`, each as (field's path, problem): msgspec itself stops at
    the first, and calls the key of a table `[...]`. Without `strict`, texts are values too."""
    plain = _without_null(kind)
    if isinstance(value, dict) and isinstance(plain, type) and issubclass(plain, msgspec.Struct):
        yield from _in_struct(value, plain, path, strict=strict)
    elif isinstance(value, dict) and get_origin(plain) is dict:
        of_key, of_value = get_args(plain)
        for key, item in value.items():
            yield from _in_leaf(key, of_key, _under(path, key), strict=strict)
            yield from found(item, of_value, _under(path, key), strict=strict)
    else:
        yield from _in_leaf(value, kind, path, strict=strict)


def _in_struct(
    value: dict[str, Any], kind: type[msgspec.Struct], path: str, *, strict: bool
) -> Iterator[tuple[str, str]]:
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    for key in value:
        if key not in fields and kind.__struct_config__.forbid_unknown_fields:
            named = getattr(kind, "keys_are_names", False)
            yield _under(path, key), f"{key!r}{NO_CHOICE}{', '.join(fields)}" if named else UNKNOWN_FIELD
    for name, field in fields.items():
        if name in value:
            yield from found(value[name], field.type, _under(path, name), strict=strict)
        elif field.required:
            yield _under(path, name), "is required but missing"


def _in_leaf(value: Any, kind: Any, path: str, *, strict: bool) -> Iterator[tuple[str, str]]:
    try:
        msgspec.convert(value, kind, strict=strict)
    except msgspec.ValidationError as error:
        within, problem = split(str(error))
        yield _under(path, within), _of_choices(value, kind) or problem


def _of_choices(value: Any, kind: Any) -> str:
    """The problem with a value that isn't one of the type's few values or names; empty for other types."""
    plain = _without_null(kind)
    if isinstance(value, str) and (reason := _reasons(kind).get(value)):
        return f"{value!r} is not supported: {reason}"
    if choices := _choices(plain):
        return f"{value!r}{NO_CHOICE}{', '.join(map(str, choices))}"
    return _or_a_list(plain) if isinstance(value, str) else ""


def _choices(kind: Any) -> tuple[Any, ...]:
    """Of a type that is a few values alone."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    parts = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else ()
    each = [_choices(part) for part in parts]
    return tuple(value for values in each for value in values) if all(each) else ()


def _reasons(kind: Any) -> dict[str, str]:
    """Values that people may expect but the type doesn't have, each with the reason from the type's metadata."""
    for part in (about for about in get_args(kind)[1:] if get_origin(kind) is Annotated):
        if isinstance(part, msgspec.Meta) and part.extra:
            return dict(part.extra.get(REFUSED, {}))
    return {}


def _or_a_list(kind: Any) -> str:
    """What a text must be where a field takes one of a few, or a list that its type names with an example."""
    if get_origin(kind) not in (Union, types.UnionType):
        return ""
    words = [word for part in get_args(kind) if get_origin(part) is Literal for word in get_args(part)]
    lists = [about for part in get_args(kind) if get_origin(part) is Annotated for about in get_args(part)[1:]]
    named = [about for about in lists if about.title and about.examples]
    if not words or len(named) != 1:
        return ""
    choices = " or ".join(map(json.dumps, words))
    return f"must be {choices} or a list of {named[0].title}, such as {json.dumps(named[0].examples[0])}"


def _under(path: str, field: str) -> str:
    return f"{path}{field}" if field.startswith("[") else f"{path}.{field}".strip(".")


def _without_null(kind: Any) -> Any:
    """The type behind what is said of it, and behind `| None`."""
    if get_origin(kind) is Annotated:
        return _without_null(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType):
        others = [one for one in get_args(kind) if one is not type(None)]
        return _without_null(others[0]) if len(others) == 1 else kind
    return kind


def in_words(problem: str) -> str:
    """One of msgspec's messages without its path, with types and bounds named as people name them."""
    if got := re.fullmatch(r"Expected `([a-z |]+)`(?:, got `.+`)?", problem):
        return f"must be {_type(got[1])}"
    if length := re.fullmatch(r"Expected `(str|array)` of length (>=|<=) (\d+)", problem):
        kind, of = ("text", "character") if length[1] == "str" else ("a list", "item")
        return f"must be {kind} {_BOUNDS[length[2]]} {length[3]} {of}{'s' if length[3] != '1' else ''}"
    if bound := re.fullmatch(r"Expected `([a-z]+)` (>=|<=|>|<) (\S+)", problem):
        return f"must be {_type(bound[1])} {_BOUNDS[bound[2]]} {bound[3].removesuffix('.0')}"
    if value := re.fullmatch(r"Invalid enum value (.+)", problem):
        return f"{value[1]} is not one of the allowed values"
    if pattern := re.fullmatch(r"Expected `str` matching regex (.+)", problem):
        return f"must match {pattern[1]}"
    return problem[0].lower() + problem[1:]


def _type(names: str) -> str:
    kinds = [_TYPES.get(name, name) for name in names.split(" | ") if name != "null"]
    return " or ".join(kinds)
