"""Planted causes are named first, live and by a record; a healthy run has no finding; remedies are commands."""

import dataclasses
import importlib
import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomli_w
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.protocol.support import planted_causes as simulated
from tests.protocol.support.planted_causes import SimulatedCluster, SimulatedRecord
from tests.protocol.support.run_files import good
from tests.tiers import is_soak, scale

from trainctl.node_agent.records.run_db import RunDb
from trainctl.protocol import messages as m
from trainctl.protocol.analysis.diagnosis.diagnose import diagnose
from trainctl.protocol.analysis.diagnosis.diagnosis_facts import (
    EVENTS_READ,
    DiagnosisFacts,
    LiveFacts,
    config_of,
    facts_of_record,
)
from trainctl.protocol.analysis.diagnosis.rules.table import RULES
from trainctl.protocol.config import run_file
from trainctl.protocol.messages import verbs
from trainctl.protocol.messages.events import CheckpointWritten, NoteWritten
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader
from trainctl.tui.cli.main import FILES

SEEDS = scale("diagnosed runs")
NAMED_FIRST = 0.95
HEALTHY_STEPS = 10_000
MOST_SECONDS = 20
"""Until a cause is named; the screen asks every 3 s."""
LOOK_EVERY_STEPS = 100 if SEEDS == 2 else 10
FACTS = {cause: simulated.planted(cause, 3, 120) for cause in simulated.CAUSES}
NAMES = sorted({name for facts in FACTS.values() for part in facts.parts[-1:] for name in part.values})
READINGS = sorted(simulated.QUIET)
WHOLE = ("view", "config", "steps", "parts", "readings", "events", "profiles", "checkpoint_step", "step_age_seconds")
EMPTY = DiagnosisFacts(at=0.0)


@pytest.mark.parametrize("cause", simulated.CAUSES)
def test_a_planted_cause_is_named_first(cause: str) -> None:
    first = []
    for seed in range(SEEDS):
        found = diagnose(simulated.planted(cause, seed))
        first.append(found.findings[0].cause if found.findings else "nothing")
    assert first.count(cause) >= NAMED_FIRST * SEEDS, first


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_slow_rank_is_named_soon(seed: int) -> None:
    """Steps of 0.7 to 3 s: not only once 24 of them were slow."""
    made = simulated.cluster(seed)
    simulated.plant("slow-rank", made)
    began = simulated.STEPS - simulated.PLANTED_STEPS
    kept = simulated.record(made, simulated.STEPS, began)
    named = next(
        step for step in kept.steps[began:]
        if [one.cause for one in diagnose(simulated.facts(made, kept, step.step)).findings] == ["slow-rank"]
    )  # fmt: skip
    assert named.committed_at - kept.steps[began - 1].committed_at <= MOST_SECONDS


