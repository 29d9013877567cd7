"""Real runs with a planted cause: the live Diagnosis screen names it, and so does the record without an agent.

Two causes are only simulated (tests/protocol/support/planted_causes.py). Swap needs swap space, which a test must not
add to the machine that it runs on. Late data without a slow disk don't occur: tokens are mapped into memory.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tomli_w
from safetensors.numpy import load_file, save_file
from tests.cluster.run_files import TORCH, on
from tests.cluster.waits import wait_for_end, wait_for_step
from tests.integration.conftest import AgentProcess
from tests.integration.support.clusters import Cluster
from tests.integration.support.namespaces import INTERFACE, Network
from tests.integration.support.planted import (
    BUSY,
    BusyLoops,
    DiskGroup,
    QuotaGroup,
    Screen,
    causes,
    forget,
    wait_until_judged,
)  # fmt: skip
from tests.integration.support.several_hosts import DESK, Hosts
from tests.tiers import is_soak
from tests.tui.support.cli_calls import call, call_json
from tests.waiting import until

from trainctl.protocol import messages as m
from trainctl.protocol.analysis.diagnosis.diagnose import of_record
from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.record.paths import RunPaths
from trainctl.trainer import demo_assets

FOREVER = 100_000
QUOTA = 0.1
"""Part of a processor that a held-back trainer gets."""
LARGE_BYTES, DISK_BYTES = 40_000_000, 1_000_000
"""Bytes of a text whose tokens a run doesn't read in its first seconds, and what a slow disk reads in a second."""
OTHERS = 4
"""Processes beside a trainer on its processor."""
RunConfig = Callable[..., dict[str, Any]]


@pytest.fixture
def assets(tmp_path: Path) -> Path:
    """A model and text with which a step takes a tenth of a second or so."""
    shape = demo_assets.llama_config(hidden=64, layers=2, heads=2, intermediate=128)
    demo_assets.make_model(tmp_path / "model", shape, seed=1)
    demo_assets.make_text(tmp_path / "text")
    return tmp_path


@pytest.fixture
def group() -> Iterator[QuotaGroup]:
    made = QuotaGroup(f"tc{os.getpid()}-quota")
    yield made
    made.close()


def config_of(run_config: RunConfig, assets: Path, **changes: Any) -> dict[str, Any]:
    return run_config(**{
        "run__steps": FOREVER, "model__path": str(assets / "model"), "data__path": str(assets / "text"),
        "data__sequence_length": 256, "batch": {"global": 16, "micro": 8}, **changes,
    })  # fmt: skip


def started(client: BlockingClient, config: dict[str, Any]) -> str:
    begun = client.send("start-run", {"config": config})
    assert begun.state == "applied", begun.reason
    assert begun.run is not None
    wait_until_judged(client)
    return begun.run


def stopped(client: BlockingClient) -> None:
    client.send("stop", {"checkpoint": False})
    wait_for_end(client)


def recorded(paths: RunPaths) -> set[str]:
    return {finding.cause for finding in of_record(paths).findings}


# ---------------------------------------------------------------- one run for each cause


class Scene(NamedTuple):
    """The things that planting a cause needs."""

    request: pytest.FixtureRequest
    folder: Path
    assets: Path
    run_config: RunConfig

    @property
    def agent(self) -> AgentProcess:
        made: AgentProcess = self.request.getfixturevalue("agent")
        return made

    def shown(self, config: dict[str, Any], words: str) -> float:
        """Diagnose a run of one node whose file plants the cause: seconds from its first step."""
        with self.agent.client() as client:
            begun = client.send("start-run", {"config": config})
            assert begun.state == "applied", begun.reason
            wait_for_step(client, 1)
            with Screen(self.folder, self.agent.address) as screen:
                taken = screen.shows(words)
            stopped(client)
        return taken


