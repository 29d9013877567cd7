"""One rank of a training loop that is attached: `python guest_rank.py LOOP`, with torchrun's variables.

Prints one JSON line at its end: the rank, its steps with the learning rates used, its checkpoints and evaluations, a
hash of the weights, and why the ranks no longer agree. Loops of torch end at a stop, or once OUTPUT/end exists. With
ALONE=1 each rank attaches a run of its own.
"""

import hashlib
import itertools
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainctl import guest
from trainctl.guest import run as guest_run

RANK = int(os.environ["RANK"])
PACE = 0.002
said: dict[str, Any] = {"rank": RANK, "rates": [], "saved": []}


def tell(model: torch.nn.Module, run: guest.Run | None = None) -> None:
    weights = [getattr(value, "full_tensor", lambda value=value: value)() for value in model.state_dict().values()]
    digest = hashlib.sha256(b"".join(value.detach().numpy().tobytes() for value in weights))
    said.update(hash=digest.hexdigest(), ended=run._group._member.ended if run and run._group else "")
    print(json.dumps(said), flush=True)


def is_over() -> bool:
    """Return whether the file is there that ends the loop, on all ranks alike."""
    flag = torch.tensor(float(Path(os.environ["OUTPUT"], "end").exists()))
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)


def data(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(8, 16, generator=generator)
    return inputs, inputs.sum(1, keepdim=True)


def torch_loop(kind: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ.get("COLLECTIVE_SECONDS", "60"))))
    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 1))
    if kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    elif kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    if kind == "accelerate":
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        backward = accelerator.backward
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        backward = torch.Tensor.backward
    run = guest.attach("ranks", optimizer=optimizer, checkpoint=lambda: said["saved"].append(run._last))
    generator = torch.Generator().manual_seed(RANK)
    for step in itertools.count():
        if step % 20 == 0 and is_over():
            break
        inputs, wanted = data(generator)
        loss = (model(inputs) - wanted).pow(2).mean()
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        said["rates"].append(run._rate.used if run._rate else None)
        time.sleep(PACE)
        if run.step(loss=loss, samples=len(inputs)):
            break
    tell(model, run)
    run.close()
    dist.barrier()
    dist.destroy_process_group()


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Random rows with a number to learn."""

    def __len__(self) -> int:
        return 80_000

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        inputs = torch.randn(16, generator=torch.Generator().manual_seed(place))
        time.sleep(PACE / 4)
        return {"inputs": inputs, "labels": inputs.sum()}


class Model(torch.nn.Module):
    """A linear model with the Trainer's interface."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(16, 1)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = self.layer(inputs).squeeze(1)
        return {"loss": (outputs - labels).pow(2).mean(), "logits": outputs}


def hf() -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from trainctl.guest import hf as guest_hf

    class Note(TrainerCallback):
        def on_optimizer_step(self, *_: Any, optimizer: Any, **__: Any) -> None:
            said["rates"].append(optimizer.param_groups[0]["lr"])

        def on_save(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            said["saved"].append(state.global_step)

    args = TrainingArguments(
        output_dir=os.environ["OUTPUT"], per_device_train_batch_size=2, max_steps=10_000, report_to="none",
        save_strategy="no", use_cpu=True, logging_steps=500, disable_tqdm=True, dataloader_num_workers=0,
    )  # fmt: off
    trainer = Trainer(Model(), args, train_dataset=Rows(), callbacks=[guest_hf.Callback(), Note()])
    trainer.train()
    tell(trainer.model)


def lightning() -> None:
    from lightning import LightningModule, Trainer

    from trainctl.guest import lightning as guest_lightning

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: Any) -> torch.Tensor:
            said["rates"].append(self.optimizers().param_groups[0]["lr"])
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

        def on_save_checkpoint(self, _: Any) -> None:
            said["saved"].append(self.global_step)

    module = Module()
    trainer = Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp", max_steps=10_000, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[guest_lightning.Callback()], default_root_dir=os.environ["OUTPUT"],
    )  # fmt: off
    trainer.fit(module, torch.utils.data.DataLoader(Rows(), batch_size=2))
    tell(module)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if os.environ.get("ALONE"):
        guest_run.rank_and_ranks = lambda: (0, 1)
        os.environ["TRAINCTL_GUEST_SOCKET"] = str(Path(os.environ["TRAINCTL_GUEST_STATE"], f"{RANK}.sock"))
    loop = sys.argv[1]
    {"hf": hf, "lightning": lightning}.get(loop, lambda: torch_loop(loop))()
