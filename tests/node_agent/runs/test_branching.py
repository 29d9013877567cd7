"""Branches of runs: what one takes from its parent, where it starts again, and lineage in both records."""

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomli_w
from tests.asking import events_of
from tests.cluster.in_process import BlockingAgent, BlockingCluster
from tests.cluster.run_files import NODE, on
from tests.cluster.waits import wait_for_end
from tests.node_agent.support.records import part, plan, step, write_checkpoint
from tests.node_agent.support.simulation import config
from tests.waiting import until

from trainctl.node_agent.planning.compatibility import RankSetup, Resumed
from trainctl.node_agent.planning.durable import Durable, LrRule, RankSetting, Rollback, Settings, Skipped
from trainctl.node_agent.records.keys import settings_key
from trainctl.node_agent.runs import checkpoint_source, restore
from trainctl.node_agent.runs.checkpoint_source import Source
from trainctl.protocol import messages as m
from trainctl.protocol.config import run_file
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages.events import RunBranched
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader

NODES = {"a": {"backend": "torch"}, "b": {"backend": "torch"}}
GENERATION = m.Generation(1, 1)
SETUP = RankSetup("a", "torch", "cpu")
CHANGED = Settings(2, 24, {0: RankSetting("a", 20, 4), 1: RankSetting("b", 4, 2)}, LrRule("schedule", 0.5))
SKIPPED = Skipped(2, 48, 24), Skipped(4, 144, 48)


def made_config(**tables: Any) -> RunFile:
    return config(100, 24, nodes=NODES, **tables)


@pytest.fixture
def parent(tmp_path: Path) -> RunPaths:
    """Four steps, the last two with other shares and half the learning rate; checkpoints of steps 2 and 3."""
    paths = RunPaths(tmp_path / "parent")
    with restore.make_directory(paths, made_config()) as recorder:
        recorder.set_meta(settings_key(2), msgspec.json.encode(CHANGED).decode())
        for number in range(1, 5):
            version = 1 if number < 3 else 2
            made = msgspec.structs.replace(plan(number, GENERATION), step=number, plan_version=version)
            recorder.plan(made, 0.0)
            row = msgspec.structs.replace(step(number, GENERATION), plan_version=version)
            recorder.commit(row, [part(number, generation=GENERATION)], 0.0)
        restore._keep(recorder, Durable(CHANGED, GENERATION, 4, skipped=SKIPPED, setups={0: SETUP}))
    write_checkpoint(paths, 2)
    write_checkpoint(paths, 3)
    return paths


def cursor_after(paths: RunPaths, at: int) -> int:
    with RecordReader(paths) as reader:
        (row,), _ = reader.steps(at - 1, 1)
    assert row.cursor is not None
    return row.cursor


def branched(parent: RunPaths, wanted: RunFile | None = None) -> restore.Opening:
    """A run that branched off at step 3, its record closed."""
    fork, folder = checkpoint_source.find_fork(parent, 3, "c"), parent.directory.parent / "agent"
    opening = restore.new_run(wanted or made_config(), "c", folder, "id-1", "anna", fork=fork)
    opening.recorder.close()
    return opening


def test_it_has_what_commands_had_changed_up_to_its_step(parent: RunPaths) -> None:
    opening = branched(parent)
    durable, progress = opening.conductor.durable, opening.conductor.progress
    assert (durable.settings.ranks, durable.settings.lr) == (CHANGED.ranks, CHANGED.lr)
    assert durable.branch == m.BranchPoint("parent", 3, cursor_after(parent, 3))
    assert (progress.step, progress.cursor) == (3, cursor_after(parent, 3))
    assert durable.skipped == SKIPPED[:1]
    assert durable.resumed == Resumed(3, {0: SETUP}), "what the checkpoint's step was made with"
    assert durable.carried["id-1"].step == 4
    assert opening.resume_from == opening.paths.checkpoint(3)


