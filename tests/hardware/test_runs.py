"""Runs on each accelerator through real agents: a kill and a resize on the way, ranks that share the device, its
readings, a profile, its calibration."""

import os
import signal
import sys
import zipfile

import msgspec
import pytest
import tomli_w
from tests.asking import newest_events, run_of
from tests.cluster.run_files import NODE, on
from tests.cluster.waits import all_steps, wait_for_end, wait_for_step
from tests.hardware.devices import ACCELERATORS
from tests.integration.support.clusters import have_back
from tests.integration.support.reference import one_rank_curve
from tests.trainer.support.curves import TOLERANCES, worst
from tests.tui.support.cli_calls import call, call_json
from tests.waiting import until

from trainctl.protocol.calibration.profile import all_profiles
from trainctl.protocol.messages import SnapshotRequest

pytestmark = pytest.mark.parametrize("device", ACCELERATORS)
STEPS = 60
KNOWN = {
    "cuda": ("power_watts", "temperature_celsius", "clock_mhz", "memory_used_bytes", "memory_total_bytes"),
    "gpu": ("memory_used_bytes",), "mps": ("memory_used_bytes",),
}  # fmt: skip
"""Readings that the system gives of a device without further programs."""
CAPTURE = {"env": {"MTL_CAPTURE_ENABLED": "1"}} if sys.platform == "darwin" else {}


def losses(steps):
    return [step.loss for step in steps]


def test_a_run_survives_its_trainer_and_keeps_its_curve(agent, run_config, device, figure):
    nodes = {NODE: device.table}
    saved = {"every_steps": 10, "at_end": False}
    config = run_config(run__steps=STEPS, model__dtype="auto", nodes=nodes, checkpoint=saved)
    with agent.client() as client:
        begun = client.send("start-run", {"config": config}, wait="accepted")
        wait_for_step(client, 15)
        (rank,) = run_of(client).ranks
        client.send("pause", {})
        until(lambda: [*agent.run_paths(begun.run).checkpoints.glob("step-10*")], what="a checkpoint")
        (pid,) = agent.trainer_pids()
        os.kill(pid, signal.SIGKILL)
        until(lambda: agent.trainer_pids() not in ([], [pid]), 60, "another trainer")
        client.send("resume", {})
        assert client.send("resize-batch", {"micro": 3}).state == "applied"
        view = wait_for_end(client)
        steps = all_steps(client)
        host = client.ask(SnapshotRequest, 0).node.host
        texts = [event.text for event in newest_events(client)]
    assert view.state == "finished", texts
    assert device.device in rank.device
    if device.device == "cuda":
        assert (rank.compute.deterministic, rank.compute.tf32) == (True, False)
    dtype = rank.compute.dtype
    assert any(f"all ranks compute in {dtype}" in text for text in texts), texts
    assert [step.step for step in steps] == list(range(1, STEPS + 1))
    alone = one_rank_curve(config | {"model": config["model"] | {"dtype": dtype}})
    (gpu, *_) = host.gpus
    figure(dtype=dtype, gpu=msgspec.to_builtins(gpu), values=host.values)
    assert losses(steps) == pytest.approx(losses(alone), rel=TOLERANCES[dtype])
    assert all((getattr(gpu, name) or 0) > 0 for name in KNOWN[device.device]), gpu
    if sys.platform == "darwin":
        assert "thermal_pressure" in host.values, "macOS gives it to everyone"


def test_ranks_on_one_device_and_one_on_the_cpu_draw_one_curve(cluster, run_config, device, figure):
    nodes = on("alpha", "beta", "gamma", alpha=device.table, beta=device.table)
    config = run_config(run__steps=STEPS, batch__micro=2, nodes=nodes)
    with cluster.client() as client:
        client.send("start-run", {"config": config}, wait="accepted")
        wait_for_step(client, 5)
        assert client.send("rebalance", {"shares": {"alpha": 5, "beta": 4, "gamma": 3}}).state == "applied"
        wait_for_step(client, 12)
        assert client.send("resize-batch", {"micro": 1}).state == "applied"
        (pid,) = cluster["beta"].trainer_pids()
        os.kill(pid, signal.SIGKILL)
        have_back(client, "beta")
        assert wait_for_end(client).state == "finished"
        steps = all_steps(client)
    alone = one_rank_curve(config | {"nodes": on("alpha")})
    figure(difference=f"{worst(losses(steps), losses(alone)):.2g}")
    assert losses(steps) == pytest.approx(losses(alone), rel=TOLERANCES["float32"])


def test_a_profile_has_the_device_s_kernels_or_capture(agent, run_config, device, tmp_path, figure):
    config = run_config(run__steps=1_000_000, nodes={NODE: device.table | CAPTURE})
    options = ("--connect", agent.address, "--out", str(tmp_path), "--json")
    with agent.client() as client:
        client.send("start-run", {"config": config}, wait="accepted")
        wait_for_step(client, 2)
        made = call_json("profile", "--steps", "3", "--node", NODE, *options)
        assert client.send("stop", {"checkpoint": False}).state == "applied"
        wait_for_end(client)
    (rank,), (file,) = made["ranks"], made["files"]
    figure(phases={phase["name"]: phase["seconds"] for phase in rank["phases"]}, lacks=rank["lacks"])
    if device.device == "cuda":
        assert next(phase for phase in rank["phases"] if phase["name"] == "forward")["device_seconds"] > 0
    if device.backend == "mlx" and sys.platform == "darwin":
        with zipfile.ZipFile(file) as archive:
            assert any("capture.gputrace" in name for name in archive.namelist())


def test_it_is_calibrated(agent, run_config, device, tmp_path):
    config = run_config(nodes={NODE: device.table}, model__dtype="bfloat16")
    (tmp_path / "run.toml").write_bytes(tomli_w.dumps(config).encode())
    done = call("calibrate", tmp_path / "run.toml", "--connect", agent.address)
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stderr
    (profile,) = all_profiles(agent.directory / "profiles")
    assert device.device in profile.key.device
    advice = call_json("advise", tmp_path / "run.toml", "--connect", agent.address)
    assert advice["answer"]["source"] == "measured"
