"""A recorded agent for the screens' tests: real messages, passed through the real codec, and a clock that stands still.

It stands where the network would; everything the screens are made of is the program's own.
"""

import asyncio
import datetime
import functools
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np
from tests.memory_values import memory, memory_parts

from trainctl.protocol import messages as m
from trainctl.protocol.batch.cost import run_rates
from trainctl.protocol.calibration.profile import DeviceProfile
from trainctl.protocol.client.client import Connection
from trainctl.protocol.errors import RefusedError, UnreachableError
from trainctl.protocol.messages import events as e
from trainctl.protocol.record.downsampling import choose
from trainctl.protocol.record.rollups import AXIS_METRICS
from trainctl.protocol.wire import codec
from trainctl.tui.app.app import TrainctlApp
from trainctl.tui.state.view_state import Clock


@dataclass(frozen=True)
class FrozenClock(Clock):
    """A clock that stands still."""

    at_monotonic: float = 1000.0
    at_wall: float = 0.0

    def monotonic(self) -> float:
        return self.at_monotonic

    def wall(self) -> float:
        return self.at_wall


NOW = datetime.datetime(2026, 11, 20, 14, 31, 5, tzinfo=datetime.UTC).timestamp()
CLOCK = FrozenClock(zone=datetime.UTC, at_monotonic=5000.0, at_wall=NOW)
BOOT = "boot-1"
Message = m.Snapshot | m.Live | m.Heartbeat | Connection


def phases(step_seconds: float, busy: float) -> m.Phases:
    """A synchronous step of which `busy` is data, forward and backward; what the optimizer and the plan, the same for
    all, leave of the rest is sync, the wait for slower ranks with it."""
    optimizer, wait = 0.012 * step_seconds, 0.006 * step_seconds
    return m.Phases(
        data=0.02 * busy, forward=0.33 * busy, backward=0.65 * busy, sync=step_seconds - busy - optimizer - wait,
        optimizer=optimizer, wait=wait,
    )  # fmt: skip


NODES = (
    # node, backend, device, share, micro, tokens a second alone, memory, cap
    ("studio", "mlx", "gpu Apple M2 Ultra", 16, 8, 2970.0, 41e9, 160e9),
    ("mbp", "mlx", "gpu Apple M3 Max", 9, 5, 1560.0, 34e9, 96e9),
    ("forge", "torch", "cuda:0 NVIDIA RTX 4090", 39, 13, 7100.0, 20e9, 24e9),
    ("mini", None, None, 0, 4, None, None, None),
)
MIXED = (
    # the demo's three: the last one is the slowest, and the others wait for it
    ("torch-a", "torch", "cpu", 12, 8, 5200.0, 0.41e9, 8.2e9),
    ("torch-b", "torch", "cpu", 10, 8, 4900.0, 0.40e9, 8.2e9),
    ("mlx-c", "mlx", "cpu", 2, 2, 690.0, 0.22e9, None),
)
ALONE = (("atlas", "torch", "cpu", 24, 8, 3048 / (0.93 * 0.31), 412e6, None),)
FLEETS: dict[int, tuple[Any, ...]] = {1: ALONE, 3: MIXED, 4: NODES}
COMPUTE = {"torch": m.Compute("float32", None, "off", "sdpa"), "mlx": m.Compute("float32", None, "off", "mx.fast")}
OF_FOUR = {
    "torch": m.Compute("bfloat16", False, "default", "sdpa", "float32", deterministic=False, cudnn_benchmark=True),
    "mlx": m.Compute("bfloat16", None, "off", "mx.fast", "float32"),
}
"""Devices of the fleet of four, by backend."""
SECONDS = {1: 0.31, 3: 0.4, 4: 3.06}
"""Seconds of a step, by the number of ranks."""


def rank_views(nodes: int) -> tuple[m.RankView, ...]:
    """`nodes` ranks; of four, the last is lost. One alone is a CPU box with the whole batch."""
    if nodes == 1:
        return (
            m.RankView(
                rank=0, node="atlas", state="run", since_at=NOW - 60, share=24, micro_batch=8, backend="torch",
                device="cpu", pid=4711, compute=m.Compute("float32", None, "off", "sdpa"),
            ),
        )  # fmt: skip
    return tuple(
        m.RankView(
            rank=rank, node=name, state="run" if own else "lost", since_at=NOW - 15000, share=share, micro_batch=micro,
            backend=backend, device=device, why="" if own else "no heartbeat",
            compute=(OF_FOUR if nodes == 4 else COMPUTE).get(backend),
        )
        for rank, (name, backend, device, share, micro, own, _, _) in enumerate(FLEETS[nodes])
    )  # fmt: skip


