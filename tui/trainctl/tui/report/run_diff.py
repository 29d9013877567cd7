"""Differences of two runs: recipe, data, versions, plans, and the first step where their losses part; as values, as
lines for a person, and as an object for a script. Pure.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from trainctl.protocol.record.whole_run import CurvePoint
from trainctl.tui.report.run_facts import DataFacts
from trainctl.tui.report.run_side import EVENTS, RunSide
from trainctl.tui.text.styled_line import clean


class FieldDifference(msgspec.Struct, frozen=True):
    """A value of both runs; empty: one doesn't have it."""

    name: str
    a: str
    b: str


class PlanDifference(msgspec.Struct, frozen=True):
    """A change of the plan at a step; empty: the run doesn't change it there."""

    step: int
    what: str
    a: str
    b: str


class LossDifference(msgspec.Struct, frozen=True):
    """Losses of one step. A loss that isn't finite has no difference."""

    step: int
    a: float | None
    b: float | None
    difference: float | None  # absolute
    relative: float | None  # of the larger of both


class CurveDifference(msgspec.Struct, frozen=True):
    """The losses of both runs, compared bit for bit at the steps that both have."""

    common_steps: int
    first: LossDifference | None  # where they part; None: they don't
    worst: LossDifference | None  # the largest difference from there on
    only_a: int  # steps from `begins` on that only one run has
    only_b: int
    begins: int = 0  # the first step that is compared: a branch has none before


class RunDifferences(msgspec.Struct, frozen=True):
    """All differences of two runs."""

    a: str
    b: str
    recipe: tuple[FieldDifference, ...]
    data: tuple[FieldDifference, ...]
    versions: tuple[FieldDifference, ...]
    plans: tuple[PlanDifference, ...]
    curve: CurveDifference
    unknown: tuple[str, ...] = ()  # what can't be compared, and why

    @property
    def same(self) -> bool:
        """Return whether nothing is known to differ."""
        curve = self.curve
        apart = curve.first is not None or curve.only_a or curve.only_b
        return not (self.recipe or self.data or self.versions or self.plans or apart)


def compare(a: RunSide, b: RunSide) -> RunDifferences:
    """Return what differs between two runs. Values that only one record has, such as versions, count as unknown."""
    data = {name: (getattr(a.data, name), getattr(b.data, name)) for name in DataFacts.__struct_fields__}
    return RunDifferences(
        a=a.run,
        b=b.run,
        recipe=tuple(_fields(a.recipe, b.recipe)),
        data=tuple(
            FieldDifference(name, str(one), str(other))
            for name, (one, other) in data.items()
            if one and other and one != other
        ),
        versions=tuple(_fields(a.versions, b.versions, both=True)),
        plans=tuple(_plans(a, b)),
        curve=_curve(a.curve, b.curve),
        unknown=tuple(_unknown(a, b)),
    )


def _fields(a: Mapping[str, str], b: Mapping[str, str], *, both: bool = False) -> Iterator[FieldDifference]:
    """Yield the differences by name; with `both` only for names that both have."""
    for name in dict.fromkeys((*a, *b)):
        if a.get(name) != b.get(name) and not (both and (name not in a or name not in b)):
            yield FieldDifference(name, a.get(name, ""), b.get(name, ""))


def _unknown(a: RunSide, b: RunSide) -> Iterator[str]:
    for which, side in (("a", a), ("b", b)):
        if not side.data.digest:
            yield f"the data of {which}: it has no checkpoint on this machine, which would have the data's digest"
        if not side.recipe:
            yield f"the recipe of {which}: its directory has no run file"
    for name in dict.fromkeys((*a.versions, *b.versions)):
        if (name in a.versions) != (name in b.versions):
            yield f"{name}: only {'a' if name in a.versions else 'b'} has it in its record"


def _plans(a: RunSide, b: RunSide) -> Iterator[PlanDifference]:
    """Yield where the plans in force differ, over the steps that both runs have: a branch has none before its first."""
    first, last = _common(a.curve, b.curve)
    changes = [[plan for plan in side.plans if plan.step <= last] for side in (a, b)]
    found = []
    for what in dict.fromkeys(one.what for side in changes for one in side):
        own, other = ({one.step: one.value for one in side if one.what == what} for side in changes)
        if what in EVENTS:
            steps = sorted(step for step in own.keys() | other.keys() if step >= first)
            pairs = [(step, own.get(step, ""), other.get(step, "")) for step in steps]
        else:
            steps = sorted({max(step, first) for step in (*own, *other)})
            pairs = [(step, _in_force(own, step), _in_force(other, step)) for step in steps]
        found += [PlanDifference(step, what, *values) for step, *values in pairs if values[0] != values[1]]
    yield from sorted(found, key=lambda one: (one.step, one.what))


