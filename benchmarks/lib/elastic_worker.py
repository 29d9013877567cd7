"""One worker of a torchrun elastic job: DDP over gloo with a checkpoint at every step, which each start goes on from.

    torchrun --nproc-per-node N --max-restarts M benchmarks/lib/elastic_worker.py --folder DIR

Rank 0 adds a line to `steps.jsonl` in the folder for each step, once its checkpoint is written: the step, the one that
was loaded at the start, the time and the process. `pid-RANK` names the worker that has a rank now.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from ddp_worker import Worker

SAMPLES, MICRO_BATCH = 8, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    port = int(os.environ["MASTER_PORT"])
    (options.folder / f"pid-{rank}").write_text(str(os.getpid()))
    dist.init_process_group("gloo")
    worker = Worker(argparse.Namespace(folder=options.folder, rank=rank, world=world, port=port))
    checkpoint, log = options.folder / "checkpoint.pt", options.folder / "steps.jsonl"
    step = loaded = worker.load(checkpoint) if checkpoint.exists() else 0
    while True:
        worker.step(SAMPLES, MICRO_BATCH)
        step += 1
        if rank == 0:
            worker.save(checkpoint, step)
            with log.open("a") as file:
                row = {"step": step, "loaded": loaded, "at": time.time(), "pid": os.getpid()}
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
