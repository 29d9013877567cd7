"""A small model, small data, and one rank whose plans a test hands out itself."""

import functools
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import tomli_w
import zmq
from tests.trainer.support.curves import losses
from tests.trainer.support.fork_servers import ForkServers
from tests.trainer.support.line import WHO, Line
from tests.trainer.support.process_agent import Agent, settings
from tests.trainer.support.ranks import Ranks
from tests.waiting import HANG_SECONDS

from trainctl.protocol import messages as m
from trainctl.protocol.config import run_file as runfile
from trainctl.protocol.config.run_tables import GroupTable
from trainctl.protocol.machine.file_digests import model_digests
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.status_page import StatusWriter
from trainctl.protocol.wire.sockets import new_socket
from trainctl.trainer import demo_assets
from trainctl.trainer.backends.base import Backend
from trainctl.trainer.backends.load import load
from trainctl.trainer.collective.membership import Membership
from trainctl.trainer.collective.shared_buffer import Layout
from trainctl.trainer.collective.standby import standby_here
from trainctl.trainer.control.thread import Control
from trainctl.trainer.data.dataset import Dataset, open_dataset
from trainctl.trainer.references.preparation import ReferenceSettings, prepare_reference, wants_reference
from trainctl.trainer.step.executor import Executor, Identity, Settings
from trainctl.trainer.step.progress import Progress

GENERATION = m.Generation(1, 1)
G = 12
RATE = 3e-3


@dataclass
class Rig:
    """One rank without a process: a backend, a data set, and plans made by the test."""

    config: runfile.RunFile
    backend: Backend
    dataset: Dataset
    progress: Progress
    executor: Executor
    sent: list[m.FromTrainer] = field(default_factory=list)
    seq: int = 0

    def plan(self, step: int, micro: int, **changes: Any) -> m.StepPlan:
        """A train plan of G samples, all of them rank 0's unless `changes` say otherwise."""
        self.seq += 1
        cursor = (step - 1) * G
        plan = m.StepPlan(
            run="r",
            generation=GENERATION,
            seq=self.seq,
            kind="train",
            step=step,
            plan_version=1,
            cursor=cursor,
            global_batch=G,
            work=(m.RankWork(0, (m.Range(cursor, G),), micro),),
            learning_rate=RATE * min(1.0, step / 5),
            divisor=256.0,
        )
        return msgspec.structs.replace(plan, **changes)

    def train(self, step: int, micro: int, **changes: Any) -> m.Report:
        return self.executor.train(self.plan(step, micro, **changes), time.perf_counter())

    def form(self, generation: m.Generation = GENERATION) -> None:
        assert self.progress.form(m.Form(run="r", generation=generation, engine="none", ranks=(0,)))


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`model` (27 k parameters, tied), `text` (ASCII with some structure) and `samples.jsonl` (variable length,
    masked)."""
    folder = tmp_path_factory.mktemp("assets")
    demo_assets.make_model(
        folder / "model", demo_assets.llama_config(hidden=32, layers=2, heads=2, intermediate=64), seed=7
    )
    words = ["def", "return", "import", "self", "value", "(", ")", ":", "\n    ", "for", "in", "range", "x"]
    chance = random.Random(5)
    (folder / "text").mkdir()
    for name in ("a", "b"):
        (folder / "text" / f"{name}.txt").write_text(" ".join(chance.choices(words, k=1500)), encoding="utf-8")
    with (folder / "samples.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(60):
            length = chance.choice([2, 3, 5, 9, 20, 40])
            tokens = [chance.randrange(97, 123) for _ in range(length)]
            asked = chance.randrange(0, max(1, length - 1))
            file.write(json.dumps({"tokens": tokens, "mask": [int(i >= asked) for i in range(length)]}) + "\n")
    return folder


@pytest.fixture
def dead_pid() -> int:
    """A process id that was just in use and isn't any more."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(timeout=HANG_SECONDS)
    return process.pid


@pytest.fixture
def run_file(assets: Path, tmp_path: Path) -> Callable[..., runfile.RunFile]:
    """Write `tmp_path`/run.toml for the small model, `table__key` changes laid over it, and parse it."""

    def write(**changes: Any) -> runfile.RunFile:
        raw: dict[str, Any] = {
            "run": {"name": "small", "steps": 1000, "seed": 3},
            "model": {"path": str(assets / "model")},
            "data": {"path": str(assets / "text"), "tokenizer": "bytes", "sequence_length": 20, "held_out": 0.05},
            "batch": {"global": G, "micro": 4},
            "optimizer": {"learning_rate": RATE, "weight_decay": 0.1},
            "nodes": {"here": {"backend": "torch", "device": "cpu", "threads": 1}},
        }
        for name, value in changes.items():
            table, _, key = name.partition("__")
            if key:
                raw.setdefault(table, {})[key] = value
            else:
                raw[table] = value
        (tmp_path / "run.toml").write_text(tomli_w.dumps(raw), encoding="utf-8")
        return runfile.read(tmp_path / "run.toml")

    return write