def quota(scene: Scene) -> float:
    """A healthy run has no finding; then its trainer is held back. Its record says so too."""
    group: QuotaGroup = scene.request.getfixturevalue("group")
    agent = scene.agent
    with agent.client() as client:
        run = started(client, config_of(scene.run_config, scene.assets))
        assert causes(client) <= BUSY
        group.take(agent.trainer_pids())
        with Screen(scene.folder, agent.address) as screen:
            taken = screen.shows("box is held back by its CPU quota", lambda: group.limit(QUOTA))
        until(lambda: "throttled" in recorded(agent.run_paths(run)), 60, "the quota in the record")
        group.limit(10)
        stopped(client)
    done = call("diagnose", str(agent.run_paths(run).directory))
    assert done.returncode == 0 and done.stdout.startswith(f"{run}, step ")
    told = call_json("diagnose", run, "--connect", agent.address)
    assert (told["run"], told["live"]) == (run, False)
    return taken


def clip_bound(scene: Scene) -> float:
    optimizer = {"learning_rate": 1e-3, "clip_norm": 1e-5}
    return scene.shown(scene.run_config(run__steps=FOREVER, optimizer=optimizer), "clipping holds the training back")


def not_finite(scene: Scene) -> float:
    """Change the files of a model to one with a weight that is no number."""
    (file,) = (scene.assets / "model").glob("*.safetensors")
    weights = load_file(file)
    name = next(name for name in weights if name.endswith("norm.weight"))
    weights[name] = weights[name] * float("nan")
    save_file(weights, file, {"format": "pt"})
    return scene.shown(config_of(scene.run_config, scene.assets), "gradients or losses are NaN")


def long_checkpoint(scene: Scene) -> float:
    """Training waits for the write of a large model after each of its small steps."""
    shape = demo_assets.llama_config(hidden=512, layers=4, heads=8, intermediate=1024)
    demo_assets.make_model(scene.folder / "large", shape, seed=1)
    checkpoint = {"every_steps": 1, "at_end": False, "background": False}
    config = config_of(
        scene.run_config, scene.assets, model__path=str(scene.folder / "large"), data__sequence_length=24,
        batch={"global": 2, "micro": 2}, checkpoint=checkpoint,
    )  # fmt: skip
    return scene.shown(config, "checkpoints take long")


def small_micro(scene: Scene) -> float:
    """Passes of one sample on a node whose calibration shows that more are faster."""
    config = config_of(scene.run_config, scene.assets, data__sequence_length=32, batch={"global": 64, "micro": 1})
    (scene.folder / "run.toml").write_bytes(tomli_w.dumps(config).encode())
    done = call("calibrate", scene.folder / "run.toml", "--connect", scene.agent.address)
    assert done.returncode == 0, done.stderr
    return scene.shown(config, "box's micro-batch is small")


def slow_rank(scene: Scene) -> float:
    """One that computes activations twice: its backward pass is longer."""
    cluster: Cluster = scene.request.getfixturevalue("cluster")
    nodes = on("alpha", "beta")
    nodes["beta"] |= {"gradient_checkpointing": "all"}
    config = config_of(scene.run_config, scene.assets, nodes=nodes, group={"first_shares": "even"})
    with cluster.client("alpha") as client:
        started(client, config)
        with Screen(scene.folder, cluster["alpha"].address) as screen:
            taken = screen.shows("beta (is slow|has too large a share)")
        stopped(client)
    return taken


def slow_link(scene: Scene) -> float:
    """One of the cables carries 4 Mbit/s from a moment of the run on."""
    words = "(the sum of gradients takes long|the link between the nodes is slow)"
    return of_hosts(scene, words, lambda network: network.slow_down("beta", "4mbit"))


def lossy_link(scene: Scene) -> float:
    """One of the cables loses a frame in twenty from a moment of the run on."""
    return of_hosts(scene, "(alpha|beta)'s link loses segments", lambda network: network.lose("beta", 0.05))