def hung(view: m.RunView, rank: int, why: str = "its agent is silent") -> m.RunView:
    """The run with one rank hung for 12 s."""
    ranks = tuple(
        msgspec.structs.replace(item, state="hung", since_at=NOW - 12, why=why) if item.rank == rank else item
        for item in view.ranks
    )
    return msgspec.structs.replace(view, ranks=ranks)


def writing(view: m.RunView) -> m.RunView:
    """The run while its first rank writes a checkpoint in the background."""
    why = f"{m.WRITING} of step {view.step - 12:,}, 40%"
    return msgspec.structs.replace(view, ranks=(msgspec.structs.replace(view.ranks[0], why=why), *view.ranks[1:]))


def leaving(view: m.RunView) -> m.RunView:
    """The run with its second rank late and its third about to be drained."""
    late = msgspec.structs.replace(
        view.ranks[1], state="late", since_at=NOW - 12, why=f"step {view.step + 1} takes long (usually 0.39 s)"
    )
    last = msgspec.structs.replace(
        view.ranks[2], state="draining", since_at=NOW - 2, why=f"until step {view.step + 1} is done"
    )
    return msgspec.structs.replace(view, ranks=(view.ranks[0], late, last))


def shrunk(view: m.RunView) -> m.RunView:
    """The group of three with only the first at work: the second is given up, the third is on its way back."""
    killed = "says: CUDA out of memory, tried to allocate 2.00 GiB with 1.21 GiB free"
    failed = msgspec.structs.replace(view.ranks[1], state="failed", since_at=NOW - 12, share=0, why=killed, pid=4712)
    back = msgspec.structs.replace(
        view.ranks[2], state="rejoining", since_at=NOW - 4, share=0, why="has been silent for 5 s"
    )
    first = msgspec.structs.replace(view.ranks[0], share=view.global_batch)
    return msgspec.structs.replace(
        view, ranks=(first, failed, back), mixed=False, engine="none", generation=m.Generation(1, 5), straggler=None
    )


def comings_and_goings(view: m.RunView, seq: int) -> list[m.Event]:
    """Return how the group of three came to be as `shrunk` has it."""
    ranks, by_gloo = ("torch-a", "torch-b", "mlx-c"), {"engine": "gloo"}

    def split(before: tuple[int, ...], after: tuple[int, ...], cause: str = "", **rank: str) -> e.SharesChanged:
        shares = [dict(zip(ranks, counts, strict=True)) for counts in (before, after)]
        return e.SharesChanged(*shares, cause, **rank)

    told: tuple[tuple[m.Severity, e.AnyEvent, int], ...] = (
        ("info", e.GenerationFormed(m.Generation(1, 2), 3, **by_gloo), 0),
        ("error", split((12, 10, 2), (13, 11, 0), "was ended by signal 9", lost="mlx-c"), 69),
        ("info", e.GenerationFormed(m.Generation(1, 3), 2, **by_gloo), 69),
        ("good", split((13, 11, 0), (12, 10, 2), returned="mlx-c"), 78),
        ("info", e.GenerationFormed(m.Generation(1, 4), 3, **by_gloo, behind=("mlx-c",), source="torch-a"), 77),
        ("error", split((12, 10, 2), (20, 0, 4), "says: CUDA out of memory", lost="torch-b"), 115),
        ("error", split((20, 0, 4), (24, 0, 0), "has been silent for 5 s", lost="mlx-c"), 115),
        ("info", e.GenerationFormed(m.Generation(1, 5), 1), 115),
    )
    verbs = {"mlx-c": "admit", "": "rebalance"}
    return [
        m.Event(
            id=20 + index, at=NOW - 40 + 4 * index, severity=severity, by="auto", data=data, step=step, run=view.run,
            verb=verbs[data.returned] if isinstance(data, e.SharesChanged) else None, boot=BOOT, seq=seq + index,
        )
        for index, (severity, data, step) in enumerate(told)
    ]  # fmt: skip


def run_view(
    nodes: int = 1, state: m.RunState = "running", step: int = 118, steps: int = 150, **other: Any
) -> m.RunView:
    name, lead, engine, n, batch = {
        1: ("stdlib", "atlas", "none", 1, 24), 3: ("demo", "torch-a", "gloo", 2, 24), 4: ("sft-1b", "studio", "ring", 4,
        64)
    }[nodes]  # fmt: skip
    many = nodes == 4
    made = m.RunView(
        run=f"{name}-20261120-{'110000' if many else '142900'}", name=name, state=state, lead=lead, engine=engine,
        mixed=nodes == 3, generation=m.Generation(1, n),
        step=step, steps=steps, plan_version=4, global_batch=batch, samples=120_000 if many else 61_440,
        cursor=step * batch, learning_rate=1.62e-4 if many else 1.21e-3, started_at=NOW - (86400 if many else 95),
        ranks=rank_views(nodes), directory="/var/lib/trainctl/atlas/runs/x", eval_loss=1.903 if many else 2.301,
        eval_step=step // 50 * 50, boot=BOOT, seq=0,
        straggler=m.Straggler(2, "mlx-c", "backward", 0.0598, 0.0918) if nodes == 3 and state == "running" else None,
    )  # fmt: skip
    return msgspec.structs.replace(made, **other)


