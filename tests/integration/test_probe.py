"""Ranks that load one model's files and hold another model: found before a step of theirs, on real processes. So is the
same model quantized otherwise, whether its files are named or only read.

gamma's Python has a `sitecustomize` of the test's own, which changes what its trainer has read as `wish` says: another
base of RoPE, weights that are scaled, or the files of another folder. No digest of a file and no shape shows that.

`make soak` has each change at the start of a run, `make test-all` one of them there, and
the other in a rank that returns and in a run that is taken up again.
"""

import os
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from tests.asking import run_of
from tests.cluster.run_files import FOREVER, NODES, on
from tests.cluster.waits import plans_of, wait_for_end, wait_for_step
from tests.integration.support.clusters import Cluster
from tests.tiers import is_soak
from tests.trainer.support.chat_model import make_chat_model
from tests.waiting import until

from trainctl.protocol import messages as m
from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.record.reader import RecordReader
from trainctl.trainer.exports.quantize_model import quantize

SOAK = is_soak()
PAIR = ("alpha", "gamma")
CHANGED = """
    import importlib.util, pathlib, sys

    BACKEND, WISH = "trainctl.trainer.backends.torch_backend", pathlib.Path(__file__).parent / "wish"

    def changed(read):
        def read_and_change(path, *named, **options):
            wish = WISH.read_text()
            model = read(pathlib.Path(wish) if "/" in wish else path, *named, **options)
            if wish == "theta":
                model.model.rotary_emb.inv_freq **= 1.5
            elif wish == "weights":
                for parameter in model.parameters():
                    parameter.data *= 1.001
            return model
        return read_and_change

    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name != BACKEND:
                return None
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            run = spec.loader.exec_module
            def run_and_change(module):
                run(module)
                module.read_model = changed(module.read_model)
            spec.loader.exec_module = run_and_change
            return spec

    sys.meta_path.insert(0, Finder())
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text(textwrap.dedent(CHANGED))
    return folder


@pytest.fixture(scope="module")
def own_cluster(tmp_path_factory: pytest.TempPathFactory, site: Path) -> Iterator[Cluster]:
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    made = Cluster(tmp_path_factory.mktemp("cluster"), environment={"gamma": {"PYTHONPATH": path}})
    yield made
    made.stop()


@pytest.fixture
def cluster(own_cluster: Cluster) -> Iterator[Cluster]:
    own_cluster.in_touch()
    yield own_cluster
    own_cluster.settle()


@pytest.fixture
def wish(site: Path) -> Callable[[str], int]:
    return (site / "wish").write_text


def events_that_start(client: BlockingClient, start: str) -> list[m.Event]:
    return [event for event in client.ask(m.EventsRequest, limit=100).events if event.text.startswith(start)]


def probes_of(cluster: Cluster, run: str) -> list[m.StepPlan]:
    return [plan for plan in plans_of(cluster.run_paths("alpha", run)) if plan.kind == "probe"]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("wished", "cause"), [("weights", "the weights (a parameter"), *[("theta", "the RoPE settings")] * SOAK]
)
def test_a_run_is_refused_where_one_rank_holds_another_model(cluster, run_config, wish, wished, cause):
    wish(wished)
    config = run_config(run__steps=FOREVER, nodes=on(*NODES))
    with cluster.client(timeout_seconds=120) as client:
        reply = client.send("start-run", {"config": config}, timeout_seconds=120)
        view = wait_for_end(client)
        assert (view.state, view.step, reply.state) == ("failed", 0, "failed"), reply
        assert view.reason.startswith("probe: gamma differs from "), view.reason
        assert f"likely cause: {cause}" in view.reason
        assert cause.startswith("the weights") or "from layer 0 of 2 on" in view.reason, view.reason
        assert view.reason in reply.reason


@pytest.mark.timeout(400)
def test_ranks_that_come_back_and_runs_taken_up_again_are_probed(cluster, run_config, wish):
    wish("")
    config = run_config(run__steps=FOREVER, nodes=on(*PAIR))
    with cluster.client(timeout_seconds=120) as client:
        run = client.send("start-run", {"config": config}, timeout_seconds=120).run
        wait_for_step(client, 2)
        passed = events_that_start(client, "probe passed")[0]  # a group that a busy machine forms once more has another
        assert (passed.kind, passed.step) == ("probe", 0)
        assert float(passed.after) < 1e-4 and "256 tokens" in passed.text

        # The process that takes the place of a rank's is refused, and the other rank trains on.
        wish("theta")
        kill_trainer(cluster, "gamma")
        found = until(lambda: events_that_start(client, "gamma is refused"), 120, "the refusal")[0]
        assert found.text.startswith("gamma is refused: probe: gamma differs from ")
        assert "the RoPE settings" in found.text
        at = run_of(client).step
        view = wait_for_step(client, at + 2).run
        assert [(rank.state, rank.share > 0) for rank in view.ranks] == [("run", True), ("failed", False)]
        assert view.ranks[1].why.startswith("probe: gamma differs from ")

        # Put right, it is admitted once its process has ended, and has passed before its next step.
        wish("")
        admit = lambda: client.send("admit", {}, node="gamma", timeout_seconds=120).state == "applied"  # noqa: E731
        until(admit, 60, "an admission, which is rejected as long as the refused process lives")
        until(lambda: run_of(client).ranks[1].state == "run", 120, "gamma's return")
        assert probes_of(cluster, run)[0].step == 0
        # A generation that a busy machine forms once more is probed once more.
        until(
            lambda: len(probes_of(cluster, run)) >= 3 and len(events_that_start(client, "probe passed")) >= 2,
            120,
            "the probe after gamma's return",
        )

        # One rank loads the checkpoint and the other is given its weights: theta shows all the same.
        assert client.send("stop", {"checkpoint": True}, timeout_seconds=120).state == "applied"
        last = wait_for_end(client).step
        wish("theta")
        client.send("start-run", {"resume": run}, timeout_seconds=120)
        view = wait_for_end(client)
        assert (view.state, view.step) == ("failed", last)
        assert "the RoPE settings" in view.reason and view.reason.startswith("probe: gamma differs from ")
        wish("")
        assert client.send("start-run", {"resume": run}, timeout_seconds=120).step == last + 1
        wait_for_step(client, last + 2)
        until(lambda: len(events_that_start(client, "probe passed")) >= 3, 30, "the event of the last probe")
    with RecordReader(cluster.run_paths("alpha", run)) as reader:
        assert [step.step for step in reader.steps(0, last + 2)[0]] == list(range(1, last + 3))


def kill_trainer(cluster: Cluster, node: str) -> None:
    (pid,) = cluster.trainers()[node]
    psutil.Process(pid).kill()


@pytest.mark.timeout(400)
def test_a_rank_with_another_quantization_of_the_model_is_refused(cluster, run_config, wish, tmp_path):
    """By the digest of its files and, where those are the same and others are read, by the probe."""
    model = make_chat_model(tmp_path / "model", hidden=64, intermediate=128)
    for form in ("mlx-4bit", "nvfp4"):
        quantize(str(model), form, None, tmp_path / form)
    adapter = {"kind": "lora", "rank": 4}
    digests = "model digests of gamma and alpha differ: config.json differs; "
    for read, other, says, probes in (
        (tmp_path / "nvfp4", {}, "probe: gamma differs from alpha by ", True),
        ("", {"model_path": "nvfp4"}, digests, False),
    ):
        wish(str(read))
        nodes = on(*PAIR, gamma={name: str(tmp_path / form) for name, form in other.items()})
        config = run_config(run__steps=FOREVER, model__path=str(tmp_path / "mlx-4bit"), adapter=adapter, nodes=nodes)
        with cluster.client(timeout_seconds=120) as client:
            reply = client.send("start-run", {"config": config}, timeout_seconds=120)
            assert reply.state == "failed"
            assert reply.reason.startswith(f"the run failed: {says}"), reply.reason
            assert bool(probes_of(cluster, reply.run)) == probes
