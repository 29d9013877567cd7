"""A plain loop of torch that attaches itself: python with_torch.py --steps 300"""

import argparse

import torch

from trainctl import guest

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=300)
steps: int = parser.parse_args().steps

torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def save() -> None:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "with_torch.pt")


with guest.attach("with-torch", steps=steps, optimizer=optimizer, checkpoint=save) as run:
    for _ in range(steps):
        inputs = torch.randn(16, 8)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if run.step(loss=loss, samples=16):
            break  # a stop was ordered
print(f"loss {loss.item():.6f}")
