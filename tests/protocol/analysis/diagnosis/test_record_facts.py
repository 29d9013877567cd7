"""Facts of a record: what its agent wrote is diagnosed like the live run, on any machine."""

from pathlib import Path

import msgspec
import pytest
import tomli_w
from tests.protocol.support import planted_causes as simulated
from tests.protocol.support.planted_causes import SimulatedCluster, SimulatedRecord
from tests.protocol.support.run_files import good
from tests.tiers import is_soak

from trainctl.node_agent.records.run_db import RunDb
from trainctl.protocol.analysis.diagnosis.diagnose import diagnose
from trainctl.protocol.analysis.diagnosis.diagnosis_facts import EVENTS_READ, LiveFacts, config_of, facts_of_record
from trainctl.protocol.messages.events import CheckpointWritten, NoteWritten
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader

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
