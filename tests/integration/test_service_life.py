"""An agent run by the very words of its unit: its supervisor hears of it, its trainer outlives its restarts and kills,
and has the priority and the variables that the run file gives it."""

import contextlib
import json
import os
import re
import shlex
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.asking import run_of
from tests.cluster.run_files import NODE
from tests.cluster.waits import wait_for_end, wait_for_step
from tests.integration.conftest import AgentProcess
from tests.node_agent.support.processes import ENVIRONMENT
from tests.waiting import until

from trainctl.node_agent.services import service_file

STALL_SECONDS = 7


class Unit(AgentProcess):
    """An agent as systemd would run it; this test is the service manager."""

    def __init__(self, folder: Path, supervisor: socket.socket) -> None:
        super().__init__(folder)
        self._supervisor = supervisor

    def start(self) -> "Unit":
        """Start, or start again on the same ports, as ExecStart, Environment, UMask and the rest have it."""
        words = (
            *service_file.own_command(),
            "run",
            "--name",
            self.name,
            "--state",
            str(self.state),
            "--listen",
            self.address,
        )
        words += ("--no-keys", "--exit-if-stalled", str(STALL_SECONDS))
        unit = service_file.unit(service_file.Service(self.name, words, "system", "root", self.directory / "logs"))
        (command,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
        given = dict(
            shlex.split(line)[0].split("=", 1) for line in re.findall(r"^Environment=(.*)$", unit, re.MULTILINE)
        )
        told = {
            "NOTIFY_SOCKET": self._supervisor.getsockname(),
            "WATCHDOG_USEC": "2000000",
            "TRAINCTL_ALLOWED_VARIABLES": "MINE",
        }
        self.process = subprocess.Popen(
            shlex.split(command), env={**ENVIRONMENT, **given, **told}, cwd="/", umask=0o077, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        said = json.loads(self.process.stdout.readline())
        self.address, self.live_address = said["listen"], said["live"]
        return self

    def heard(self) -> list[str]:
        """What the supervisor has received since the last time."""
        found: list[str] = []
        with contextlib.suppress(BlockingIOError):
            while True:
                found += self._supervisor.recv(4096).decode().splitlines()
        return found

    def wait_for_word(self, word: str) -> None:
        until(lambda: word in self.heard(), what=word)


@pytest.fixture
def unit(tmp_path: Path) -> Iterator[Unit]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(str(tmp_path / "notify"))
        supervisor.setblocking(False)
        made = Unit(tmp_path / "state", supervisor).start()
        yield made
        made.clean_up()


def test_a_trainer_lives_through_restarts_and_kills_of_its_agents_service(unit: Unit, run_config: Any) -> None:
    unit.wait_for_word("READY=1")
    nice = min(os.getpriority(os.PRIO_PROCESS, 0) + 1, 19)
    nodes = {NODE: {"backend": "mlx", "device": "cpu", "threads": 1, "priority": nice, "env": {"MINE": "ü $x"}}}
    with unit.client() as client:
        client.send("start-run", {"config": run_config(run__steps=1_000_000, nodes=nodes)}, wait="accepted")
        run = wait_for_step(client, 3, 150).run.run
        (pid,) = unit.trainer_pids()
        trainer = psutil.Process(pid)
        assert trainer.nice() == psutil.Process(trainer.ppid()).nice() == nice
        environment = trainer.environ()
        assert environment["MINE"] == "ü $x" and "NOTIFY_SOCKET" not in environment
        assert stat.S_IMODE(unit.run_paths(run).log(0).stat().st_mode) == 0o600
        unit.wait_for_word(f"STATUS=box at {unit.address}: conducts {run} (running)")
        unit.wait_for_word("WATCHDOG=1")

        # systemctl restart, with KillMode=process: only the main process gets the signal.
        unit.heard()
        assert unit.terminate() == 0
        assert unit.heard()[-1] == "STOPPING=1"
        unit.start()
        step = until(lambda: run_of(client)).step
        wait_for_step(client, step + 3)
        assert unit.trainer_pids() == [pid]

        unit.kill()
        unit.start()
        step = until(lambda: run_of(client)).step
        wait_for_step(client, step + 3)
        assert unit.trainer_pids() == [pid]
        client.send("stop", {"checkpoint": False})
        wait_for_end(client)