def of_hosts(scene: Scene, words: str, plant: Callable[[Network], None]) -> float:
    """Plant causes in a run on hosts of their own."""
    hosts = Hosts(scene.folder / "hosts")
    try:
        hosts.start()
        nodes = {node: {**TORCH, "interface": INTERFACE} for node in ("alpha", "beta")}
        config = scene.run_config(run__steps=FOREVER, nodes=nodes, group={"engine": "ring"}, batch__micro=6)
        (scene.folder / "run.toml").write_text(tomli_w.dumps(config))
        assert hosts.said("run", str(scene.folder / "run.toml"), "--connect", hosts.address("alpha"))["ok"]
        hosts.wait(lambda view: view["run"]["step"] >= 20, "some steps")
        variables = [f"{name}={value}" for name, value in hosts.env(DESK).items()]
        before = hosts.network.on(DESK, "env", *variables)
        with Screen(scene.folder, hosts.address("alpha"), before) as screen:
            taken = screen.shows(words, lambda: plant(hosts.network))
        assert hosts.said("send", "stop", "checkpoint=false", "--connect", hosts.address("alpha"))["ok"]
        hosts.wait(lambda view: view["run"]["state"] not in m.ACTIVE_RUN_STATES, "the run's end")
    finally:
        hosts.close()
    return taken


def slow_disk(scene: Scene) -> float:
    """Tokens that have to be read from a disk, which is slow from a moment of the run on."""
    text = b"".join(path.read_bytes() for path in sorted((scene.assets / "text").iterdir()))
    (scene.folder / "large.txt").write_bytes(text * -(-LARGE_BYTES // len(text)))
    config = config_of(scene.run_config, scene.assets, data__path=str(scene.folder / "large.txt"))
    group, agent = DiskGroup(f"tc{os.getpid()}-disk", scene.folder), scene.agent
    try:
        with agent.client() as client:
            started(client, config)
            group.take(agent.trainer_pids())

            def plant() -> None:
                group.limit(DISK_BYTES)
                forget(agent.directory / "data")

            with Screen(scene.folder, agent.address) as screen:
                taken = screen.shows("box's disk is slow", plant)
            group.limit(10**9)
            stopped(client)
    finally:
        group.close()
    return taken


def stolen_cpu(scene: Scene) -> float:
    """Others want the processor on which the trainer has to run."""
    agent, loops, processor = scene.agent, list[BusyLoops](), min(os.sched_getaffinity(0))
    try:
        with agent.client() as client:
            started(client, config_of(scene.run_config, scene.assets))
            for pid in agent.trainer_pids():
                for thread in Path(f"/proc/{pid}/task").iterdir():
                    os.sched_setaffinity(int(thread.name), {processor})
            with Screen(scene.folder, agent.address) as screen:
                taken = screen.shows(
                    "others take processor time from box", lambda: loops.append(BusyLoops(processor, OTHERS))
                )  # fmt: skip
            stopped(client)
    finally:
        for one in loops:
            one.close()
    return taken


PLANTED: dict[str, Callable[[Scene], float]] = {
    "throttled": quota, "clip-bound": clip_bound, "not-finite": not_finite, "long-checkpoint": long_checkpoint,
    "small-micro": small_micro, "slow-rank": slow_rank, "slow-link": slow_link,
    "lossy-link": lossy_link, "slow-disk": slow_disk, "stolen-cpu": stolen_cpu,
}  # fmt: skip
NEEDS = {
    "throttled": ("cpu-quota", "tmux"), "slow-link": ("namespaces", "tmux"), "lossy-link": ("namespaces", "tmux"),
    "slow-disk": ("disk-limit", "tmux"), "stolen-cpu": ("linux", "tmux"),
}  # fmt: skip
ALL = is_soak()
CHOSEN = PLANTED if ALL else ("throttled",)
MOST_SECONDS = 30
"""Seconds until a cause is on screen, on a machine with nothing else to do."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "cause", [pytest.param(cause, marks=pytest.mark.needs(*NEEDS.get(cause, ("tmux",)))) for cause in CHOSEN]
)
def test_a_planted_cause_is_on_screen(
    request: pytest.FixtureRequest, cause: str, tmp_path: Path, assets: Path, run_config: RunConfig
) -> None:
    taken = PLANTED[cause](Scene(request, tmp_path, assets, run_config))
    print(f"{cause}: on screen after {taken:.0f} s")
    assert not ALL or taken <= MOST_SECONDS, "with all causes, the machine has to be idle"
