"""`python -m tests.trainer.support.peak_memory RUN.toml NODE`: the memory that a rank's model takes at its peak.

Prints the bytes by which the peak of two steps exceeds what the process held once all was imported. The first step has
two small micro-batches, and makes the optimizer's state; the second has two of the run's size. With `--allocator` it
prints the most that MLX's allocator held in these steps, as on a GPU. With `--copy` a checkpoint's copy of the first
state is held all the time, as while it is written. With `--micros 1,2,4` it prints a JSON object instead: for each
micro-batch in this order, the bytes that the process held at most in a step of one, the median of three.
"""

import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path

from tests.trainer.support.passes import accumulate, blocks

from trainctl.protocol.config import run_file
from trainctl.protocol.config.objectives import objective_of
from trainctl.trainer.backends.backend import Backend
from trainctl.trainer.backends.load import load
from trainctl.trainer.backends.memory import KernelPeak
from trainctl.trainer.checkpoints.saver import HostCopy
from trainctl.trainer.data import batch as batches


def import_all(backend: str) -> None:
    if backend == "torch":
        import peft  # noqa: F401
        import torch
        import torch._dynamo  # an optimizer's first step imports it
        from transformers.models.llama import modeling_llama  # noqa: F401

        torch.set_num_threads(1)
        parameter = torch.nn.Parameter(torch.zeros(2, 2))
        parameter.grad = torch.zeros(2, 2)
        torch.optim.AdamW([parameter]).step()
    else:
        import mlx_lm.models.llama
        import mlx_lm.tuner
        import mlx_lm.utils  # noqa: F401


def update(backend: Backend) -> None:
    backend.gradient_norm()
    backend.update(1e-3, 1.0)
    backend.clear()


def peaks_of(backend: Backend, length: int, micros: list[int], kept: KernelPeak) -> dict[int, float]:
    accumulate(backend, blocks(1, length))
    update(backend)  # it makes the optimizer's state
    found: dict[int, float] = {}
    for micro in micros:
        backend.device.free_cache()  # what the allocator keeps of the size before
        peaks = []
        for _ in range(4):  # in the first one, the allocator's cache fills
            kept.reset()
            accumulate(backend, blocks(micro, length, seed=micro))
            update(backend)
            peaks.append(kept.read().peak_bytes or 0)
        found[micro] = statistics.median(peaks[1:])
    return found


def main() -> None:
    config, node = run_file.read(Path(sys.argv[1])), sys.argv[2]
    import_all(config.nodes[node].backend)
    kept = KernelPeak()
    held = kept.read().used_bytes or 0
    config = run_file.on_node(config, node)
    backend, length = load(config, config.nodes[node], "run.toml"), config.data.sequence_length
    if "--micros" in sys.argv:
        print(json.dumps(peaks_of(backend, length, [*map(int, sys.argv[-1].split(","))], kept)))
        return
    by_allocator = "--allocator" in sys.argv
    if by_allocator:
        import mlx.core as mx

        mx.reset_peak_memory()
    copy, state = HostCopy(backend), None
    for shape in ((1, 8), (config.nodes[node].micro or config.batch.micro, length)):
        given = blocks(*shape)
        if objective_of(config.objective, config.data.kind).encodes_prompts:
            given = replace(given, prompts=batches.Prompts(given.inputs, given.lengths))
        accumulate(backend, given, given)
        if "--copy" in sys.argv and state is None:
            state = copy.take()
        update(backend)
    del state
    print(mx.get_peak_memory() if by_allocator else (kept.read().peak_bytes or 0) - held)


if __name__ == "__main__":
    main()
