"""Supervised fine-tuning draws the curves of the libraries people use: same weights, same rows, 50 steps in float32.

Ours runs on one rank whose micro-batch changes; theirs on a micro-batch of their own. All read the rows in our order.
`make test` has 15 steps of TRL's, `make test-all` mlx-lm's, `make soak` 50 of each.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.trainer.support.chat_model import questions, tokenizer, write_rows
from tests.trainer.support.curves import G, worst
from tests.trainer.support.library_trainers import (
    FEW_STEPS,
    FULL,
    LORA,
    RATE,
    STEPS,
    arguments,
    library_model,
    order,
    ours,
    trained,
)

ROWS = questions(90)
Start = Callable[..., Any]


@pytest.fixture
def start(new_rig, chat_model, tmp_path):
    """A rank on rows: `start("torch", ROWS)`."""

    def make(backend, rows, **changes):
        data = {"path": str(write_rows(tmp_path / "rows.jsonl", rows)), "kind": "rows", "sequence_length": 256}
        optimizer = {"learning_rate": RATE, "weight_decay": 0.1, "beta2": 0.999}
        settings = {"model__path": str(chat_model), "data": data, "optimizer": optimizer}
        return new_rig(backend, **(settings | changes))

    return make


@pytest.mark.parametrize("steps", [FEW_STEPS, pytest.param(STEPS, marks=pytest.mark.tier("soak"))])
def test_lora_is_trl_s(start, tmp_path, steps):
    import trl

    rig = start("torch", ROWS, adapter=LORA)
    rows, model = [ROWS[index] for index in order(rig, steps)], library_model(rig, task_type="CAUSAL_LM")
    args = arguments(trl.SFTConfig, tmp_path / "trl", steps, max_length=257)
    theirs = trained(trl.SFTTrainer, rows, model=model, args=args, processing_class=tokenizer()).losses
    assert theirs[0] / theirs[-1] - 1 > 1000 * 1e-5, "it has to learn for this to mean anything"
    assert worst(ours(rig, steps), theirs) < 1e-5


@pytest.mark.tier("soak")
@pytest.mark.parametrize("adapter", [FULL, LORA, LORA | {"kind": "rslora"}], ids=lambda table: table["kind"])
def test_each_adapter_is_that_of_peft_and_transformers_trainer(start, tmp_path, adapter):
    import transformers

    rig = start("torch", ROWS, adapter=adapter)
    rows = [
        {"input_ids": tokens.tolist(), "labels": [-100, *np.where(flags, tokens[1:], -100).tolist()]}
        for tokens, flags in (rig.dataset._sample(int(index)) for index in order(rig))
    ]
    model = library_model(rig, use_rslora=adapter["kind"] == "rslora")
    args = arguments(transformers.TrainingArguments, tmp_path / "plain")
    collator = transformers.DataCollatorForSeq2Seq(tokenizer(), label_pad_token_id=-100)
    theirs = trained(transformers.Trainer, rows, model=model, args=args, data_collator=collator).losses
    assert worst(ours(rig), theirs) < 1e-5


@pytest.mark.tier("all")
def test_lora_is_mlx_lm_s(start, tmp_path):
    """On rows of one length: mlx-lm's loss counts a target of padding in each row that has any."""
    import mlx.core as mx
    import mlx.optimizers as optim
    from mlx_lm.tuner.trainer import TrainingArgs, train
    from mlx_lm.tuner.utils import linear_to_lora_layers

    from trainctl.trainer.model.mlx_model import read_model

    ids = tokenizer()(Path(json.__file__).read_text("utf-8"))["input_ids"]
    rows = [{"tokens": ids[start : start + 33]} for start in range(0, 60 * 32, 32)]
    plain = {"optimizer__clip_norm": 0.0, "optimizer__weight_decay": 0.0}
    rig = start("mlx", rows, adapter=LORA, data__kind="samples", **plain)
    model: Any = read_model(Path(rig.config.model.path), "run.toml", 256)
    model.freeze()
    linear_to_lora_layers(model, 2, {"rank": 4, "scale": 4.0, "dropout": 0.0, "keys": None})
    names = {name: name.removeprefix("base_model.model.") for name in rig.backend.shapes}
    names = {
        name: own.replace(".lora_A.weight", ".lora_a").replace(".lora_B.weight", ".lora_b")
        for name, own in names.items()
    }
    first = rig.backend.copy_out("weights")
    model.load_weights([(names[name], mx.array(array.T)) for name, array in first.items()], strict=False)

    def in_order(**options):
        for chosen in order(rig).reshape(STEPS, G):
            batch = rig.dataset._batch(chosen)
            whole = np.concatenate([batch.inputs, batch.targets[:, -1:]], axis=1)
            yield mx.array(whole), mx.array([[0, whole.shape[1] - 1]] * len(whole))

    found: list[float] = []

    class Losses:
        def on_train_loss_report(self, report):
            found.append(report["train_loss"])

        def on_val_loss_report(self, report): ...

    adapters = str(tmp_path / "adapters.safetensors")
    args = TrainingArgs(batch_size=G, iters=STEPS, steps_per_report=1, steps_per_save=10**6, adapter_file=adapters)
    optimizer = optim.AdamW(RATE, betas=[0.9, 0.999], weight_decay=0.0, bias_correction=True)
    mx.disable_compile()  # on a CPU a compiler would run for each new kernel
    train(model, optimizer, train_dataset=[], args=args, iterate_batches=in_order, training_callback=Losses())
    mx.enable_compile()
    assert len(found) == STEPS and found[0] / found[-1] - 1 > 100 * 1e-4
    assert worst(ours(rig), found) < 1e-4
