"""Predictions of `trainctl advise` beside what is then measured, with real agents on this machine.

    sudo python -m benchmarks advise [--cases one,equal,quotas,mixed,link,scoring] [--steps N] [--rounds N]

Each case calibrates its nodes, alone and at once, asks for advice, and then runs what was advised about: one rank; two
equal torch ranks; two held to 100 and 20 % of a core; a torch and an MLX rank; two whose loopback carries 100 Mbit/s
each way, so that one alone is faster (a network namespace with tbf); and scoring on two nodes. A run has the predicted
shares. All nodes are in cgroups with a core or less and a high priority, so that other programs take little. Two that
compute at once have 0.8 cores each: what is left is for the client, which elsewhere has a machine of its own. Prints
predicted and measured rates with their difference, and one JSON object with each plan's median difference over all
rounds and its 95 % interval; exits 1 if a median is over the bar, 2 if cgroups or namespaces can't be made for a case.
"""

import argparse
import asyncio
import contextlib
import ctypes
import io
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w
from lib.quota import Quota
from lib.sides import Cluster, end_on_sigterm, run_config, until

from trainctl.protocol.client.client import Client
from trainctl.protocol.messages import ACTIVE_RUN_STATES, SnapshotRequest, WorkView
from trainctl.trainer import demo_assets
from trainctl.tui.export.row_scores import ScoreRequest, Scoring, new_id, read_file

BAR = 0.1
MEGABITS = 100
ROW_CHARACTERS = 127
"""Characters of a row for scoring: as long as the run's samples."""
SCORE_SECONDS = 30.0
CLONE_NEWNET = 0x40000000
NAMESPACE = f"advise{os.getpid()}"


class Case(NamedTuple):
    """Case that is calibrated and run."""

    nodes: Mapping[str, Mapping[str, Any]]  # by node, its table in the run file
    batch: int
    micro: int
    quotas: Mapping[str, float] = {}  # cores; others have one
    scores: bool = False
    model: Mapping[str, int] = {"hidden": 128, "layers": 4, "heads": 4, "intermediate": 416}


TWO = {"a": 0.8, "b": 0.8}
CASES = {
    "one": Case({"a": {}}, 16, 4),
    "equal": Case({"a": {}, "b": {}}, 16, 4, quotas=TWO),
    "quotas": Case({"a": {}, "b": {}}, 24, 4, quotas={"a": 1.0, "b": 0.2}),
    "mixed": Case({"a": {}, "b": {"backend": "mlx"}}, 24, 4, quotas=TWO),
    "link": Case(
        {"a": {}, "b": {}}, 8, 4, quotas=TWO, model={"hidden": 256, "layers": 4, "heads": 4, "intermediate": 832}
    ),
    "scoring": Case({"a": {}, "b": {}}, 16, 8, quotas=TWO, scores=True),
}


class Compared(NamedTuple):
    """One prediction."""

    case: str
    what: str
    predicted: float  # samples or rows per second
    measured: float

    @property
    def difference(self) -> float:
        return self.predicted / self.measured - 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--steps", type=int, default=40, help="that are measured of each run")
    parser.add_argument("--rounds", type=int, default=1, help="of all cases")
    options = parser.parse_args()
    end_on_sigterm()
    comparisons: list[Compared] = []
    print(f"{'case':<9} {'what':<14} {'predicted':>9} {'measured':>9} {'difference':>10}")
    for name in options.cases.split(",") * options.rounds:
        try:
            with _network(name):
                comparisons += _case(name, options.steps)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 2
    plans = [_summary(comparisons, *plan) for plan in dict.fromkeys((row.case, row.what) for row in comparisons)]
    worst = max(abs(plan["median"]) for plan in plans)
    print(json.dumps({"bar": BAR, "worst": worst, "plans": plans}))
    return 0 if worst <= BAR else 1


def _summary(comparisons: Sequence[Compared], case: str, what: str) -> dict[str, Any]:
    """Return a plan's median difference; its 95 % interval by ranks, from six rounds on."""
    differences = sorted(row.difference for row in comparisons if (row.case, row.what) == (case, what))
    count = len(differences)
    cut = max(0, math.floor((count - 1.96 * math.sqrt(count)) / 2))
    return {
        "case": case,
        "what": what,
        "rounds": count,
        "median": round(statistics.median(differences), 4),
        "from": round(differences[cut], 4),
        "to": round(differences[-1 - cut], 4),
    }


def _case(name: str, steps: int) -> list[Compared]:
    case, found, begun = CASES[name], list[Compared](), time.monotonic()
    with tempfile.TemporaryDirectory() as text, contextlib.ExitStack() as stack:
        folder = Path(text)
        demo_assets.make_model(folder / "model", demo_assets.llama_config(**case.model))
        demo_assets.make_text(folder / "data")
        own = Quota(os.cpu_count() or 1, "own")  # commands must not wait for other programs either
        stack.callback(own.remove)
        own.hold(os.getpid())
        cluster = stack.enter_context(Cluster(folder, [*case.nodes]))
        for node, agent in zip(case.nodes, cluster._agents, strict=True):
            quota = Quota(case.quotas.get(node, 1.0), node)
            stack.callback(quota.remove)
            quota.hold(agent.pid)  # and what it starts
        config = _config(folder, case)
        (folder / "run.toml").write_bytes(tomli_w.dumps(config).encode())
        _calibrate(folder, alone=len(case.nodes) > 1 and not case.scores)
        advice = _trainctl(folder, "advise", folder / "run.toml", "--json")
        for made in _score(folder, cluster, case, advice) if case.scores else _train(cluster, config, advice, steps):
            found.append(Compared(name, *made))
            one = found[-1]
            print(
                f"{one.case:<9} {one.what:<14} {one.predicted:>9.2f} {one.measured:>9.2f} {one.difference:>+10.1%}",
                flush=True,
            )
        answer, took = advice["answer"], time.monotonic() - begun
        print(
            f"{'':<9} advised: {answer['mode']} on {'+'.join(answer['nodes'])}; the case took {took:.0f} s", flush=True
        )
    return found