def committed(
    view: m.RunView, step: int, seq: int = 0, seconds: float | None = None, loss: float | None = None
) -> m.StepCommitted:
    many = len(view.ranks) == 4
    seconds = SECONDS[len(view.ranks)] if seconds is None else seconds
    return m.StepCommitted(
        run=view.run, generation=view.generation, step=step, committed_at=NOW - 0.2 - seconds * (view.step - step),
        loss=loss_at(step, many) if loss is None else loss, weight=32768.0 if many else 3048.0,
        samples=view.global_batch,
        learning_rate=view.learning_rate, grad_norm=0.71, cursor=step * view.global_batch,
        global_batch=view.global_batch,
        plan_version=view.plan_version, step_seconds=seconds, tokens=32768 if many else 3048,
        tokens_total=step * (32768.0 if many else 3048.0), weight_total=step * (32768.0 if many else 3048.0),
        seconds_total=seconds * step,
        boot=BOOT,
        seq=seq,
    )  # fmt: skip


def loss_at(step: int, many: bool) -> float:
    noise = 0.03 * math.sin(step * 12.9898) + 0.02 * math.sin(step * 78.233)
    return 1.8 + 0.75 * math.exp(-step / 5200) + noise if many else 2.1 + 3.45 * math.exp(-step / 28) + noise


def tokens_of(view: m.RunView, rank: int) -> float:
    """Tokens of a rank's share."""
    share = FLEETS[len(view.ranks)][rank][3]
    return 3048.0 if len(view.ranks) == 1 else (512.0 if len(view.ranks) == 4 else 127.0) * share


def rank_step(view: m.RunView, step: int, rank: int, seq: int = 0, seconds: float | None = None) -> m.RankStep:
    seconds = SECONDS[len(view.ranks)] if seconds is None else seconds
    _, _, _, _, _, own, used, most = FLEETS[len(view.ranks)][rank]
    tokens = tokens_of(view, rank)
    ranked = view.ranks[rank]
    return m.RankStep(
        run=view.run, generation=view.generation, step=step, rank=rank, node=ranked.node, tokens=tokens,
        samples=ranked.share, micro_batch=ranked.micro_batch, replays=0, step_seconds=seconds,
        phases=phases(seconds, tokens / (own or 1.0)), values={**memory((used or 0) * 0.9, used or 0, most),
                **memory_parts(used or 0, (used or 0) * 0.9), "own_loss": loss_at(step + rank, len(view.ranks) > 1)},
        boot=BOOT, seq=seq,
    )  # fmt: skip


def host(node: str, seq: int = 0, gpu: bool = False) -> m.HostReading:
    gpus = (
        m.GpuReading("NVIDIA RTX 4090", 93.0, 2520.0, 412.0, 71.0, 20_000_000_000, 24_000_000_000)
        if node == "forge"
        else m.GpuReading("Apple M", 89.0 if node == "studio" else 98.0, 1380.0, 54.0, None, None, None),
    )
    return m.HostReading(
        node=node, read_at=NOW - 0.4, cpu_percent=87.0, memory_used_bytes=4_100_000_000,
        memory_total_bytes=8_200_000_000,
        disk_free_bytes=212_000_000_000, load_1min=2.1, gpus=gpus if gpu else (), boot=BOOT, seq=seq,
        values={} if node in ("studio", "atlas", "torch-a") else {"round_trip_seconds": 0.0021},
    )  # fmt: skip


def events(view: m.RunView) -> tuple[m.Event, ...]:
    def event(number: int, ago: float, data: e.AnyEvent, **other: Any) -> m.Event:
        rest: dict[str, Any] = {"severity": "info", "by": "auto", **other}
        return m.Event(id=number, at=NOW - ago, data=data, run=view.run, boot=BOOT, **rest)

    start, lead = view.step, view.lead
    by_anna = {"by": "anna", "outcome": "applied"}
    return (
        event(1, 12600, e.Notice(f"{view.name} started"), severity="good"),
        event(2, 11000, e.Notice(f"evaluated: {view.eval_loss}", "evaluation"), step=max(start - 118, 0)),
        event(3, 9000, e.MicroBatchChanged(((lead, 4),), ((lead, 8),)), step=max(start - 70, 1), verb="resize-batch",
              command="a", **by_anna),
        event(4, 700, e.CheckpointWritten(start - 18, 300_000_000, 0.014), step=start - 18),
        event(5, 660, e.LearningRateChanged(1.8e-4, 1.62e-4, "scale"), step=start - 30, verb="set-lr", command="b",
              **by_anna),
        event(6, 5, e.Notice(f"{view.ranks[-1].node} slowed by 0.14 s in backward", "rank"), severity="warning",
              step=start),
    )  # fmt: skip


