"""Trainers of other libraries that do what a rig does: its adapters, its rows in its order, its optimizer."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.trainer.support.curves import SIZES, G

from trainctl.trainer.data.permutation import samples_at

STEPS, FEW_STEPS, RATE = 50, 15, 2e-3
"""Steps beside another library in `make soak`, and in other tiers."""
LORA = {"kind": "lora", "rank": 4, "alpha": 16.0}
FULL = {"kind": "full"}


def order(rig: Any, steps: int = STEPS) -> NDArray[np.int64]:
    """Return the number of each row of the file, as the run reads them."""
    return rig.dataset._training[samples_at(np.arange(steps * G), rig.dataset.samples, rig.config.run.seed)]


def reports(rig: Any, steps: int = STEPS, sizes: tuple[int, ...] = SIZES) -> list[Any]:
    return [rig.train(step, sizes[step % len(sizes)], learning_rate=RATE) for step in range(1, steps + 1)]


def losses(found: list[Any]) -> list[float]:
    return [report.loss_sum / report.weight for report in found]


def ours(rig: Any, steps: int = STEPS) -> list[float]:
    return losses(reports(rig, steps))


def library_model(rig: Any, *, alpha: int = 16, **options: Any) -> Any:
    """Return transformers' model, with peft's adapters if the rig has some; it has the rig's weights."""
    import torch
    from peft import LoraConfig, get_peft_model

    from trainctl.trainer.model import torch_model

    model: Any = torch_model.read_model(Path(rig.config.model.path), "run.toml")
    if rig.config.adapter.kind != "full":
        model = get_peft_model(model, LoraConfig(r=4, lora_alpha=alpha, target_modules="all-linear", **options))
    named = {name.replace(".default", ""): p for name, p in model.named_parameters() if p.requires_grad}
    values = rig.backend.copy_out("weights")
    assert named.keys() == values.keys()
    for name, parameter in named.items():
        parameter.data.copy_(torch.from_numpy(values[name]))
    return model


def arguments(kind: Any, folder: Path, steps: int = STEPS, batch: int = 4, **changes: Any) -> Any:
    """Return options of transformers' Trainer, or of TRL's, that make it do what the run file says."""
    options: dict[str, Any] = {
        "report_to": [],
        "use_cpu": True,
        "max_steps": steps,
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": G // batch,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.1,
        "adam_beta2": 0.999,
        "max_grad_norm": 1.0,
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "bf16": False,
        "dataloader_pin_memory": False,
    }
    return kind(str(folder), **options | changes)


def trained(kind: Any, rows: list[Any], **parts: Any) -> Any:
    """Train on the rows in order. The trainer's `losses` are the steps', each the sum over its micro-batches' parts."""
    import datasets
    import torch

    class Ordered(kind):  # type: ignore[misc]
        def _get_train_sampler(self, *dataset: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def training_step(self, *arguments: Any, **options: Any) -> Any:
            loss = super().training_step(*arguments, **options)
            self.micro_losses.append(loss.item())
            return loss

    made = Ordered(train_dataset=datasets.Dataset.from_list(rows), **parts)
    made.micro_losses = []
    made.train()
    each = made.args.gradient_accumulation_steps
    made.losses = [sum(made.micro_losses[step : step + each]) for step in range(0, len(made.micro_losses), each)]
    return made
