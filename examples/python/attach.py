"""A bigram model of bytes with its own training loop (plain SGD), which the agent of this machine records and shows.

    python attach.py README.md --steps 300

It trains on whatever happens to the agent, and whether there is one or not: the agent gets what it lacks later. The
commands `set-lr`, `checkpoint`, `pause`, `resume` and `stop` act between two steps.
"""

import argparse
import collections
import functools
import json
import math
import random
import sys
from pathlib import Path

from trainctl import guest


def main() -> int:
    """Train, and return the exit code."""
    options = arguments()
    text = options.text.read_bytes()
    if len(text) < 2:
        print(f"attach.py: {options.text} needs at least two bytes of text", file=sys.stderr)
        return 2
    model, chance = Bigrams(options.learning_rate), random.Random(options.seed)
    save = functools.partial(model.save, options.checkpoint)
    run = guest.attach(
        options.text.name, run=options.run, steps=options.steps, checkpoint=save, loss_unit="nats per byte"
    )
    run.offer("set-lr", model.set_rate)
    with run:
        for number in range(1, options.steps + 1):
            places = [chance.randrange(len(text) - 1) for _ in range(options.batch)]
            loss, norm = model.step([(text[at], text[at + 1]) for at in places])
            own = {"grad_norm": norm, "contexts": len(model.logits)}
            if run.step(number, loss=loss, samples=options.batch, tokens=options.batch, lr=model.rate, **own):
                break
    print(f"{run.id}: loss {loss:.3f} after {number} steps")
    return 0


class Bigrams:
    """Logits of the next byte, given the previous one."""

    def __init__(self, rate: float) -> None:
        self.logits: dict[int, list[float]] = {}
        self.rate = rate

    def set_rate(self, value: float, schedule: str = "set") -> tuple[float, float]:
        """Use another learning rate from the next step on; return the one before and this one."""
        before, self.rate = self.rate, value
        return before, value

    def save(self, path: Path) -> tuple[None, str]:
        """Write the model's logits, and return what has changed."""
        path.write_text(json.dumps(self.logits))
        return None, str(path)

    def step(self, batch: list[tuple[int, int]]) -> tuple[float, float]:
        """Do a step of SGD on pairs (byte, next byte); return the cross-entropy in nats, and the gradient's norm."""
        gradients: dict[int, list[float]] = collections.defaultdict(lambda: [0.0] * 256)
        loss = 0.0
        for before, after in batch:
            row = self.logits.setdefault(before, [0.0] * 256)
            highest = max(row)
            exps = [math.exp(value - highest) for value in row]
            total = sum(exps)
            loss += math.log(total) + highest - row[after]
            gradient = gradients[before]
            for byte, value in enumerate(exps):
                gradient[byte] += value / total / len(batch)
            gradient[after] -= 1 / len(batch)
        for before, gradient in gradients.items():
            self.logits[before] = [
                value - self.rate * slope for value, slope in zip(self.logits[before], gradient, strict=True)
            ]
        norm = math.sqrt(sum(slope * slope for gradient in gradients.values() for slope in gradient))
        return loss / len(batch), norm


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a bigram model and show it in trainctl.")
    parser.add_argument("text", type=Path, help="text file to train on")
    parser.add_argument("--run", help="run ID, to continue a run [a new one]")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=64, help="number of byte pairs in each step")
    parser.add_argument("--learning-rate", type=float, default=5.0)
    parser.add_argument(
        "--checkpoint", type=Path, default=Path("bigrams.json"), help="file of the command `checkpoint`"
    )
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
