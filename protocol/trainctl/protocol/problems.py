"""What msgspec found wrong with a value, in the words of a person who typed it."""

import re

_TYPES = {
    "int": "a whole number", "float": "a number", "bool": "true or false", "str": "text", "object": "a table",
    "array": "a list", "null": "nothing",
}  # fmt: skip
_BOUNDS = {">=": "of at least", "<=": "of at most", ">": "above", "<": "below"}


def split(text: str) -> tuple[str, str]:
    """The field's path (empty at the root) and the problem: "Expected `int` >= 1 - at `$.micro`" becomes
    ("micro", "must be a whole number of at least 1")."""
    problem, _, path = text.partition(" - at `$")
    field = path.rstrip("`").lstrip(".")
    missing = re.fullmatch(r"Object missing required field `(.+)`", problem)
    unknown = re.fullmatch(r"Object contains unknown field `(.+)`", problem)
    if missing:
        return f"{field}.{missing[1]}".lstrip("."), "is required and not there"
    if unknown:
        return f"{field}.{unknown[1]}".lstrip("."), "there is no such field"
    return field, in_words(problem)


def in_words(problem: str) -> str:
    """One of msgspec's messages without its path, with types and bounds named as people name them."""
    if got := re.fullmatch(r"Expected `([a-z |]+)`(?:, got `.+`)?", problem):
        return f"needs {_type(got[1])}"
    if length := re.fullmatch(r"Expected `str` of length (>=|<=) (\d+)", problem):
        return f"must be text {_BOUNDS[length[1]]} {length[2]} character{'s' if length[2] != '1' else ''}"
    if bound := re.fullmatch(r"Expected `([a-z]+)` (>=|<=|>|<) (\S+)", problem):
        return f"must be {_type(bound[1])} {_BOUNDS[bound[2]]} {bound[3].removesuffix('.0')}"
    if value := re.fullmatch(r"Invalid enum value (.+)", problem):
        return f"{value[1]} is none of its values"
    if pattern := re.fullmatch(r"Expected `str` matching regex (.+)", problem):
        return f"must match {pattern[1]}"
    return problem[0].lower() + problem[1:]


def _type(names: str) -> str:
    kinds = [_TYPES.get(name, name) for name in names.split(" | ") if name != "null"]
    return " or ".join(kinds)
