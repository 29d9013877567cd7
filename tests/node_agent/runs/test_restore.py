"""An ended run taken up again: with the settings of the life that made its last step, whatever an older one planned."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.node_agent.support.records import part, plan, step, write_checkpoint
from tests.node_agent.support.simulation import config

from trainctl.node_agent.conductor import views
from trainctl.node_agent.planning.compatibility import RankSetup, Resumed
from trainctl.node_agent.planning.durable import Durable, PolicyState, RankSetting, Rollback, Settings
from trainctl.node_agent.records.keys import settings_key
from trainctl.node_agent.runs import checkpoint_source, restore
from trainctl.node_agent.runs.checkpoint_source import Source
from trainctl.node_agent.runs.figures import keep_times, kept_times
from trainctl.protocol import messages as m
from trainctl.protocol.batch.cost import NodeTime
from trainctl.protocol.messages import event_prose
from trainctl.protocol.messages.events import CheckpointWritten
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader

ALL = Settings(1, 24, {0: RankSetting("a", 12, 4), 1: RankSetting("b", 12, 4)})
WITHOUT_A = Settings(2, 24, {0: RankSetting("a", 0, 4, out="drained"), 1: RankSetting("b", 24, 4)})
BACK = msgspec.structs.replace(ALL, plan_version=3)


def live(recorder: restore.RunDb, n: int, versions: dict[int, int], until: int) -> None:
    """A life of the run in generation 1.n: each step planned with a version, those up to `until` committed."""
    generation = m.Generation(1, n)
    for number, version in versions.items():
        made = plan(100 * n + number, generation)
        recorder.plan(msgspec.structs.replace(made, step=number, plan_version=version), 0.0)
    for number in versions:
        if number <= until:
            recorder.commit(step(number, generation), [part(number, generation=generation)], 0.0)
        recorder.flush()


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """In its first life rank 0 was drained from step 3 on; it went back behind that, with both ranks, to step 4."""
    made = RunPaths(tmp_path / "run-1")
    nodes = {"a": {"backend": "torch"}, "b": {"backend": "torch"}}
    with restore.make_directory(made, config(100, 24, nodes=nodes)) as recorder:
        for settings in (ALL, WITHOUT_A, BACK):
            key = settings_key(settings.plan_version)
            recorder.set_meta(key, msgspec.json.encode(settings).decode())
        live(recorder, 1, {1: 1, 2: 1, 3: 2, 4: 2, 5: 2, 6: 2}, until=5)
        recorder.retract_after(2)
        live(recorder, 2, {3: 3, 4: 3}, until=4)
        restore._keep(recorder, Durable(BACK, m.Generation(1, 2), 204))
    return made


def keep(paths: RunPaths, **fields: Any) -> None:
    with restore.RunDb(paths) as recorder:
        restore._keep(recorder, Durable(BACK, m.Generation(1, 2), 204, **fields))


def told_to_go_back(paths: RunPaths, step: int, skip_batches: int) -> None:
    keep(paths, rollback=Rollback(step, skip_batches), checkpoints=(2, 4))


def resumed(paths: RunPaths, step: int) -> restore.Opening:
    opening = restore.old_run(paths, "c", ("a", "b", "c"), Source(step, "b"), None)
    opening.recorder.close()
    return opening


def survived(paths: RunPaths, **known: Any) -> restore.Opening:
    opening = restore.surviving_run(paths, frozenset(), **known)
    opening.recorder.close()
    return opening


def recorded_times(paths: RunPaths) -> tuple[NodeTime, ...]:
    with restore.RunDb(paths) as recorder:
        return kept_times(recorder)


@pytest.mark.parametrize("after", [2, 3, 4])
def test_the_life_that_was_gone_back_behind_has_no_say(paths: RunPaths, after: int) -> None:
    opening = resumed(paths, after)
    ranks = opening.conductor.durable.settings.ranks
    assert {rank: (setting.share, setting.out) for rank, setting in ranks.items()} == {0: (12, ""), 1: (12, "")}
    assert not any("undone" in notice for notice in opening.notices)


def test_a_rank_that_takes_part_again_has_not_departed(paths: RunPaths) -> None:
    """Rank 0 left after the step that the run goes back to; rank 2 was lost before it."""
    lost = msgspec.structs.replace(BACK, ranks={**BACK.ranks, 2: RankSetting("c", 0, 4, out="lost")})
    with restore.RunDb(paths) as recorder:
        recorder.set_meta(settings_key(3), msgspec.json.encode(lost).decode())
        restore._keep(recorder, Durable(lost, m.Generation(1, 2), 204, departed=(0, 2)))
    assert resumed(paths, 4).conductor.durable.departed == (2,)


@pytest.mark.parametrize(("kept", "is_known"), [((0, 1, 2), True), ((0,), False)])
def test_what_the_ranks_of_the_step_computed_with_is_kept_for_the_group_that_continues_it(paths, kept, is_known):
    """Ranks 0 and 1 made the step."""
    setups = {rank: RankSetup("abc"[rank], "torch", "cpu") for rank in kept}
    with restore.RunDb(paths) as recorder:
        recorder.add_part(part(4, 1, generation=m.Generation(1, 2)), 1000.0)
        restore._keep(recorder, Durable(BACK, m.Generation(1, 2), 204, setups=setups))
    found = resumed(paths, 4).conductor.durable.resumed
    assert found == (Resumed(4, {rank: setups[rank] for rank in (0, 1)}) if is_known else None)


def test_what_came_after_the_step_is_undone_with_it(paths: RunPaths) -> None:
    drained = msgspec.structs.replace(WITHOUT_A, plan_version=4)
    with restore.RunDb(paths) as recorder:
        recorder.set_meta(settings_key(4), msgspec.json.encode(drained).decode())
        live(recorder, 3, {5: 3, 6: 4}, until=6)
        restore._keep(recorder, Durable(drained, m.Generation(1, 3), 306))
    opening = resumed(paths, 4)
    assert opening.conductor.durable.settings.ranks[0].share == 12
    assert any("undone" in notice for notice in opening.notices)


@pytest.mark.parametrize(("kept", "after"), [(None, (0, 1)), ((), ()), ((1,), (1,))])
def test_ranks_that_outlive_an_agent_are_probed_unless_they_were_or_know_no_probes(paths, kept, after):
    """None: their agent's version knew none. A run that is taken up again is probed in any case."""
    keep(paths, members=(0, 1), probed=kept)
    assert survived(paths).conductor.durable.probed == after
    assert resumed(paths, 4).conductor.durable.probed == ()


