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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import tomli_w
import zmq
from tests.cluster.run_files import with_changes
from tests.trainer.support import preferences
from tests.trainer.support.chat_model import make_chat_model
from tests.trainer.support.curves import losses
from tests.trainer.support.families import save
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
from trainctl.trainer.backends.backend import Backend
from trainctl.trainer.backends.load import load
from trainctl.trainer.collective.membership import Membership
from trainctl.trainer.collective.shared_buffer import Layout
from trainctl.trainer.collective.standby import standby_here
from trainctl.trainer.control.thread import Control
from trainctl.trainer.data.dataset import Dataset, open_dataset
from trainctl.trainer.loop import train
from trainctl.trainer.reference import ReferenceSettings, prepare_reference, wants_reference
from trainctl.trainer.step.progress import Progress
from trainctl.trainer.step.rank import Identity, Rank

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
    rank: Rank
    sent: list[m.FromTrainer] = field(default_factory=list)
    seq: int = 0

    def plan(self, step, micro, **changes):
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

    def train(self, step, micro, **changes):
        return train(self.rank, self.plan(step, micro, **changes), time.perf_counter())

    def form(self, generation=GENERATION):
        assert self.progress.form(m.Form(run="r", generation=generation, engine="none", ranks=(0,)))


@pytest.fixture(scope="session")
def assets(tmp_path_factory):
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
def dead_pid():
    """A process id that was just in use and isn't any more."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(timeout=HANG_SECONDS)
    return process.pid


@pytest.fixture
def run_file(assets, tmp_path):
    """Write `tmp_path`/run.toml for the small model, `table__key` changes laid over it, and parse it."""

    def write(**changes):
        raw: dict[str, Any] = {
            "run": {"name": "small", "steps": 1000, "seed": 3},
            "model": {"path": str(assets / "model")},
            "data": {"path": str(assets / "text"), "tokenizer": "bytes", "sequence_length": 20, "held_out": 0.05},
            "batch": {"global": G, "micro": 4},
            "optimizer": {"learning_rate": RATE, "weight_decay": 0.1},
            "nodes": {"here": {"backend": "torch", "device": "cpu", "threads": 1}},
        }
        (tmp_path / "run.toml").write_text(tomli_w.dumps(with_changes(raw, changes)), encoding="utf-8")
        return runfile.read(tmp_path / "run.toml")

    return write


@pytest.fixture
def load_backend(run_file):
    """Load the small model, or that of a run file's changes: `load_backend("mlx", model__dtype="bfloat16")`."""

    def make(backend="torch", *, trains=True, **changes):
        there = {"backend": backend, "device": "cpu", "threads": 1}
        config = run_file(**({"nodes__here": there} | changes))
        return load(config, config.nodes["here"], "run.toml", trains=trains)

    return make


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory):
    """A small Llama with a tokenizer and a chat template. No test changes it."""
    return make_chat_model(tmp_path_factory.mktemp("chat") / "model")


@pytest.fixture(scope="session")
def family(tmp_path_factory):
    """The random model of a family in float32, as transformers saves it: `family("llama")`. No test changes it."""
    folder = tmp_path_factory.mktemp("families")

    def saved(name, **changes):
        path = folder / "-".join([name, *map(str, changes.values())])
        return path if path.exists() else save(name, path, **changes)

    return saved


@pytest.fixture
def new_rig(run_file, tmp_path, assets):
    """Make a rank: `new_rig("torch")`, `new_rig("mlx", samples=True)`, `new_rig("torch", model__dtype="bfloat16")`.
    One of a group, `rank=2`, has not been told to form anything. `node`: more of its node's table."""
    pages: list[StatusWriter] = []
    opened: list[Rank] = []

    def make(backend, *, samples=False, wrap=None, rank=None, node=None, **changes):
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
        sent: list[m.FromTrainer] = []
        model = wrap(loaded) if wrap else loaded
        made = Rank(Identity("r", "here", rank or 0), config, model, dataset, progress, status, send=sent.append)
        opened.append(made)
        rig = Rig(config, model, dataset, progress, made, sent)
        if rank is None:
            rig.form()
        return rig

    yield make
    for made in opened:
        made.prefetch.close()
    for page in pages:
        page.close()


@pytest.fixture
def tune(new_rig, tmp_path, chat_model):
    """Make a rank that tunes preferences: `tune("torch", {"kind": "dpo"}, adapter=FULL)`."""

    def make(backend, objective, *, wrap=None, **changes):
        return new_rig(backend, wrap=wrap, **preferences.run_settings(tmp_path, chat_model, objective, **changes))

    return make


@pytest.fixture
def gpu_as_found():
    """Set back what a rank sets on CUDA, which holds for the whole process. Without a use of CUDA it does nothing."""
    import torch

    yield
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        gc.collect()
        torch.use_deterministic_algorithms(False)
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def known_curves():
    return {}


@pytest.fixture
def curve(new_rig, known_curves):
    """Losses of one rank, each worked out once a session: `curve("torch", samples=True, resized=False)`."""

    def run(backend, *, samples, resized):
        key = (backend, samples, resized)
        if key not in known_curves:
            known_curves[key] = losses(new_rig(backend, samples=samples), resized)
        return known_curves[key]

    return run


@pytest.fixture(scope="session")
def fork_servers():
    """Shared by all tests that want reducers, not what makes them."""
    made = ForkServers()
    yield made
    made.end()


@pytest.fixture
def new_ranks(new_rig, fork_servers):
    """Make a group that is still to be formed: `new_ranks("gloo", ("torch", "mlx"), samples=True)`; `own_standby` has
    a process of their own make the reducers."""
    made: list[Ranks] = []

    def make(engine, backends, *, own_standby=False, **changes):
        makers = [functools.partial(new_rig, backend, **changes) for backend in backends]
        made.append(Ranks(makers, engine, standby_here() if own_standby else fork_servers))
        return made[-1]

    yield make
    for ranks in made:
        ranks.close()


@pytest.fixture
def progress():
    made = Progress()
    made.load(0, 0)
    return made


@pytest.fixture
def line(tmp_path, progress, fork_servers):
    context = zmq.Context()
    socket = new_socket(context, zmq.ROUTER)
    status = StatusWriter(tmp_path / "rank-0.status", os.getpid())
    with tempfile.TemporaryDirectory(prefix="tt-", dir="/tmp") as folder:
        socket.bind(f"ipc://{folder}/a")
        with Control(WHO, f"ipc://{folder}/a", progress, status) as control:
            layout = Layout({"a": (4,)}, "x")
            control.groups.membership = Membership(WHO.rank, layout, GroupTable(), "", None, standby=fork_servers)
            made = Line(control, socket)
            made.hear(m.Alive)
            yield made
            control.groups.membership.close()
        made.close()
    context.term()
    status.close()


@pytest.fixture
def run_python(assets):
    """Run a script in a fresh interpreter, the assets' folder its argument, and return what it printed."""

    def run(script):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script), str(assets)],
            env=environment, capture_output=True, text=True, timeout=HANG_SECONDS, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def same_bits():
    """Check that two sets of named arrays are equal to the byte."""
    return lambda one, other: one.keys() == other.keys() and all(np.array_equal(one[k], other[k]) for k in one)


@pytest.fixture
def agent(tmp_path, run_file):
    run_file(**settings(tmp_path))
    with tempfile.TemporaryDirectory(prefix="tt-", dir="/tmp") as folder:  # socket paths are short
        made = Agent(tmp_path / "node", tmp_path / "run.toml", Path(folder))
        yield made
        made.close()
