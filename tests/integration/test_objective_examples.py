"""The example run file of each objective trains, from the command line, on its own data; the model is a tiny one.

`make soak` takes each of them, `make test-all` one of rows and one of pairs.
"""

from pathlib import Path

from tests.cluster.waits import wait_for_end
from tests.conftest import ROOT
from tests.integration.conftest import AgentProcess
from tests.tiers import is_soak
from tests.trainer.support.chat_model import make_chat_model
from tests.trainer.support.quantized_model import quantized_copy
from tests.trainer.support.seq2seq_model import make_seq2seq_model
from tests.tui.support.cli_calls import call, call_json

from trainctl.protocol.messages import PairsRequest

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