def test_an_evaluation_of_a_step_that_is_undone_is_not_the_newest_any_more(paths: RunPaths) -> None:
    with restore.RunDb(paths) as recorder:
        recorder.evaluation(2, 3000.0, 2.5, 10.0, 0.1, {"eval/kl": 0.25})
        recorder.evaluation(4, 3001.0, 1.5, 10.0, 0.1, {"eval/kl": 0.5})
    keep(paths, eval_loss=1.5, eval_step=4, eval_values={"eval/kl": 0.5})
    back = resumed(paths, 3).conductor.durable
    assert (back.eval_step, back.eval_loss, back.eval_values) == (2, 2.5, {"eval/kl": 0.25})
    none = resumed(paths, 1).conductor.durable
    assert (none.eval_step, none.eval_loss, none.eval_values) == (None, None, {})


def test_the_time_between_the_loss_of_agent_and_trainers_and_the_resume_is_nobody_s(paths: RunPaths) -> None:
    with restore.RunDb(paths) as recorder:
        last = recorder.last_state().step
        assert last is not None
        keep_times(recorder, (NodeTime("a", 5.0, last.committed_at - 10), NodeTime("b", 7.0)))
    resumed(paths, 2)
    assert recorded_times(paths) == (NodeTime("a", 15.0), NodeTime("b", 7.0))


def test_a_run_that_outlives_its_agent_goes_on_taking_time_but_for_a_node_whose_trainers_ended(paths: RunPaths) -> None:
    """The rank has taken part up to the last step."""
    with restore.RunDb(paths) as recorder:
        last = recorder.last_state().step
        assert last is not None
        since = last.committed_at - 10
        keep_times(recorder, (NodeTime("a", 5.0, since), NodeTime("b", 7.0, since), NodeTime("c", 3.0)))
    survived(paths, gone={"a"})
    assert recorded_times(paths) == (NodeTime("a", 15.0), NodeTime("b", 7.0, since), NodeTime("c", 3.0))


def test_what_policies_have_counted_is_that_of_the_checkpoints_step(paths: RunPaths) -> None:
    """The plateau's evaluations go back with the run; a bar stays, and no command is open any more."""
    kept = {"best": 2.0, "best_step": 1.0, "evaluations": 3.0, "last_step": 4.0}
    policies = {
        "plateau": PolicyState(memory=kept),
        "micro-batch": PolicyState("on", {"barred 0": 4.0}, sent=("id-9",)),
    }
    with restore.RunDb(paths) as recorder:
        for at in range(1, 5):
            recorder.evaluation(at, float(at), 2.0, 1.0, 0.1, {})
        restore._keep(recorder, Durable(BACK, m.Generation(1, 2), 204, policies=policies))
    after = resumed(paths, 2).conductor.durable.policies
    assert after["plateau"].memory == {"best": 2.0, "best_step": 1.0, "evaluations": 1.0, "last_step": 2.0}
    assert after["micro-batch"] == PolicyState("on", {"barred 0": 4.0})


