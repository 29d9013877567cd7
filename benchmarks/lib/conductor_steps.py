"""A conductor's steps without trainers: `python conductor_steps.py RANKS`, and numbers of steps on standard input.

Prints the milliseconds a step that the conductor took for each line. It runs under today's package and under
0.2.0's, and answers each plan as real ranks do: all say `Soon`, then all report.
"""

import gc
import sys
import time
from collections import deque
from typing import Any

from trainctl.node_agent.conductor import conductor as conductors
from trainctl.node_agent.conductor import events as decisions
from trainctl.node_agent.conductor import state as states
from trainctl.node_agent.planning import durable as durables
from trainctl.protocol.config import run_file
from trainctl.protocol.messages import (
    Fence,
    Fenced,
    Form,
    Formed,
    Generation,
    Offer,
    Offered,
    Phases,
    Probed,
    Ready,
    Report,
    Soon,
)

RUN = "bench"
STEPS = 10_000_000
MEMORY = {"memory_bytes": 1 << 30, "memory_peak_bytes": 1 << 32, "memory_cap_bytes": 5 << 30}
PHASES = Phases(forward=0.1, backward=0.2)


class Bench:
    """A conductor of as many ranks, each on a node of its own with 4 samples a step."""

    def __init__(self, ranks: int) -> None:
        by_rank = {rank: durables.RankSetting(f"n{rank}", 4, 4) for rank in range(ranks)}
        settings = durables.Settings(1, 4 * ranks, by_rank)
        durable = durables.Durable(settings, Generation(1, 0), 0)
        self.conductor = conductors.Conductor(RUN, config(ranks), durable, states.Progress())
        self.answers: deque[Any] = deque()
        self.now = self.seconds = 0.0
        for rank in range(ranks):
            self.feed(ready(rank))

    def feed(self, event: Any) -> None:
        """Only the conductor's own work is timed."""
        self.now += 1e-5
        began = time.perf_counter()
        decided = self.conductor.handle(event, self.now)
        self.seconds += time.perf_counter() - began
        for decision in decided:
            self.carry_out(decision)

    def carry_out(self, decision: Any) -> None:
        match decision:
            case decisions.Tell():
                self.answers.extend(self.answer(decision.rank, decision.message))
            case decisions.Issue():
                plan = decision.plan
                if plan.kind == "train":
                    same = {"run": RUN, "generation": plan.generation, "seq": plan.seq}
                    self.answers.extend(Soon(rank=work.rank, **same) for work in plan.work)
                self.answers.extend(report(plan, work) for work in plan.work)

    def answer(self, rank: int, order: Any) -> list[Any]:
        same = {"run": RUN, "rank": rank, "generation": order.generation}
        match order:
            case Fence():
                return [Fenced(**same, last_step=self.conductor.progress.step)]
            case Offer():
                return [Offered(**same, endpoints=(f"127.0.0.1:{rank}",))]
            case Form():
                return [Formed(**same, join_seconds=0.01)]
        return []

    def steps(self, count: int) -> float:
        """Milliseconds a step."""
        self.seconds, last = 0.0, self.conductor.progress.step + count
        while self.conductor.progress.step < last:
            self.feed(self.answers.popleft())
        return self.seconds / count * 1000


def config(ranks: int) -> Any:
    return run_file.parse(
        {
            "run": {"name": RUN, "steps": STEPS},
            "model": {"path": "/model"},
            "data": {"path": "/data"},
            "batch": {"global": 4 * ranks, "micro": 4},
            "optimizer": {"learning_rate": 1e-3, "schedule": "constant"},
            "checkpoint": {"at_end": False},
            "group": {"first_shares": "even"},
        }
    )


def ready(rank: int) -> Any:
    return Ready(
        run=RUN,
        rank=rank,
        pid=1,
        backend="torch",
        device="cpu",
        parameters=1000,
        samples=1_000_000,
        held_out=0,
        mean_weight=4.0,
        layout_digest="l",
        model_digest="m",
        data_digest="d",
        last_step=0,
        cursor=0,
        system="Linux",
        engines=("gloo", "ring"),
    )


def report(plan: Any, work: Any) -> Any:
    said = {
        "run": RUN,
        "rank": work.rank,
        "generation": plan.generation,
        "seq": plan.seq,
        "kind": plan.kind,
        "step": plan.step,
        "loss_sum": 2.0,
        "weight": 1.0,
        "own_weight": 1.0,
        "micro_batch": work.micro_batch,
        "own_samples": sum(piece.count for piece in work.ranges),
        "phases": PHASES,
        "step_seconds": 0.5,
    }
    if plan.kind == "probe":
        alike = {"family": "llama", "tokens_digest": "t", "lengths": (2, 1), "weight_norms": b"\0\0\x80\x3f"}
        return Probed(**said, **alike, log_probabilities=bytes(12))
    return Report(**said, values=MEMORY)


def main() -> None:
    bench = Bench(int(sys.argv[1]))
    bench.steps(20)
    gc.collect()
    for line in sys.stdin:
        print(bench.steps(int(line)), flush=True)


if __name__ == "__main__":
    main()
