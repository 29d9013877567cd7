"""Examples and benches as a person runs them: each objective's run file, an attached loop, and settings compared.

`make soak` takes each objective, `make test-all` one of rows and one of pairs.
"""

import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w
from tests.cluster.waits import wait_for_end
from tests.conftest import ROOT
from tests.integration.conftest import AgentProcess
from tests.tiers import is_soak
from tests.trainer.support.chat_model import make_chat_model
from tests.trainer.support.quantized_model import quantized_copy
from tests.trainer.support.seq2seq_model import make_seq2seq_model
from tests.tui.support.cli_calls import ENVIRONMENT, assert_none_left, call, call_json, started
from tests.waiting import HANG_SECONDS, until

from trainctl.protocol.messages import HistoryRequest, PairsRequest, RunsRequest, RunSummary
from trainctl.protocol.record.reader import RecordReader

WEIGHTS = {"pretrain": "model.safetensors", "sft": "model.safetensors", "sft-lora": "adapter_model.safetensors"} | {
    "dpo": "adapter_model.safetensors",
    "seq2seq": "adapter_model.safetensors",
    "qlora": "adapter_model.safetensors",
    "orpo": "adapter_model.safetensors",
}
TRIED = tuple(WEIGHTS) if is_soak() else ("sft-lora", "dpo")
CHECKED = ("pretrain", "sft-lora")
"""Examples that `trainctl check` reads too: one of each kind of data."""
STEPS = 2


def test_each_trains_on_real_text(agent: AgentProcess, tmp_path: Path) -> None:
    chat = make_chat_model(tmp_path / "model", hidden=64, intermediate=128)
    others = {"qlora": lambda: quantized_copy(chat, "mlx-4bit"), "seq2seq": lambda: make_seq2seq_model(tmp_path / "t5")}
    for name in TRIED:
        model, weights = others[name]() if name in others else chat, WEIGHTS[name]
        file = ROOT / "examples" / f"{name}.toml"
        change = ["--set", f"model.path={model}", "--set", f"run.steps={STEPS}", "--set", "samples.every_steps=0"]
        if name in CHECKED:
            assert call("check", file, *change).returncode == 0
        run = call_json("run", file, *change, "--connect", agent.address)["run"]
        with agent.client() as client:
            view = wait_for_end(client)
            pairs = client.ask(PairsRequest, run).evaluations
        assert (view.run, view.state, view.step) == (run, "finished", STEPS), view.reason
        assert (agent.run_paths(run).checkpoints / f"step-{STEPS}" / weights).is_file()
        assert ("eval/rewards/margins" in dict(view.eval_values)) == ("eval/entropy" in dict(view.eval_values))
        assert bool(pairs) == (name in ("dpo", "orpo"))
        assert all(pair.prompt and pair.chosen_text and pair.rejected_text for one in pairs for pair in one.pairs)


RUN = "mine-1"
EXAMPLES = Path(__file__).parents[2] / "examples" / "python"


def start_example(agent: AgentProcess, *words: str) -> "subprocess.Popen[str]":
    """Start attach.py, whose steps wait in the agent's state folder while it is down."""
    script = str(EXAMPLES / "attach.py")
    env = {**ENVIRONMENT, "TRAINCTL_GUEST_STATE": str(agent.state)}
    words = (sys.executable, script, script, "--run", RUN, *words)
    return subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(agent: AgentProcess) -> RunSummary | None:
    with agent.client() as client:
        return next((run for run in client.ask(RunsRequest).runs if run.state == "finished"), None)


def test_the_example_trains_and_is_recorded(agent: AgentProcess) -> None:
    with start_example(agent, "--steps", "60", "--batch", "16") as process:
        said, errors = process.communicate(timeout=HANG_SECONDS)
    assert (process.returncode, errors) == (0, "") and "after 60 steps" in said
    summary = until(lambda: finished(agent), what="the record")
    assert (summary.step, summary.kind) == (60, "guest")
    with agent.client() as client:
        losses = client.ask(HistoryRequest, RUN, ("loss",), columns=100).series[0].last
    assert losses[-1] < losses[0] - 0.5 and abs(losses[0] - math.log(256)) < 1e-6


def test_the_example_trains_on_without_an_agent_and_catches_up(agent: AgentProcess) -> None:
    agent.terminate()
    with start_example(agent, "--steps", "1200", "--batch", "64") as process:
        agent.start()
        with agent.client() as client:
            until(lambda: any(run.step > 0 for run in client.ask(RunsRequest).runs), what="steps of the loop")
        agent.kill()
        agent.start()
        _, errors = process.communicate(timeout=HANG_SECONDS)
    assert (process.returncode, errors) == (0, "")
    until(lambda: finished(agent), what="the record")
    with RecordReader(agent.run_paths(RUN)) as reader:
        found = [step.step for first in (0, 1000) for step in reader.steps(first, 1000)[0] if step.step > first]
    assert sorted(set(found)) == list(range(1, 1201))


@pytest.fixture
def run_toml(run_config, tmp_path):
    config = run_config(run__steps=1000)
    config["nodes"] = {"studio": {"backend": "torch", "device": "cpu", "threads": 1}}
    (tmp_path / "run.toml").write_bytes(tomli_w.dumps(config).encode())
    return tmp_path / "run.toml"


def environment(folder: Path) -> dict[str, str]:
    (folder / "tmp").mkdir()
    return {**ENVIRONMENT, "TMPDIR": str(folder / "tmp"), "TRAINCTL_STATE": str(folder / "state")}


def test_each_setting_trains_and_one_that_fails_is_a_row_that_says_why(run_toml, tmp_path):
    (tmp_path / "cluster.toml").write_text('[nodes.studio]\naddress = "ipc:///tmp/none"\nprice_per_hour = 2.0\n')
    found = call_json(
        "bench", run_toml, "--over", "batch.micro=1,2,4096", "--steps", "4", "--cluster", tmp_path / "cluster.toml"
    )
    one, two, failed = found["rows"]
    assert found["ok"] and found["node"] == "studio"
    for row in (one, two):
        assert row["ok"] and row["tokens_per_second"] > 0 and row["peak_bytes"] > 1e7
        assert row["steps_of_run"] == 1000 and row["seconds_to_end"] == pytest.approx(1000 * row["step_seconds"])
        assert row["cost"] == pytest.approx(2.0 * row["seconds_to_end"] / 3600)
    assert one["against_first"] == 1.0
    assert not failed["ok"] and "batch.micro: 4096 is above batch.global" in failed["problem"]
    assert not (tmp_path / "state").exists()


def test_ctrl_c_ends_the_run_and_its_agent_and_the_node_keeps_its_tokens(run_toml, tmp_path):
    kept = tmp_path / "state" / "studio"
    kept.mkdir(parents=True)
    with started("bench", run_toml, "--steps", "10000", env=environment(tmp_path)) as process:
        until(lambda: [*(tmp_path / "tmp").rglob("runs/*/record.db")], HANG_SECONDS, "the run")
        until(lambda: [path for path in kept.rglob("*") if path.is_file()], HANG_SECONDS, "the tokens")
        os.kill(process.pid, signal.SIGINT)
        process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 130
    assert_none_left(tmp_path)
    left = [path.name for path in (tmp_path / "tmp").iterdir()]
    assert [name for name in left if not name.startswith("torchinductor_")] == []  # torch's own folder