def test_data_after_the_checkpoint_are_skipped_and_the_events_say_which(paths: RunPaths) -> None:
    told_to_go_back(paths, 2, 5)
    before = resumed_cursor(paths, 2)
    assert restore.rollback_step(paths) == 2
    opening = resumed(paths, 2)
    assert opening.conductor.progress.cursor == before + 5 * 24
    assert f"positions {before:,} to {before + 119:,} are skipped: their samples aren't trained on" in opening.notices
    kept = opening.conductor.durable
    assert (kept.rollback, kept.checkpoints) == (None, (2,))
    assert views.run_view(opening.conductor, 0.0, "", (), "a").skipped == ((before, 120),)
    assert restore.rollback_step(paths) is None


@pytest.mark.parametrize(("skips", "end"), [(5, "step 2, nothing is skipped"), (0, "step 2")])
def test_an_older_checkpoint_than_the_one_wanted_is_said_and_nothing_is_skipped(paths: RunPaths, skips, end) -> None:
    told_to_go_back(paths, 3, skips)
    opening = resumed(paths, 2)
    want = f"rollback to step 3: its checkpoint is gone or unreachable; continued from {end}"
    assert want in opening.notices
    assert not opening.conductor.durable.skipped and opening.conductor.durable.rollback is None


def test_what_is_skipped_stays_skipped_until_the_run_goes_back_behind_it(paths: RunPaths) -> None:
    told_to_go_back(paths, 2, 5)
    first = resumed(paths, 2).conductor.progress.cursor
    assert resumed(paths, 2).conductor.progress.cursor == first
    assert survived(paths).conductor.progress.cursor == first
    assert not resumed(paths, 1).conductor.durable.skipped


@pytest.mark.parametrize("starter", [None, "id-9"])
def test_checkpoints_of_undone_steps_on_other_nodes_count_no_more(paths: RunPaths, starter: str | None) -> None:
    """Whichever node took the run up, and even if its agent is killed before it could say so."""
    with restore.RunDb(paths) as recorder:
        for at in (2, 4):
            recorder.event(float(at), CheckpointWritten(at), "good", "b", step=at)
    told_to_go_back(paths, 2, 1)
    opening = restore.old_run(paths, "c", ("a", "b", "c"), Source(2, "b"), starter, "anna")
    opening.recorder.close()
    assert [event_prose.text(event.data) for event in opening.kept] == ["resumed from step 2: later steps are repeated"]
    assert opening.kept[0].by == ("auto" if starter is None else "anna")
    assert checkpoint_source.find(paths, "c") == Source(2, "b")


@pytest.mark.parametrize(("kept", "written"), [((2, 4), 2), ((4,), 3), ((), 3)])
def test_the_newest_checkpoint_is_none_of_an_undone_step(paths: RunPaths, kept: tuple[int, ...], written: int) -> None:
    keep(paths, checkpoints=kept, written=4)
    assert resumed(paths, 3).conductor.durable.written == written


def test_more_may_be_skipped_of_what_follows_the_same_step(paths: RunPaths) -> None:
    told_to_go_back(paths, 2, 5)
    opening = resumed(paths, 2)
    keep(paths, rollback=Rollback(2, 1), skipped=opening.conductor.durable.skipped, checkpoints=(2,))
    assert resumed(paths, 2).conductor.progress.cursor == opening.conductor.progress.cursor + 24


def resumed_cursor(paths: RunPaths, step: int) -> int:
    """The first position after a step, by the record."""
    with RecordReader(paths) as reader:
        (row,), _ = reader.steps(step - 1, 1)
    assert row.cursor is not None
    return row.cursor


def own_checkpoint(paths: RunPaths, step: int, cursor: int, n: int = 2) -> Source:
    write_checkpoint(paths, step, m.Generation(1, n), f'{{"cursor": {cursor}, "step": {step}}}')
    return checkpoint_source.find(paths, "a")


