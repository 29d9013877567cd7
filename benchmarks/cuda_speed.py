"""Training in bfloat16 on an NVIDIA GPU: one rank's steps against a plain torch loop, the same compiled, and
transformers' Trainer.

    python -m benchmarks cuda_speed [--sizes 0.1B,1B] [--rounds N] [--steps N] [--device cuda]

Llamas of 0.1 and 1 billion parameters on random tokens, 2,048 per sample, two micro-batches a step. Ours is measured
with and without `compile = "default"`. Both loops keep float32 weights beside bfloat16 ones, clip, and update by
torch's fused AdamW. Trainer has `bf16 = True` and its other defaults; the best Trainer is compiled too, has workers for
its data, and doesn't look for losses that aren't finite. Contenders train in turns; of the larger model one after
another, as memory allows. `hosted` is a run under an agent, measured from its record. A copy for a checkpoint is
compared with a memcpy of the same arrays.

Prints a line for each figure, with the part of the device's peak in its datasheet, then one JSON object; exits 1 if a
bar is missed. Each bar compares like with like: ours compiled with the compiled loop and the best Trainer, ours at its
defaults with Trainer at its own. `--sizes tiny --device cpu` tries the benchmark itself, and no bar applies. Without a
GPU it says so and exits 0.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lib.cuda_contenders import MAKERS, SIZES, Work

from trainctl.protocol.batch.device_table import datasheet_tflops
from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.messages import ACTIVE_RUN_STATES, SnapshotRequest, StepsRequest
from trainctl.trainer.checkpoints.saver import HostCopy

BARS = {("compiled ours", "compiled loop"): 0.98, ("ours", "Trainer"): 1.1, ("compiled ours", "best Trainer"): 1.0}
"""The least tokens per second of ours over those of a peer."""


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds_of(contender: Any, steps: int) -> float:
    """Return the seconds of one step, as the mean of `steps`."""
    synchronize()
    begun = time.perf_counter()
    for _ in range(steps):
        contender.step()
    synchronize()
    return (time.perf_counter() - begun) / steps


def compare(work: Work, names: list[str], options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Tokens per second of some contenders in turns, with the peak while each of them warmed up."""
    alive, found, seconds = dict[str, Any](), dict[str, dict[str, float]](), dict[str, list[float]]()
    on_cuda = work.device.startswith("cuda")
    for name in names:
        held = torch.cuda.memory_allocated() if on_cuda else 0
        if on_cuda:
            torch.cuda.reset_peak_memory_stats()
        alive[name] = MAKERS[name](work)
        seconds_of(alive[name], 4)
        peak = torch.cuda.max_memory_allocated() - held if on_cuda else 0
        found[name] = {"peak_bytes_per_parameter": peak / work.parameters}
    for number in range(options.rounds):
        for name in names if number % 2 else names[::-1]:
            seconds.setdefault(name, []).append(seconds_of(alive[name], options.steps))
    for name in names:
        spent = statistics.median(seconds[name])
        found[name] |= {"seconds": spent, "least": min(seconds[name]), "most": max(seconds[name])}
        found[name] |= rates(work, work.tokens_a_step / spent, options.peak_tflops)
        print(f"{work.size} {name}: {said(found[name])}, {found[name]}", flush=True)
    for name in [name for name in ("ours", "compiled ours") if name in alive]:
        found[name] |= alive[name].values | checkpoint_copy(alive[name].backend)
        print(found[name], flush=True)
    for contender in alive.values():
        contender.close()
    alive.clear()
    gc.collect()
    torch.cuda.empty_cache()
    return found


def rates(work: Work, tokens_per_second: float, peak_tflops: float | None) -> dict[str, float]:
    """Tokens and operations per second, and the part of the device's peak, where that is known."""
    tflops = tokens_per_second * work.flops_per_token / 1e12
    found = {"tokens_per_second": tokens_per_second, "tflops": tflops}
    return found | ({"utilization": tflops / peak_tflops} if peak_tflops else {})


