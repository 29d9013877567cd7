"""An agent that speaks with trainer processes."""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import zmq
from tests.waiting import HANG_SECONDS

from trainctl.protocol import messages as m
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.wire import codec
from trainctl.protocol.wire.sockets import new_socket

G = 12
FIRST, SECOND, THIRD = (m.Generation(1, n) for n in (1, 2, 3))
M = TypeVar("M", bound=m.Message)


class Agent:
    """A ROUTER at a socket file, and the trainers that were started to connect to it; most often that of rank 0."""

    def __init__(self, node: Path, run_file: Path, socket_folder: Path) -> None:
        self.paths = RunPaths(node / "runs" / "r")
        self._run_file = run_file
        self.endpoint = f"ipc://{socket_folder / 'a'}"
        self._context = zmq.Context()
        self._who: dict[int, bytes] = {}
        self._of_others: list[Any] = []
        self.processes: list[subprocess.Popen[str]] = []
        self.listen()

    @property
    def trainer(self) -> bytes:
        return self._who[0]

    def listen(self) -> None:
        self.socket = new_socket(self._context, zmq.ROUTER)
        self.socket.bind(self.endpoint)

    def vanish(self) -> None:
        self.socket.close()

    def start(self, *more: str, node: str = "here", rank: int = 0) -> "subprocess.Popen[str]":
        paths = self.paths if rank == 0 else RunPaths(self.paths.directory.parents[2] / node / "runs" / "r")
        paths.directory.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self._run_file, paths.run_file)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        command = [sys.executable, "-m", "trainctl.trainer", "--run-directory", str(paths.directory), "--run", "r"]
        command += ["--node", node, "--rank", str(rank), "--endpoint", self.endpoint, *more]
        out: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        self.processes.append(subprocess.Popen(command, env=environment, start_new_session=True, **out))
        return self.processes[-1]

    def tell(self, order: m.ToTrainer, *ranks: int) -> None:
        for rank in ranks or (0,):
            self.socket.send_multipart([self._who[rank], codec.encode(order)])

    def hear(self, kind: type[M], wanted: Callable[[M], bool] = lambda message: True, rank: int = 0) -> M:
        """Return the next message of a kind from a rank. Others from it are passed over, those of other ranks kept."""
        deadline = time.monotonic() + HANG_SECONDS
        while time.monotonic() < deadline:
            mine = next((message for message in self._of_others if getattr(message, "rank", 0) == rank), None)
            if mine is not None:
                self._of_others.remove(mine)
                if isinstance(mine, kind) and wanted(mine):
                    return mine
            elif self.socket.poll(100):
                identity, frame = self.socket.recv_multipart()
                message = codec.decode_answer(frame)
                assert isinstance(message, kind) or not isinstance(message, m.TrainerFailed), message
                self._who[getattr(message, "rank", 0)] = identity
                self._of_others.append(message)
        raise AssertionError(f"no {kind.__name__} of rank {rank}")

    def form(self, generation: m.Generation) -> None:
        self.tell(m.Form(run="r", generation=generation, engine="none", ranks=(0,)))
        self.hear(m.Formed, lambda formed: formed.generation == generation)

    def plan_of(self, seq: int, step: int, generation: m.Generation = FIRST, **changes: Any) -> m.StepPlan:
        cursor = max(0, step - 1) * G
        values: dict[str, Any] = {
            "run": "r", "generation": generation, "seq": seq, "kind": "train", "step": step, "plan_version": 1,
            "cursor": cursor, "global_batch": G, "work": (m.RankWork(0, (m.Range(cursor, G),), 5),),
            "learning_rate": 1e-3, "divisor": 256.0,
        }  # fmt: skip
        return m.StepPlan(**(values | changes))

    def plan(self, seq: int, step: int, generation: m.Generation = FIRST, **changes: Any) -> None:
        self.tell(self.plan_of(seq, step, generation, **changes))

    def step(self, seq: int, step: int, generation: m.Generation = FIRST, **changes: Any) -> m.Report:
        self.plan(seq, step, generation, **changes)
        return self.hear(m.Report, lambda report: report.seq == seq)

    def leave(self, process: "subprocess.Popen[str]") -> str:
        """Ask it to leave, check that its status is 0, and return what it wrote on standard error."""
        self.tell(m.Leave(run="r", reason="the test is over"))
        _, errors = process.communicate(timeout=HANG_SECONDS)
        assert process.returncode == 0, errors
        return errors

    def close(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                if process.poll() is None:
                    process.kill()
            process.communicate(timeout=HANG_SECONDS)
        self.socket.close()
        self._context.term()


def settings(tmp_path: Path) -> dict[str, Any]:
    here = {"backend": "torch", "device": "cpu", "threads": 1, "cache_path": str(tmp_path / "caches")}
    return {"run__orphan_seconds": 1.0, "nodes": {"here": here}}
