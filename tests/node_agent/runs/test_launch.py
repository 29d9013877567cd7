"""Runs that are begun or taken up: what ranks say before they are open, and directories that were being made."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.node_agent.support.simulation import config

from trainctl.node_agent.planning.durable import Durable, RankSetting, Rollback, Settings
from trainctl.node_agent.records import run_folders
from trainctl.node_agent.runs import launch, restore
from trainctl.node_agent.runs.checkpoint_source import Source
from trainctl.node_agent.runs.launch import Launch
from trainctl.protocol import messages as m
from trainctl.protocol.errors import InvalidInputError, RefusedError
from trainctl.protocol.messages.events import CheckpointWritten
from trainctl.protocol.record.paths import RunPaths, runs_directory

RUN = "r-20260101-000000-0000"


def test_an_exit_told_before_a_node_hosts_its_rank_is_of_an_earlier_life() -> None:
    own: Any = SimpleNamespace(db=None)
    launch = Launch(own, own, lambda run: None)
    gone = m.PeerExit(link="l", seq=1, run=RUN, rank=1, clean=True, why="exited with 0")
    alive = m.PeerAnswer(link="l", seq=2, answer=m.Alive(run=RUN, rank=1, generation=None, step=0, phase="load"))
    launch.early = [("beta", gone), ("beta", alive), ("gamma", gone)]
    launch.forget_exits("beta")
    assert launch.done() == [("beta", alive), ("gamma", gone)]
    assert launch.early == []


@pytest.mark.parametrize(
    ("node", "alive", "gone"), [("b", False, {"b"}), ("b", True, set()), ("b", None, set()), ("a", False, set())]
)
def test_a_node_is_gone_if_none_of_its_trainers_lives(tmp_path: Path, node: str, alive: bool | None, gone) -> None:
    paths = told_to_go_back(tmp_path, 20)

    def find(run_paths: RunPaths, rank: int) -> object | None:
        if alive is None:
            raise OSError("too many open files")
        return object() if alive else None

    context: Any = SimpleNamespace(db=None, node=node, supervisor=SimpleNamespace(find=find))
    assert Launch(context, context, lambda run: None)._gone(paths) == gone


class Link:
    """A link to a node that has said what devices it has, and which machine it is on."""

    def __init__(self, *types: str, machine: str = "other", cores: float = 2.0) -> None:
        self._types, self._machine, self._cores = types, machine, cores

    async def welcome(self, seconds: float) -> m.PeerWelcome:
        devices = (m.DeviceTypes("torch", "cuda:0", self._types),)
        return m.PeerWelcome(
            link="l", node="b", boot="x", live_address="", version="0", devices=devices, machine=self._machine,
            cores=self._cores,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("theirs", "chosen"), [(("bfloat16", "float16"), "bfloat16"), (("float16",), "float16"), ((), "float32")]
)
async def test_the_lead_asks_all_nodes_what_they_compute_in(monkeypatch, theirs, chosen):
    every = ("bfloat16", "float16")
    monkeypatch.setattr(launch, "read_devices", lambda: (m.DeviceTypes("torch", "cpu", every),))
    context: Any = SimpleNamespace(db=None, node="a")
    peers: Any = SimpleNamespace(links={"b": Link(*theirs), "elsewhere": Link()})
    wanted = config(4, model={"path": "/model", "dtype": "auto"}, nodes={"a": {}, "b": {}})
    found, why = await Launch(context, peers, lambda run: None).resolved(wanted)
    assert found.model.dtype == chosen
    assert len(why) == 1 and chosen in why[0]


async def test_nodes_of_one_machine_are_given_a_part_of_its_cores(monkeypatch):
    monkeypatch.setattr(launch, "core_pool", lambda: "here")
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(launch, "usable_cores", lambda: 8.0)
    context: Any = SimpleNamespace(db=None, node="a")
    peers: Any = SimpleNamespace(links={"b": Link(machine="here", cores=8.0), "c": Link(cores=2.0)})
    wanted = config(4, nodes={"a": {}, "b": {}, "c": {}})
    found, why = await Launch(context, peers, lambda run: None).resolved(wanted)
    assert {node: table.shared_threads for node, table in found.nodes.items()} == {"a": 4, "b": 4, "c": 0}
    assert why == ("a, b share 8 cores: 4 threads for each",)


class Starting:
    """A link to a node whose agent is still starting, and has a checkpoint."""

    def __init__(self, comes_up: bool) -> None:
        self._comes_up, self._is_up = comes_up, False

    async def welcome(self, seconds: float) -> None:
        self._is_up = self._comes_up

    async def claim(self, term: int, hosted: m.HostedRank, seconds: float) -> m.PeerConsent | None:
        answer = m.PeerConsent(link="l", seq=1, run=RUN, term=0, checkpoint=30, checkpoint_cursor=720)
        return answer if self._is_up else None


@pytest.mark.parametrize(("comes_up", "source"), [(True, Source(30, "b", cursor=720)), (False, None)])
async def test_a_node_that_is_just_starting_is_asked_for_its_checkpoint_too(tmp_path, comes_up, source):
    paths = RunPaths(tmp_path / RUN)
    restore.make_directory(paths, config(100, 24, nodes={"b": {"backend": "torch"}})).close()
    context: Any = SimpleNamespace(db=None, node="a")
    peers: Any = SimpleNamespace(links={"b": Starting(comes_up)})
    assert await Launch(context, peers, lambda run: None)._newer(paths, {"b"}, Source()) == source


def told_to_go_back(directory: Path, step: int, *written: tuple[str, int]) -> RunPaths:
    """A run with a pending rollback to a step, whose nodes have written these checkpoints."""
    paths = RunPaths(directory / RUN)
    settings = Settings(1, 24, {0: RankSetting("b", 24, 4)})
    with restore.make_directory(paths, config(100, 24, nodes={"b": {"backend": "torch"}})) as recorder:
        for node, at in written:
            recorder.event(float(at), CheckpointWritten(at), "good", node, step=at)
        restore._keep(recorder, Durable(settings, m.Generation(1, 1), 40, rollback=Rollback(step, 2)))
    return paths


def test_a_run_goes_back_to_an_older_checkpoint_where_the_one_wanted_is_gone(tmp_path: Path) -> None:
    paths = told_to_go_back(tmp_path, 20, ("b", 10), ("b", 30))
    assert launch._source(paths, "a", set()) == Source(10, "b")
    with pytest.raises(InvalidInputError, match=r"only b \(unreachable\) has a checkpoint.*; resume when b is back"):
        launch._source(paths, "a", {"b"})
    assert restore.rollback_step(paths) == 20, "one whose node is unreachable is not gone"


def test_it_never_goes_to_a_later_one_and_can_be_resumed_without_the_rollback(tmp_path: Path) -> None:
    paths = told_to_go_back(tmp_path, 20, ("b", 30))
    with pytest.raises(launch.RollbackGoneError) as caught:
        launch._source(paths, "a", set())
    assert str(caught.value) == (
        "resume: the checkpoint of step 20 is gone, and there is no older one: the rollback is called off; "
        "resume the run to continue from step 30, on b"
    )
    assert launch._source(paths, "a", set()) == Source(30, "b")


UNSTARTED = config(100, 24, nodes={"a": {"backend": "torch"}})


def opened(node_dir: Path) -> Path:
    """The directory of a run that no database knows yet."""
    opening = restore.new_run(UNSTARTED, "c", node_dir, "id-1", "anna")
    opening.recorder.close()
    return opening.paths.directory


def test_only_what_was_being_made_goes(tmp_path: Path) -> None:
    runs = runs_directory(tmp_path)
    run_folders.remove_unstarted(runs, lambda _: False)  # a node's first start
    copied, known, _ = (opened(tmp_path) for _ in range(3))
    run_folders.unmark(copied)
    run_folders.mark_unstarted(runs / "not-made-yet")
    run_folders.remove_unstarted(runs, {known.name}.__contains__)
    assert {*runs.iterdir()} == {copied, known}
    assert (known / "record.db").exists()


def test_a_run_that_can_t_be_made_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(restore, "write_file", full)
    with pytest.raises(RefusedError, match=r"cannot make the run directory: .*No space left"):
        opened(tmp_path)
    assert [*runs_directory(tmp_path).iterdir()] == []
