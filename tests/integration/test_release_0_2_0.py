"""Agents of a live run are upgraded one by one from release 0.2.0, and state that it wrote opens. See
tests/golden/release-0.2.0/README.md."""

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.asking import events_of, run_of
from tests.cluster.run_files import FOREVER, NODES, on
from tests.cluster.waits import all_steps, wait_for_end, wait_for_step
from tests.conftest import ROOT
from tests.integration.support.clusters import Cluster
from tests.integration.support.exactness import check_ledger
from tests.integration.support.packages import Venv
from tests.waiting import until

from trainctl.node_agent.records.agent_db import AgentDb
from trainctl.node_agent.records.run_db import RunDb
from trainctl.protocol import messages as m
from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.messages.events import MicroBatchChanged, StepRetracted
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader

FOLDER = ROOT / "tests" / "golden" / "release-0.2.0"
WHEELS = tuple(sorted(FOLDER.glob("*.whl")))
DEFAULTS = """
import json
import msgspec
from trainctl.protocol.config import policies, run_tables

def defaults(kind, path=""):
    for field in msgspec.structs.fields(kind):
        name, made = f"{path}{field.encode_name}", field.default
        if field.default_factory is not msgspec.NODEFAULT:
            made = field.default_factory()
        if hasattr(made if made is not msgspec.NODEFAULT else field.type, "__struct_fields__"):
            yield from defaults(field.type if made is msgspec.NODEFAULT else type(made), f"{name}.")
        elif made is not msgspec.NODEFAULT:
            yield name, repr(made)

def all_defaults():
    modes = {f"policy.{name}.mode": policy.default for name, policy in policies.POLICIES.items()}
    return dict(defaults(run_tables.RunFile)) | dict(defaults(run_tables.NodeTable, "nodes.X.")) | modes
"""
"""Gives every default of a run file, as text, by the field's path."""
MOVED = {
    "policy.plateau.least_rate": "policy.plateau.min_rate",
    "policy.spike.least_back": "policy.spike.min_back",
    "policy.spike.most_times": "policy.spike.max_times",
    "policy.spike.mads": "alerts.loss_spike_mads",
    "policy.spike.steps": "alerts.loss_spike_steps",
    "policy.divergence.mads": "alerts.diverged_mads",
}
"""Fields of 0.2.0 by the names of those that say the same now."""
DRIVE = """
import json, sys
from trainctl.protocol.client.blocking import BlockingClient
for address in sys.argv[1:]:
    with BlockingClient(address, by="earlier", timeout_seconds=600) as client:
        said = [client.send(verb, {}, timeout_seconds=600).state for verb in ("pause", "resume")]
        view = client.snapshot(0).run
        print(json.dumps([said, view.run, view.state, [rank.node for rank in view.ranks]]))
"""
WRITE = """
import sys
from pathlib import Path
from trainctl.node_agent.records.agent_db import AgentDb, digest_of
from trainctl.node_agent.records.run_db import RunDb
from trainctl.protocol import messages as m
from trainctl.protocol.messages.events import MicroBatchChanged
from trainctl.protocol.record.paths import RunPaths

folder = Path(sys.argv[1])
paths, first = RunPaths(folder / "run-1"), m.Generation(1, 1)
paths.directory.mkdir()
phases = m.Phases(forward=0.1, backward=0.2)
with RunDb(paths) as recorder:
    recorder.set_meta("name", "demo")
    for number in range(1, 31):
        values = {"loss/kl": number / 10}
        recorder.commit(
            m.StepCommitted(
                run="run-1", generation=first, step=number, committed_at=1000.0 + number, loss=3.0 / number, weight=8.0,
                samples=4, learning_rate=1e-3, grad_norm=1.0, cursor=4 * number, global_batch=4, plan_version=1,
                step_seconds=0.5, tokens_total=10.0 * number, tokens=10, weight_total=8.0 * number,
                seconds_total=0.5 * number, values=values,
            ),
            [m.RankStep(
                run="run-1", generation=first, step=number, rank=0, node="a", tokens=10, samples=4, micro_batch=4,
                replays=0, step_seconds=0.5, phases=phases, weight=8.0, values={"memory_bytes": 7.0},
            )],
            1000.0 + number,
        )
    recorder.evaluation(30, 1031.0, 2.25, 512.0, 0.5, {"eval/kl": 0.125})
    changed = MicroBatchChanged((("a", 8),), (("a", 4),))
    recorder.event(1032.0, changed, "good", "anna", step=30, verb="resize-batch", outcome="applied", undoes="7")
with AgentDb(folder / "agent.db") as db:
    command = m.Command(rid="r", id="8b7c6d5e-0000-4000-8000-000000000001", verb="pause", by="anna", undoes="7")
    assert db.accept(command, digest_of(command), 1000.0)
"""


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Venv:
    """Has 0.2.0, and all libraries of this environment."""
    made = Venv(tmp_path_factory.mktemp("earlier") / "venv")
    made.link()
    made.unpack(*WHEELS)
    where = made.run(
        made.python, "-c", "import trainctl.node_agent as one, trainctl.protocol as other; print(one, other)"
    )
    assert where.count(str(made.packages)) == 2
    return made


