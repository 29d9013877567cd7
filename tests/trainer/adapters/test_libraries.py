"""Supervised fine-tuning draws the curves of the libraries people use: same weights, same rows, 50 steps in float32.

Ours runs on one rank whose micro-batch changes; theirs on a micro-batch of their own. All read the rows in our order.
`make test` has 15 steps of TRL's, `make soak` 50.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.trainer.support.chat_model import make_chat_model, questions, tokenizer, write_rows
from tests.trainer.support.curves import SIZES, worst

from trainctl.trainer.backends import torch_model
from trainctl.trainer.data.permutation import samples_at

STEPS, FEW_STEPS = 50, 15
G = 12
RATE = 2e-3
LORA = {"kind": "lora", "rank": 4, "alpha": 16.0}
Start = Callable[..., Any]


@pytest.fixture
def start(new_rig: Callable[..., Any], tmp_path: Path) -> Start:
    """A rank on rows with a model of its own: `start("torch", rows)`."""

    def make(backend: str, rows: list[Any], **changes: Any) -> Any:
        model = make_chat_model(tmp_path / "model")
        data = {"path": str(write_rows(tmp_path / "rows.jsonl", rows)), "kind": "rows", "sequence_length": 256}
        optimizer = {"learning_rate": RATE, "weight_decay": 0.1, "beta2": 0.999}
        settings = {"model__path": str(model), "data": data, "optimizer": optimizer}
        return new_rig(backend, **(settings | changes))

    return make


def ours(rig: Any, steps: int = STEPS) -> list[float]:
    reports = []
    for step in range(1, steps + 1):
        plan = rig.plan(step, SIZES[step % len(SIZES)], learning_rate=RATE)
        reports.append(rig.executor.train(plan, time.perf_counter()))
    return [report.loss_sum / report.weight for report in reports]


def order(rig: Any, steps: int = STEPS) -> NDArray[np.int64]:
    """The number of each row of the file, as the run reads them."""
    return rig.dataset._training[samples_at(np.arange(steps * G), rig.dataset.samples, rig.config.run.seed)]


def copied(model: Any, values: dict[str, Any]) -> Any:
    """The model with the adapters' matrices that ours begins with."""
    import torch

    named = {name.replace(".default", ""): p for name, p in model.named_parameters() if p.requires_grad}
    assert named.keys() == values.keys()
    for name, parameter in named.items():
        parameter.data.copy_(torch.from_numpy(values[name]))
    return model


def arguments(kind: Any, folder: Path, steps: int = STEPS, **changes: Any) -> Any:
    """Options of transformers' Trainer and of TRL's that make it do what the run file says."""
    return kind(
        str(folder), report_to=[], use_cpu=True, max_steps=steps, per_device_train_batch_size=4,
        gradient_accumulation_steps=G // 4, learning_rate=RATE, lr_scheduler_type="constant", weight_decay=0.1,
        adam_beta2=0.999, max_grad_norm=1.0, save_strategy="no", logging_strategy="no", disable_tqdm=True, bf16=False,
        dataloader_pin_memory=False, **changes,
    )  # fmt: skip