@pytest.mark.parametrize("is_here", [True, False])
def test_a_run_continues_from_a_checkpoint_whose_steps_the_record_has_lost(paths: RunPaths, is_here: bool) -> None:
    """By the cursor of the checkpoint, or on another node by the record's batch size; one notice names them."""
    source = own_checkpoint(paths, 9, 500) if is_here else Source(9, "b")
    assert source == (Source(9, "a", paths.checkpoint(9)) if is_here else source)
    opening = restore.old_run(paths, "c", ("a", "b", "c"), source, None, seen=m.Generation(1, 7))
    before = opening.recorder.last_state().step
    opening.recorder.close()
    assert before is not None and before.step == 4
    cursor = 500 if is_here else (before.cursor or 0) + 5 * 24
    assert (opening.conductor.progress.step, opening.conductor.progress.cursor) == (9, cursor)
    (notice,) = opening.notices
    assert "lost steps 5 to 9" in notice
    assert opening.conductor.durable.generation == m.Generation(1, 7)
    assert opening.conductor.durable.checkpoints == (9,)
    again = restore.old_run(paths, "c", ("a", "b", "c"), source, None)
    again.recorder.close()
    assert (again.notices, again.conductor.progress.step) == ((), 9)
    assert resumed(paths, 3).conductor.durable.gap is None, "behind it"


@pytest.mark.parametrize("left", [0.0, 0.5, None])
def test_a_log_that_was_cut_short_or_is_gone_refuses_no_resume(tmp_path: Path, left: float | None) -> None:
    paths, nodes = RunPaths(tmp_path / "run-1"), {"a": {"backend": "torch"}}
    recorder = restore.make_directory(paths, config(100, 24, nodes=nodes))
    live(recorder, 1, dict.fromkeys(range(1, 10), 1), until=9)
    recorder.flush()
    log = paths.record.with_name("record.db-wal")
    kept = {file: file.read_bytes() for file in (paths.record, log)}
    recorder.close()
    for file, content in kept.items():  # as if it had not been closed
        file.write_bytes(content if file != log or left is None else content[: int(left * len(content))])
    if left is None:
        log.unlink()
    source = own_checkpoint(paths, 9, 216, 1)
    assert survived(paths, seen=m.Generation(1, 3)).conductor.durable.generation == m.Generation(1, 3)
    opening = restore.old_run(paths, "c", ("a", "c"), source, None, seen=m.Generation(1, 3))
    opening.recorder.close()
    assert (opening.conductor.progress.step, opening.conductor.progress.cursor) == (9, 216)
    assert "lost step" in opening.notices[-1]


def said(step: int, n: int, cursor: int | None = None) -> m.PeerConsent:
    """Another node's answer about its newest checkpoint."""
    return m.PeerConsent(
        link="l", seq=1, run="run-1", term=1, checkpoint=step, checkpoint_generation=m.Generation(1, n),
        checkpoint_cursor=cursor,
    )  # fmt: skip


def test_a_checkpoint_counts_unless_its_step_is_retracted_also_one_that_only_another_node_knows(paths):
    """Step 5 was made in the life that the run has gone back behind."""
    assert own_checkpoint(paths, 5, 500, 1).step == 0
    here = Source(2, "a")
    assert checkpoint_source.newer(paths, here, {"b": said(4, 2), "c": said(3, 2)}) == Source(4, "b")
    assert checkpoint_source.newer(paths, here, {"b": said(9, 2, 500)}) == Source(9, "b", cursor=500)  # steps are lost
    for none in (said(4, 1), said(5, 1), said(2, 2), said(0, 0)):  # retracted and made again, retracted, no newer, none
        assert checkpoint_source.newer(paths, here, {"b": none}) is None


def test_a_lead_that_lost_its_whole_record_continues_from_another_node_s_checkpoint(tmp_path: Path) -> None:
    paths, nodes = RunPaths(tmp_path / "run-1"), {"a": {"backend": "torch"}, "b": {"backend": "torch"}}
    restore.make_directory(paths, config(500, 24, nodes=nodes)).close()
    here = checkpoint_source.find(paths, "a")
    source = checkpoint_source.newer(paths, here, {"b": said(400, 3, 9700)})
    assert here.step == 0 and source == Source(400, "b", cursor=9700)
    opening = restore.old_run(paths, "c", ("a", "b", "c"), source, None)
    opening.recorder.close()
    assert (opening.conductor.progress.step, opening.conductor.progress.cursor) == (400, 9700)


def test_a_node_says_its_newest_checkpoint_with_its_cursor_and_none_that_its_disk_refuses(paths, monkeypatch):
    assert checkpoint_source.newest_here(paths) == (0, None, None)
    own_checkpoint(paths, 9, 500)
    assert checkpoint_source.newest_here(paths) == (9, m.Generation(1, 2), 500)

    def refuse(*_: object) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "iterdir", refuse)
    assert checkpoint_source.newest_here(paths) == (0, None, None)
