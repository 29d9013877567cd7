"""A bigram model of bytes with its own training loop (plain SGD), recorded and shown by an agent.

    python attach.py README.md --steps 300
    python attach.py TEXT --connect tcp://studio:7474

The loop continues without the agent and waits at most one second for it. Steps that could not be sent are sent with the
next ones. An agent that returns or restarts receives the steps that it lacks.
"""

import argparse
import collections
import math
import os
import random
import sys
import time
from pathlib import Path
from typing import Literal

from trainctl.protocol import messages as m
from trainctl.protocol.client import BlockingClient
from trainctl.protocol.errors import RefusedError, TrainctlError

SEND_SECONDS = 0.5
"""Seconds between sending steps."""
END_SECONDS = 10.0
"""Seconds for which the end of the run is sent again while the agent does not answer."""
MAX_WAITING = 10_000
"""Most steps kept while the agent is unreachable; the oldest are dropped first."""


def main() -> int:
    """Train and report to the agent; return the exit code."""
    given = arguments()
    text = given.text.read_bytes()
    if len(text) < 2:
        print(f"attach.py: {given.text} needs at least two bytes of text", file=sys.stderr)
        return 2
    model, chance = Bigrams(), random.Random(given.seed)
    with Reporter(given.connect, given.run, given.text.name, given.steps) as reporter:
        for number in range(1, given.steps + 1):
            began = time.perf_counter()
            places = [chance.randrange(len(text) - 1) for _ in range(given.batch)]
            loss, norm = model.step([(text[at], text[at + 1]) for at in places], given.learning_rate)
            seconds = time.perf_counter() - began
            part = m.GuestPart(
                rank=0, tokens=given.batch, samples=given.batch, step_seconds=seconds, phases=m.Phases(forward=seconds),
                values={"own_loss": loss, "user:contexts": len(model.logits)},
            )  # fmt: skip
            reporter.add(
                m.GuestStep(
                    step=number, committed_at=time.time(), step_seconds=seconds, samples=given.batch,
                    tokens=given.batch,
                    weight=given.batch, loss=loss, learning_rate=given.learning_rate, grad_norm=norm, parts=(part,),
                )
            )  # fmt: skip
    print(f"{given.run}: loss {loss:.3f} after {given.steps} steps; {reporter.kept} recorded")
    return 0


class Bigrams:
    """Logits of the next byte, given the previous one."""

    def __init__(self) -> None:
        self.logits: dict[int, list[float]] = {}

    def step(self, batch: list[tuple[int, int]], rate: float) -> tuple[float, float]:
        """One step of SGD on pairs (byte, next byte); mean cross-entropy in nats, and the gradient's norm."""
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
                value - rate * slope for value, slope in zip(self.logits[before], gradient, strict=True)
            ]  # fmt: skip
        norm = math.sqrt(sum(slope * slope for gradient in gradients.values() for slope in gradient))
        return loss / len(batch), norm


class Reporter:
    """Sends steps to an agent every SEND_SECONDS; a failing agent delays the loop by at most the client's timeout."""

    def __init__(self, address: str, run: str, name: str, steps: int) -> None:
        self._client = BlockingClient(address, by="attach.py", timeout_seconds=1.0)
        self._run, self._name, self._steps, self._started_at = run, name, steps, time.time()
        self._waiting: collections.deque[m.GuestStep] = collections.deque(maxlen=MAX_WAITING)
        self._sent_monotonic, self._attached = -math.inf, False
        self._failure: TrainctlError | None = None
        self._after_step: int | None = 0  # start over: retract the steps that an earlier process recorded
        self.kept = 0

    def __enter__(self) -> "Reporter":
        self._client.connect()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        deadline = time.monotonic() + END_SECONDS
        while (failure := self._end("failed" if kind else "finished", str(error or ""))) is not None:
            if time.monotonic() > deadline:
                print(f"attach.py: {failure}", file=sys.stderr)
                break
            time.sleep(SEND_SECONDS)
        self._client.close()

    def _end(self, state: Literal["finished", "failed"], reason: str) -> TrainctlError | None:
        """Send what is queued and end the run; return why it failed, or None."""
        if self._waiting or not self._attached:
            self._send()
        try:
            if not self._waiting:
                self._client.end_run(self._run, state, reason)
                return None
        except TrainctlError as failure:
            return failure
        return self._failure

    def add(self, step: m.GuestStep) -> None:
        """Queue a completed step, and send the queue if it is due."""
        self._waiting.append(step)
        if time.monotonic() - self._sent_monotonic >= SEND_SECONDS:
            self._send()

    def _send(self) -> None:
        self._sent_monotonic = time.monotonic()
        try:
            if not self._attached:
                rank = m.GuestRank(0, backend="python", device="cpu", pid=os.getpid())
                kept = self._client.attach_run(
                    self._run, self._name, (rank,), steps=self._steps, started_at=self._started_at,
                    after_step=self._after_step,
                )  # fmt: skip
                self.kept, self._attached, self._after_step = kept.step, True, None
            self.kept = self._client.run_steps(self._run, tuple(self._waiting)).step
        except RefusedError as refused:
            self._failure, self._attached = refused, False  # the run was given up, or a different agent answers
        except TrainctlError as unreachable:
            self._failure = unreachable
        while self._waiting and self._waiting[0].step <= self.kept:
            self._waiting.popleft()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a bigram model and show it in trainctl.")
    parser.add_argument("text", type=Path, help="text file to train on")
    parser.add_argument("--connect", help="the agent [the one on this machine]")
    parser.add_argument("--run", default=f"bigrams-{time.strftime('%Y%m%d-%H%M%S')}", help="run ID")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=64, help="number of byte pairs in each step")
    parser.add_argument("--learning-rate", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
