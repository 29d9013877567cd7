"""Wait of training for data: the share of a step's time that ranks spend in the phase `data`, by their records.

    python -m benchmarks data_wait [--steps N] [--cases LIST]

`demo` is `trainctl demo`, whose text is tokenized before its first step. `rows` is one rank on a few MB of JSONL alone.
`tokenizing` is the same rank while another process tokenizes a much larger JSONL file on all cores of this machine.
`growing` is one rank on a large JSONL file that grows: later chunks are tokenized while earlier ones are trained on.
Prints a table, then one JSON object; exits 1 if a rank waits longer than the bar allows.
"""

import argparse
import contextlib
import json
import random
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lib.sides import Cluster, end, end_on_sigterm, run_config, until

from trainctl.protocol.messages import SnapshotRequest
from trainctl.protocol.record.reader import RecordReader
from trainctl.trainer import demo_assets

BARS = {"demo": 0.01, "rows": 0.05, "tokenizing": 0.05, "growing": 0.05}
"""Most of a step's time that a rank may spend in the phase `data`."""
WARM_STEPS = 5
"""Steps at the start that are not counted."""
NODE = "bench"
GLOBAL_BATCH, MICRO_BATCH = 24, 8
ROWS_BYTES, OTHER_BYTES, GROWING_BYTES = 4_000_000, 1_000_000_000, 400_000_000
"""Bytes of the file that is trained on, of the one tokenized beside it while that runs, and of the growing one."""
CHUNK_SAMPLES = 4096
"""Lines of a chunk of the growing file."""

