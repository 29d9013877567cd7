"""The Trainer of Lightning with a callback: python with_lightning.py --steps 300"""

import argparse
from typing import Any

import lightning.pytorch as lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

from trainctl import guest

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--output", default="with_lightning")
options = parser.parse_args()


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def training_step(self, batch: Any, index: int) -> Any:
        return (self.net(batch[0]) - batch[0].sum(1, keepdim=True)).pow(2).mean()

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", (self.net(batch[0]) - batch[0].sum(1, keepdim=True)).pow(2).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


torch.manual_seed(1)
data = DataLoader(TensorDataset(torch.randn(256, 8)), batch_size=16)
trainer = lightning.Trainer(
    max_steps=options.steps,
    default_root_dir=options.output,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    callbacks=[guest.lightning.Callback()],
)
trainer.fit(Module(), data, data)
print(f"loss {float(trainer.callback_metrics['val_loss']):.6f}")
