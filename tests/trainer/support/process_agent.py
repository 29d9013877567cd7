"""An agent that speaks with trainer processes."""

import contextlib
import os
import shutil
import subprocess
import sys
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
    """A ROUTER at a socket file, and the trainer of rank 0 that was started to connect to it."""

    def __init__(self, node: Path, run_file: Path, socket_folder: Path) -> None:
        self.paths = RunPaths(node / "runs" / "r")
        self._run_file = run_file
        self.endpoint = f"ipc://{socket_folder / 'a'}"
        self._context = zmq.Context()
        self.trainer = b""  # who sent the last message
        self.processes: list[subprocess.Popen[str]] = []
        self.listen()

    def listen(self) -> None:
        self.socket = new_socket(self._context, zmq.ROUTER)
        self.socket.bind(self.endpoint)

    def vanish(self) -> None:
        self.socket.close()

    def start(self, *more: str) -> "subprocess.Popen[str]":
        self.paths.directory.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self._run_file, self.paths.run_file)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        command = [sys.executable, "-m", "trainctl.trainer", "--run-directory", str(self.paths.directory), "--run", "r"]
        command += ["--node", "here", "--rank", "0", "--endpoint", self.endpoint, *more]
        out: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        self.processes.append(subprocess.Popen(command, env=environment, start_new_session=True, **out))
        return self.processes[-1]

    def tell(self, order: m.ToTrainer) -> None:
        self.socket.send_multipart([self.trainer, codec.encode(order)])

    def hear(self, kind: type[M], wanted: Callable[[M], bool] = lambda message: True) -> M:
        """Return the next message of a kind; others are passed over."""
        while self.socket.poll(int(1000 * HANG_SECONDS)):
            self.trainer, frame = self.socket.recv_multipart()
            message = codec.decode_answer(frame)
            assert isinstance(message, kind) or not isinstance(message, m.TrainerFailed), message
            if isinstance(message, kind) and wanted(message):
                return message
        raise AssertionError(f"no {kind.__name__}")

    def form(self, generation: m.Generation) -> None:
        self.tell(m.Form(run="r", generation=generation, engine="none", ranks=(0,)))
        self.hear(m.Formed, lambda formed: formed.generation == generation)

    def plan(self, seq: int, step: int, generation: m.Generation = FIRST, **changes: Any) -> None:
        cursor = max(0, step - 1) * G
        values: dict[str, Any] = {
            "run": "r", "generation": generation, "seq": seq, "kind": "train", "step": step, "plan_version": 1,
            "cursor": cursor, "global_batch": G, "work": (m.RankWork(0, (m.Range(cursor, G),), 5),),
            "learning_rate": 1e-3, "divisor": 256.0,
        }  # fmt: skip
        self.tell(m.StepPlan(**(values | changes)))

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
