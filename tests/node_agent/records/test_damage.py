"""Databases that were cut short or have flipped bytes: they are moved aside and made again, without a traceback, and no
run that its folder holds is lost."""

import random
import shutil
from functools import partial
from pathlib import Path

import pytest
from tests.cluster.in_process import blocking_cluster
from tests.cluster.run_files import FOREVER, NODE
from tests.cluster.waits import wait_for_end, wait_for_step

from trainctl.node_agent.records import run_folders
from trainctl.node_agent.records.agent_db import AgentDb
from trainctl.node_agent.runs import restore
from trainctl.protocol import messages as m
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.record.paths import RunPaths, runs_directory
from trainctl.protocol.record.rank_record import MetricsWriter
from trainctl.protocol.record.reader import RecordReader

SEEDS = [range(10), pytest.param(range(400), marks=pytest.mark.tier("all"))]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory, run_config) -> Path:
    """The folder of a node whose run has ended, of about 200 steps and with commands."""
    folder = tmp_path_factory.mktemp("damaged")
    with blocking_cluster(folder, (NODE,)) as cluster, cluster.client(NODE) as client:
        client.send("start-run", {"config": run_config(run__steps=FOREVER)})
        for micro in (2, 3, 4, 2, 3):
            client.send("resize-batch", {"micro": micro}, node=NODE)
        wait_for_step(client, 200)
        client.send("stop", {"checkpoint": False})
        wait_for_end(client)
    return folder / "state" / NODE


def damaged(node: Path, to: Path, name: str, seed: int) -> Path:
    """A copy of the node's folder in which a database was cut short or has flipped bytes."""
    chance = random.Random(seed)
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(node, to)
    (file,) = to.rglob(name)
    content = bytearray(file.read_bytes())
    if chance.random() < 0.5:
        del content[chance.randrange(len(content)) :]
    else:
        area = len(content) if chance.random() < 0.5 else 4096
        for _ in range(chance.choice((1, 8, 64, 512))):
            content[chance.randrange(area)] = chance.randrange(256)
    file.write_bytes(content)
    return to


def known(directory: Path) -> tuple[set[str], set[tuple[str, str]], m.Generation | None]:
    """The runs of a node, its commands with their outcomes, and its generation."""
    with AgentDb(directory / "agent.db", partial(run_folders.add_runs, NODE, runs_directory(directory))) as db:
        runs = {run.run for run in db.runs() if run.state == "stopped"}
        commands = {(row.id, row.state) for run in runs for row in db.commands_of(run, 100)}
        assert db.open_commands() == ()
        db.refusals(10)
        db.saw(m.Generation(9, 9))
        return runs, commands, db.generation


@pytest.mark.parametrize("seeds", SEEDS)
def test_a_damaged_agent_db_is_made_again_with_its_runs_commands_and_generation(node, tmp_path, seeds) -> None:
    whole = shutil.copytree(node, tmp_path / "whole")
    runs, commands, generation = known(whole)
    assert len(runs) == 1 and len(commands) == 7 and {state for _, state in commands} == {"applied"}
    remade = 0
    for seed in seeds:
        copy = damaged(node, tmp_path / "copy", "agent.db", seed)
        found = known(copy)
        assert found[0] == runs, seed
        if [*copy.glob("agent.db.damaged-*")]:  # else a flipped byte has made no difference, or another letter
            assert found[1] >= commands and found[2] == generation, seed
            remade += 1
    assert remade > len(seeds) / 3


def test_a_missing_agent_db_is_made_again_too(node, tmp_path) -> None:
    copy = shutil.copytree(node, tmp_path / "copy")
    (copy / "agent.db").unlink()
    assert known(copy) == known(shutil.copytree(node, tmp_path / "whole"))


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("name", ["record.db", "rank-0.db"])
def test_a_run_with_a_damaged_record_is_taken_up_and_can_be_read(node, tmp_path, name, seeds) -> None:
    for seed in seeds:
        copy = damaged(node, tmp_path / "copy", name, seed)
        (directory,) = [path for path in runs_directory(copy).iterdir() if path.is_dir()]
        paths = RunPaths(directory)
        read(paths)
        restore.make_usable(paths)
        opening = restore.surviving_run(paths, frozenset())
        opening.recorder.close()
        opening = restore.old_run(paths, NODE, (NODE,), restore.Source(), None)
        opening.recorder.close()
        read(paths, whole=True)
        MetricsWriter(paths.rank_record(0), NODE).close()
        if name != "record.db":
            with RecordReader(paths) as reader:
                assert reader.events(0, 500)[0], seed


def read(paths: RunPaths, *, whole: bool = False) -> None:
    """Ask for all that clients ask for; a damaged record may refuse it in a line."""
    try:
        with RecordReader(paths) as reader:
            reader.last_step()
            reader.steps(0, 500)
            reader.events(0, 500)
            reader.evaluations()
            reader.host_readings(0, 100)
            for metric in ("loss", "tokens_per_second"):
                reader.series(metric, None, 0, None, 50)
            for rank in reader.ranks():
                reader.series("rank_step_seconds", rank, 0, None, 50)
            reader.totals()
    except InvalidInputError as error:
        assert not whole and "\n" not in str(error), error
