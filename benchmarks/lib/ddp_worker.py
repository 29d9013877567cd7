"""One rank of torch DistributedDataParallel over gloo on a run's model and data, measured on demand.

    python benchmarks/lib/ddp_worker.py --folder DIR --rank R --world N --port PORT

Says `{"ready": ...}` once loaded; for each line `{"steps", "samples", "micro"}` on its input it then trains that many
steps of `samples` each and says `{"seconds", "tokens"}`. With a world of one it is the plain loop. It is the usual
one: gradients accumulated over micro-batches with the exchange held back but for the last, clipping, AdamW.
"""

import argparse
import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from sides import SEQUENCE, WARM_STEPS, run_config

from trainctl.protocol.config import run_file
from trainctl.protocol.messages import Range
from trainctl.trainer.data.dataset import open_dataset
from trainctl.trainer.data.permutation import positions_of, samples_at
from trainctl.trainer.model.torch_model import read_model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    worker = Worker(options)
    say({"ready": 1})
    for line in sys.stdin:
        asked = json.loads(line)
        say(worker.measure(asked["steps"], asked["samples"], asked["micro"]))
    if options.world > 1:
        dist.destroy_process_group()
    return 0


def say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


class Worker:
    """The model, its data and its place in the group."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._rank, self._world = options.rank, options.world
        config = run_file.parse(run_config(options.folder, ["bench"], 8, 8))
        self._data = open_dataset(config, options.folder / f"tokens-{options.rank}", "bench")
        model = read_model(Path(config.model.path), "bench").train()
        if self._world > 1:
            if not dist.is_initialized():
                dist.init_process_group(
                    "gloo", init_method=f"tcp://127.0.0.1:{options.port}", rank=self._rank, world_size=self._world
                )
            model = torch.nn.parallel.DistributedDataParallel(model)
        self._model: Any = model
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0)
        self._cursor = 0

    def measure(self, steps: int, samples: int, micro: int) -> dict[str, float]:
        for _ in range(WARM_STEPS):
            self.step(samples, micro)
        if self._world > 1:
            dist.barrier()
        begun = time.perf_counter()
        tokens = sum(self.step(samples, micro) for _ in range(steps))
        return {"seconds": time.perf_counter() - begun, "tokens": tokens}

    def save(self, path: Path, step: int) -> None:
        """All that a restart needs, under its name only when whole."""
        state = {"step": step, "model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}
        torch.save({**state, "cursor": self._cursor}, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)

    def load(self, path: Path) -> int:
        """The step that was saved."""
        kept = torch.load(path, weights_only=True)
        self._model.load_state_dict(kept["model"])
        self._optimizer.load_state_dict(kept["optimizer"])
        self._cursor = kept["cursor"]
        step: int = kept["step"]
        return step

    def step(self, samples: int, micro: int) -> float:
        """Tokens of this rank's part."""
        starts = list(range(0, samples, micro))
        first = self._cursor + self._rank * samples
        tokens = 0.0
        for start in starts:
            last = start == starts[-1]
            held_back = contextlib.nullcontext() if last or self._world == 1 else self._model.no_sync()
            with held_back:
                tokens += self._micro_batch(first + start, min(micro, samples - start), samples)
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._cursor += samples * self._world
        return tokens

    def _micro_batch(self, start: int, count: int, samples: int) -> float:
        positions = positions_of((Range(start, count),))
        batch = self._data.batch(samples_at(positions, self._data.samples, 0))
        inputs = torch.from_numpy(batch.inputs).to(torch.int64)
        targets = torch.from_numpy(np.where(batch.counted > 0, batch.targets, -100)).to(torch.int64)
        logits = self._model(input_ids=inputs, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        (loss / (samples * SEQUENCE)).backward()
        float(loss.item())
        return float(batch.weight)


if __name__ == "__main__":
    sys.exit(main())
