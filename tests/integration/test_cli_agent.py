"""The command line against a real agent and its trainer; tests/tui/cli/test_live_run.py has what needs none."""

import asyncio
import contextlib
import itertools
import json
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from tests.cluster.run_files import FOREVER, NODE, TORCH, on_mlx
from tests.integration.conftest import AgentProcess
from tests.integration.support.sshd import LoopbackSshd
from tests.tui.support.cli_calls import call, call_json, interrupt, started, wait_until
from tests.waiting import HANG_SECONDS

from trainctl.protocol import messages as m
from trainctl.protocol.client.client import Client
from trainctl.trainer.demo_assets import llama_config, make_model


@pytest.mark.tier("test")
@pytest.mark.needs("sshd")
def test_an_agent_is_followed_through_sockets_that_ssh_forwards(tmp_path: Path) -> None:
    """The lines of docs/training.md, "Over SSH": the first event comes live, from the second socket."""
    state, near = tmp_path / "there", Path(tempfile.mkdtemp(dir="/tmp")) / "studio.sock"
    command = [sys.executable, "-m", "trainctl.node_agent.cli", "run", "--name", "studio", "--state", str(state)]
    with LoopbackSshd(tmp_path) as sshd, subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        there = json.loads(agent.stdout.readline())["listen"].removeprefix("ipc://")
        forwards = ["-L", f"{near}:{there}", "-L", f"{near}.live:{there}.live"]
        with subprocess.Popen(["ssh", "-F", str(sshd.config), "-N", *forwards, "there"]) as ssh:
            try:
                wait_until(Path(f"{near}.live").exists, "the forwarded sockets")
                assert stat.S_IMODE(near.stat().st_mode) == 0o600
                assert call_json("ls", "--connect", f"ipc://{near}")["runs"] == []

                async def heard() -> str:
                    async with Client(f"ipc://{near}") as client, contextlib.aclosing(client.attach(0)) as items:
                        return await anext(item.node async for item in items if isinstance(item, m.Heartbeat))

                assert asyncio.run(heard()) == "studio"
            finally:
                ssh.terminate()
                agent.terminate()
    shutil.rmtree(near.parent)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    process = AgentProcess(tmp_path / "state", options=("--metrics", "127.0.0.1:0")).start()
    yield process
    process.clean_up()


def test_a_run_is_started_shown_watched_counted_and_stopped(
    agent: AgentProcess, run_config: Any, tmp_path: Path
) -> None:
    at, file = ("--connect", agent.address), tmp_path / "run.toml"
    file.write_text(tomli_w.dumps(run_config(run__name="tiny", run__steps=FOREVER, nodes={NODE: TORCH})))
    assert re.fullmatch(r"tiny-\d{8}-\d{6}-[0-9a-f]{4}\n", call("run", file, *at).stdout)
    with started("watch", "--json", *at) as process:
        assert process.stdout is not None
        items = (json.loads(line) for line in iter(process.stdout.readline, ""))
        steps = [*itertools.islice((item["step"] for item in items if item["type"] == "step-committed"), 5)]
        assert (interrupt(process)[1], process.returncode) == ("", 130)
    assert steps == list(range(steps[0], steps[0] + 5))
    compute = call_json("status", *at)["run"]["ranks"][0]["compute"]
    assert {"python", "torch", "numpy"} <= {name for name, _ in compute.pop("versions")}
    assert compute == {
        "dtype": "float32", "tf32": None, "compile": "off", "attention": "sdpa", "weights": "float32",
        "deterministic": None, "cudnn_benchmark": None, "update": "",
    }  # fmt: skip

    def scraped() -> str:
        with urllib.request.urlopen(agent.metrics_url, timeout=HANG_SECONDS) as reply:
            return str(reply.read().decode())

    lines = (
        r'trainctl_agent_process_memory_bytes\{.*role="trainer".*\} .*',
        r'trainctl_steps_total\{run="tiny-.*"\} [1-9].*',
        rf'trainctl_rank_phase_seconds_total\{{node="{NODE}",phase="backward",rank="0",run="tiny-.*"\}} [0-9.e+-]+',
        rf'trainctl_agent_event_loop_lag_seconds\{{node="{NODE}"\}} [0-9.e+-]+',
        r'trainctl_run_state\{run="tiny-.*",state="running"\} 1.0',
    )
    wait_until(lambda: all(re.search(f"^{line}$", text, re.M) for text in [scraped()] for line in lines), "its figures")
    assert call("send", "stop", "checkpoint=false", *at).returncode == 0
    wait_until(lambda: call_json("status", *at)["run"]["state"] == "stopped", "the run to stop")


def test_a_run_that_fails_while_it_loads_says_why(agent: AgentProcess, run_config: Any, tmp_path: Path) -> None:
    """The model's weights are not of the shapes that its configuration says: only loading it shows that."""
    at, file, model = ("--connect", agent.address), tmp_path / "run.toml", tmp_path / "model"
    make_model(model, llama_config(hidden=16, layers=1, heads=2, intermediate=32))
    tables = {"model": {"path": str(model)}, "nodes": on_mlx(NODE)}
    file.write_text(tomli_w.dumps(run_config(run__name="tiny", **tables)))
    described = model / "config.json"
    described.write_bytes(described.read_bytes().replace(b'"hidden_size": 16', b'"hidden_size": 32'))
    followed = call("run", file, "--follow", *at)
    wait_until(lambda: "failed at step 0" in call("events", *at).stdout, "the failed run to be over", 20)
    assert followed.returncode == 3
    assert re.search(rf"^trainctl: tiny-\S+ failed: .*{model}", followed.stderr, re.M)
    assert (followed.stdout + followed.stderr).count(str(model)) == 1, "the reason is told once"
    assert "Traceback" not in followed.stderr
