"""Measures the cost of an attached run in the loop's own process: the call, the thread, the import and a whole loop.

    python -m benchmarks guest_cost [--count N] [--pairs N] [--seconds N]

`step()` of ten values in a tight loop, less an empty call with the same arguments. In a torch loop of 5 ms steps: the
CPU time of the call beside wandb (offline), tensorboardX and trackio, where they are installed, in blocks that take
turns; the CPU time of the thread a step; and the whole process's CPU a step in pairs of blocks, attached and bare, with
the ratio's 95 % interval by order. A real agent records the run where this package has one. Ends with one JSON line;
exits 1 if a bar is missed.
"""

import argparse
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lib.sides import agent, end_on_sigterm

from trainctl import guest

CALL_BAR, THREAD_BAR, IMPORT_BAR, LOOP_BAR = 3.0, 20.0, 15.0, 0.99
"""Microseconds of a call and of the thread a step, milliseconds of the import, and bare over attached CPU."""
PEER_BARS = {"wandb": 1 / 20, "tensorboardX": 1 / 20, "trackio": 1 / 8}
"""Largest part of each one's CPU that a call may take."""
STEP_SECONDS = 0.005
BLOCK = 40
Z_95 = 1.96
IMPORT = "import time; t = time.process_time(); from trainctl import guest; print(time.process_time() - t)"
Log = Callable[[int, dict[str, float]], object]


def values(step: int) -> dict[str, float]:
    return {f"value_{place}": step * 1e-3 + place for place in range(9)} | {"loss": 2 + 1 / (1 + step)}


class Empty:
    """A call that does nothing."""

    def step(
        self,
        n: int | None = None,
        /,
        *,
        loss: Any = None,
        samples: Any = None,
        tokens: Any = None,
        lr: Any = None,
        **metrics: Any,
    ) -> bool:
        return False


def tight(call: Callable[..., object], given: dict[str, Any], count: int) -> float:
    """Return the median microseconds of a call."""
    spent = []
    for _ in range(count):
        began = time.perf_counter_ns()
        call(**given)
        spent.append(time.perf_counter_ns() - began)
    return statistics.median(spent) / 1000