@pytest.mark.parametrize(
    ("tables", "keeps_shares", "keeps_rate"),
    [({"optimizer": {"learning_rate": 1e-2}}, True, False), ({"batch": {"global": 48}}, False, True)],
)
def test_what_its_run_file_changes_isn_t_its_parent_s(parent, tables, keeps_shares, keeps_rate):
    wanted = made_config()
    for name, values in tables.items():
        given = {key if key != "global" else "global_": value for key, value in values.items()}
        wanted = msgspec.structs.replace(wanted, **{name: msgspec.structs.replace(getattr(wanted, name), **given)})
    opening = branched(parent, wanted)
    settings = opening.conductor.durable.settings
    assert (settings.ranks == CHANGED.ranks) is keeps_shares
    assert (settings.lr == CHANGED.lr) is keeps_rate
    assert settings.global_batch == wanted.batch.global_


def test_a_step_without_a_checkpoint_is_refused_with_those_there_are(parent: RunPaths) -> None:
    assert checkpoint_source.find_fork(parent, None, "c").step == 3, "the newest without a step"
    with pytest.raises(InvalidInputError, match="no checkpoint of step 4 on c; it has those of steps 2, 3"):
        checkpoint_source.find_fork(parent, 4, "c")
    (parent.checkpoint(3) / "state.json").write_text("[]torn")
    with pytest.raises(InvalidInputError, match=r"branch: .*state.json has 6 of 2 bytes"):
        checkpoint_source.find_fork(parent, 3, "c")


def test_a_branch_of_a_run_s_last_step_is_refused(parent: RunPaths) -> None:
    wanted = msgspec.structs.replace(made_config(), run=msgspec.structs.replace(made_config().run, steps=3))
    with pytest.raises(InvalidInputError, match=r"config: run.steps: 3, but the branch starts at step 3"):
        branched(parent, wanted)


def test_before_its_first_step_it_starts_again_from_the_checkpoint_that_it_branched_off(parent: RunPaths) -> None:
    opening = branched(parent)
    paths, cursor = opening.paths, cursor_after(parent, 3)
    again = restore.surviving_run(paths, frozenset())
    again.recorder.close()
    assert (again.conductor.progress.step, again.conductor.progress.cursor) == (3, cursor)
    assert checkpoint_source.find(paths, "c") == Source(3, "c", paths.checkpoint(3))
    assert checkpoint_source.find(paths, "a") == Source(3, "a", paths.checkpoint(3)), "a copy of the record knows it"
    back = restore.old_run(paths, "c", ("a", "b", "c"), Source(3, "c"), None)
    back.recorder.close()
    assert (back.conductor.progress.step, back.conductor.progress.cursor) == (3, cursor)
    with pytest.raises(InvalidInputError, match="started from a checkpoint of step 3, which is gone or unreachable"):
        restore.old_run(paths, "c", ("a", "b", "c"), Source(), None)


def test_a_rollback_to_its_first_step_skips_from_there(parent: RunPaths) -> None:
    opening = branched(parent)
    with restore.RunDb(opening.paths) as recorder:
        restore._keep(recorder, msgspec.structs.replace(opening.conductor.durable, rollback=Rollback(3, 2)))
    back = restore.old_run(opening.paths, "c", ("a", "b", "c"), Source(3, "c"), None)
    back.recorder.close()
    assert back.conductor.progress.cursor == cursor_after(parent, 3) + 2 * 24


def test_the_checkpoint_outlives_its_parent_s(parent: RunPaths) -> None:
    opening = branched(parent)
    for file in parent.checkpoint(3).iterdir():
        file.unlink()
    assert checkpoint_source.whole(opening.paths, 3) == opening.paths.checkpoint(3)
    shutil.rmtree(opening.paths.checkpoint(3))
    assert checkpoint_source.find(opening.paths, "a") == Source(3, "c"), "a copy of the record names the node"


def test_shares_of_the_run_file_don_t_refuse_a_global_batch_that_was_set(parent: RunPaths) -> None:
    """A branch has its parent's recipe: the parent's own file, in which each node has a share of the batch that it
    began with."""
    nodes = {name: {**table, "share": 12} for name, table in NODES.items()}
    doubled = msgspec.structs.replace(CHANGED, global_batch=48, ranks={
        rank: msgspec.structs.replace(setting, share=24) for rank, setting in CHANGED.ranks.items()
    })  # fmt: skip
    with restore.RunDb(parent) as recorder:
        recorder.set_meta(settings_key(2), msgspec.json.encode(doubled).decode())
    wanted = config(100, 24, nodes=nodes)
    parent.run_file.write_bytes(tomli_w.dumps(run_file.to_dict(wanted)).encode())
    opening = branched(parent, wanted)
    settings = opening.conductor.durable.settings
    assert (settings.global_batch, settings.ranks) == (48, doubled.ranks)