@pytest.fixture
def old_cluster(earlier: Venv, tmp_path: Path) -> Iterator[Cluster]:
    """Three agents of 0.2.0."""
    made = Cluster(tmp_path, python=str(earlier.python))
    yield made
    made.settle()
    made.stop()


def test_the_wheels_are_the_ones_that_were_released() -> None:
    known = dict(reversed(line.split()) for line in (FOLDER / "sha256").read_text("utf-8").splitlines())
    assert {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in WHEELS} == known
    assert len(known) == 2


def test_no_default_of_a_run_file_has_changed(earlier: Venv) -> None:
    """So that all agents of a run mean the same by a field that isn't sent."""
    then = json.loads(earlier.run(earlier.python, "-c", f"{DEFAULTS}\nprint(json.dumps(all_defaults()))"))
    names: dict[str, Any] = {}
    exec(DEFAULTS, names)
    now = names["all_defaults"]()
    assert {"nodes.X.micro", "policy.rebalance.mode", "policy.drain.gain", "batch.micro"} <= then.keys()
    gone = ("policy.caches.", "policy.clip-bound.", "optimizer.offload")
    kept = {name: default for name, default in then.items() if not name.startswith(gone)}
    assert {name: now.get(MOVED.get(name, name)) for name in kept} == kept


@pytest.mark.tier("test")
def test_a_record_and_an_agents_state_of_0_2_0_open_and_go_on(earlier: Venv, tmp_path: Path) -> None:
    earlier.run(earlier.python, "-c", WRITE, tmp_path)
    paths = RunPaths(tmp_path / "run-1")
    for _ in range(2):  # as 0.2.0 left it, and once it was opened for writing
        with RecordReader(paths) as reader:
            last = reader.last_step()
            assert last is not None and (last.step, last.loss, last.values) == (30, 0.1, {"loss/kl": 3.0})
            assert (last.tokens, last.weight_total, last.seconds_total) == (10, 240.0, 15.0)
            assert reader.series("loss", columns=3).last[-1] == 0.1 and reader.own_metrics() == ("loss/kl",)
            assert reader.series("loss/kl", columns=30).last[0] == pytest.approx(0.1)
            (part,), (evaluation,), ((event,), _) = reader.rank_steps(30), reader.evaluations(), reader.events()
            assert (part.node, part.weight, part.values) == ("a", 8.0, {"memory_bytes": 7.0})
            assert (evaluation.loss, evaluation.values) == (2.25, {"eval/kl": 0.125})
            assert (event.data, event.undoes) == (MicroBatchChanged((("a", 8),), (("a", 4),)), "7")
        with RunDb(paths) as recorder:
            assert recorder.last_state().step == last and recorder.meta("name") == "demo"
    with AgentDb(tmp_path / "agent.db") as db:
        (command,) = db.open_commands()
        assert (command.verb, command.by, command.undoes) == ("pause", "anna", "7")