def call_cost(run: guest.Run, given: dict[str, Any], count: int) -> float:
    """Return the median microseconds of `step()`, less an empty call's: the median of blocks that take turns."""
    empty, blocks = Empty(), []
    for _ in range(15):
        blocks.append(tight(run.step, given, count // 15) - tight(empty.step, given, count // 15))
        time.sleep(0.3)  # the thread takes what waits
    return statistics.median(blocks)


@contextmanager
def peers(folder: Path) -> Iterator[dict[str, Log]]:
    """Yield what logs to each of the other libraries that are installed."""
    logs: dict[str, Log] = {}
    ends: list[Callable[[], object]] = []
    if importlib.util.find_spec("wandb"):
        os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(folder)}
        import wandb

        offline = wandb.init(project="bench", dir=str(folder), mode="offline")
        logs["wandb"] = lambda step, row: offline.log(row, step=step)
        ends.append(offline.finish)
    if importlib.util.find_spec("tensorboardX"):
        import tensorboardX

        writer = tensorboardX.SummaryWriter(str(folder))
        logs["tensorboardX"] = lambda step, row: [writer.add_scalar(name, row[name], step) for name in row]
        ends.append(writer.close)
    if importlib.util.find_spec("trackio"):
        os.environ["TRACKIO_DIR"] = str(folder)
        import trackio

        trackio.init(project="bench", embed=False)
        logs["trackio"] = lambda step, row: trackio.log(row, step=step)
        ends.append(trackio.finish)
    yield logs
    for end in ends:
        end()


def work(torch: Any, size: int) -> Callable[[], None]:
    """Return a step of about STEP_SECONDS of CPU: forward, backward and update of a small model."""
    model = torch.nn.Sequential(torch.nn.Linear(size, size), torch.nn.ReLU(), torch.nn.Linear(size, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(64, size)

    def once() -> None:
        model(batch).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    began = time.thread_time()
    for _ in range(20):
        once()
    seconds = (time.thread_time() - began) / 20
    repeats = max(1, round(STEP_SECONDS / seconds))
    return lambda: [once() for _ in range(repeats)] and None


def call_cpu(once: Callable[[], None], log: Log, first: int) -> float:
    """Return the median CPU microseconds of a call of a block, in a loop."""
    spent = []
    for step in range(first, first + BLOCK):
        once()
        row = values(step)
        began = time.thread_time_ns()
        log(step, row)
        spent.append(time.thread_time_ns() - began)
    return statistics.median(spent) / 1000


def block_cpu(once: Callable[[], None], log: Log | None, first: int) -> float:
    """Return the CPU seconds of the whole process for a block of steps."""
    began = time.process_time()
    for step in range(first, first + BLOCK):
        once()
        row = values(step)
        if log is not None:
            log(step, row)
    return time.process_time() - began


def import_cost() -> float:
    """Return the median CPU milliseconds of the import in a new process."""
    compiled = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    spent = [float(subprocess.check_output([sys.executable, "-c", IMPORT], env=compiled)) for _ in range(16)]
    return 1000 * statistics.median(spent[1:])


def thread_seconds() -> float:
    (thread,) = (one for one in threading.enumerate() if one.name == "trainctl-guest")
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def measure(options: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], bool]:
    import torch

    torch.set_num_threads(1)
    run = guest.attach("cost")

    def ours(step: int, row: dict[str, float]) -> None:
        run.step(**row)

    graph = torch.ones((), requires_grad=True) * 2
    tensors = {f"value_{place}": torch.tensor(float(place)) for place in range(9)} | {"loss": graph}
    figures: dict[str, Any] = {
        "import_ms": import_cost(),
        "call_us": call_cost(run, values(1), options.count),
        "call_of_tensors_us": call_cost(run, tensors, options.count),
    }
    once = work(torch, 256)
    nothing = statistics.median(call_cpu(once, lambda step, row: None, 0) for _ in range(3))
    with peers(folder) as logs:
        costs: dict[str, list[float]] = {name: [] for name in ("trainctl", *logs)}
        for block in range(options.blocks):
            for name, log in (("trainctl", ours), *logs.items()):
                costs[name].append(call_cpu(once, log, block * BLOCK) - nothing)
    figures["loop_call_us"] = {name: statistics.median(spent) for name, spent in costs.items()}
    spent, ratios, steps = 0.0, [], 0
    for pair in range(options.pairs):
        order = (ours, None) if pair % 2 else (None, ours)
        cpu = {}
        for log in order:
            before = thread_seconds()
            cpu[log is not None] = block_cpu(once, log, 0)
            spent += thread_seconds() - before
        steps += BLOCK
        ratios.append(cpu[False] / cpu[True])
    ratios.sort()
    beside = max(0, int(options.pairs / 2 - Z_95 * math.sqrt(options.pairs) / 2))
    figures["thread_us"] = 1e6 * spent / steps
    figures["bare_over_attached"] = [ratios[beside], statistics.median(ratios), ratios[-1 - beside]]
    figures["has_agent"] = run._link._socket is not None
    run.close()
    calls = figures["loop_call_us"]
    passed = (
        figures["import_ms"] <= IMPORT_BAR
        and figures["call_us"] <= CALL_BAR
        and figures["thread_us"] <= THREAD_BAR
        and figures["bare_over_attached"][1] >= LOOP_BAR
        and all(calls["trainctl"] <= PEER_BARS[name] * cpu for name, cpu in calls.items() if name in PEER_BARS)
    )
    return figures, passed


def main() -> int:
    """Measure, print, and return the exit status."""
    end_on_sigterm()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=15_000, help="calls in the tight loop")
    parser.add_argument("--blocks", type=int, default=10, help=f"blocks of {BLOCK} calls for each library")
    parser.add_argument("--pairs", type=int, default=100, help=f"pairs of blocks of {BLOCK} steps, attached and bare")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tt-", dir="/tmp") as folder:
        os.environ["TRAINCTL_STATE"] = folder
        with agent("bench", Path(folder)):
            figures, passed = measure(options, Path(folder))
    if not figures["has_agent"]:
        print("no agent answered: measured without one")
    calls = figures["loop_call_us"]
    print(f"import: {figures['import_ms']:.1f} ms of CPU, bar {IMPORT_BAR:g}")
    print(
        f"step() of ten numbers in a tight loop: {figures['call_us']:.2f} us, bar {CALL_BAR:g}; of ten tensors ", end=""
    )
    print(f"{figures['call_of_tensors_us']:.2f} us")
    for name, cpu in calls.items():
        bar = f", ours is 1/{cpu / calls['trainctl']:.0f}, bar 1/{1 / PEER_BARS[name]:.0f}" if name in PEER_BARS else ""
        print(f"CPU of the call in a loop, {name}: {cpu:.1f} us{bar}")
    print(f"thread: {figures['thread_us']:.1f} us of CPU a step, bar {THREAD_BAR:g}")
    low, median, high = figures["bare_over_attached"]
    interval = f"{median:.4f} ({low:.4f} to {high:.4f})"
    print(f"bare / attached CPU at {1000 * STEP_SECONDS:g} ms a step: {interval}, bar {LOOP_BAR}")
    print(json.dumps(figures | {"passed": passed}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
