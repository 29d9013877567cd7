"""Any fact may be missing: a diagnosis never raises, and never takes what is missing for 0."""

import dataclasses
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.protocol.support import planted_causes as simulated

from trainctl.protocol import messages as m
from trainctl.protocol.analysis.diagnosis.diagnose import diagnose
from trainctl.protocol.analysis.diagnosis.diagnosis_facts import DiagnosisFacts
from trainctl.protocol.analysis.diagnosis.situation import Situation

FACTS = {cause: simulated.planted(cause, 3, 120) for cause in simulated.CAUSES}
NAMES = sorted({name for facts in FACTS.values() for part in facts.parts[-1:] for name in part.values})
READINGS = sorted(simulated.QUIET)
WHOLE = ("view", "config", "steps", "parts", "readings", "events", "profiles", "checkpoint_step", "step_age_seconds")
EMPTY = DiagnosisFacts(at=0.0)


def without(facts: DiagnosisFacts, fields: set[str], names: set[str], readings: set[str], kept: int) -> DiagnosisFacts:
    """Without whole fields, metrics of ranks and readings by name, and with only the newest steps."""
    changed: dict[str, Any] = {name: getattr(EMPTY, name) for name in fields}
    if "parts" not in fields:
        parts = facts.parts[-kept:] if kept else ()
        changed["parts"] = tuple(msgspec.structs.replace(one, values=_but(one.values, names)) for one in parts)
    if "readings" not in fields:
        changed["readings"] = {
            node: tuple(msgspec.structs.replace(one, values=_but(one.values, readings)) for one in found)
            for node, found in facts.readings.items()
        }
    return dataclasses.replace(facts, **changed)


def _but(values: dict[str, float], names: set[str]) -> dict[str, float]:
    return {name: value for name, value in values.items() if name not in names}


@settings(max_examples=60)
@given(
    cause=st.sampled_from([*FACTS]), fields=st.sets(st.sampled_from(WHOLE)), names=st.sets(st.sampled_from(NAMES)),
    readings=st.sets(st.sampled_from(READINGS)), kept=st.integers(0, 300), is_live=st.booleans(),
)  # fmt: skip
def test_missing_facts_raise_nothing(
    cause: str, fields: set[str], names: set[str], readings: set[str], kept: int, is_live: bool
) -> None:
    facts = dataclasses.replace(without(FACTS[cause], fields, names, readings, kept), is_live=is_live)
    found = diagnose(facts)
    assert all(finding.evidence for finding in found.findings)
    assert all(finding.what_if is None or finding.what_if.saved >= 0 for finding in found.findings)


@settings(max_examples=30)
@given(names=st.sets(st.sampled_from(READINGS), min_size=1))
def test_a_missing_reading_is_unknown(names: set[str]) -> None:
    facts = without(FACTS["slow-disk"], set(), set(), names, 300)
    situation = Situation(facts)
    assert {situation.reading("node-0", name) for name in names} == {None}
    assert {situation.reading_before("node-0", name) for name in names} == {None}


@settings(max_examples=40)
@given(
    numbers=st.lists(st.sampled_from([0.0, 1e-9, 1.0, 1e9]), min_size=6, max_size=6), samples=st.integers(0, 3),
    micro=st.sampled_from([None, 0, 1, 8]), tokens=st.sampled_from([0.0, 100.0]),
)  # fmt: skip
def test_odd_numbers_of_a_guest_raise_nothing(
    numbers: list[float], samples: int, micro: int | None, tokens: float
) -> None:
    def odd(part: m.RankStep) -> m.RankStep:
        return msgspec.structs.replace(
            part, phases=m.Phases(*numbers), samples=samples, micro_batch=micro, tokens=tokens, step_seconds=numbers[0]
        )

    facts = FACTS["slow-rank"]
    steps = tuple(msgspec.structs.replace(one, step_seconds=numbers[0], learning_rate=None) for one in facts.steps)
    diagnose(dataclasses.replace(facts, parts=tuple(map(odd, facts.parts)), steps=steps))