def said(found: Mapping[str, float]) -> str:
    part = f"{found['utilization']:.1%} of the peak" if "utilization" in found else "a peak that isn't known"
    return f"{found['tokens_per_second']:,.0f} tokens/s, {found['tflops']:.3g} TFLOP/s, {part}"


def judged(size: str, found: Mapping[str, Mapping[str, float]]) -> list[dict[str, Any]]:
    """By bar, what was reached."""
    rows = []
    for (ours, peer), bar in BARS.items():
        ratio = found[ours]["tokens_per_second"] / found[peer]["tokens_per_second"]
        rows.append({"ours": ours, "peer": peer, "ratio": ratio, "bar": bar, "passed": ratio >= bar})
        print(f"{size} {ours} / {peer}: {ratio:.3f}, bar {bar}: {'passed' if ratio >= bar else 'MISSED'}", flush=True)
    return rows


def checkpoint_copy(backend: Any) -> dict[str, float]:
    """Seconds of the copy that the loop pays for, and of a memcpy of its arrays."""
    copy, spent, plain = HostCopy(backend), list[float](), list[float]()
    state = copy.take()
    arrays = [array for part in (state.weights, *state.slots.values()) for array in part.values()]
    into = [array.copy() for array in arrays]
    for _ in range(5):
        begun = time.perf_counter()
        copy.take()
        spent.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        for array, other in zip(arrays, into, strict=True):
            np.copyto(other, array)
        plain.append(time.perf_counter() - begun)
    return {"copy_seconds": statistics.median(spent), "memcpy_seconds": statistics.median(plain)}


def hosted(work: Work, steps: int) -> float:
    """Tokens per second of a run under an agent, from its record."""
    command = [sys.executable, "-m", "trainctl.node_agent.cli", "run", "--name", "here"]
    command += ["--state", str(work.folder / "state")]
    agent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None
    try:
        with BlockingClient(json.loads(agent.stdout.readline())["listen"]) as client:
            client.send("start-run", {"config": work.raw()}, timeout_seconds=120)
            while client.ask(SnapshotRequest, 0).run.step < steps + 6:  # type: ignore[union-attr]
                time.sleep(0.1)
            rows = client.ask(StepsRequest, after_step=5, limit=steps + 1).steps
            client.send("stop", {"checkpoint": False})
            while client.ask(SnapshotRequest, 0).run.state in ACTIVE_RUN_STATES:  # type: ignore[union-attr]
                time.sleep(0.05)
    finally:
        agent.terminate()
        agent.wait(20)
    return steps * work.tokens_a_step / (rows[-1].committed_at - rows[0].committed_at)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--sizes", default="0.1B,1B", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5, help="steps of each contender in a round")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print("no NVIDIA GPU: nothing is measured")
        return 0
    device = torch.cuda.get_device_name(options.device) if options.device.startswith("cuda") else options.device
    options.peak_tflops = datasheet_tflops(device, "bfloat16")
    results: dict[str, Any] = {"device": device, "peak_tflops": options.peak_tflops, "torch": torch.__version__}
    bars = list[dict[str, Any]]()
    for size in options.sizes.split(","):
        with tempfile.TemporaryDirectory(prefix="cuda-speed-") as folder:
            work = Work(Path(folder), size, options.device)
            groups = [[name] for name in MAKERS] if size == "1B" else [[*MAKERS]]
            found: dict[str, Any] = {}
            for names in groups:
                found |= compare(work, names, options)
            found["hosted"] = rates(work, hosted(work, 15 if size == "1B" else 40), options.peak_tflops)
            print(f"{size} hosted: {said(found['hosted'])}", flush=True)
            if size != "tiny":
                bars += judged(size, found)
            results[size] = found | {"parameters": work.parameters}
    print(json.dumps(results | {"bars": bars}))
    return 0 if all(one["passed"] for one in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