def restart(cluster: Cluster, node: str, python: str) -> None:
    """The agent of a node ends, and one of another environment takes its place."""
    cluster[node].terminate()
    cluster[node].python = python
    cluster.start(node)


def together(client: BlockingClient, step: int) -> None:
    """Wait until the run has come to a step, with all ranks."""
    until(
        lambda: (run := view_of(client)).step >= step and {rank.state for rank in run.ranks} == {"run"},
        what="steps of all ranks", progress=lambda: view_of(client).step,
    )  # fmt: skip


def view_of(client: BlockingClient) -> m.RunView:
    view = run_of(client)
    assert view is not None
    return view


@pytest.mark.timeout(1800)
def test_agents_upgraded_one_by_one_adopt_their_trainers_and_lose_no_step(
    old_cluster: Cluster, earlier: Venv, run_config: Any
) -> None:
    """First a follower, then the lead, which has a follower of 0.2.0 then. The losses are those of a run that nothing
    disturbs, by the same lead and a follower of 0.2.0; either client commands it through either agent. The rate is low:
    where an agent is away for long, the other ranks take over its samples, and sums in another order differ by 1e-7."""
    cluster, nodes = old_cluster, on(*NODES, **{node: {"share": 4} for node in NODES})
    known = {"calibration": {"at_start": "never"}}  # without `seconds`, which 0.2.0 lacks
    config = run_config(run__steps=FOREVER, nodes=nodes, optimizer={"learning_rate": 3e-5}, **known)
    cluster.in_touch()
    with cluster.client("alpha") as client:
        begun = client.send("start-run", {"config": config})
        assert begun.state == "applied", begun.reason
        wait_for_step(client, 3)
    trainers = cluster.trainers()
    for node in ("gamma", "alpha", "beta"):
        restart(cluster, node, sys.executable)
        cluster.in_touch()
        with cluster.client("alpha") as client:
            view = view_of(client)
            assert view.run == begun.run
            together(client, view.step + 3)
        assert cluster.trainers() == trainers, node
    disturbed, last = stopped(cluster)
    check_ledger(cluster, disturbed, last, was_lost=())

    restart(cluster, "beta", str(earlier.python))
    cluster.in_touch()
    with cluster.client("alpha") as client:
        begun = client.send("start-run", {"config": config})
        assert begun.state == "applied", begun.reason
        said = earlier.run(earlier.python, "-c", DRIVE, cluster["alpha"].address, cluster["beta"].address)
        both = [["applied", "applied"], begun.run, "running"]
        assert [*map(json.loads, said.splitlines())] == [[*both, [*NODES]], [*both, ["beta"]]]
        with cluster.client("beta") as other:
            assert [other.send(verb, {}).state for verb in ("pause", "resume")] == ["applied", "applied"]
        wait_for_step(client, last)
    undisturbed, _ = stopped(cluster)
    with cluster.client("alpha") as client:
        each = [all_steps(client, run)[:last] for run in (disturbed, undisturbed)]
    assert [step.loss for step in each[0]] == pytest.approx([step.loss for step in each[1]], rel=1e-6)


def stopped(cluster: Cluster) -> tuple[str, int]:
    """The run and its last step, once it and its trainers have ended; no step was taken back."""
    with cluster.client("alpha") as client:
        assert client.send("stop", {"checkpoint": False}).state == "applied"
        view = wait_for_end(client)
        events = events_of(client, view.run)
    until(lambda: not any(cluster.trainers().values()), 30, "the trainers' end")
    assert view.state == "stopped" and not [one for one in events if isinstance(one.data, StepRetracted)]
    return view.run, view.step