def _common(a: Sequence[CurvePoint], b: Sequence[CurvePoint]) -> tuple[int, float]:
    """Return the first and the last step that both runs could have; all steps where one has none."""
    if not a or not b:
        return 0, math.inf
    return max(a[0].step, b[0].step), min(a[-1].step, b[-1].step)


def _in_force(changes: Mapping[int, str], step: int) -> str:
    return next((changes[at] for at in sorted(changes, reverse=True) if at <= step), "")


def _curve(a: tuple[CurvePoint, ...], b: tuple[CurvePoint, ...]) -> CurveDifference:
    own, other = ({point.step: point.loss for point in curve} for curve in (a, b))
    first, _ = _common(a, b)
    common = [step for step in own if step in other]
    apart = [step for step in common if not _is_same(own[step], other[step])]
    found = [_loss(step, own[step], other[step]) for step in apart]
    return CurveDifference(
        common_steps=len(common),
        first=found[0] if found else None,
        worst=max(found, key=lambda one: math.inf if one.difference is None else one.difference, default=None),
        only_a=sum(step >= first for step in own) - len(common),
        only_b=sum(step >= first for step in other) - len(common),
        begins=first,
    )


def _is_same(a: float | None, b: float | None) -> bool:
    """Bit for bit. All NaNs are equal, since a record does not keep their bits."""
    if a is None or b is None:
        return a is b
    return a == b or (math.isnan(a) and math.isnan(b))


def _loss(step: int, a: float | None, b: float | None) -> LossDifference:
    if a is None or b is None or not (math.isfinite(a) and math.isfinite(b)):
        return LossDifference(step, a, b, None, None)
    size = max(abs(a), abs(b))
    return LossDifference(step, a, b, abs(a - b), abs(a - b) / size if size else 0.0)


MOST_LINES: Final = 40
"""The most lines of a part; the rest is counted."""
_NOTHING: Final = "-"
"""Stands for a value that a run doesn't have."""


def text(found: RunDifferences) -> str:
    """Return a heading for each part that differs."""
    made = [f"a: {found.a}", f"b: {found.b}"]
    if found.same:
        made.append(_same(found.curve))
    for name, rows in (("recipe", found.recipe), ("data", found.data), ("versions", found.versions)):
        made += _part(name, map(_field, rows))
    made += _part("plans", map(_plan, found.plans))
    made += _part("curve", () if found.same else _curve_lines(found.curve))
    made += _part("not known", found.unknown)
    return "\n".join(made)


def _same(curve: CurveDifference) -> str:
    if not curve.common_steps:
        return "no setting differs, and neither run has a step to compare"
    return f"nothing differs: the losses of {_steps(curve.common_steps)} are the same bit for bit"


def _steps(count: int, what: str = "") -> str:
    return f"{count:,} {what}step{'s' if count != 1 else ''}"


def objects(found: RunDifferences) -> dict[str, Any]:
    """Return all differences as plain values, with `same`: whether nothing is known to differ."""
    return {"same": found.same, **msgspec.to_builtins(found)}


def _part(name: str, lines: Iterable[str]) -> list[str]:
    kept = list(lines)
    more = [f"  and {len(kept) - MOST_LINES:,} more"] if len(kept) > MOST_LINES else []
    return [name, *(f"  {clean(line)}" for line in itertools.islice(kept, MOST_LINES)), *more] if kept else []


def _field(difference: FieldDifference) -> str:
    return f"{difference.name}: {difference.a or _NOTHING} → {difference.b or _NOTHING}"


def _plan(difference: PlanDifference) -> str:
    return f"step {difference.step:,}, {difference.what}: {difference.a or 'no change'} → {difference.b or 'no change'}"


def _curve_lines(found: CurveDifference) -> Iterator[str]:
    if found.common_steps and found.begins > 1:
        yield f"compared from step {found.begins:,} on, where the later run begins"
    if not found.common_steps:
        neither = not (found.only_a or found.only_b)
        yield "neither run has a step to compare" if neither else "the runs have no step in common"
    elif found.first is None:
        yield f"the losses of {_steps(found.common_steps, 'common ')} are the same bit for bit"
    else:
        yield f"the losses part at step {found.first.step:,}: {_loss_text(found.first)}"
    if found.worst is not None and found.worst != found.first:
        yield f"largest later difference, at step {found.worst.step:,}: {_loss_text(found.worst)}"
    for name, count in (("a", found.only_a), ("b", found.only_b)):
        if count:
            yield f"only {name} has {_steps(count, 'more ')}"


def _loss_text(difference: LossDifference) -> str:
    values = f"{_value(difference.a)} → {_value(difference.b)}"
    if difference.difference is None:
        return values
    return f"{values}, a difference of {difference.difference:.3g} (relative {difference.relative:.3g})"


def _value(loss: float | None) -> str:
    """Return all digits: a difference in the last bit shows."""
    return _NOTHING if loss is None else repr(loss)
