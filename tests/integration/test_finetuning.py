"""Fine-tuning on a cluster, of small and real models: one curve through changes and a kill, and exports that answer.

Random weights hide what a trained model's large activations show: `python -m tools.real_model build/real-model` makes
one. On two cores its tests take about 20 minutes, most of them in MLX's products.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests import lacking
from tests.cluster.run_files import FOREVER, NODES, on
from tests.cluster.waits import all_steps, wait_for_end, wait_for_step
from tests.integration.support.clusters import Cluster, have_back, kill_trainer
from tests.integration.support.exactness import check_ledger, worst_deviation
from tests.integration.support.reference import one_rank_curve
from tests.tiers import is_soak
from tests.trainer.support.chat_model import make_chat_model, questions, write_rows
from tests.tui.support.cli_calls import call_process

from trainctl.protocol import messages as m
from trainctl.trainer.exports.quantize_model import quantize

STEPS = 40
LORA = {"kind": "lora", "rank": 4, "alpha": 16.0}
MIXED = {"gamma": {"backend": "mlx"}}
SOAK = is_soak()
DRAWS = 4
"""Changes of the first weights, whose largest effect limits that of faults."""
FULL = {"kind": "full"}
CASES = [
    *([pytest.param(LORA, MIXED, 5e-5, "", id="lora, mixed")] * SOAK),
    *([pytest.param(FULL, {}, 1e-5, "", id="full, torch")] * SOAK),
    *([pytest.param(LORA, {}, 1e-5, "", id="lora, torch")] * SOAK),
    *([pytest.param(FULL, MIXED, 5e-5, "", id="full, mixed")] * SOAK),
]
"""Adapter, nodes' backends, deviation allowed, format of a quantized base: `make test-all` takes one on a quantized
base, `make soak` all. Runs of all weights are disturbed in test_cluster_group and test_faults too."""
QUANTIZED = [
    pytest.param(LORA, MIXED, 5e-5, "mlx-4bit", id="lora on mlx-4bit, mixed"),
    *([pytest.param(LORA, MIXED, 5e-5, "nvfp4", id="lora on nvfp4, mixed")] * SOAK),
]
Make = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`model`, quantized ones by their format, and `rows.jsonl` with completions of unlike lengths."""
    folder = tmp_path_factory.mktemp("finetuning")
    make_chat_model(folder / "model")
    wide = make_chat_model(folder / "wide", hidden=64, intermediate=128)
    for form in ("mlx-4bit", *["nvfp4"] * SOAK):
        quantize(str(wide), form, None, folder / form)
    write_rows(folder / "rows.jsonl", questions(150))
    return folder


@pytest.fixture
def make(run_config: Make, rows: Path) -> Make:
    def config(**changes: Any) -> dict[str, Any]:
        data = {"path": str(rows / "rows.jsonl"), "kind": "rows", "sequence_length": 128, "held_out": 0.05}
        told: dict[str, Any] = {"model__path": str(rows / "model"), "data": data, "group": {"first_shares": "even"}}
        rate = {"learning_rate": 1e-3, "schedule": "constant"}
        told |= {"run__steps": STEPS, "optimizer": rate, "checkpoint": {"every_steps": 10}}
        return run_config(**(told | changes))

    return config


@pytest.mark.tier("test")
@pytest.mark.parametrize(("adapter", "mix", "tolerance", "base"), [*CASES, *QUANTIZED])
def test_two_rebalances_two_resizes_and_a_kill_do_not_bend_the_curve(
    cluster: Cluster, make: Make, rows: Path, adapter: dict[str, Any], mix: dict[str, Any], tolerance: float, base: str
) -> None:
    model = {} if not base else {"model__path": str(rows / base), "model__base": base}
    steps = disturbed_run(cluster, make(adapter=adapter, nodes=on(*NODES, **mix), **model))
    alone = one_rank_curve(make(adapter=adapter, nodes=on("alpha", alpha={"micro": 6}), **model))
    assert steps[0].loss is not None and steps[-1].loss is not None
    assert steps[0].loss - steps[-1].loss > 1000 * tolerance, "it has to learn for this to mean anything"
    found = worst_deviation(steps, alone)
    print(f"worst relative deviation {found:.1e}")
    assert found < tolerance


