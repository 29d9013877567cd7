"""Runs on an NVIDIA GPU through real agents: a kill and a resize on the way, ranks that share the device, its readings,
its calibration. Left out where there is none."""

import os
import signal

import pytest
import tomli_w
from tests.cluster.run_files import NODE, on
from tests.cluster.waits import all_steps, wait_for_end, wait_for_step
from tests.integration.support.clusters import have_back
from tests.integration.support.reference import one_rank_curve
from tests.tui.support.cli_calls import call, call_json
from tests.waiting import until

from trainctl.protocol.calibration import profile_file

pytestmark = pytest.mark.needs("cuda")
GPU = {"backend": "torch", "device": "cuda", "threads": 1}
STEPS = 60


def losses(steps):
    return [step.loss for step in steps]


def test_a_run_on_the_gpu_survives_its_trainer_and_keeps_its_curve(agent, run_config):
    nodes = {NODE: GPU | {"deterministic": True}}
    saved = {"every_steps": 10, "at_end": False}
    config = run_config(run__steps=STEPS, model__dtype="auto", nodes=nodes, checkpoint=saved)
    with agent.client() as client:
        begun = client.send("start-run", {"config": config}, wait="accepted")
        wait_for_step(client, 15)
        (rank,) = client.snapshot(0).run.ranks
        client.send("pause", {})
        until(lambda: [*agent.run_paths(begun.run).checkpoints.glob("step-10*")], what="a checkpoint")
        (pid,) = agent.trainer_pids()
        os.kill(pid, signal.SIGKILL)
        until(lambda: agent.trainer_pids() not in ([], [pid]), 60, "another trainer")
        client.send("resume", {})
        assert client.send("resize-batch", {"micro": 3}).state == "applied"
        view = wait_for_end(client)
        steps = all_steps(client)
        host = client.snapshot(0).node.host
        texts = [event.text for event in client.events(newest=True).events]
    assert view.state == "finished", texts
    assert "cuda:0" in rank.device
    assert rank.compute.dtype == "bfloat16"
    assert (rank.compute.deterministic, rank.compute.tf32) == (True, False)
    assert any("all ranks compute in bfloat16" in text for text in texts), texts
    assert [step.step for step in steps] == list(range(1, STEPS + 1))
    alone = one_rank_curve(config | {"model": config["model"] | {"dtype": "bfloat16"}})
    assert losses(steps) == pytest.approx(losses(alone), rel=5e-4)
    (gpu, *_) = host.gpus
    assert "NVIDIA" in gpu.name
    known = (gpu.power_watts, gpu.temperature_celsius, gpu.clock_mhz, gpu.memory_used_bytes, gpu.memory_total_bytes)
    assert all(value and value > 0 for value in known), gpu
    assert gpu.utilization_percent is not None


def test_ranks_on_one_gpu_and_one_on_the_cpu_draw_one_curve(cluster, run_config):
    nodes = on("alpha", "beta", "gamma", alpha=GPU, beta=GPU)
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
    assert losses(steps) == pytest.approx(losses(alone), rel=5e-6)


def test_the_gpu_is_calibrated(agent, run_config, tmp_path):
    (tmp_path / "run.toml").write_bytes(tomli_w.dumps(run_config(nodes={NODE: GPU}, model__dtype="bfloat16")).encode())
    done = call("calibrate", tmp_path / "run.toml", "--connect", agent.address)
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stderr
    (profile,) = profile_file.all_stored(agent.directory / "profiles")
    assert "cuda:0 NVIDIA" in profile.key.device
    advice = call_json("advise", tmp_path / "run.toml", "--connect", agent.address)
    assert advice["answer"]["source"] == "measured"
