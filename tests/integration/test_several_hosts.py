"""Three agents on three hosts, paired with keys: they train on gloo and on ring, are steered from a fourth by script
and by screen, give a fifth nothing, sum over no network that nobody trusts, and outlive a cut cable."""

import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from tests.cluster.folding import check_steps
from tests.cluster.run_files import FOREVER, TORCH
from tests.integration.support.namespaces import INTERFACE, SIDE, SIDE_LAN
from tests.integration.support.several_hosts import DESK, NODES, PORT, STRANGER, Hosts
from tests.integration.support.terminals import Terminal
from tests.waiting import slowness

from trainctl.protocol import messages as m

pytestmark = [pytest.mark.needs("namespaces"), pytest.mark.needs("tmux")]
MLX = {"backend": "mlx", "device": "cpu", "threads": 1}
SHARES = {"alpha": 5, "beta": 5, "gamma": 2}
PROGRAM_SECONDS = 3.0
"""Seconds that the start of the program may take beside a refusal, on a busy machine."""
LISTENER = """
import sys, zmq
socket = zmq.Context().socket(zmq.SUB)
socket.subscribe(b"")
socket.connect(sys.argv[1])
sys.exit(9 if socket.poll(2500) else 0)
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    made = Hosts(tmp_path_factory.mktemp("hosts"))
    try:
        made.start()
        yield made
    finally:
        made.close()


@pytest.fixture
def write_run(run_config: Any, tmp_path: Path) -> Callable[..., str]:
    """A run file over all three hosts: on gloo two torch ranks and an MLX one, as the demo's group; on ring one torch
    rank, for those of MLX start in less than half the CPU time there."""

    def write(engine: str, interface: str = INTERFACE) -> str:
        kinds = dict(zip(NODES, (TORCH, TORCH if engine == "gloo" else MLX, MLX), strict=True))
        nodes = {node: {**kinds[node], "share": SHARES[node], "interface": interface} for node in NODES}
        config = run_config(run__steps=FOREVER, nodes=nodes, group={"engine": engine}, batch__micro=2)
        path = tmp_path / f"{engine}.toml"
        path.write_text(tomli_w.dumps(config))
        return str(path)

    return write


def begin(hosts: Hosts, run_file: str) -> str:
    started = hosts.said("run", run_file, "--connect", hosts.address("alpha"))
    assert started["ok"], started
    hosts.wait(lambda view: view["run"]["step"] >= 2, "the second step")
    return str(started["run"])


def end(hosts: Hosts, run: str) -> dict[str, Any]:
    """Stop the run; each of its steps has had all of its samples, on all ranks as its plan has it."""
    assert hosts.said("send", "stop", "checkpoint=false", "--connect", hosts.address("gamma"))["state"] == "applied"
    view = hosts.wait(lambda view: view["run"]["state"] not in m.ACTIVE_RUN_STATES, "the run's end")["run"]
    assert (view["state"], view["mixed"]) == ("stopped", True), view["reason"]
    check_steps(hosts, run, 1, view["step"])
    return view


def test_they_train_on_ring_and_a_script_on_another_host_moves_work(hosts, write_run):
    run = begin(hosts, write_run("ring"))
    asked = [f"{node}={share}" for node, share in {"alpha": 7, "beta": 4, "gamma": 1}.items()]
    sent = hosts.said("send", "rebalance", *asked, "--connect", hosts.address("beta"))
    assert sent["state"] == "applied", sent
    hosts.wait(lambda view: view["run"]["step"] > sent["step"], "the step after it")
    assert end(hosts, run)["engine"] == "ring"


def test_they_train_on_gloo_steered_by_a_screen_and_outlive_a_cut_cable(hosts, write_run, tmp_path):
    run = begin(hosts, write_run("gloo"))
    steer_by_screen(hosts, tmp_path)
    hosts.network.cut("gamma")
    try:
        view = hosts.wait(lambda view: rank_of(view, "gamma")["state"] not in ("run", "late"), "the loss of gamma")
        alone = view["run"]["step"]
        view = hosts.wait(lambda view: view["run"]["step"] >= alone + 5, "steps without it")
        assert next(peer for peer in view["peers"] if peer["node"] == "gamma")["state"] != "connected"
    finally:
        hosts.network.repair("gamma")
    view = hosts.wait(lambda view: rank_of(view, "gamma")["state"] == "run", "its return")
    hosts.wait(lambda now: now["run"]["step"] >= view["run"]["step"] + 3, "steps with it")
    assert end(hosts, run)["engine"] == "gloo"
    events = hosts.said("events", "--last", "200", "--connect", hosts.address("alpha"))
    assert any("gamma" in event["text"] for event in events["events"] if event["severity"] != "info")


def rank_of(view: dict[str, Any], node: str) -> dict[str, Any]:
    return next(rank for rank in view["run"]["ranks"] if rank["node"] == node)


def steer_by_screen(hosts: Hosts, folder: Path) -> None:
    variables = [f"{name}={value}" for name, value in hosts.env(DESK).items()]
    program = [sys.executable, "-m", "trainctl.tui.cli.main", "--connect", hosts.address("alpha")]
    terminal = Terminal(folder, 120, 40, shlex.join(hosts.network.on(DESK, "env", *variables, *program)))
    try:
        terminal.wait_for(r"five keys to begin with")
        terminal.keys("Escape")
        terminal.wait_gone(r"five keys to begin with")
        terminal.wait_for(r"RUNNING")
        terminal.wait_for(r"gamma\s.*mlx")
        terminal.keys("b")
        terminal.wait_for(r"resize micro-batch")
        terminal.keys("BSpace", "1", "Enter")
        terminal.wait_for(r"applied @ step [\d,]+")
        terminal.wait_gone(r"resize micro-batch")
        terminal.keys("q")
        assert terminal.exit_status() == "status=0"
    finally:
        terminal.close()


def test_a_network_that_nobody_trusts_carries_no_sums(hosts, write_run):
    refused = hosts.said("run", write_run("gloo", SIDE), "--connect", hosts.address("alpha"))
    assert not refused["ok"], refused
    assert "trusted_networks" in str(refused) and SIDE in str(refused) and SIDE_LAN in str(refused), refused


def test_a_host_without_a_known_key_gets_nothing(hosts):
    at, key = hosts.address("beta"), hosts.keys["beta"].agent().public
    began = time.monotonic()
    unknown = hosts.trainctl("status", "--connect", at, host=STRANGER, TRAINCTL_SERVER_KEY=key)
    seconds = time.monotonic() - began
    assert unknown.returncode == 6 and len(unknown.stderr.splitlines()) == 1, unknown.stderr
    assert seconds < (3.0 + PROGRAM_SECONDS) * slowness()
    keyless = hosts.trainctl("status", "--connect", at, host=STRANGER, TRAINCTL_CLUSTER="/dev/null")
    assert keyless.returncode == 2 and "--server-key" in keyless.stderr, keyless.stderr
    for where in (at, at.replace(str(PORT), str(PORT + 1))):
        heard = hosts.network.run(STRANGER, sys.executable, "-c", LISTENER, where)
        assert heard.returncode == 0, "a listener without keys was told something"
    told = hosts.said("keys", "audit", "--connect", at)["refused"]
    row = next(row for row in told if row["key"] == hosts.keys[STRANGER].user().public)
    assert row["address"] == hosts.network.addresses[STRANGER]
