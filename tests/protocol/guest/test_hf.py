"""The Trainer of transformers as a guest: rows of each step, and orders between two."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.protocol.support.line_server import LineServer
from tests.waiting import until
from torch.optim import lr_scheduler
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from trainctl import guest
from trainctl.guest import hf


def tiny_model(dropout: float = 0.1) -> GPT2LMHeadModel:
    torch.manual_seed(3)
    config = GPT2Config(
        vocab_size=32,
        bos_token_id=0,
        eos_token_id=0,
        n_positions=16,
        n_embd=8,
        n_layer=1,
        n_head=1,
        resid_pdrop=dropout,
    )
    return GPT2LMHeadModel(config)


def rows(count: int, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    chance = random.Random(seed)
    made = []
    for _ in range(count):
        ids = torch.tensor([chance.randrange(32) for _ in range(12)])
        mask = torch.ones_like(ids)
        mask[12 - chance.randrange(4) :] = 0
        made.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    return made


class Orders(TrainerCallback):
    """Has an order arrive before certain steps are over."""

    def __init__(self, server: LineServer, orders: dict[int, list[tuple[str, dict[str, Any]]]]) -> None:
        self.server, self.orders, self.ids = server, orders, list[str]()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for verb, values in self.orders.get(state.global_step, []):
            arrived = guest.attach()._orders.arrived
            until(lambda: self.server.of("hello"))
            before = len(arrived)
            self.ids.append(self.server.order(verb, f"{verb}-{state.global_step}-{len(self.ids)}", **values))
            until(lambda: len(arrived) > before)  # noqa: B023

    @property
    def outcomes(self) -> list[dict[str, Any]]:
        return [self.server.outcome(id) for id in self.ids]


def train(folder: Path, *callbacks: TrainerCallback, model: Any = None, **kwargs: Any) -> Trainer:
    optimizers = kwargs.pop("optimizers", (None, None))
    resume = kwargs.pop("resume", None)
    arguments: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 20,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_strategy": "no",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 5,
        "report_to": "none",
    }
    trainer = Trainer(
        model=model or tiny_model(),
        args=TrainingArguments(**arguments | kwargs),
        train_dataset=rows(48),
        eval_dataset=rows(8, seed=2),
        callbacks=[*callbacks],
        optimizers=optimizers,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def logged(trainer: Trainer, name: str = "loss") -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def column(server: LineServer, name: str) -> list[Any]:
    return [row.get(name, row["values"].get(name)) for _, row in sorted(server.rows.items())]


@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_each_step_has_the_loss_that_would_be_logged(server: LineServer, tmp_path: Path, accumulation: int) -> None:
    every = train(tmp_path, logging_strategy="steps", logging_steps=1, gradient_accumulation_steps=accumulation)
    callback = hf.Callback()
    train(tmp_path, callback, gradient_accumulation_steps=accumulation, logging_strategy="steps", logging_steps=500)
    assert [*server.rows] == [*range(1, 21)]
    assert column(server, "loss") == logged(every)
    assert column(server, "learning_rate") == logged(every, "learning_rate")
    assert column(server, "grad_norm") == logged(every, "grad_norm")
    assert set(column(server, "samples")) == {2 * accumulation}
    assert all(18 * accumulation <= tokens <= 24 * accumulation for tokens in column(server, "tokens"))
    assert server.of("end")[-1]["state"] == "finished"


def test_what_is_logged_and_evaluated_is_in_its_own_step(server: LineServer, tmp_path: Path) -> None:
    trainer = train(
        tmp_path,
        hf.Callback(),
        logging_strategy="steps",
        logging_steps=5,
        eval_strategy="steps",
        eval_steps=10,
        eval_on_start=True,
    )
    held_out = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
    first = held_out.pop(0)
    assert {step: row["values"]["eval_loss"] for step, row in server.rows.items() if row["values"]} == {
        1: first,
        **held_out,
    }
    assert [*held_out] == [10, 20]


@pytest.mark.parametrize("scheduler", ["linear", "reduce_lr_on_plateau"])
def test_evaluations_and_checkpoints_leave_no_trace(server: LineServer, tmp_path: Path, scheduler: str) -> None:
    def run(*callbacks: TrainerCallback) -> Trainer:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        return train(
            tmp_path / "run",
            EarlyStoppingCallback(early_stopping_patience=5),
            *callbacks,
            max_steps=60,
            lr_scheduler_type=scheduler,
            logging_strategy="steps",
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=4,
            save_strategy="steps",
            save_steps=4,
            save_total_limit=2,
            load_best_model_at_end=True,
            metric_for_best_model="loss",
        )

    bare = run()
    orders = Orders(server, {step: [("evaluate", {}), ("checkpoint", {})] for step in range(1, 21)})
    steered = run(orders, hf.Callback())
    assert logged(steered) == logged(bare) and 20 <= len(logged(bare)) < 60
    assert logged(steered, "eval_loss") == logged(bare, "eval_loss")
    assert logged(steered, "learning_rate") == logged(bare, "learning_rate")
    assert {outcome["state"] for outcome in orders.outcomes} == {"applied"} and len(orders.ids) == 40
    assert all("eval_loss" in server.rows[step]["values"] for step in range(1, 21))
    kept = sorted(int(path.name.rpartition("-")[2]) for path in (tmp_path / "run").glob("kept-checkpoint-*"))
    assert kept == [*range(1, 21)]
    assert all((tmp_path / "run" / f"kept-checkpoint-{step}" / "trainer_state.json").exists() for step in kept)
    for name, value in bare.model.state_dict().items():
        assert torch.equal(value, steered.model.state_dict()[name])


def test_a_checkpoint_that_was_ordered_is_resumed_from(server: LineServer, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", logging_strategy="steps", logging_steps=1)
    orders = Orders(server, {7: [("checkpoint", {}), ("stop", {"checkpoint": False})]})
    cut = train(tmp_path / "cut", orders, hf.Callback(), logging_strategy="steps", logging_steps=1)
    assert cut.state.global_step == 7 and server.of("end")[-1]["state"] == "stopped"
    assert orders.outcomes[0]["after"] == "checkpoint-7"
    rest = train(tmp_path / "cut", logging_strategy="steps", logging_steps=1, resume=True)
    assert logged(rest)[-13:] == logged(whole)[7:]


def test_a_stop_writes_a_checkpoint(server: LineServer, tmp_path: Path) -> None:
    orders = Orders(server, {4: [("stop", {})]})
    train(tmp_path, orders, hf.Callback())
    assert (tmp_path / "checkpoint-4" / "model.safetensors").exists() and [*server.rows][-1] == 4


def test_a_checkpoint_that_fails_leaves_nothing_and_training_goes_on(
    server: LineServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Trainer, "_save_optimizer_and_scheduler", full)
    orders = Orders(server, {3: [("checkpoint", {})], 5: [("stop", {})]})
    trainer = train(tmp_path, orders, hf.Callback())
    assert trainer.state.global_step == 20 and not [*tmp_path.glob("*checkpoint-*")]
    assert [outcome["state"] for outcome in orders.outcomes] == ["failed", "failed"]
    assert "No space left" in orders.outcomes[0]["reason"]


RATES: list[tuple[int, float, str]] = [(3, 5e-3, "scale"), (5, 0.0, "scale"), (8, 2e-2, "scale"), (11, 3e-3, "set")]
Schedule = Callable[[torch.optim.Optimizer], Any]
SCHEDULERS: dict[str, Schedule] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.95),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 4, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [4, 9], 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 6),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.3, 1.0, 12),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 30, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 15, 1e-3),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 6, 2, 1e-4),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-2, 5, cycle_momentum=False),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, 30, cycle_momentum=False),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 1e-3, 8),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 5), lr_scheduler.CosineAnnealingLR(o, 15)], [5]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(o, 0.95), lr_scheduler.ConstantLR(o, 0.5, 6)]
    ),
}
BY_NAME = {
    "linear": {},
    "cosine": {},
    "cosine_with_restarts": {"num_cycles": 2},
    "polynomial": {"power": 2.0},
    "constant": {},
    "constant_with_warmup": {},
    "inverse_sqrt": {},
    "reduce_lr_on_plateau": {"factor": 0.5, "patience": 0},
    "cosine_with_min_lr": {"min_lr": 1e-4},
    "cosine_warmup_with_min_lr": {"min_lr": 1e-4},
    "warmup_stable_decay": {"num_decay_steps": 10},
    "greedy": {"patience": 0, "min_lr": 1e-4},
}


def expected(own: list[float]) -> list[float]:
    """Return the rates that RATES makes of a schedule's own."""
    result, factor, constant = [], 1.0, None
    for step, rate in enumerate(own, 1):
        for after, value, schedule in RATES:
            if step == after + 1:
                factor, constant = (value / rate, None) if schedule == "scale" else (1.0, value)
        result.append(rate * factor if constant is None else constant)
    return result


