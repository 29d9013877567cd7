"""Trainers of TRL as guests: each step has the loss that was trained on, also where TRL logs zeros."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tests.protocol.support.line_server import LineServer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from trainctl.guest import hf

WORDS = [f"w{number}" for number in range(28)]
EVERY_STEP = {"logging_strategy": "steps", "logging_steps": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write a tiny model; return its folder, from which TRL also loads references."""
    torch.manual_seed(3)
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"vocab_size": 32, "n_positions": 64, "n_embd": 8, "n_layer": 1, "n_head": 1}
    config = GPT2Config(**sizes, **none, bos_token_id=1, eos_token_id=2)
    folder = str(tmp_path_factory.mktemp("model"))
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def tokenizer() -> PreTrainedTokenizerFast:
    words = {word: number for number, word in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", *WORDS])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def text(chance: random.Random) -> str:
    return " ".join(chance.choice(WORDS) for _ in range(chance.randrange(4, 10)))


def examples(kind: str) -> Dataset:
    chance = random.Random(1)
    names = {"sft": ("text",), "dpo": ("prompt", "chosen", "rejected"), "grpo": ("prompt",)}[kind]
    return Dataset.from_list([{name: text(chance) for name in names} for _ in range(24)])


def train(kind: str, model: str, folder: Path, *callbacks: hf.Callback, **kwargs: Any) -> Any:
    config, trainer = {
        "sft": (SFTConfig, SFTTrainer),
        "dpo": (DPOConfig, DPOTrainer),
        "grpo": (GRPOConfig, TappedGRPOTrainer),
    }[kind]
    common: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "logging_strategy": "steps",
        "logging_steps": 500,
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
    }
    more = {"reward_funcs": [reward]} if kind == "grpo" else {}
    made = trainer(
        model=model,
        args=config(**common | kwargs),
        train_dataset=examples(kind),
        processing_class=tokenizer(),
        callbacks=[*callbacks],
        **more,
    )
    made.train()
    return made


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(completion.split()))) for completion in completions]


class TappedGRPOTrainer(GRPOTrainer):
    """Keeps what its loss is made from."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.by_hand: list[float] = []

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        """Work the micro-batch's loss out again: -A for each token on the policy's own samples, plus beta times KL."""
        mask = inputs["completion_mask"].double()
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        attended = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=attended).logits[:, -mask.shape[1] - 1 : -1].double()
        logps = logits.log_softmax(-1).gather(-1, inputs["completion_ids"][..., None])[..., 0]
        gap = inputs["ref_per_token_logps"].double() - logps
        per_token = -inputs["advantages"].double()[:, None] + self.beta * (gap.exp() - gap - 1)
        per_row = (per_token * mask).sum(-1) / mask.sum(-1).clamp(min=1)
        self.by_hand.append(float(per_row.mean()) / self.current_gradient_accumulation_steps)
        return super()._compute_loss(model, inputs)


def column(server: LineServer, name: str) -> list[Any]:
    return [row[name] for _, row in sorted(server.rows.items())]


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_each_step_has_the_loss_that_would_be_logged(server: LineServer, model: str, tmp_path: Path, kind: str) -> None:
    bare = train(kind, model, tmp_path, **EVERY_STEP)
    train(kind, model, tmp_path, hf.Callback())
    logged = [entry["loss"] for entry in bare.state.log_history if "loss" in entry]
    assert column(server, "loss") == pytest.approx(logged, rel=0, abs=1e-6) and len(logged) == 6
    assert all(tokens > 0 for tokens in column(server, "tokens"))


def test_grpo_has_the_loss_worked_out_by_hand(server: LineServer, model: str, tmp_path: Path) -> None:
    own = {"num_generations": 4, "max_completion_length": 6, "beta": 0.1, "loss_type": "grpo", "temperature": 1.0}
    trainer = train("grpo", model, tmp_path, hf.Callback(), per_device_train_batch_size=4, **own, **EVERY_STEP)
    hand = [first + second for first, second in zip(trainer.by_hand[::2], trainer.by_hand[1::2], strict=True)]
    assert column(server, "loss") == pytest.approx(hand, rel=0, abs=1e-6) and len(hand) == 6
    assert any(abs(loss) > 1e-6 for loss in hand)
    assert all("user:reward" in row["values"] for row in server.rows.values())