def _config(folder: Path, case: Case) -> dict[str, Any]:
    config = run_config(folder, [*case.nodes], case.batch, case.micro, first_shares="even")
    for node, table in case.nodes.items():
        config["nodes"][node] |= table
    return config | {"policy": {"rebalance": {"mode": "off"}}}


def _calibrate(folder: Path, *, alone: bool) -> None:
    """Alone for the plans of one node, if there are others, then at once."""
    if alone:
        _trainctl(folder, "calibrate", folder / "run.toml", "--alone", "--json")
    _trainctl(folder, "calibrate", folder / "run.toml", "--json")


def _trainctl(folder: Path, *words: str | Path) -> dict[str, Any]:
    """Return what a command prints with `--json`; this program ends if it fails."""
    command = [sys.executable, "-m", "trainctl.tui.cli.main", *map(str, words)]
    command += ["--cluster", str(folder / "cluster.toml")]
    env = {**os.environ, "TRAINCTL_STATE": str(folder / "state")}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{words[0]} ended with {done.returncode}: {done.stdout}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# ---------------------------------------------------------------- training


def _train(
    cluster: Cluster, config: dict[str, Any], advice: dict[str, Any], steps: int
) -> Iterator[tuple[str, float, float]]:
    """Each plan that is one run."""
    for plan in advice["plans"]:
        if plan["mode"] == "separate":
            continue
        nodes = {node: config["nodes"][node] for node in plan["nodes"]}
        shared = {node: {**table, "share": plan["shares"].get(node)} for node, table in nodes.items()}
        wanted = shared if plan["mode"] == "sync" else nodes
        cluster.start(config | {"nodes": wanted})
        seconds = cluster.measure(steps)["step_seconds"]
        _stop(cluster)
        yield f"{plan['mode']} {'+'.join(nodes)}", plan["samples_per_second"], config["batch"]["global"] / seconds


def _stop(cluster: Cluster) -> None:
    cluster.client.send("stop", {"checkpoint": False}, timeout_seconds=60)
    until(lambda: cluster.client.ask(SnapshotRequest, 0).run.state not in ACTIVE_RUN_STATES, "the run's end")  # type: ignore[union-attr]


# ---------------------------------------------------------------- scoring


def _score(folder: Path, cluster: Cluster, case: Case, advice: dict[str, Any]) -> Iterator[tuple[str, float, float]]:
    run = _checkpointed(folder, cluster, case)
    predicted = advice["scoring"]["rows_per_second"]
    text = next((folder / "data").rglob("*.txt")).read_text("utf-8", "replace")
    count = int(predicted * SCORE_SECONDS)
    starts = [at * 61 % max(1, len(text) - ROW_CHARACTERS) for at in range(count)]
    rows = [{"text": text[start : start + ROW_CHARACTERS]} for start in starts]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    yield (
        "all nodes",
        predicted,
        asyncio.run(_rate(cluster.client.ask(SnapshotRequest, 0).node.address, folder, run, case.nodes)),
    )


def _checkpointed(folder: Path, cluster: Cluster, case: Case) -> str:
    config = _config(folder, case)
    config |= {"run": {"name": "bench", "steps": 1}, "checkpoint": {"at_end": True}}
    run = cluster.client.send("start-run", {"config": config}, timeout_seconds=300).run
    assert run is not None
    until(lambda: cluster.client.ask(SnapshotRequest, 0).run.state not in ACTIVE_RUN_STATES, "the run's end")  # type: ignore[union-attr]
    return run


async def _rate(address: str, folder: Path, run: str, nodes: Sequence[str] | Mapping[str, Any]) -> float:
    """Rows per second from when every node has answered until the last row but those of one slice each."""
    seen: list[tuple[float, int]] = []

    def show(view: WorkView) -> None:
        if len(view.nodes) == len(nodes) and all(node.rows for node in view.nodes):
            seen.append((time.monotonic(), view.answered))

    rows = read_file(folder / "rows.jsonl")
    async with Client(address) as client:
        await Scoring(client, rows, ScoreRequest(new_id(), run, None, False, ()), io.BytesIO(), show).run()
    (began, first), (ended, last) = seen[0], seen[-1]
    return (last - first) / (ended - began)


# ---------------------------------------------------------------- network


@contextlib.contextmanager
def _network(case: str) -> Iterator[None]:
    """For the case `link`: this process and those that it starts are in a namespace whose loopback is narrow. Both
    directions pass the same queue, so it lets through twice the rate."""
    if case != "link":
        yield
        return
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    subprocess.run(["ip", "netns", "add", NAMESPACE], check=True)
    try:
        inside = os.open(f"/run/netns/{NAMESPACE}", os.O_RDONLY)
        _enter(inside)
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        limits = ["rate", f"{2 * MEGABITS}mbit", "burst", "128kb", "latency", "200ms"]
        subprocess.run(["tc", "qdisc", "add", "dev", "lo", "root", "tbf", *limits], check=True)
        yield
    finally:
        _enter(own)
        subprocess.run(["ip", "netns", "del", NAMESPACE], check=True)


def _enter(namespace: int) -> None:
    """A network namespace, for this thread and what it starts. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    sys.exit(main())
