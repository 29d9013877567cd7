"""A real model trains on torch and MLX together, and its exports answer as the libraries do.

Random weights hide what a trained model's large activations show. `python -m tools.real_model build/real-model` makes
it. On two cores the tests take about 20 minutes, most of them in MLX's products.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests import lacking
from tests.cluster.run_files import on
from tests.cluster.waits import all_steps, wait_for_end, wait_for_step
from tests.integration.support.clusters import Cluster, have_back, kill_trainer
from tests.integration.support.reference import one_rank_curve
from tests.tui.support.cli_calls import call_process

from trainctl.trainer.exports.quantize_model import quantize

pytestmark = [pytest.mark.tier("soak"), pytest.mark.needs("real-model"), pytest.mark.timeout(3600)]
REAL = lacking.ROOT / "build" / "real-model"
STEPS, GLOBAL, PROMPTS, ANSWER_TOKENS = 6, 8, 2, 12
PAIR = ("alpha", "gamma")


@pytest.mark.parametrize("base", ["whole", "mlx-4bit"])
def test_a_mixed_run_has_the_losses_of_one_rank(
    cluster: Cluster, run_config: Callable[..., dict[str, Any]], tmp_path: Path, base: str
) -> None:
    model = {"path": str(REAL / "model")}
    if base != "whole":
        quantize(model["path"], base, None, tmp_path / base)
        model = {"path": str(tmp_path / base), "base": base}
    data = {"path": str(REAL / "rows.jsonl"), "kind": "rows", "sequence_length": 96, "held_out": 0.05}
    changes: dict[str, Any] = {
        "run__steps": STEPS, "model": model, "data": data, "batch": {"global": GLOBAL, "micro": 1},
        "adapter": {"kind": "lora", "rank": 16}, "optimizer": {"learning_rate": 2e-4, "schedule": "constant"},
        "checkpoint": {"at_end": True}, "group": {"first_shares": "even"},
    }  # fmt: skip
    shares = {"alpha": {"share": GLOBAL - 1}, "gamma": {"share": 1, "backend": "mlx"}}
    with cluster.client(timeout_seconds=900) as client:
        config = run_config(**changes, nodes=on(*PAIR, **shares))
        run = client.send("start-run", {"config": config}, timeout_seconds=900).run
        wait_for_step(client, 2, 900)
        assert (
            client.send("rebalance", {"shares": {"alpha": GLOBAL - 2, "gamma": 2}}, timeout_seconds=900).state
            == "applied"
        )
        kill_trainer(cluster, "alpha")
        have_back(client, *PAIR)
        view = wait_for_end(client, 1800)
        assert (view.state, view.step) == ("finished", STEPS), view.reason
        steps = all_steps(client)
    alone = one_rank_curve(run_config(**changes, nodes=on("alpha", alpha={"threads": 2})))
    losses = [(step.loss, other.loss) for step, other in zip(steps, alone, strict=True)]
    print(base, losses)
    assert max(abs(mixed - one) for mixed, one in losses) < 1e-3
    assert_exports_answer_alike(cluster, str(run), tmp_path)


def assert_exports_answer_alike(cluster: Cluster, run: str, folder: Path) -> None:
    """By `score --answers` on the cluster, transformers and mlx-lm: greedy answers to some of the questions."""
    rows = [json.loads(line)["messages"][:1] for line in (REAL / "rows.jsonl").read_text("utf-8").splitlines()]
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows[:PROMPTS]), "utf-8")
    words = ["--answers", "--max-tokens", str(ANSWER_TOKENS), "--nodes", "alpha", "--cluster", str(cluster.file)]
    scored = call_process("score", run, prompts, *words)
    assert scored.returncode == 0, scored.stderr
    answers = [json.loads(line)["answer"] for line in scored.stdout.splitlines()]
    directory = str(cluster.run_paths("alpha", run).directory)
    fused = folder / "fused"
    done = call_process("model", "export", directory, "--to", "fused", "--dtype", "float32", "--output", fused)
    assert done.returncode == 0, done.stderr
    assert answers_of_transformers(fused, rows[:PROMPTS]) == answers
    assert answers_of_mlx(fused, rows[:PROMPTS]) == answers


def answers_of_transformers(model: Path, rows: list[Any]) -> list[str]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    answers = []
    for row in rows:
        asked = tokenizer.apply_chat_template(row, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        whole = loaded.generate(**asked, max_new_tokens=ANSWER_TOKENS, do_sample=False)[0]
        answers.append(tokenizer.decode(whole[asked["input_ids"].shape[1] :], skip_special_tokens=True))
    return answers


def answers_of_mlx(model: Path, rows: list[Any]) -> list[str]:
    import mlx.core as mx
    from mlx_lm import generate, load

    loaded, tokenizer, *_ = load(str(model))
    loaded.set_dtype(mx.float32)
    prompts = [tokenizer.apply_chat_template(row, add_generation_prompt=True) for row in rows]
    return [generate(loaded, tokenizer, prompt, max_tokens=ANSWER_TOKENS) for prompt in prompts]