@pytest.mark.parametrize(("adapter", "mix", "tolerance", "base"), CASES)
def test_300_disturbed_steps_deviate_less_than_after_a_tiny_change_of_the_first_weights(
    cluster: Cluster, make: Make, adapter: dict[str, Any], mix: dict[str, Any], tolerance: float, base: str
) -> None:
    """A long run amplifies rounding, so what it may deviate by is measured: by the same run on one rank from weights
    that differ by 1e-6 of themselves, which is another amount in each draw. Adapters learn at four times the rate of
    all weights: at the same rate they amplify nothing, and both deviations are the rounding of the loss."""
    rate = {"learning_rate": 1e-3 if adapter == FULL else 4e-3, "schedule": "constant"}
    whole = {"run__steps": 300, "adapter": adapter, "optimizer": rate}
    steps = disturbed_run(cluster, make(**whole, nodes=on(*NODES, **mix)))
    config = make(**whole, nodes=on("alpha", alpha={"micro": 6}))
    alone = one_rank_curve(config)
    allowed = max(worst_deviation(one_rank_curve(config, None, 1e-6, draw), alone) for draw in range(1, DRAWS + 1))
    found = worst_deviation(steps, alone)
    print(f"worst relative deviation {found:.1e}; after a change of 1e-6: {allowed:.1e}")
    assert found <= allowed


if not SOAK:
    del test_300_disturbed_steps_deviate_less_than_after_a_tiny_change_of_the_first_weights


def disturbed_run(cluster: Cluster, config: dict[str, Any]) -> list[m.StepCommitted]:
    """The steps of a run on three nodes with two rebalances, two resizes and a kill, each sample done once."""
    with cluster.client() as client:
        begun = client.send("start-run", {"config": config})
        assert begun.state == "applied", begun.reason
        for step, verb, args, node in (
            (3, "rebalance", {"shares": {"alpha": 7, "beta": 3, "gamma": 2}}, None),
            (6, "resize-batch", {"micro": 1}, "gamma"),
            (9, "rebalance", {"shares": {"alpha": 2, "beta": 4, "gamma": 6}}, None),
            (12, "resize-batch", {"micro": 3}, "beta"),
        ):
            wait_for_step(client, step)
            assert client.send(verb, args, node=node).state == "applied"
        kill_trainer(cluster, "beta")
        have_back(client, "beta")
        view = wait_for_end(client)
        assert (view.state, view.step) == ("finished", config["run"]["steps"]), view.reason
        steps = all_steps(client, begun.run)
    check_ledger(cluster, begun.run, len(steps), was_lost=["beta"])
    return steps


def test_an_adapter_s_run_resumes_from_its_checkpoint_and_peft_opens_it(cluster: Cluster, make: Make) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    config = make(adapter=LORA, nodes=on("alpha"), run__steps=FOREVER)
    with cluster.client() as client:
        begun = client.send("start-run", {"config": config})
        wait_for_step(client, 12)
        assert client.send("stop", {"checkpoint": True}).state == "applied"
        stopped = wait_for_end(client)
        (folder,) = [path for path in cluster.run_paths("alpha", begun.run).checkpoints.iterdir()
                     if path.name == f"step-{stopped.step}"]  # fmt: skip
        assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= {
            file.name for file in folder.iterdir()
        }
        loader: Any = AutoModelForCausalLM
        opened: Any = PeftModel.from_pretrained(loader.from_pretrained(config["model"]["path"]), str(folder))
        assert any(parameter.any() for name, parameter in opened.named_parameters() if "lora_B" in name)
        resumed = client.send("start-run", {"resume": begun.run})
        assert (resumed.state, resumed.step) == ("applied", stopped.step + 1), resumed.reason
        wait_for_step(client, stopped.step + 20)
        assert client.send("stop", {"checkpoint": False}).state == "applied"
        assert wait_for_end(client).state == "stopped"
        steps = all_steps(client, begun.run)
    assert len(steps) >= stopped.step + 20
    assert worst_deviation(steps, one_rank_curve(config, len(steps))) < 1e-5


REAL = lacking.ROOT / "build" / "real-model"
REAL_STEPS, GLOBAL, PROMPTS, ANSWER_TOKENS = 6, 8, 2, 12
PAIR = ("alpha", "gamma")


@pytest.mark.tier("soak")
@pytest.mark.needs("real-model")
@pytest.mark.timeout(3600)
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
        "run__steps": REAL_STEPS, "model": model, "data": data, "batch": {"global": GLOBAL, "micro": 1},
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
        assert (view.state, view.step) == ("finished", REAL_STEPS), view.reason
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