@functools.lru_cache(maxsize=64)  # the same views come again in many tests
def series(view: m.RunView, first_step: int = 0) -> tuple[m.Series, ...]:
    """The run's history from a step on as an agent sends it, at most 256 buckets a series."""
    size = 1
    while (view.step - first_step) / size > 256:
        size *= 10 if size == 1 else 2
    nodes = len(view.ranks)
    many, seconds = nodes == 4, SECONDS[nodes]

    def make(metric: str, rank: int | None, value: Callable[[int], float]) -> m.Series:
        steps = range(first_step if size > 1 else max(first_step, 1), view.step + 1, size)
        chunks = [np.array([value(step + i) for i in range(min(size, 8))]) for step in steps]
        columns = [tuple(float(pick(chunk)) for chunk in chunks) for pick in (np.min, np.max, np.mean, lambda c: c[-1])]
        return m.Series(metric, rank, size, tuple(steps), *columns)

    made = [
        make("loss", None, lambda step: loss_at(step, many)),
        make("step_seconds", None, lambda step: seconds + 0.01 * math.sin(step)),
        make("tokens_per_second", None, lambda step: (32768 if many else 3048) / (seconds + 0.01 * math.sin(step))),
    ]
    if view.rate_metric != "tokens_per_second":
        made.append(make(view.rate_metric, None, lambda step: 24 / seconds))
    for rank in view.ranks:
        own = FLEETS[nodes][rank.rank][5]
        if own is None:
            continue
        busy = tokens_of(view, rank.rank) / own
        made += [
            make("busy_seconds", rank.rank, lambda step, busy=busy: busy * (1 + 0.01 * math.sin(step * 0.7))),
            make("own_tokens_per_second", rank.rank, lambda step, own=own: own * (1 + 0.01 * math.sin(step * 2.3))),
            make("wait_seconds", rank.rank, lambda step: 0.0007),
        ]  # fmt: skip
    every = max(view.step // 6, 1)
    at = tuple(range(every, view.step + 1, every))
    values = tuple(loss_at(step, many) + 0.06 for step in at)
    return (*made, m.Series("eval_loss", None, 1, at, values, values, values, values))


@functools.lru_cache(maxsize=16)
def lap_series(view: m.RunView, first_step: int) -> tuple[m.Series, ...]:
    """Where each rank's steps went, one by one; of some steps nothing is known."""
    steps = tuple(step for step in range(max(first_step, 1), view.step + 1) if step % 40 not in (31, 32))
    swell = [1 + 0.05 * math.sin(step / 5) for step in steps]
    filled = [0.96 + 0.04 * min(step % 50, 40) / 40 for step in steps]
    made = []
    for rank in view.ranks:
        if FLEETS[len(view.ranks)][rank.rank][5] is None:
            continue
        part = rank_step(view, view.step, rank.rank)
        for name in ("data", "forward", "backward", "sync", "optimizer", "wait"):
            seconds = getattr(part.phases, name)
            values = tuple(seconds * by for by in swell)
            made.append(m.Series(f"{name}_seconds", rank.rank, 1, steps, values, values, values, values))
        for name in ("memory_bytes", "memory_peak_bytes"):
            memory = tuple(part.values[name] * by for by in filled)
            made.append(m.Series(name, rank.rank, 1, steps, memory, memory, memory, memory))
    return tuple(made)


def compile_series(view: m.RunView, first_step: int, last_step: int, columns: int) -> tuple[m.Series, ...]:
    """Return what the compiler took in step 1 of the ranks that compile, in a bucket as wide as is asked for."""
    size, seconds = choose(first_step, last_step, columns).bucket_steps, (41.2,)
    ranks = [rank.rank for rank in view.ranks if rank.compute is not None and rank.compute.compile != "off"]
    return tuple(m.Series("compile_seconds", rank, size, (1 // size * size,), *[seconds] * 4) for rank in ranks)


@functools.lru_cache(maxsize=64)
def history_of(
    view: m.RunView, metrics: tuple[str, ...], first_step: int, last_step: int | None, columns: int
) -> tuple[m.Series, ...]:
    """Return what a record answers: each metric between two steps in at most `columns` buckets."""
    first, last = max(first_step, 1), min(last_step or view.step, view.step)
    zoom = choose(first, last, columns)
    every = {(made.metric, made.rank): made for made in series(view)}
    seconds, many = SECONDS[len(view.ranks)], len(view.ranks) == 4
    exact: dict[str, Callable[[int], float]] = {
        "loss": lambda step: loss_at(step, many),
        "grad_norm": lambda step: 0.7 + 0.2 * math.sin(step * 3.1) + 2 / (1 + step / 20),
        "learning_rate": lambda step: 1.62e-4 * min(step / 2000, 1.0),
        "tokens_total": lambda step: step * (32768.0 if many else 3048.0),
        "committed_at": lambda step: NOW - 0.2 - seconds * (view.step - step),
    }
    wanted = [(name, None) for name in metrics if name in exact] + [key for key in every if key[0] in metrics]
    made = []
    for name, rank in dict.fromkeys(wanted):
        known = every.get((name, rank))
        if known is not None and name == "eval_loss":
            made.append(known)
            continue
        value = exact.get(name) or (lambda step, known=known: known.last[step % len(known.last)])
        starts = range(first // zoom.bucket_steps * zoom.bucket_steps, last + 1, zoom.bucket_steps)
        chunks = []
        for start in starts:
            low, high = max(start, first), min(start + zoom.bucket_steps - 1, last)
            if name in AXIS_METRICS:
                low, high = max(start, 1), min(start + zoom.bucket_steps - 1, view.step)
            chunks.append([value(step) for step in {*range(low, high + 1, max(zoom.bucket_steps // 8, 1)), high}])
        columns_of = [tuple(pick(chunk) for chunk in chunks) for pick in (min, max, lambda c: sum(c) / len(c), max)]
        made.append(m.Series(name, rank, zoom.bucket_steps, tuple(starts), *columns_of))
    return tuple(made)


def snapshot(view: m.RunView | None, seq: int = 0) -> m.Snapshot:
    """Return what an agent answers an attach with; passed through the codec, as everything here."""
    lead = view.lead if view else "atlas"
    live = [rank.rank for rank in view.ranks if rank.state != "lost"] if view and view.step else []
    made = m.Snapshot(
        rid="r", boot=BOOT, seq=seq, at=NOW,
        node=m.NodeView(lead, BOOT, "tcp://127.0.0.1:7474", "tcp://127.0.0.1:7475", host(lead, gpu=lead == "studio"),
        "0.1.0"),
        run=view, last_step=committed(view, view.step) if view and view.step else None,
        rank_steps=tuple(rank_step(view, view.step, rank) for rank in live) if view else (),
        events=events(view) if view and view.step else (), series=series(view) if view and view.step else (),
    )  # fmt: skip
    decoded = codec.decode_reply(codec.encode(made))
    assert isinstance(decoded, m.Snapshot)
    return decoded


def live_hosts(view: m.RunView) -> list[m.HostReading]:
    """One reading of each live node, numbered from 1."""
    nodes = [rank.node for rank in view.ranks if rank.state == "run"]
    return [host(node, seq, gpu=len(view.ranks) == 4) for seq, node in enumerate(nodes, 1)]


def under_way(view: m.RunView, steps: int = 5) -> list["Message"]:
    """The run attached to `steps` steps ago, and all of them since as they came, with live ranks' reports."""
    made: list[Message] = [
        CONNECTED,
        snapshot(msgspec.structs.replace(view, step=view.step - steps)),
        *live_hosts(view),
    ]
    live = [rank.rank for rank in view.ranks if rank.state == "run"]
    for step in range(view.step - steps + 1, view.step + 1):
        made.append(committed(view, step, seq=len(made) + 8))
        made += [rank_step(view, step, rank, seq=len(made) + 8 + index) for index, rank in enumerate(live)]
    return made


CONNECTED = Connection("connected", CLOCK.at_monotonic)
_STOPPED = run_view(4, "stopped", 18_240, 60_000)
RUNS = (
    m.RunSummary(
        "stdlib-20261120-142900", "stdlib", "running", 118, 150, 2.153, NOW - 95, "/runs/stdlib-20261120-142900",
        "atlas", ("atlas",), NOW - 0.2, rates=run_rates(run_view(1), committed(run_view(1), 118)),
    ),
    m.RunSummary(
        "sft-1b-20261119-090000", "sft-1b", "stopped", 18_240, 60_000, 1.842, NOW - 90000, "/runs/sft-1b", "studio",
        ("studio", "mbp", "forge", "mini"), NOW - 34200, rates=run_rates(_STOPPED, committed(_STOPPED, 18_240)),
    ),
    m.RunSummary(
        "tiny-20261101-120000", "tiny", "failed", 3, 2_000, None, NOW - 1_650_000, "/runs/tiny",
        rates=m.RunRates("tokens/s", 812.0, 6.2, 148.8, 0.00672, 412.9, 0.8),
    ),
)  # fmt: skip


SCORING = m.WorkSummary(
    "studio", m.WorkView(
        work="5f0c9a77b1d2", kind="log-probabilities", run=RUNS[1].run, checkpoint=18_240, state="running", rows=5_000,
        answered=1_200, received_bytes=1_000_000, nodes=(
            m.WorkNode("studio", "working", "torch cuda:0", rows=900, rows_per_second=131.0),
            m.WorkNode("mbp", "working", "mlx gpu", rows=300, rows_per_second=59.0),
            m.WorkNode("forge", "silent", why="no message for 8 s"),
        ),
    ), "test.jsonl", slices=41, slices_answered=39, rows_per_second=190.0, seconds_left=20.0,
)  # fmt: skip
"""`trainctl score` in progress."""
FAILED_SCORING = msgspec.structs.replace(
    SCORING, rows_per_second=None, seconds_left=None, view=msgspec.structs.replace(
        SCORING.view, state="failed", reason="no node can process the rows; forge: no message for 8 s"
    ),
)  # fmt: skip


def _branch(name: str, parent: str, at: int, age: float, **changes: Any) -> m.RunSummary:
    return msgspec.structs.replace(
        RUNS[1], run=f"{name}-20261120-100000", name=name, started_at=NOW - age, rates=None,
        branch=m.BranchPoint(parent, at), **changes,
    )  # fmt: skip


BRANCHES = (
    _branch("sft-1b-warm", "sft-1b-low-20261120-100000", 9_500, 3_600, step=12_400, last_loss=1.790),
    _branch("sft-1b-low", RUNS[1].run, 9_000, 7_200, step=15_000, last_loss=1.802),
    RUNS[1],
    _branch("sft-2", "gone-20261001-120000", 500, 90_500, step=800, last_loss=2.011),
    RUNS[2],
)
"""A branch of a branch, and one whose parent isn't there any more, newest first."""


class Recorded:
    """A source that plays messages, answers from memory, and keeps every command it was given.

    `replies` gives, for a command's verb, what an agent would answer in order; the default is accepted, then applied.
    """

    by = "me"

    def __init__(self, messages: Sequence[Message], runs: tuple[m.RunSummary, ...] = RUNS) -> None:
        self.messages = list(messages)
        self.known_runs = runs
        self.known_samples: tuple[m.Sample, ...] = ()
        self.known_pairs: tuple[m.HeldOutPairs, ...] = ()
        self.known_step_profiles: tuple[m.Event, ...] = ()
        self.known_traces: dict[tuple[str, str], bytes] = {}  # by node and file
        self.known_policies: m.Policies | None = None
        self.dry_runs: Callable[[m.DryRunRequest], m.DryRun] | None = None
        self.known_diagnosis: m.DiagnosisReply | None = None
        self.known_profiles: dict[str, tuple[DeviceProfile, ...]] = {}  # by node
        self.known_works: tuple[m.WorkSummary, ...] = ()
        self.commands: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
        self.replies: dict[str, list[dict[str, Any]]] = {}
        self.asked: list[m.HistoryRequest] = []
        self.more: asyncio.Queue[Message | tuple[str, Message]] = asyncio.Queue()
        self.gate: asyncio.Event | None = None
        self.refuses = False
        self.logs: dict[int, str] = {}  # by rank; a rank that isn't there has no agent that answers
        self.asked_logs: list[tuple[str, int, int]] = []  # (node, rank, offset) of each part of a log
        self.viewers: tuple[m.Viewer, ...] = ()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    async def follow(self, columns: int = 120) -> AsyncGenerator[tuple[str, Message], None]:
        """All of it as of the agent that conducts, but what is put into `more` as (node, message)."""
        for message in self.messages:
            yield "", message
        while True:
            item = await self.more.get()
            yield item if isinstance(item, tuple) else ("", item)

    async def command(self, verb: str, args: dict[str, Any], **options: Any) -> AsyncIterator[m.CommandReply]:
        if self.refuses:
            raise UnreachableError("no answer from tcp://127.0.0.1:7474 within 5 s")
        self.commands.append((verb, args, options))
        default = [{"state": "accepted"}, {"state": "applied", "step": 120, "before": "micro 8", "after": "micro 4",
                                           "plan_version": 5}]  # fmt: skip
        for index, reply in enumerate(self.replies.get(verb, default)):
            if index and self.gate is not None:
                await self.gate.wait()
            yield m.CommandReply(rid="r", id="00000000-0000-0000-0000-000000000000", **reply)

    @property
    def lead(self) -> "Recorded":
        return self

    async def ask(self, request: Callable[..., m.Request[Any]], *args: Any, **fields: Any) -> Any:
        """Answer as the agent that conducts; methods by the request's tag stand in for single answers."""
        asked: Any = request("r", *args, **fields)
        match asked:
            case m.SnapshotRequest():
                return self.snapshot(asked)
            case m.HistoryRequest():
                return await self.history(asked)
            case m.EventsRequest():
                return self.events(asked)
            case m.AttendRequest():
                return m.Viewers(rid="r", viewers=self.viewers)
            case m.WorksRequest():
                return m.Works(rid="r", works=self.known_works)
            case m.SamplesRequest():
                return m.Samples(rid="r", run=asked.run, samples=self.known_samples, last_row=0, more=False)
            case m.PairsRequest():
                return m.Pairs(rid="r", run=asked.run, evaluations=self.known_pairs)
            case m.StepProfilesRequest():
                return m.StepProfiles(rid="r", run=asked.run, profiles=self.known_step_profiles)
            case m.TraceRequest():
                data = self.known_traces[asked.node, asked.file]
                part = data[asked.offset_bytes : asked.offset_bytes + m.TRACE_PART_BYTES]
                return m.TracePart(rid="r", offset_bytes=asked.offset_bytes, size_bytes=len(data), data=part)
            case m.PoliciesRequest() if self.known_policies is None:
                raise RefusedError(f"run: {asked.run} isn't active: its policies see nothing until it is resumed")
            case m.PoliciesRequest():
                return self.known_policies
            case m.DryRunRequest() if self.dry_runs is None:
                raise UnreachableError("no answer from studio within 3 s")
            case m.DryRunRequest():
                return self.dry_runs(asked)
            case m.DiagnosisRequest() if self.known_diagnosis is None:
                raise UnreachableError("no answer from studio within 3 s")
            case m.DiagnosisRequest():
                return self.known_diagnosis
        raise AssertionError(f"nothing is recorded for {asked}")

    def snapshot(self, asked: m.SnapshotRequest) -> m.Snapshot:
        if asked.run == RUNS[1].run:
            return snapshot(run_view(4, "stopped", 18_240, 60_000, run=asked.run, reason="stopped by anna"))
        raise RefusedError(f"no run {asked.run!r} here")

    async def history(self, asked: m.HistoryRequest) -> m.History:
        self.asked.append(asked)
        view = next(item.run for item in self.messages if isinstance(item, m.Snapshot))
        if view is None or asked.run != view.run:
            view = self.snapshot(m.SnapshotRequest("r", 0, asked.run)).run
        assert view is not None
        laps = tuple(item for item in lap_series(view, asked.first_step) if item.metric in asked.metrics)
        series = history_of(view, asked.metrics, asked.first_step, asked.last_step, asked.columns)
        if "compile_seconds" in asked.metrics:
            laps += compile_series(view, asked.first_step, asked.last_step or view.step, asked.columns)
        return m.History(rid="r", series=(*series, *laps))

    def events(self, asked: m.EventsRequest) -> m.Events:
        view = next((item.run for item in self.messages if isinstance(item, m.Snapshot)), None)
        return m.Events(rid="r", run=asked.run, events=events(view) if view else (), more=False)

    async def runs(self) -> m.Runs:
        return m.Runs(rid="r", runs=self.known_runs)

    async def follow_run(self, run: str) -> bool:
        return False

    async def calibrations(self, node: str) -> m.Calibrations:
        return m.Calibrations(rid="r", profiles=self.known_profiles.get(node, ()))

    async def log(self, node: str, run: str, rank: int, offset_bytes: int, limit_bytes: int) -> m.LogPart:
        self.asked_logs.append((node, rank, offset_bytes))
        if rank not in self.logs:
            raise UnreachableError(f"no answer from {node} within 3 s")
        data = self.logs[rank].encode()
        at = max(len(data) + offset_bytes, 0) if offset_bytes < 0 else min(offset_bytes, len(data))
        text = data[at : at + limit_bytes].decode("utf-8", "replace")
        return m.LogPart(rid="r", run=run, rank=rank, offset_bytes=at, size_bytes=len(data), text=text)


def source_of(nodes: int = 1, **view: Any) -> Recorded:
    """An agent with one run of `nodes` ranks, attached and up to date."""
    if nodes == 4:
        view = {"step": 18_240, "steps": 60_000, **view}
    made = run_view(nodes, **view)
    extra = live_hosts(made) if nodes > 1 else []
    source = Recorded([CONNECTED, snapshot(made), *extra])
    source.dry_runs = splits(made) if nodes == 3 else None
    return source


def app_of(source: Recorded, clock: FrozenClock = CLOCK, **options: Any) -> TrainctlApp:
    """The program over a recorded agent, with everything that could vary held still."""
    options = {"address": "tcp://127.0.0.1:7474", "in_ascii": False, **options}
    return TrainctlApp(lambda: source, clock=clock, theme="night", **options)


def _forecast(rank: int, node: str, share: tuple[int, int | None], micro: tuple[int, int | None]) -> m.RankForecast:
    return m.RankForecast(
        rank=rank, node=node, share_before=share[0], share=share[1], micro_before=micro[0], micro=micro[1]
    )


def predicted(asked: m.DryRunRequest) -> m.DryRun:
    """The answer of a lead of four nodes, of which mini is lost, to the commands that pictures show."""
    memory = {"memory_bytes": 20.0e9, "memory_is_bound": True, "memory_cap_bytes": 24.0e9}
    ranks = {
        "resize-batch": (msgspec.structs.replace(_forecast(2, "forge", (39, 39), (13, 4)), **memory),),
        "rebalance": (_forecast(0, "studio", (16, 17), (8, 8)), _forecast(1, "mbp", (9, 8), (5, 5))),
        "set-global-batch": (
            _forecast(0, "studio", (16, 32), (8, 8)),
            _forecast(1, "mbp", (9, 18), (5, 5)),
            _forecast(2, "forge", (39, 78), (13, 13)),
        ),
        "drain": (
            _forecast(0, "studio", (16, 27), (8, 8)),
            _forecast(1, "mbp", (9, 37), (5, 5)),
            _forecast(2, "forge", (39, None), (13, None)),
        ),
    }
    seconds = {"rebalance": (3.06, 3.04), "set-global-batch": (3.06, 6.01), "drain": (3.06, 5.2)}
    before, after = seconds.get(asked.verb, (None, None))
    return m.DryRun(
        rid="r",
        run=asked.run or "",
        verb=asked.verb,
        step=18_241,
        before="64" if asked.verb == "set-global-batch" else None,
        after="128, learning rate unchanged" if asked.verb == "set-global-batch" else None,
        ranks=ranks.get(asked.verb, ()),
        step_seconds_before=before,
        step_seconds=after,
    )


def splits(view: m.RunView) -> Callable[[m.DryRunRequest], m.DryRun]:
    """The answers to `rebalance` of a run's lead, by what each rank does alone, and the memory that it has."""
    fleet = FLEETS[len(view.ranks)]
    live = {item.node: (item.rank, item.share, item.micro_batch) for item in view.live_ranks}
    of_sample = 512.0 if len(fleet) == 4 else 127.0
    each = {name: of_sample / own for name, _, _, _, _, own, _, _ in fleet if own}
    memory = {name: (used, cap) for name, _, _, _, _, _, used, cap in fleet}
    floor = SECONDS[len(view.ranks)] - max(share * each[node] for node, (_, share, _) in live.items())

    def seconds(shares: dict[str, int]) -> float:
        return floor + max(share * each[node] for node, share in shares.items())

    def answer(asked: m.DryRunRequest) -> m.DryRun:
        now = {node: share for node, (_, share, _) in live.items()}
        shares = asked.args.get("shares", {"torch-a": 12, "torch-b": 11, "mlx-c": 1})
        ranks = tuple(
            msgspec.structs.replace(
                _forecast(rank, node, (share, shares[node]), (min(micro, share), min(micro, shares[node]))),
                seconds=shares[node] * each[node] + floor,
                memory_bytes=memory[node][0],
                memory_cap_bytes=memory[node][1],
                memory_is_bound=shares[node] < micro,
            )
            for node, (rank, share, micro) in live.items()
            if shares[node] != share
        )
        before, after = seconds(now), seconds(shares)
        return m.DryRun("r", asked.run or "", asked.verb, ranks=ranks, step_seconds_before=before, step_seconds=after)

    return answer


def resized(asked: m.DryRunRequest) -> m.DryRun:
    """The answer of a lead whose rank 0 has a share of 24 samples, to `resize-batch`; others change nothing known."""
    micro = asked.args.get("micro", 8)
    refused = {"refused": f"{micro} is over atlas's share of 24 samples", "field": "micro"} if micro > 24 else {}
    rank = m.RankForecast(rank=0, node="atlas", share_before=24, share=24, micro_before=8, micro=micro)
    return m.DryRun(rid="r", run=asked.run or "", verb=asked.verb, step=120, ranks=(rank,), **refused)