def test_all_schedules_of_transformers_are_tried() -> None:
    untried = {"layerwise"}
    assert {kind.value for kind in transformers.SchedulerType} - untried <= {*BY_NAME}


@pytest.mark.parametrize("name", [*SCHEDULERS, *BY_NAME])
def test_a_rate_that_is_set_is_exact_under_any_schedule(server: LineServer, tmp_path: Path, name: str) -> None:
    """Also to 0 and back, and after the run is resumed from a checkpoint; and it is what the Trainer logs."""

    def run(*callbacks: TrainerCallback, **more: Any) -> Trainer:
        model = tiny_model(0.0)
        if name in SCHEDULERS:
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
            more["optimizers"] = (optimizer, SCHEDULERS[name](optimizer))
        else:
            more |= {"lr_scheduler_type": name, "lr_scheduler_kwargs": BY_NAME[name], "warmup_steps": 3}
            more |= {"optim": "sgd"}
        plateau = {"eval_strategy": "steps", "eval_steps": 2} if name in ("reduce_lr_on_plateau", "greedy") else {}
        return train(tmp_path, *callbacks, model=model, logging_strategy="steps", logging_steps=1, **plateau, **more)

    own = logged(run(), "learning_rate")
    orders = Orders(server, {step: [("set-lr", {"value": v, "schedule": s})] for step, v, s in RATES})
    orders.orders[13] = [("stop", {})]
    first = run(orders, hf.Callback())
    assert {outcome["state"] for outcome in orders.outcomes} == {"applied"}
    if name not in ("reduce_lr_on_plateau", "greedy"):  # which follow the losses
        assert logged(first, "learning_rate") == pytest.approx(expected(own)[:13], rel=0, abs=1e-12)
    assert column(server, "learning_rate") == logged(first, "learning_rate")
    server.forget()
    resumed = run(hf.Callback(), resume=True)
    assert column(server, "learning_rate") == pytest.approx([3e-3] * 7, rel=0, abs=1e-12)
    assert logged(resumed, "learning_rate")[-7:] == column(server, "learning_rate")


