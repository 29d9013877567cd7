"""Two trainers, of unlike backends and with paths of their own, as the agents of a group see them."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
import zmq
from tests.trainer.support.fork_servers import ForkServers
from tests.waiting import HANG_SECONDS

from trainctl.protocol import messages as m
from trainctl.protocol.config.run_tables import GroupTable
from trainctl.protocol.record import log_format
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.wire import codec
from trainctl.protocol.wire.sockets import new_socket
from trainctl.trainer.collective.group import ReducerGroup
from trainctl.trainer.collective.membership import Membership
from trainctl.trainer.collective.shared_buffer import Layout

G = 12
DEADLINE_SECONDS = HANG_SECONDS
NODES = ("here", "there")
M = TypeVar("M", bound=m.Message)


class Agents:
    """Both ranks' agents in one: a ROUTER that knows which rank it hears."""

    def __init__(self, folder: Path, run_file: Path, socket_folder: Path) -> None:
        self._folder, self._run_file = folder, run_file
        self._endpoint = f"ipc://{socket_folder / 'a'}"
        self._context = zmq.Context()
        self._socket = new_socket(self._context, zmq.ROUTER)
        self._socket.bind(self._endpoint)
        self._who: dict[int, bytes] = {}
        self._heard: list[Any] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self.generation = m.Generation(1, 0)

    def start(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        for rank, node in enumerate(NODES):
            paths = RunPaths(self._folder / node / "runs" / "r")
            paths.directory.mkdir(parents=True)
            shutil.copyfile(self._run_file, paths.run_file)
            command = [sys.executable, "-m", "trainctl.trainer", "--run-directory", str(paths.directory), "--run", "r"]
            command += ["--node", node, "--rank", str(rank), "--endpoint", self._endpoint]
            log = (self._folder / f"{rank}.log").open("w", encoding="utf-8")
            with log:
                self.processes.append(
                    subprocess.Popen(
                        command, env=environment, stdout=log, stderr=log, text=True, start_new_session=True
                    )
                )

    def log(self, rank: int) -> str:
        return (self._folder / f"{rank}.log").read_text(encoding="utf-8")

    def tell(self, order: m.ToTrainer, *ranks: int) -> None:
        for rank in ranks or (0, 1):
            self._socket.send_multipart([self._who[rank], codec.encode(order)])

    def hear(self, kind: type[M], rank: int, wanted: Callable[[M], bool] = lambda message: True) -> M:
        """The next message of a kind from a rank; those of the other rank are kept."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while time.monotonic() < deadline:
            for message in self._heard:
                if isinstance(message, kind) and getattr(message, "rank", -1) == rank and wanted(message):
                    self._heard.remove(message)
                    return message
            if self._socket.poll(100):
                identity, frame = self._socket.recv_multipart()
                message = codec.decode_answer(frame)
                assert not isinstance(message, m.TrainerFailed), message
                self._who[message.rank] = identity
                if not isinstance(message, m.Alive):
                    self._heard.append(message)
        raise AssertionError(f"no {kind.__name__} of rank {rank}: {self._heard} {self.log(rank)}")

    def form(self, engine: m.Engine) -> list[m.Formed]:
        self.generation = self.generation.next()
        self.tell(m.Offer(run="r", generation=self.generation, engine=engine))
        offered = [self.hear(m.Offered, rank) for rank in (0, 1)]
        endpoints = tuple(offer.endpoints for offer in offered)
        self.tell(m.Form(run="r", generation=self.generation, engine=engine, ranks=(0, 1), endpoints=endpoints))
        return [self.hear(m.Formed, rank) for rank in (0, 1)]

    def plan(self, seq: int, step: int, **changes: Any) -> m.StepPlan:
        cursor = max(0, step - 1) * G
        work = (m.RankWork(0, (m.Range(cursor, 8),), 3), m.RankWork(1, (m.Range(cursor + 8, 4),), 4))
        values: dict[str, Any] = {
            "run": "r", "generation": self.generation, "seq": seq, "kind": "train", "step": step, "plan_version": 1,
            "cursor": cursor, "global_batch": G, "work": work, "learning_rate": 1e-3, "divisor": 256.0,
        }  # fmt: skip
        return m.StepPlan(**(values | changes))

    def run(self, plan: m.StepPlan) -> list[m.Report]:
        self.tell(plan)
        return [self.hear(m.Report, rank, lambda report: report.seq == plan.seq) for rank in (0, 1)]

    def fence(self, *ranks: int) -> list[m.Fenced]:
        self.generation = self.generation.next()
        self.tell(m.Fence(run="r", generation=self.generation), *ranks)
        return [self.hear(m.Fenced, rank) for rank in ranks]

    def close(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait(HANG_SECONDS)
        self._socket.close()
        self._context.term()


@pytest.fixture
def agents(tmp_path: Path, run_file: Callable[..., Any], assets: Path) -> Iterator[Agents]:
    shutil.copytree(assets / "model", tmp_path / "elsewhere" / "model")
    shutil.copytree(assets / "text", tmp_path / "elsewhere" / "text")
    there = {
        "backend": "mlx", "device": "cpu", "threads": 1,
        "model_path": str(tmp_path / "elsewhere" / "model"), "data_path": str(tmp_path / "elsewhere" / "text"),
    }  # fmt: skip
    run_file(nodes__there=there)
    with tempfile.TemporaryDirectory(prefix="tt-", dir="/tmp") as folder:  # socket paths are short
        made = Agents(tmp_path / "nodes", tmp_path / "run.toml", Path(folder))
        made.start()
        yield made
        made.close()


def test_two_trainers_train_as_one_and_survive_each_other_and_a_signal_ends_one_that_waits(
    agents: Agents, fork_servers: ForkServers
) -> None:
    ready = [agents.hear(m.Ready, rank) for rank in (0, 1)]
    assert [one.backend for one in ready] == ["torch", "mlx"]
    for field in ("layout_digest", "model_digest", "data_digest", "model_files", "data_files", "system", "samples"):
        assert getattr(ready[0], field) == getattr(ready[1], field), field
    assert [file.name for file in ready[0].model_files] == ["config.json", "model.safetensors"]
    assert [file.name for file in ready[0].data_files] == ["a.txt", "b.txt"]
    assert ready[0].engines == ready[1].engines == ("gloo", "ring")
    assert ready[0].system == os.uname().sysname

    formed = agents.form("gloo")
    assert all(one.join_seconds > 0 for one in formed)
    first = agents.run(agents.plan(1, 1))
    assert first[0].loss_sum == first[1].loss_sum
    assert [one.own_samples for one in first] == [8, 4]
    assert [one.weight for one in first] == [240.0, 240.0]
    synced = agents.run(agents.plan(2, 1, kind="sync"))
    assert synced[0].drift == 0.0
    assert synced[1].drift is not None
    assert 0 <= synced[1].drift < 1e-4
    measured = agents.run(agents.plan(3, 1, kind="measure"))
    assert all(one.samples_per_second and one.samples_per_second > 0 for one in measured)
    assert [agents.run(agents.plan(seq, seq - 2))[0].step for seq in (4, 5)] == [2, 3]

    children = [psutil.Process(process.pid).children(recursive=True) for process in agents.processes]
    assert [len(found) for found in children] == [2, 2], "one in the group and the one that made it"
    plan = agents.plan(6, 4)
    agents.tell(plan, 0)
    agents.hear(m.Soon, 0, lambda soon: soon.seq == 6)
    agents.tell(agents.plan(7, 5), 0)  # issued ahead; nothing may come of it
    agents.processes[1].kill()
    agents.processes[1].wait(HANG_SECONDS)
    failed = agents.hear(m.GroupFailed, 0)
    assert re.fullmatch("connection to there was (reset|closed)", failed.reason), failed.reason
    assert not psutil.wait_procs(children[1], timeout=HANG_SECONDS)[1], "no reducer outlives its trainer"
    (fenced,) = agents.fence(0)
    assert (fenced.last_step, fenced.held_from, fenced.held) == (3, plan.generation, (m.Range(36, 8),))

    agents.generation = agents.generation.next()
    agents.tell(m.Form(run="r", generation=agents.generation, engine="none", ranks=(0,)), 0)
    agents.hear(m.Formed, 0)
    rest = (m.RankWork(0, (m.Range(44, 4),), 4),)
    agents.tell(agents.plan(8, 4, work=rest, finishes=plan.generation), 0)
    report = agents.hear(m.Report, 0)
    assert (report.step, report.own_samples, report.weight, report.skipped) == (4, G, 240.0, None)

    agents.fence(0)
    with waiting_for_others(agents, ready[0].layout_digest, fork_servers):
        children = [psutil.Process(agents.processes[0].pid).children(recursive=True)]
        assert len(children[0]) == 2
        agents.processes[0].send_signal(signal.SIGTERM)
        assert agents.processes[0].wait(HANG_SECONDS) == 143
    assert log_format.read(agents.log(0).splitlines()[-1])[1:] == ("INFO", "leaving: ended by a signal")
    assert not psutil.wait_procs(children[0], timeout=HANG_SECONDS)[1]


@contextlib.contextmanager
def waiting_for_others(agents: Agents, digest: str, fork_servers: ForkServers) -> Iterator[None]:
    """Rank 0 is in a group by the ring with a rank 1 of this process, which stays away from the sum."""
    agents.generation = generation = agents.generation.next()
    offer = m.Offer(run="r", generation=generation, engine="ring")
    peer = Membership(1, Layout({"a": (4,)}, digest), GroupTable(), "", None, fork_servers)
    agents.tell(offer, 0)
    endpoints = (agents.hear(m.Offered, 0).endpoints, peer.offer(offer))
    form = m.Form(run="r", generation=generation, engine="ring", ranks=(0, 1), endpoints=endpoints)
    agents.tell(form, 0)
    group = peer.form(form)
    assert isinstance(group, ReducerGroup)
    try:
        group.complete()
        agents.hear(m.Formed, 0, lambda formed: formed.generation == generation)
        agents.tell(agents.plan(9, 5), 0)
        agents.hear(m.Soon, 0, lambda soon: soon.seq == 9)
        yield
    finally:
        peer.close()
        group.close()