def test_a_branch_branches_at_the_checkpoint_that_it_started_from(parent: RunPaths) -> None:
    opening = branched(parent)
    again = checkpoint_source.find_fork(opening.paths, None, "c")
    assert (again.step, again.cursor, again.run) == (3, cursor_after(parent, 3), opening.paths.directory.name)


def test_a_checkpoint_of_a_step_that_was_retracted_starts_no_branch(parent: RunPaths) -> None:
    write_checkpoint(parent, 4, m.Generation(1, 0))
    with pytest.raises(InvalidInputError, match="the checkpoint of step 4 on c is of a step that was retracted"):
        checkpoint_source.find_fork(parent, 4, "c")


STEPS, FORK = 12, 6


def test_a_branch_begins_at_a_checkpoint_that_there_is_and_ends_after_it(agent: BlockingAgent, run_config: Any) -> None:
    table = {"every_steps": FORK // 2, "keep_last": 1000, "background": False}
    with agent.client() as client:
        begun = client.send("start-run", {"config": run_config(run__steps=STEPS, checkpoint=table)})
        assert begun.state == "applied", begun.reason
        parent = wait_for_end(client)
        branch = client.send("start-run", {"branch": f"{parent.run}@{FORK}"})
        assert (branch.state, branch.step) == ("applied", FORK + 1), branch.reason
        view = wait_for_end(client)
        assert view.branch == m.BranchPoint(parent.run, FORK, 12 * FORK)
        assert view.trained(12 * STEPS) == 12 * (STEPS - FORK)
        assert {run.run: run.branch for run in client.ask(m.RunsRequest).runs} == {
            parent.run: None,
            view.run: view.branch,
        }
        for run in (parent.run, view.run):
            kept = [event.data for event in events_of(client, run) if isinstance(event.data, RunBranched)]
            assert kept == [RunBranched(parent.run, FORK, view.run, NODE)]
        missing = client.send("start-run", {"branch": f"{parent.run}@{FORK + 1}"})
        assert (missing.state, missing.field) == ("rejected", "branch")
        assert missing.reason == (
            f"{parent.run} has no checkpoint of step 7 on {view.lead}; it has those of steps 3, 6, 9, 12"
        )
        over = client.send("start-run", {"branch": f"{parent.run}"})
        assert (over.state, over.field) == ("rejected", "config: run.steps")


def branches_in(cluster: BlockingCluster, node: str, run: str) -> list[RunBranched]:
    with RecordReader(cluster.run_paths(node, run)) as reader:
        events, _ = reader.events(limit=500)
    return [event.data for event in events if isinstance(event.data, RunBranched)]


def test_the_record_of_the_parents_lead_names_a_branch_that_another_node_started(
    cluster: BlockingCluster, run_config: Any
) -> None:
    table = {"checkpoint": {"at_end": True, "background": False}}
    with cluster.client("alpha") as client:
        begun = client.send("start-run", {"config": run_config(run__steps=FORK, nodes=on("alpha", "beta"), **table)})
        assert begun.state == "applied", begun.reason
        parent = wait_for_end(client)
    until(lambda: cluster.view("beta").state not in m.ACTIVE_RUN_STATES, what="the follower's end")
    with cluster.client("beta") as client:
        config = run_config(run__steps=FORK + 2, nodes=on("beta"), **table)
        begun = client.send("start-run", {"branch": f"{parent.run}@{FORK}", "config": config}, node="beta")
        assert begun.state == "applied", begun.reason
        branch = wait_for_end(client)
    said = RunBranched(parent.run, FORK, branch.run, "beta")
    assert branches_in(cluster, "beta", branch.run) == [said]
    until(lambda: branches_in(cluster, "alpha", parent.run) == [said], 60, "the event in the parent's record")