def test_report_to_and_a_second_callback_make_one_run(server: LineServer, tmp_path: Path) -> None:
    guest.register()
    train(tmp_path, hf.Callback(), report_to="trainctl", max_steps=4)
    assert [*server.rows] == [1, 2, 3, 4] and server.repeated == 0 and len(server.of("end")) == 1


def test_an_unknown_version_is_only_watched(
    server: LineServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf, "KNOWN", ((4, 0), (5, 1)))
    train(tmp_path, hf.Callback(), max_steps=6)
    verbs = server.of("hello")[-1]["verbs"]
    assert [*server.rows] == [1, 2, 3, 4, 5, 6]
    assert {verb for verb, why in verbs.items() if not why} == {"note"} and "only watches" in verbs["set-lr"]
    assert len([event for event in server.of("event") if "only watches" in event["text"]]) == 1


def test_the_trainer_is_left_as_it_was(server: LineServer, tmp_path: Path) -> None:
    trainer = train(tmp_path, hf.Callback(), max_steps=2)
    assert not {"training_step", "_get_grad_norm", "_get_learning_rate", "get_batch_samples"} & {*vars(trainer)}


def test_without_an_agent_it_trains_the_same(no_agent: None, tmp_path: Path) -> None:
    bare = train(tmp_path, logging_strategy="steps", logging_steps=1)
    alone = train(tmp_path, hf.Callback(), logging_strategy="steps", logging_steps=1)
    assert logged(alone) == logged(bare)
