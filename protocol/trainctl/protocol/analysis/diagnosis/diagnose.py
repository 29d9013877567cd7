"""Asks each rule in order what it finds in a run."""

import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainctl.protocol.analysis.diagnosis.diagnosis_facts import DiagnosisFacts, config_of, facts_of_record
from trainctl.protocol.analysis.diagnosis.rule import Clear, Found, Rule, Rung, Unknown, Verdict
from trainctl.protocol.analysis.diagnosis.rules.table import RULES
from trainctl.protocol.analysis.diagnosis.situation import Situation
from trainctl.protocol.messages import CheckedCause, Diagnosis, Finding, Remedy
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader


@dataclass(frozen=True)
class _Verdict:
    rule: Rule
    of: Verdict


def diagnose(facts: DiagnosisFacts, rules: Sequence[Rule] = RULES) -> Diagnosis:
    """Return what is wrong with a run, a cause before those that follow from it. Missing facts raise nothing: what
    can't be judged is `unknown`."""
    situation = Situation(facts)
    said = [_Verdict(rule, verdict) for rule in rules for verdict in rule.check(situation)]
    found = [one for one in said if isinstance(one.of, Found)]
    kept = [one for one in found if not any(_explains(other, one) for other in found)]
    first = next((part.step for parts in situation.recent[:1] for part in parts.values()), 0)
    return Diagnosis(
        at=facts.at,
        step=facts.steps[-1].step if facts.steps else 0,
        first_step=first,
        step_seconds=situation.step_seconds,
        findings=tuple(_finding(situation, one, said) for one in kept),
        checked=tuple(_checked(one, is_kept=one in kept) for one in said),
    )


def _explains(cause: _Verdict, other: _Verdict) -> bool:
    if not isinstance(cause.of, Found) or not isinstance(other.of, Found):
        return False
    same = cause.of.node == other.of.node or not cause.of.node or not other.of.node
    return same and other.rule.cause in cause.rule.explains


def _finding(s: Situation, one: _Verdict, said: Sequence[_Verdict]) -> Finding:
    found = one.of
    assert isinstance(found, Found)
    return Finding(
        cause=one.rule.cause,
        title=found.title,
        severity=found.severity,
        node=found.node,
        rank=found.rank,
        evidence=found.evidence,
        ruled_out=tuple(_ruled_out(one, said)),
        what_if=found.what_if,
        remedies=tuple(_remedies(s, found, one.rule.ladder)),
    )


def _ruled_out(one: _Verdict, said: Iterable[_Verdict]) -> Iterator[str]:
    """Causes that would explain it, and aren't there or aren't known."""
    node = one.of.node if isinstance(one.of, Found) else ""
    for other in said:
        if isinstance(other.of, Found) or one.rule.cause not in other.rule.explains:
            continue
        if not other.of.node or not node or other.of.node == node:
            unknown = "not known, for lack of " if isinstance(other.of, Unknown) else ""
            yield f"{_lowered(other.rule.title)}: {unknown}{other.of.text}"


def _lowered(title: str) -> str:
    """A title within a line: `a disk is slow`, but `NVIDIA's ...`."""
    return title[0].lower() + title[1:] if title[1:2].islower() or title[1:2] == " " else title


def _checked(one: _Verdict, *, is_kept: bool) -> CheckedCause:
    match one.of:
        case Found(title=title):
            return CheckedCause(one.rule.cause, "found" if is_kept else "follows", title)
        case Clear(text=text):
            return CheckedCause(one.rule.cause, "clear", text)
        case Unknown(text=text):
            return CheckedCause(one.rule.cause, "unknown", text)


# ---------------------------------------------------------------- remedies


def _remedies(s: Situation, found: Found, ladder: Iterable[Rung]) -> Iterator[Remedy]:
    values = {name: value for name, value in {**_run_values(s), **found.values}.items() if value is not None}
    for rung in ladder:
        if fields(rung) <= values.keys() and rung.fits(s, found):
            command = rung.command.format_map(values)
            yield Remedy(rung.text.format_map(values), command, _verb(command))


def fields(rung: Rung) -> set[str]:
    """Names of the values that a remedy needs."""
    return {name for text in (rung.text, rung.command) for _, name, _, _ in string.Formatter().parse(text) if name}


def _verb(command: str) -> str:
    return command.split()[2] if command.startswith("trainctl send ") else ""


def _run_values(s: Situation) -> Mapping[str, Any]:
    config, view = s.facts.config, s.facts.view
    rank = config.adapter.rank if config is not None else 1
    length = config.data.sequence_length if config is not None else 2
    return {
        "run": view.run if view is not None else None,
        "checkpoint": s.facts.checkpoint_step,
        "nodes": ",".join(config.nodes) or None if config is not None else None,
        "less_rank": rank // 2 if rank > 1 else None,
        "shorter": length // 2 if length >= 4 else None,
    }


def of_record(paths: RunPaths, last_step: int | None = None) -> Diagnosis:
    """Return the diagnosis of a recorded run at its end, or at `last_step`. Raises InvalidInputError if the record
    cannot be read."""
    with RecordReader(paths) as reader:
        return diagnose(facts_of_record(reader, config_of(paths), last_step=last_step))