Shares = dict[str, float]
"""By node, the phase's share of all step time."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--cases", default=",".join(BARS))
    options = parser.parse_args()
    end_on_sigterm()
    found = {}
    for case in options.cases.split(","):
        with tempfile.TemporaryDirectory() as folder:
            found[case] = CASES[case](Path(folder), options.steps)
        for node, share in found[case].items():
            print(f"{case:<12}{node:<10}{share:>8.3%} of a step, at most {BARS[case]:.0%}", flush=True)
    print(json.dumps({"bars": BARS, "shares": found}))
    return 0 if all(share <= BARS[case] for case, shares in found.items() for share in shares.values()) else 1


def demo(folder: Path, steps: int) -> Shares:
    words = ["demo", "--headless", "--steps", str(steps + WARM_STEPS), "--folder", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "trainctl.tui.cli.main", *words], stdout=subprocess.PIPE, text=True, check=True
    )
    directory = Path(json.loads(done.stdout)["run_directory"])
    return shares_of(directory, WARM_STEPS + 1, WARM_STEPS + steps)


def rows(folder: Path, steps: int) -> Shares:
    return trained(folder, steps, lambda: contextlib.nullcontext())


def tokenizing(folder: Path, steps: int) -> Shares:
    return trained(folder, steps, lambda: other_file_tokenized(folder))


def growing(folder: Path, steps: int) -> Shares:
    return trained(
        folder, steps, lambda: chunks_tokenized(folder), GROWING_BYTES, growing=True, chunk_samples=CHUNK_SAMPLES
    )


CASES: dict[str, Callable[[Path, int], Shares]] = {
    "demo": demo,
    "rows": rows,
    "tokenizing": tokenizing,
    "growing": growing,
}


def trained(
    folder: Path,
    steps: int,
    beside: Callable[[], contextlib.AbstractContextManager[None]],
    size: int = ROWS_BYTES,
    **data: Any,
) -> Shares:
    """Return the shares of a rank on a JSONL file of `size` bytes, with `beside` going on while steps are measured."""
    demo_assets.make_model(folder / "model")
    demo_assets.make_text(folder / "data")
    make_rows(folder / "rows.jsonl", folder / "data", size)
    config = row_config(folder, folder / "rows.jsonl")
    config["data"] |= data
    with Cluster(folder, [NODE]) as cluster:
        cluster.start(config)
        view = cluster.client.ask(SnapshotRequest, 0).run
        assert view is not None
        with beside():
            first = view.step + WARM_STEPS + 1
            cluster.measure(first + steps - view.step)
        return shares_of(Path(view.directory), first, first + steps - 1)


def row_config(folder: Path, path: Path) -> dict[str, Any]:
    config = run_config(folder, [NODE], GLOBAL_BATCH, MICRO_BATCH)
    config["data"] |= {"path": str(path), "kind": "rows"}
    return config


def make_rows(path: Path, texts: Path, size: int) -> None:
    """Prompts and completions cut from texts, about `size` bytes of them; the same ones again if the texts are over."""
    text, chance = "".join(one.read_text("utf-8") for one in sorted(texts.rglob("*.txt"))), random.Random(3)
    lines, length = [], 0
    while length < min(size, ROWS_BYTES):
        start = chance.randrange(len(text) - 256)
        middle, stop = start + chance.randrange(8, 64), start + chance.randrange(72, 256)
        lines.append(json.dumps({"prompt": text[start:middle], "completion": text[middle:stop]}))
        length += len(lines[-1]) + 1
    with path.open("w", encoding="utf-8") as file:
        for _ in range(max(1, size // length)):
            file.writelines(f"{line}\n" for line in lines)


@contextlib.contextmanager
def other_file_tokenized(folder: Path) -> Iterator[None]:
    """The process by which a trainer tokenizes is at work on a file of its own. Raises RuntimeError if it ended before
    the block did."""
    make_rows(folder / "other.jsonl", folder / "data", OTHER_BYTES)
    config = row_config(folder, folder / "other.jsonl")
    task = {"config": config, "folder": str(folder / "other-tokens"), "where": "other"}
    with (folder / "progress.jsonl").open("w") as progress:
        process = subprocess.Popen(
            [sys.executable, "-m", "trainctl.trainer.data.tokenizing"],
            stdin=subprocess.PIPE,
            stdout=progress,
            text=True,
        )
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(task) + "\n")
        process.stdin.flush()
        until(lambda: tokenized_bytes(folder / "progress.jsonl"), "the first tokens of the other file")
        begun = tokenized_bytes(folder / "progress.jsonl")
        yield
        if process.poll() is not None:
            raise RuntimeError("the other file was tokenized before the steps were done: give fewer --steps")
        print(
            f"{(tokenized_bytes(folder / 'progress.jsonl') - begun) / 1e6:,.0f} MB were tokenized meanwhile", flush=True
        )
    finally:
        process.stdin.close()
        end(process)


@contextlib.contextmanager
def chunks_tokenized(folder: Path) -> Iterator[None]:
    """The growing file's chunks are tokenized meanwhile. Raises RuntimeError if the last of them was."""
    with (folder / "rows.jsonl").open("rb") as file:
        whole = sum(1 for _ in file) // CHUNK_SAMPLES
    begun = chunks_in(folder)
    yield
    if (done := chunks_in(folder)) >= whole:
        raise RuntimeError("the growing file was tokenized before the steps were done: give fewer --steps")
    print(f"{done - begun:,} chunks of {CHUNK_SAMPLES:,} lines were tokenized meanwhile", flush=True)


def chunks_in(folder: Path) -> int:
    """Return the number of chunks that have their token cache."""
    return sum(1 for _ in (folder / "state").rglob("cache.json"))


def tokenized_bytes(progress: Path) -> int:
    """By the last whole line that the process has said."""
    lines = progress.read_text("utf-8").split("\n")[:-1]
    return int(json.loads(lines[-1]).get("done", 0)) if lines else 0


def shares_of(directory: Path, first: int, last: int) -> Shares:
    """From a run's record, over some of its steps."""
    waited, whole = defaultdict[str, float](float), defaultdict[str, float](float)
    with RecordReader(directory) as record:
        parts = record.parts_between(first, last)
    for part in parts:
        waited[part.node] += part.phases.data
        whole[part.node] += part.step_seconds
    return {node: waited[node] / whole[node] for node in sorted(whole)}


if __name__ == "__main__":
    sys.exit(main())
