"""The reference pass of a preference run on three unequal nodes, beside three plain loops that run at once.

The ranks and the loops, with transformers, are held to 100, 50 and 20 % of a core by cgroups (root, Linux). Rates are
pairs per second while all ranks compute, to the end of the pass: loading is in neither side's time. The loops run
before and after each pass. Each pair must be computed once. Other programs should be quiet, for their load changes
between the loops and the pass. Exit status 1 if the median ratio is under the bar, 2 if no cgroup can be made.
"""

import argparse
import json
import random
import shutil
import sqlite3
import sys
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from lib.sides import SEQUENCE, Cluster, run_config, until
from score_speed import CORES, LOAD_SECONDS, MICRO_BATCH, SETTLE_SECONDS, loop_rates, run
from unequal import Quota

from trainctl.protocol.messages import ACTIVE_RUN_STATES, RunsRequest, SnapshotRequest
from trainctl.trainer import demo_assets

LOOK_SECONDS = 0.2
"""Time between looks at the journal of the pass."""
ROWS = 2
"""Rows of the loops for each pair."""


def main() -> int:
    return run(__doc__.splitlines()[0], measure, ("ratio",))


def measure(folder: Path, options: argparse.Namespace, quotas: dict[str, Quota]) -> list[dict[str, float]]:
    """For each round the loops' rate, that of the pass and the ratio, in pairs per second."""
    demo_assets.make_model(folder / "model")
    demo_assets.make_text(folder / "data")
    (folder / "checkpoint").symlink_to(folder / "model")
    text = "".join(path.read_text("utf-8") for path in sorted((folder / "data").rglob("*.txt")))
    chance, found = random.Random(3), []
    with Cluster(folder, [*CORES]) as cluster:
        for _ in range(options.rounds):
            make_pairs(folder, text, 600, chance)
            before = sum(loop_rates(folder, options.seconds, quotas).values()) / ROWS
            make_pairs(folder, text, int(before * (options.seconds + LOAD_SECONDS + SETTLE_SECONDS)), chance)
            rate = pass_rate(folder, cluster, quotas)
            loops = (before + sum(loop_rates(folder, options.seconds, quotas).values()) / ROWS) / 2
            found.append({"loops": loops, "pass": rate, "ratio": rate / loops})
    return found


def make_pairs(folder: Path, text: str, count: int, chance: random.Random) -> None:
    """Texts of unlike lengths, their second half preferred to the same backwards; and the same as rows of the loops."""
    pairs, rows = [], []
    for _ in range(count):
        start, size = chance.randrange(len(text) - 400), chance.randrange(40, 360)
        prompt, answer = text[start : start + size // 2], text[start + size // 2 : start + size]
        if answer != answer[::-1]:
            pairs.append(json.dumps({"prompt": prompt, "chosen": answer, "rejected": answer[::-1]}))
            rows += [json.dumps({"text": prompt + half}) for half in (answer, answer[::-1])]
    (folder / "pairs.jsonl").write_text("".join(f"{line}\n" for line in pairs))
    (folder / "rows.jsonl").write_text("".join(f"{line}\n" for line in rows))


def pass_rate(folder: Path, cluster: Cluster, quotas: dict[str, Quota]) -> float:
    """Pairs per second of one pass, from when all ranks have settled in to the end. Raises SystemExit if a pair wasn't
    computed once."""
    config = run_config(folder, [*CORES], len(CORES) * MICRO_BATCH, MICRO_BATCH, first_shares="even")
    config["run"]["steps"] = 1
    config["data"] |= {"path": str(folder / "pairs.jsonl"), "kind": "rows", "sequence_length": 400}
    config["batch"]["micro_tokens"] = MICRO_BATCH * SEQUENCE
    config |= {"objective": {"kind": "dpo"}}
    for caches in (folder / "state").glob("*/data"):
        shutil.rmtree(caches)
    known = {run.run for run in cluster.client.ask(RunsRequest).runs}
    begun = next(cluster.client.command("start-run", {"config": config}))
    assert begun.state == "accepted", begun.reason  # it is applied with its first step
    view = until(
        lambda: (now := cluster.client.ask(SnapshotRequest, 0).run) and now.run not in known and now, "the run"
    )
    seen = watch(Path(view.directory).parents[1] / "data", cluster, quotas)
    until(
        lambda: (now := cluster.client.ask(SnapshotRequest, 0).run) and now.state not in ACTIVE_RUN_STATES,
        "the run's end",
    )
    whole = len((folder / "pairs.jsonl").read_text().splitlines())
    print(seen[-1][1], file=sys.stderr)
    if sum(seen[-1][1].values()) != whole:
        raise SystemExit(f"{sum(seen[-1][1].values())} pairs computed of {whole}")
    all_work_at = next(at for at, done in seen if len(done) == len(CORES))
    start, first = next((at, done) for at, done in seen if at >= all_work_at + SETTLE_SECONDS)
    finish, last = next((at, done) for at, done in seen if sum(done.values()) == whole)
    return (sum(last.values()) - sum(first.values())) / (finish - start)


def watch(caches: Path, cluster: Cluster, quotas: dict[str, Quota]) -> list[tuple[float, dict[int, int]]]:
    """Pairs computed by each rank, over time, while the journal of the pass is there; each rank is held to its part of
    a core once it computes."""
    seen: list[tuple[float, dict[int, int]]] = []
    held: set[str] = set()

    def look() -> bool:
        for journal in caches.glob(".reference-*/slices.db"):
            with suppress(sqlite3.Error), closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True)) as connection:
                query = "SELECT rank, sum(CASE WHEN answered IS NULL THEN 0 ELSE units END) FROM slices GROUP BY rank"
                dealt: dict[int, int] = dict(connection.execute(query).fetchall())
                seen.append((time.monotonic(), {rank: units for rank, units in dealt.items() if units}))
                hold({[*CORES][rank] for rank in dealt}, cluster, quotas, held)
        view: Any = cluster.client.ask(SnapshotRequest, 0).run if not seen or len(seen) % 10 == 0 else None
        return view is not None and (view.step >= 1 or view.state not in ACTIVE_RUN_STATES)

    while not look():
        time.sleep(LOOK_SECONDS)
    return seen


def hold(nodes: set[str], cluster: Cluster, quotas: dict[str, Quota], held: set[str]) -> None:
    for node in nodes - held:
        with suppress(ProcessLookupError):  # a child that has just ended: again at the next look
            quotas[node].hold(cluster.trainer_pids()[node])
            held.add(node)


if __name__ == "__main__":
    sys.exit(main())