@pytest.mark.parametrize("seed", range(SEEDS // 2))
def test_a_healthy_run_has_no_finding(seed: int) -> None:
    made, kept = simulated.healthy(1000 + seed, HEALTHY_STEPS)
    for last in range(20, HEALTHY_STEPS + 1, LOOK_EVERY_STEPS):
        assert diagnose(simulated.facts(made, kept, last)).findings == (), f"at step {last}"


def without(facts: DiagnosisFacts, fields: set[str], names: set[str], readings: set[str], kept: int) -> DiagnosisFacts:
    """Without whole fields, metrics of ranks and readings by name, and with only the newest steps."""
    changed: dict[str, Any] = {name: getattr(EMPTY, name) for name in fields}

    def less(row: Any, names: set[str]) -> Any:
        return msgspec.structs.replace(row, values={name: row.values[name] for name in row.values.keys() - names})

    if "parts" not in fields:
        changed["parts"] = tuple(less(part, names) for part in facts.parts[len(facts.parts) - kept :])
    if "readings" not in fields:
        changed["readings"] = {
            node: tuple(less(one, readings) for one in rows) for node, rows in facts.readings.items()
        }
    return dataclasses.replace(facts, **changed)


@settings(max_examples=60)
@given(
    cause=st.sampled_from([*FACTS]), fields=st.sets(st.sampled_from(WHOLE)), names=st.sets(st.sampled_from(NAMES)),
    readings=st.sets(st.sampled_from(READINGS)), kept=st.integers(0, 240), is_live=st.booleans(),
)  # fmt: skip
def test_missing_facts_raise_nothing(
    cause: str, fields: set[str], names: set[str], readings: set[str], kept: int, is_live: bool
) -> None:
    facts = dataclasses.replace(without(FACTS[cause], fields, names, readings, kept), is_live=is_live)
    found = diagnose(facts)
    assert all(finding.evidence for finding in found.findings)
    assert all(finding.what_if is None or finding.what_if.saved >= 0 for finding in found.findings)


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


def test_a_cause_costs_a_part_of_the_step_and_none_of_a_step_that_takes_no_time() -> None:
    assert [m.WhatIf(*each).part for each in ((4.0, 1.0), (4.0, 5.0), (0.0, 0.0))] == [0.75, 0.0, 0.0]


VALUES: dict[str, Any] = {
    "node": "studio", "other": "mbp", "rank": 1, "run": "run-20261126-110000-abcd", "checkpoint": 100, "back": 100,
    "smaller": 4, "micro": 8, "double": 16, "prefetch": 4, "threads": 2, "workers": 2, "less_rank": 8, "shorter": 256,
    "half_rate": "5e-05", "norm": "2.5", "every": 500, "batch": 96, "alone": "1.2 s",
    "clip": "0.5", "warmup": "warmup_steps=3", "nodes": "studio,mbp",
}  # fmt: skip
"""One value of each name that a remedy may need."""
COMMANDS = sorted({rung.command.format_map(VALUES) for rule in RULES for rung in rule.ladder if rung.command})
RUN = good() | {
    "model": {"path": "model", "dtype": "float16", "gradient_checkpointing": "alternate"},
    "data": {"path": "data.jsonl", "kind": "rows"},
    "checkpoint": {"background": False},
    "adapter": {"kind": "lora"},
    "nodes": {"studio": {}, "mbp": {}},
}


def test_each_cause_is_there_once_and_explains_later_ones() -> None:
    order = [rule.cause for rule in RULES]
    assert len(set(order)) == len(order)
    for at, rule in enumerate(RULES):
        assert rule.ladder and {*rule.explains} <= {*order}, rule.cause
        assert all(order.index(cause) > at for cause in rule.explains if cause != "throttled"), rule.cause


@pytest.mark.parametrize("command", COMMANDS)
def test_a_remedy_is_a_command_of_this_program(command: str, tmp_path: Path) -> None:
    program, name, *words = command.split()
    assert program == "trainctl"
    group = typer.main.get_group(importlib.import_module(f"trainctl.tui.cli.{FILES[name]}").app)
    entry: Any = group.commands[name]
    with entry.make_context(name, [*words]) as context:
        assert not context.args or name in ("send", "data")
    if name == "send":
        node = words[words.index("--node") + 1] if "--node" in words else None
        pairs = dict(word.split("=", 1) for word in words if "=" in word)
        verbs.check(words[0], verbs.parse_args(words[0], pairs), node)
    if "--set" in words:
        path = tmp_path / "run.toml"
        path.write_text(tomli_w.dumps(RUN), "utf-8")
        pairs = dict(word.split("=", 1) for flag, word in itertools.pairwise(words) if flag == "--set")
        changed = run_file.read(path, pairs)
        assert changed != run_file.read(path) and changed.nodes.keys() == RUN["nodes"].keys()
        path.write_text(tomli_w.dumps(RUN | {"nodes": {}}), "utf-8")
        assert {*run_file.read(path, pairs).nodes} in ({*RUN["nodes"]}, set())


STEPS = 140
CAUSES = [*simulated.CAUSES] if is_soak() else ["slow-disk", "slow-rank", "long-checkpoint"]


def written(folder: Path, c: SimulatedCluster, kept: SimulatedRecord) -> RunPaths:
    """Record the run as its agent does."""
    paths = RunPaths(folder)
    with RunDb(paths) as db:
        for step in kept.steps:
            db.commit(step, [part for part in kept.parts if part.step == step.step], step.committed_at)
        for readings in kept.readings.values():
            for reading in readings:
                db.host(reading)
        for event in kept.events:
            db.event(event.at, event.data, event.severity, event.by, step=event.step)
        view = msgspec.structs.replace(simulated.view(c, STEPS), state="finished")
        db.set_meta("view", msgspec.json.encode(view).decode())
    return paths


@pytest.mark.parametrize("cause", CAUSES)
def test_a_record_is_diagnosed_like_the_live_run(cause: str, tmp_path: Path) -> None:
    made = simulated.cluster(5)
    simulated.plant(cause, made)
    if made.skipped:
        made.skipped = tuple(range(STEPS - 20, STEPS, 3))
    paths = written(tmp_path, made, simulated.record(made, STEPS, STEPS - simulated.PLANTED_STEPS))
    with RecordReader(paths) as reader:
        found = diagnose(facts_of_record(reader))
        before = diagnose(facts_of_record(reader, last_step=70))
    assert found.findings[0].cause == cause
    assert found.step == STEPS
    if cause not in ("small-micro", "clip-bound", "long-checkpoint"):
        assert before.findings == ()  # the cause begins later
        assert before.step == 70


def test_an_agent_adds_what_only_it_knows(tmp_path: Path) -> None:
    made = simulated.cluster(5)
    kept = simulated.record(made, STEPS, STEPS)
    with RecordReader(written(tmp_path, made, kept)) as reader:
        at = kept.steps[-1].committed_at + 95
        view = simulated.with_rank(simulated.facts(made, kept), 1, state="hung").view
        newest = {node: (msgspec.structs.replace(found[-1], read_at=at),) for node, found in kept.readings.items()}
        live = LiveFacts(view, profiles=simulated.profiles(made), readings=newest, step_age_seconds=95.0)
        facts = facts_of_record(reader, simulated.CONFIG, live=live, at=at)
    assert facts.is_live
    assert facts.checkpoint_step == 100
    assert {node: found[-1].read_at for node, found in facts.readings.items()} == {one.name: at for one in made.nodes}
    assert diagnose(facts).findings[0].cause == "hang"


def test_a_checkpoint_is_found_behind_many_other_events(tmp_path: Path) -> None:
    """At the record's end and as it was earlier."""
    with RunDb(RunPaths(tmp_path)) as db:
        for step, at in ((40, 1.0), (80, 2.0)):
            db.event(at, CheckpointWritten(step, 1000, 0.1), "info", "auto", step=step)
        for number in range(EVENTS_READ + 50):
            db.event(3.0 + number, NoteWritten("noted"), "info", "user", step=90)
    with RecordReader(tmp_path) as reader:
        facts = facts_of_record(reader)
        early = reader.newest_events(5, until=1.5)
    assert facts.checkpoint_step == 80
    assert [event.id for event in facts.events] == [1, 2, *range(53, EVENTS_READ + 53)]
    assert [event.step for event in early] == [40]


def test_an_empty_record_finds_nothing_and_the_run_file_is_read_where_there_is_one(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    RunDb(paths).__enter__().close()
    with RecordReader(tmp_path) as reader:
        found = diagnose(facts_of_record(reader))
    assert found.findings == ()
    assert {one.result for one in found.checked} == {"unknown"}
    assert config_of(paths) is None
    paths.run_file.write_text("not a run file", "utf-8")
    assert config_of(paths) is None
    paths.run_file.write_text(tomli_w.dumps(good()), "utf-8")
    config = config_of(paths)
    assert config is not None and config.run.name == "sft-1b"
