"""The policy `rebalance` on three real torch ranks held to 100, 50 and 20 % of a core, beside the best static split.

    python -m benchmarks rebalance [--batch G] [--rounds N] [--quotas 1 0.5 0.2]

From even shares the policy has 10 steps. Then its split and the best one that a search of static splits finds are
measured in turns. After that the quotas of the first and the last rank are exchanged in the middle of the run, and the
same is done again 10 steps later. Quotas are cgroups' and need the right to make them. Prints a table and one JSON
object; exits 1 if the policy's rate is under the bar, 2 if no cgroup can be made.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lib.quota import Quota
from lib.ratios import interval
from lib.sides import DEADLINE_SECONDS, Cluster, end_on_sigterm, run_config, until

from trainctl.protocol.messages import CommandReply, SnapshotRequest, StepsRequest
from trainctl.trainer import demo_assets

BAR = 0.95
NODES = ("one", "two", "three")
WITHIN_STEPS = 10
"""Steps after which the policy's split counts."""
MEASURED_STEPS, SEARCH_STEPS = 6, 3
"""Steps of a measurement, and of one of the search."""
MICRO_BATCH = 4
STALE_STEPS = 8
"""Steps after which the conductor's rates are of steps under the quotas alone."""

Split = dict[str, int]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=48, help="samples of a step")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of measurements of the two splits")
    parser.add_argument("--quotas", type=float, nargs=3, default=[1.0, 0.5, 0.2], help="cores of each rank")
    options = parser.parse_args()
    end_on_sigterm()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        try:
            quotas = {node: Quota(cores, node) for node, cores in zip(NODES, options.quotas, strict=True)}
        except OSError as error:
            print(f"no cgroup can be made here: {error}", file=sys.stderr)
            return 2
        for quota in quotas.values():
            stack.callback(quota.remove)
        demo_assets.make_model(folder / "model")
        demo_assets.make_text(folder / "data")
        run = Run(stack.enter_context(Cluster(folder, NODES)), folder, options.batch)
        for node, pid in run.cluster.trainer_pids().items():
            quotas[node].hold(pid)
        print(f"{'':>10} {'split':>12} {'best static':>12} {'ratio':>6} {'low':>6} {'high':>6} {'even':>6}")
        run.go()
        found = [compare(run, "from even", options.rounds)]
        quotas[NODES[0]].set(options.quotas[2])
        quotas[NODES[2]].set(options.quotas[0])
        found.append(compare(run, "exchanged", options.rounds))
    print(json.dumps({"bar": BAR, "quotas": options.quotas, "phases": found}))
    return 0 if all(phase["median"] >= BAR for phase in found) else 1


class Run:
    """A run of which a policy and this program change the shares."""

    def __init__(self, cluster: Cluster, folder: Path, batch: int) -> None:
        self.cluster, self._batch = cluster, batch
        config = run_config(folder, NODES, batch, MICRO_BATCH, first_shares="even")
        self.cluster.start(config | {"policy": {"rebalance": {"mode": "off"}}})

    def go(self) -> None:
        """Begin, once the quotas hold the trainers; give the policy steps that were all made so."""
        self._send("resume", {})
        first = self._view().step
        until(lambda: self._view().step >= first + STALE_STEPS, f"step {first + STALE_STEPS}")

    def mode(self, mode: str) -> None:
        """Set the mode of the policy `rebalance`."""
        self._send("autopilot", {"name": "rebalance", "mode": mode})

    def even(self) -> Split:
        """Even shares."""
        split = dict(zip(NODES, [self._batch // 3 + (rank < self._batch % 3) for rank in range(3)], strict=True))
        self.share(split)
        return split

    def share(self, split: Split) -> int:
        """Take a split; the first step that has it."""
        if split == self.split():
            return self._view().step + 1
        reply = self._send("rebalance", {"shares": split})
        assert reply.step is not None
        return reply.step

    def split(self) -> Split:
        """The shares as they are."""
        return {rank.node: rank.share for rank in self._view().ranks}

    def follow(self, steps: int) -> Split:
        """Let the policy act for as many steps, and give the shares then."""
        self.mode("on")
        last = self._view().step + steps
        until(lambda: self._view().step >= last, f"step {last}")
        self.mode("off")
        return self.split()

    def seconds(self, split: Split, steps: int) -> float:
        """The median seconds of a step with a split."""
        first = self.share(split)
        until(lambda: self._view().step >= first + steps, f"step {first + steps}")
        rows = self.cluster.client.ask(StepsRequest, after_step=first - 1, limit=steps + 1).steps
        return statistics.median(b.committed_at - a.committed_at for a, b in itertools.pairwise(rows))

    def _send(self, verb: str, args: dict[str, Any]) -> CommandReply:
        reply: CommandReply = self.cluster.client.send(verb, args, timeout_seconds=DEADLINE_SECONDS)
        return reply

    def _view(self) -> Any:
        view = self.cluster.client.ask(SnapshotRequest, 0).run
        assert view is not None
        return view


def compare(run: Run, title: str, rounds: int) -> dict[str, Any]:
    """The policy's split within its steps, and the best static one, in turns."""
    split = run.follow(WITHIN_STEPS)
    best = search(run, split)
    pairs = [(run.seconds(split, MEASURED_STEPS), run.seconds(best, MEASURED_STEPS)) for _ in range(rounds)]
    even = run.seconds(run.even(), MEASURED_STEPS)
    run.share(split)
    ratios = interval([static / own for own, static in pairs])
    seconds = statistics.median(own for own, _ in pairs)
    print(
        f"{title:>10} {'/'.join(map(str, split.values())):>12} {'/'.join(map(str, best.values())):>12}"
        f" {ratios['median']:>6.3f} {ratios['low']:>6.3f} {ratios['high']:>6.3f} {seconds / even:>6.3f}",
        flush=True,
    )
    return {"phase": title, "split": split, "best": best, "seconds": seconds, "even_seconds": even, **ratios}


def search(run: Run, start: Split) -> Split:
    """Hill climbing from a split: samples moved from one rank to another as long as that is faster by 1 %."""
    best, seconds, size = start, run.seconds(start, SEARCH_STEPS), 4
    while size:
        moved = [
            best | {giver: best[giver] - size, taker: best[taker] + size}
            for giver in best
            for taker in best
            if giver != taker and best[giver] > size
        ]
        timed = [(run.seconds(split, SEARCH_STEPS), tuple(split.items())) for split in moved]
        least, found = min(timed)
        if least < 0.99 * seconds:
            best, seconds = dict(found), least
        else:
            size //= 2
    return best


if __name__ == "__main__":
    sys.exit(main())