def trained(kind: Any, **parts: Any) -> list[float]:
    """The losses of a trainer that reads its rows in order: a step's is the sum over its micro-batches' parts."""
    import torch

    class Ordered(kind):  # type: ignore[misc]
        losses: list[float]

        def _get_train_sampler(self, *dataset: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def training_step(self, *arguments: Any, **options: Any) -> Any:
            loss = super().training_step(*arguments, **options)
            self.losses.append(loss.item())
            return loss

    made = Ordered(**parts)
    made.losses = []
    made.train()
    return [sum(made.losses[step : step + G // 4]) for step in range(0, len(made.losses), G // 4)]


@pytest.mark.parametrize("steps", [FEW_STEPS, pytest.param(STEPS, marks=pytest.mark.tier("soak"))])
def test_lora_is_trl_s(start: Start, tmp_path: Path, steps: int) -> None:
    """Prompts with completions of unlike lengths, tokenised by each side itself."""
    import datasets
    import trl
    from peft import LoraConfig, get_peft_model

    rows = questions(90)
    rig = start("torch", rows, adapter=LORA)
    config = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    base: Any = torch_model.read_model(Path(rig.config.model.path), "run.toml")
    model = copied(get_peft_model(base, config), rig.backend.copy_of("weights"))
    theirs = trained(
        trl.SFTTrainer, model=model, args=arguments(trl.SFTConfig, tmp_path / "trl", steps, max_length=257),
        train_dataset=datasets.Dataset.from_list([rows[index] for index in order(rig, steps)]),
        processing_class=tokenizer(),
    )  # fmt: skip
    assert theirs[0] / theirs[-1] - 1 > 1000 * 1e-5, "it has to learn for this to mean anything"
    assert worst(ours(rig, steps), theirs) < 1e-5


@pytest.mark.tier("soak")
@pytest.mark.parametrize(
    "adapter", [{"kind": "full"}, LORA, LORA | {"kind": "rslora"}], ids=lambda table: table["kind"]
)
def test_each_adapter_is_that_of_peft_and_transformers_trainer(
    start: Start, tmp_path: Path, adapter: dict[str, Any]
) -> None:
    import datasets
    import transformers
    from peft import LoraConfig, get_peft_model

    rig = start("torch", questions(90), adapter=adapter)
    model: Any = torch_model.read_model(Path(rig.config.model.path), "run.toml")
    if adapter["kind"] != "full":
        config = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", use_rslora=adapter["kind"] == "rslora")
        model = copied(get_peft_model(model, config), rig.backend.copy_of("weights"))
    rows = [rig.dataset._sample(int(index)) for index in order(rig)]
    labelled = [
        {"input_ids": tokens.tolist(), "labels": [-100, *np.where(flags, tokens[1:], -100).tolist()]}
        for tokens, flags in rows
    ]
    theirs = trained(
        transformers.Trainer, model=model, args=arguments(transformers.TrainingArguments, tmp_path / "plain"),
        train_dataset=datasets.Dataset.from_list(labelled),
        data_collator=transformers.DataCollatorForSeq2Seq(tokenizer(), label_pad_token_id=-100),
    )  # fmt: skip
    assert worst(ours(rig), theirs) < 1e-5


def test_lora_is_mlx_lm_s(start: Start, tmp_path: Path) -> None:
    """On rows of one length: mlx-lm's loss counts a target of padding in each row that has any."""
    import mlx.core as mx
    import mlx.optimizers as optim
    from mlx_lm.tuner.trainer import TrainingArgs, train
    from mlx_lm.tuner.utils import linear_to_lora_layers

    text = Path(json.__file__).read_text("utf-8")
    made = tokenizer()
    ids = made(text)["input_ids"]
    rows = [{"tokens": ids[start : start + 33]} for start in range(0, 60 * 32, 32)]
    rig = start(
        "mlx", rows, adapter=LORA, data__kind="samples", optimizer__clip_norm=0.0, optimizer__weight_decay=0.0
    )  # fmt: skip
    from trainctl.trainer.backends.mlx_model import read_model

    model: Any = read_model(Path(rig.config.model.path), "run.toml", 256)
    model.freeze()
    linear_to_lora_layers(model, 2, {"rank": 4, "scale": 4.0, "dropout": 0.0, "keys": None})
    first = rig.backend.copy_of("weights")
    held = {name.removeprefix("base_model.model."): array for name, array in first.items()}
    model.load_weights(
        [(name.replace(".lora_A.weight", ".lora_a").replace(".lora_B.weight", ".lora_b"), mx.array(array.T))
         for name, array in held.items()], strict=False,
    )  # fmt: skip
    batches = order(rig).reshape(STEPS, G)

    def in_order(**options: Any) -> Any:
        for chosen in batches:
            batch = rig.dataset._batch(chosen)
            whole = np.concatenate([batch.inputs, batch.targets[:, -1:]], axis=1)
            yield mx.array(whole), mx.array([[0, whole.shape[1] - 1]] * len(whole))

    found: list[float] = []

    class Losses:
        def on_train_loss_report(self, report: dict[str, Any]) -> None:
            found.append(report["train_loss"])

        def on_val_loss_report(self, report: dict[str, Any]) -> None: ...

    mx.disable_compile()  # on a CPU a compiler would run for each new kernel
    train(
        model, optim.AdamW(RATE, betas=[0.9, 0.999], weight_decay=0.0, bias_correction=True), train_dataset=[],
        args=TrainingArgs(
            batch_size=G, iters=STEPS, steps_per_report=1, steps_per_save=10**6,
            adapter_file=str(tmp_path / "adapters.safetensors"),
        ), iterate_batches=in_order, training_callback=Losses(),
    )  # fmt: skip
    mx.enable_compile()
    assert len(found) == STEPS and found[0] / found[-1] - 1 > 100 * 1e-4
    assert worst(ours(rig), found) < 1e-4
