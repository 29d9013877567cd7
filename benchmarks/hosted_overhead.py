"""Cost of being hosted: tokens/s of a run under an agent, recorded and watched, over the backend's bare loop.

    python -m benchmarks hosted_overhead [--backend torch|mlx] [--steps N] [--rounds N] [--threads N]

Both sides train the demo's model on the demo's text with the same batches, in turns within one run, so that whatever
else the machine does weighs on both. The bare loop is the backend's own calls and nothing else: no agent, no record, no
messages, no phases. The hosted side is `trainctl-agent` with a client attached to every live message, which asks for
nothing more while steps are timed. Prints a table with the agent's processor time per step, then one JSON object; exits
1 if the lower 95 % bound of the median ratio is under the bar.
"""

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
from lib.ratios import interval
from lib.sides import SEQUENCE, agent, end_on_sigterm, kill_left, run_config

from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.config import run_file
from trainctl.protocol.messages import ACTIVE_RUN_STATES, Range, RunView, SnapshotRequest, StepCommitted, StepsRequest
from trainctl.trainer import demo_assets
from trainctl.trainer.backends.load import load
from trainctl.trainer.data.dataset import open_dataset
from trainctl.trainer.data.permutation import positions_of, samples_at

BAR = 0.96
NODE = "bench"
GLOBAL_BATCH, MICRO_BATCH = 24, 8
MOST_SECONDS = 1200.0
"""Time in which the hosted steps of a round must be done."""
WARM_STEPS = 3
"""Steps at the start of each side that are not counted: allocators and caches settle."""


def main() -> int:
    end_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=["torch", "mlx"], default="torch")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            rounds = measure(Path(folder), options)
        finally:
            kill_left(Path(folder))  # trainers outlive their agents
    ratio = interval([row["ratio"] for row in rounds])
    seconds = statistics.median(row["agent_cpu_seconds_per_step"] for row in rounds)
    print(f"{'round':>5} {'bare tok/s':>12} {'hosted tok/s':>13} {'ratio':>7} {'agent CPU ms/step':>18}")
    for number, row in enumerate(rounds, 1):
        cpu = 1000 * row["agent_cpu_seconds_per_step"]
        print(f"{number:>5} {row['bare']:>12,.0f} {row['hosted']:>13,.0f} {row['ratio']:>7.3f} {cpu:>18.2f}")
    found = {"backend": options.backend, "ratio": ratio, "bar": BAR, "agent_cpu_seconds_per_step": round(seconds, 5)}
    print(json.dumps(found | {"rounds": rounds}))
    return 0 if ratio["low"] >= BAR else 1


def measure(folder: Path, options: argparse.Namespace) -> list[dict[str, float]]:
    """Rounds of (bare, hosted) in alternating order; both stay loaded throughout, one idles while the other runs."""
    demo_assets.make_model(folder / "model")
    demo_assets.make_text(folder / "data")
    config = write_config(folder, options)
    bare = Bare(config, folder)
    hosted = Hosted(config, folder / "state")
    try:
        rounds = []
        for number in range(options.rounds):
            sides = [bare.tokens_per_second, hosted.tokens_per_second]
            order = sides if number % 2 == 0 else sides[::-1]
            got = {side.__qualname__.split(".")[0]: side(options.steps) for side in order}
            row = {"bare": got["Bare"], "hosted": got["Hosted"], "ratio": got["Hosted"] / got["Bare"]}
            row["agent_cpu_seconds_per_step"] = hosted.agent_cpu_seconds_per_step
            rounds.append(row)
        return rounds
    finally:
        hosted.close()


def write_config(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    nodes = {NODE: {"backend": options.backend, "device": "cpu", "threads": options.threads}}
    return run_config(folder, [NODE], GLOBAL_BATCH, MICRO_BATCH) | {"nodes": nodes}


class Bare:
    """The backend's own loop in this process."""

    def __init__(self, raw: dict[str, Any], folder: Path) -> None:
        self._config = run_file.parse(raw)
        self._dataset = open_dataset(self._config, folder / "tokens", "bench")
        self._backend = load(self._config, self._config.nodes[NODE], "bench")
        self._cursor = 0

    def tokens_per_second(self, steps: int) -> float:
        for _ in range(WARM_STEPS):
            self._step()
        begun = time.perf_counter()
        tokens = sum(self._step() for _ in range(steps))
        return tokens / (time.perf_counter() - begun)

    def _step(self) -> float:
        self._backend.clear()
        expected, weight = float(GLOBAL_BATCH * SEQUENCE), 0.0
        for start in range(self._cursor, self._cursor + GLOBAL_BATCH, MICRO_BATCH):
            positions = positions_of((Range(start, MICRO_BATCH),))
            batch = self._dataset.batch(samples_at(positions, self._dataset.samples, 0))
            self._backend.loss_and_gradient(batch, {"tokens": 1 / expected}, adding=nullcontext())
            weight += batch.weight
        factor = expected / weight
        norm = self._backend.gradient_norm() * factor
        self._backend.update(1e-3, factor * min(1.0, 1.0 / (norm + 1e-6)))
        self._cursor += GLOBAL_BATCH
        return weight


class Hosted:
    """A paused run under an agent with a watcher; each measurement resumes it for a while."""

    def __init__(self, raw: dict[str, Any], state: Path) -> None:
        self._block = agent(NODE, state)
        self._agent, self._address = self._block.__enter__()
        self.agent_cpu_seconds_per_step = 0.0
        """CPU seconds per step of the agent's process, which keeps the record too, in the last measurement."""
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._moved, self._step = threading.Condition(), 0
        self._client = BlockingClient(self._address).__enter__()
        self._client.send("start-run", {"config": raw}, timeout_seconds=120)
        self._client.send("pause", {})
        self._watcher.start()

    def tokens_per_second(self, steps: int) -> float:
        """From the record: tokens between two commits over the time between them."""
        first = self._client.ask(SnapshotRequest, 0).run.step + WARM_STEPS
        cpu_seconds, began_at = self._cpu_seconds(), first - WARM_STEPS
        self._client.send("resume", {})
        with self._moved:
            assert self._moved.wait_for(lambda: self._step >= first + steps, timeout=MOST_SECONDS), "no more steps"
        self._client.send("pause", {})
        done = self._client.ask(SnapshotRequest, 0).run.step - began_at
        self.agent_cpu_seconds_per_step = (self._cpu_seconds() - cpu_seconds) / done
        rows = self._client.ask(StepsRequest, after_step=first - 1, limit=steps + 1).steps
        assert len(rows) == steps + 1
        return (rows[-1].tokens_total - rows[0].tokens_total) / (rows[-1].committed_at - rows[0].committed_at)

    def _cpu_seconds(self) -> float:
        times = psutil.Process(self._agent.pid).cpu_times()
        return times.user + times.system

    def _watch(self) -> None:
        with BlockingClient(self._address) as client:
            for item in client.attach():
                if isinstance(item, StepCommitted):
                    with self._moved:
                        self._step = item.step
                        self._moved.notify()
                if isinstance(item, RunView) and item.state not in ACTIVE_RUN_STATES:
                    return

    def close(self) -> None:
        self._client.send("stop", {"checkpoint": False})
        self._watcher.join(10)
        while self._client.ask(SnapshotRequest, 0).run.state in ACTIVE_RUN_STATES:
            time.sleep(0.05)
        self._client.__exit__(None, None, None)
        self._block.__exit__(None, None, None)


if __name__ == "__main__":
    sys.exit(main())
