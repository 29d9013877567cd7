"""How two runs differ, as lines for a person and as an object for a script. Pure."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec

from trainctl.tui.report.run_diff import (
    CurveDifference,
    FieldDifference,
    LossDifference,
    PlanDifference,
    RunDifferences,
)
from trainctl.tui.text.styled_line import clean

MOST_LINES: Final = 40
"""Of a part; the rest is counted."""
_NOTHING: Final = "-"
"""Stands for a value that a run doesn't have."""


def text(found: RunDifferences) -> str:
    """A heading for each part that differs."""
    made = [f"a: {found.a}", f"b: {found.b}"]
    if found.same:
        made.append(_same(found.curve))
    for name, rows in (("recipe", found.recipe), ("data", found.data), ("versions", found.versions)):
        made += _part(name, map(_field, rows))
    made += _part("plans", map(_plan, found.plans))
    made += _part("curve", () if found.same else _curve(found.curve))
    made += _part("not known", found.unknown)
    return "\n".join(made)


def _same(curve: CurveDifference) -> str:
    if not curve.common_steps:
        return "no setting differs, and neither run has a step to compare"
    return f"nothing differs: the losses of {_steps(curve.common_steps)} are the same bit for bit"


def _steps(count: int, what: str = "") -> str:
    return f"{count:,} {what}step{'s' if count != 1 else ''}"


def objects(found: RunDifferences) -> dict[str, Any]:
    """All of it, with `same`: whether nothing is known to differ."""
    return {"same": found.same, **msgspec.to_builtins(found)}


def _part(name: str, lines: Iterable[str]) -> list[str]:
    kept = list(lines)
    more = [f"  and {len(kept) - MOST_LINES:,} more"] if len(kept) > MOST_LINES else []
    return [name, *(f"  {clean(line)}" for line in itertools.islice(kept, MOST_LINES)), *more] if kept else []


def _field(one: FieldDifference) -> str:
    return f"{one.name}: {one.a or _NOTHING} → {one.b or _NOTHING}"


def _plan(one: PlanDifference) -> str:
    return f"step {one.step:,}, {one.what}: {one.a or 'no change'} → {one.b or 'no change'}"


def _curve(found: CurveDifference) -> Iterator[str]:
    if found.common_steps and found.begins > 1:
        yield f"compared from step {found.begins:,} on, where the later run begins"
    if not found.common_steps:
        neither = not (found.only_a or found.only_b)
        yield "neither run has a step to compare" if neither else "the runs have no step in common"
    elif found.first is None:
        yield f"the losses of {_steps(found.common_steps, 'common ')} are the same bit for bit"
    else:
        yield f"the losses part at step {found.first.step:,}: {_loss(found.first)}"
    if found.worst is not None and found.worst != found.first:
        yield f"largest later difference, at step {found.worst.step:,}: {_loss(found.worst)}"
    for name, count in (("a", found.only_a), ("b", found.only_b)):
        if count:
            yield f"only {name} has {_steps(count, 'more ')}"


def _loss(one: LossDifference) -> str:
    values = f"{_value(one.a)} → {_value(one.b)}"
    if one.difference is None:
        return values
    return f"{values}, a difference of {one.difference:.3g} (relative {one.relative:.3g})"


def _value(loss: float | None) -> str:
    """All digits: a difference in the last bit shows."""
    return _NOTHING if loss is None else repr(loss)