@pytest.fixture
def new_rig(run_file: Callable[..., runfile.RunFile], tmp_path: Path, assets: Path) -> Iterator[Callable[..., Rig]]:
    """Make a rank: `new_rig("torch")`, `new_rig("mlx", samples=True)`, `new_rig("torch", model__dtype="bfloat16")`.
    One of a group, `rank=2`, has not been told to form anything. `node`: more of its node's table."""
    pages: list[StatusWriter] = []
    opened: list[Executor] = []

    def make(
        backend: str,
        *,
        samples: bool = False,
        wrap: Callable[[Backend], Backend] | None = None,
        rank: int | None = None,
        node: Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> Rig:
        if samples:
            changes |= {"data__path": str(assets / "samples.jsonl"), "data__kind": "samples", "data__held_out": 0.0}
        table = {"backend": backend, "device": "cpu", "threads": 1, **(node or {})}
        config = run_file(nodes__here=table, **changes)
        status = StatusWriter(RunPaths(tmp_path).status_page(len(pages)), os.getpid())
        pages.append(status)
        dataset = open_dataset(config, tmp_path / "data", "run.toml")
        loaded = load(config, config.nodes["here"], "run.toml")
        if wants_reference(config):
            kept = ReferenceSettings.of(config, "here", tmp_path / "data", model_digests(Path(config.model.path)).whole)
            prepare_reference(kept, dataset, loaded)
        progress = Progress()
        progress.load(0, 0)
        settings = Settings.of(config, "here")
        sent: list[m.FromTrainer] = []
        model = wrap(loaded) if wrap else loaded
        executor = Executor(Identity("r", "here", rank or 0), settings, model, dataset, progress, status, sent.append)
        opened.append(executor)
        rig = Rig(config, model, dataset, progress, executor, sent)
        if rank is None:
            rig.form()
        return rig

    yield make
    for executor in opened:
        executor._prefetch.close()
    for page in pages:
        page.close()


@pytest.fixture
def gpu_as_found() -> Iterator[None]:
    """What a rank sets on CUDA holds for the whole process: set it back. Without a use of CUDA it does nothing."""
    import torch

    yield
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        gc.collect()
        torch.use_deterministic_algorithms(False)
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def known_curves() -> dict[Any, list[float]]:
    return {}


@pytest.fixture
def curve(new_rig: Callable[..., Rig], known_curves: dict[Any, list[float]]) -> Callable[..., list[float]]:
    """Losses of one rank, each worked out once a session: `curve("torch", samples=True, resized=False)`."""

    def run(backend: str, *, samples: bool, resized: bool) -> list[float]:
        key = (backend, samples, resized)
        if key not in known_curves:
            known_curves[key] = losses(new_rig(backend, samples=samples), resized)
        return known_curves[key]

    return run


@pytest.fixture(scope="session")
def fork_servers() -> Iterator[ForkServers]:
    """Shared by all tests that want reducers, not what makes them."""
    made = ForkServers()
    yield made
    made.end()


@pytest.fixture
def new_ranks(new_rig: Callable[..., Rig], fork_servers: ForkServers) -> Iterator[Callable[..., Ranks]]:
    """Make a group that is still to be formed: `new_ranks("gloo", ("torch", "mlx"), samples=True)`; `own_standby` has
    a process of their own make the reducers."""
    made: list[Ranks] = []

    def make(engine: m.Engine, backends: Sequence[str], *, own_standby: bool = False, **changes: Any) -> Ranks:
        makers = [functools.partial(new_rig, backend, **changes) for backend in backends]
        made.append(Ranks(makers, engine, standby_here() if own_standby else fork_servers))
        return made[-1]

    yield make
    for ranks in made:
        ranks.close()


@pytest.fixture
def progress() -> Progress:
    made = Progress()
    made.load(0, 0)
    return made


@pytest.fixture
def line(tmp_path: Path, progress: Progress, fork_servers: ForkServers) -> Iterator[Line]:
    context = zmq.Context()
    socket = new_socket(context, zmq.ROUTER)
    status = StatusWriter(tmp_path / "rank-0.status", os.getpid())
    with tempfile.TemporaryDirectory(prefix="tt-", dir="/tmp") as folder:
        socket.bind(f"ipc://{folder}/a")
        with Control(WHO, f"ipc://{folder}/a", progress, status) as control:
            layout = Layout({"a": (4,)}, "x")
            control.groups.membership = Membership(WHO.rank, layout, GroupTable(), "", None, fork_servers)
            made = Line(control, socket)
            made.hear(m.Alive)
            yield made
            control.groups.membership.close()
        made.close()
    context.term()
    status.close()


def pytest_configure(config: pytest.Config) -> None:
    """Array libraries beside each other on few cores: one thread each, set before either is imported."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")


@pytest.fixture
def run_python(assets: Path) -> Callable[[str], str]:
    """Run a script in a fresh interpreter, the assets' folder its argument, and return what it printed."""

    def run(script: str) -> str:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script), str(assets)],
            env=environment, capture_output=True, text=True, timeout=HANG_SECONDS, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def same_bits() -> Callable[[dict[str, Any], dict[str, Any]], bool]:
    """Whether two sets of named arrays are equal to the byte."""

    def compare(one: dict[str, Any], other: dict[str, Any]) -> bool:
        return one.keys() == other.keys() and all(np.array_equal(one[k], other[k]) for k in one)

    return compare


@pytest.fixture
def agent(tmp_path: Path, run_file: Callable[..., Any]) -> Iterator[Agent]:
    run_file(**settings(tmp_path))
    with tempfile.TemporaryDirectory(prefix="tt-", dir="/tmp") as folder:  # socket paths are short
        made = Agent(tmp_path / "node", tmp_path / "run.toml", Path(folder))
        yield made
        made.close()
