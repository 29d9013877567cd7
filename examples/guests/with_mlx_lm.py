"""The training function of mlx-lm with hooks: python with_mlx_lm.py --steps 300"""

import argparse
import random
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx_lm.tuner.trainer import TrainingArgs, train

from trainctl import guest

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--output", default="with_mlx_lm.safetensors")
options = parser.parse_args()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(64, 32), nn.Linear(32, 64)

    def __call__(self, ids: Any) -> Any:
        return self.out(self.embed(ids))


mx.random.seed(1)
chance = random.Random(1)
rows = [([chance.randrange(64) for _ in range(16)], 0) for _ in range(256)]
model, optimizer = Model(), optim.AdamW(learning_rate=1e-3)
args = TrainingArgs(batch_size=8, iters=options.steps, steps_per_report=5, adapter_file=options.output)
hooks = guest.mlx_lm.hooks(model, optimizer, args=args, val_dataset=rows[240:])
train(model, optimizer, rows[:240], rows[240:], args=args, **hooks)
