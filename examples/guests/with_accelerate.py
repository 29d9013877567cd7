"""A loop with accelerate that logs to trainctl: python with_accelerate.py --steps 300"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

from trainctl import guest

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--output", default="with_accelerate")
options = parser.parse_args()
guest.register()

torch.manual_seed(1)
project = ProjectConfiguration(options.output, automatic_checkpoint_naming=True)
accelerator = Accelerator(log_with="trainctl", project_config=project)
accelerator.init_trackers("with-accelerate")
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
for step in range(1, options.steps + 1):
    inputs = torch.randn(16, 8, device=accelerator.device)
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.log({"loss": loss.item()}, step=step)
accelerator.end_training()
print(f"loss {loss.item():.6f}")
