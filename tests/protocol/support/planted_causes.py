"""Simulated runs with a planted cause, made from a seed: what ranks report, and what machines read meanwhile.

Ranks compute, wait in the sum for the slowest one, and sum over their link. The first step takes far longer, and
evaluations and checkpoints are made now and then. Most causes begin 60 steps before the end.
"""

import dataclasses
import math
import random
from dataclasses import dataclass, field
from typing import Final

import msgspec

from trainctl.protocol import messages as m
from trainctl.protocol.analysis.diagnosis.diagnosis_facts import DiagnosisFacts
from trainctl.protocol.batch.pass_curve import PassCurve
from trainctl.protocol.batch.split import ShareCost, split
from trainctl.protocol.batch.step_model import StepModel
from trainctl.protocol.calibration.profile import LinkRate, Pass, ProfileSummary
from trainctl.protocol.config import run_file
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.messages import events as e

NOISE: Final = 0.05
"""Standard deviation of a phase's seconds, relative."""
LONG_STEPS: Final = 0.01
"""Part of the steps in which one rank takes much longer."""
STEPS, PLANTED_STEPS = 300, 60
BEGAN_AT: Final = 1_700_000_000.0
SIZES: Final = (1, 2, 4, 8, 16, 32)
GENERATION: Final = m.Generation(1, 1)
QUIET: Final = {
    "cpu_pressure": 2.0, "io_pressure": 0.5, "memory_pressure": 0.0, "cpu_throttled_percent": 0.0,
    "cpu_steal_percent": 0.2, "swap_used_bytes": 0.0, "swap_in_bytes_per_second": 0.0,
    "swap_out_bytes_per_second": 0.0, "disk_read_bytes_per_second": 2e4, "disk_write_bytes_per_second": 1e5,
    "disk_busy_percent": 3.0, "network_in_bytes_per_second": 4e8, "network_out_bytes_per_second": 4e8,
    "retransmits_per_second": 0.2,
}  # fmt: skip
"""Readings of a machine that is well."""


@dataclass
class SimulatedNode:
    """One machine with one rank."""

    name: str
    curve: PassCurve  # seconds of forward and backward by micro-batch
    micro: int
    share: int = 1
    factors: dict[str, float] = field(default_factory=dict)  # of phases, from the planted step on
    data_part: float = 0.0  # of the passes' seconds that it waits for data, from the planted step on
    readings: dict[str, float] = field(default_factory=dict)  # from the planted step on
    limits: tuple[m.ClockLimit, ...] = ()  # from the planted step on


@dataclass
class SimulatedCluster:
    """A run's ranks, and what is planted into it."""

    draw: random.Random
    nodes: list[SimulatedNode]
    link_part: float  # of the usual step that the sum takes by itself
    link_factor: float = 1.0  # from the planted step on
    lost: float = 0.0  # probability that a sum loses a segment, from the planted step on
    clip_scale: float = 1.0
    skipped: tuple[int, ...] = ()  # steps that are NaN
    checkpoint_part: float = 0.005  # of the time between two checkpoints
    has_profiles: bool = True

    @property
    def victim(self) -> SimulatedNode:
        """The node that a cause is planted on: the one with the most to do."""
        return max(self.nodes, key=lambda node: node.curve.share_seconds(node.share, node.micro))

    @property
    def usual_seconds(self) -> float:
        return max(node.curve.share_seconds(node.share, node.micro) for node in self.nodes)


def cluster(seed: int) -> SimulatedCluster:
    """Two to four ranks, equal or not, with the best split and good micro-batches."""
    draw = random.Random(seed)
    count, are_equal = draw.choice((2, 2, 3, 4)), draw.random() < 0.5
    nodes = []
    for number in range(count):
        sample = 0.02 if are_equal else 0.02 * draw.uniform(0.5, 2.0)
        curve = PassCurve(tuple((size, 1.5 * sample + sample * size) for size in SIZES))
        nodes.append(SimulatedNode(f"node-{number}", curve, micro=16))
    costs = {at: ShareCost.at(StepModel(node.curve), node.micro) for at, node in enumerate(nodes)}
    shares = split(32 * count, costs)
    for at, node in enumerate(nodes):
        node.share = shares[at]
    return SimulatedCluster(draw, nodes, draw.uniform(0.01, 0.06), has_profiles=draw.random() < 0.7)


CAUSES: Final = (
    "slow-disk", "slow-link", "lossy-link", "throttled", "stolen-cpu", "swap", "small-micro", "late-data", "slow-rank",
    "long-checkpoint", "clip-bound", "not-finite",
)  # fmt: skip
"""Causes that can be planted, by the rule that must name it first."""


def plant(cause: str, c: SimulatedCluster) -> None:
    """Make a cluster suffer from a cause."""
    uniform, victim = c.draw.uniform, c.victim
    match cause:
        case "slow-disk":
            victim.data_part = uniform(0.12, 0.8)
            victim.readings = {"io_pressure": uniform(20, 70), "disk_busy_percent": uniform(70, 100),
                               "disk_read_bytes_per_second": uniform(5e6, 4e7)}  # fmt: skip
        case "slow-link":
            c.link_factor = uniform(0.2, 1.0) / c.link_part
        case "lossy-link":
            c.lost = uniform(0.5, 0.9)
            for node in c.nodes:
                node.readings = {"retransmits_per_second": uniform(5, 200), "network_out_bytes_per_second": 1e6}
        case "throttled":
            _slow_down(c, 1.2, 3.0)
            if c.draw.random() < 0.5:
                victim.readings = {"cpu_throttled_percent": uniform(20, 100)}
            else:
                victim.limits = (c.draw.choice(("thermal", "power", "hardware")),)
        case "stolen-cpu":
            _slow_down(c, 1.2, 2.5)
            name, low = c.draw.choice((("cpu_steal_percent", 8), ("cpu_pressure", 40)))
            victim.readings = {name: uniform(low, 90)}
        case "swap":
            _slow_down(c, 1.3, 4.0)
            victim.data_part = uniform(0, 0.2)
            victim.readings = {"swap_in_bytes_per_second": uniform(4e6, 1e8), "memory_pressure": 30.0,
                               "swap_used_bytes": 4e9, "io_pressure": 25.0}  # fmt: skip
        case "small-micro":
            c.has_profiles = True
            for node in c.nodes:
                node.micro = 1
        case "late-data":
            for node in c.nodes if c.draw.random() < 0.5 else [victim]:
                node.data_part = uniform(0.12, 0.8)
        case "slow-rank":
            victim.factors = {c.draw.choice(("forward", "backward")): uniform(1.5, 3.0)}
        case "long-checkpoint":
            c.checkpoint_part = uniform(0.08, 0.4)
        case "clip-bound":
            c.clip_scale = 10 ** uniform(-6, -2.3)
        case "not-finite":
            steps = range(STEPS - PLANTED_STEPS, STEPS + 1)
            c.skipped = tuple(sorted(c.draw.sample(steps, c.draw.randint(4, 30))))


def _slow_down(c: SimulatedCluster, low: float, high: float) -> None:
    factor = c.draw.uniform(low, high)
    c.victim.factors = {name: factor * c.draw.uniform(0.97, 1.03) for name in m.BUSY_PHASES}


@dataclass
class SimulatedRecord:
    steps: list[m.StepCommitted] = field(default_factory=list)
    parts: list[m.RankStep] = field(default_factory=list)
    readings: dict[str, list[m.HostReading]] = field(default_factory=dict)
    events: list[m.Event] = field(default_factory=list)


def planted(cause: str, seed: int, steps: int = STEPS) -> DiagnosisFacts:
    """A run with this cause, as a diagnosis sees it at its end."""
    made = cluster(seed)
    plant(cause, made)
    return facts(made, record(made, steps, steps - PLANTED_STEPS))


def healthy(seed: int, steps: int = STEPS) -> tuple[SimulatedCluster, SimulatedRecord]:
    made = cluster(seed)
    return made, record(made, steps, steps)


def record(c: SimulatedCluster, steps: int, planted_after: int) -> SimulatedRecord:
    kept, now, tokens, read_at = SimulatedRecord(), BEGAN_AT, 0.0, 0.0
    for step in range(1, steps + 1):
        is_planted = step > planted_after
        parts = _parts(c, step, is_planted=is_planted)
        seconds = parts[0].step_seconds
        now += seconds
        tokens += sum(part.tokens for part in parts)
        kept.parts += parts
        kept.steps.append(_step(c, step, now, seconds, tokens))
        if step % 50 == 0:
            now += _side_plans(c, kept, step, now, 50 * seconds)
        if now - read_at >= 10.0:
            read_at = now
            for node in c.nodes:
                kept.readings.setdefault(node.name, []).append(_reading(c, node, now, is_planted=is_planted))
    return kept


def _parts(c: SimulatedCluster, step: int, *, is_planted: bool) -> list[m.RankStep]:
    link = c.usual_seconds * c.link_part * (c.link_factor if is_planted else 1.0) * _noise(c)
    if is_planted and c.draw.random() < c.lost:
        link += c.usual_seconds * c.draw.uniform(0.3, 2.0)
    phases = [_phases(c, node, step, is_planted=is_planted) for node in c.nodes]
    if c.draw.random() < LONG_STEPS:
        late = c.draw.choice(phases)
        late["backward"] += sum(late.values()) * c.draw.uniform(1, 9)
    longest = max(sum(one.values()) for one in phases)
    found = []
    for rank, (node, busy) in enumerate(zip(c.nodes, phases, strict=True)):
        sync, optimizer, wait = longest - sum(busy.values()) + link, 0.005 * _noise(c), 0.002 * _noise(c)
        seconds = longest + link + 0.007
        values = {"memory_peak_bytes": 4e9, "memory_cap_bytes": 8e9, "sum_bytes": 4e8}
        if c.has_profiles:
            usual = node.curve.share_seconds(node.share, node.micro)
            values["calibrated_speed"] = usual / (busy["forward"] + busy["backward"])
            values["link_use"] = 0.9 * c.link_part * c.usual_seconds / sync
        found.append(m.RankStep(
            run="run", generation=GENERATION, step=step, rank=rank, node=node.name, tokens=400.0 * node.share,
            samples=node.share, micro_batch=node.micro, replays=0, step_seconds=seconds, values=values,
            phases=m.Phases(**busy, sync=sync, optimizer=optimizer, wait=wait),
        ))  # fmt: skip
    return found


def _phases(c: SimulatedCluster, node: SimulatedNode, step: int, *, is_planted: bool) -> dict[str, float]:
    usual = node.curve.share_seconds(node.share, node.micro) * (20 if step == 1 else 1)
    parts = dict(zip(m.BUSY_PHASES, (0.01, 0.33, 0.66), strict=True))
    factors = node.factors if is_planted else {}
    found = {name: usual * part * factors.get(name, 1.0) * _noise(c) for name, part in parts.items()}
    if is_planted and node.data_part:
        found["data"] += usual * node.data_part * c.draw.uniform(0.5, 1.5)
    return found


def _noise(c: SimulatedCluster) -> float:
    return math.exp(c.draw.gauss(0, NOISE))


def _step(c: SimulatedCluster, step: int, now: float, seconds: float, tokens: float) -> m.StepCommitted:
    skipped = step in c.skipped
    loss = (2 + 3 * 0.5 ** (step / 60)) * (1 + c.draw.gauss(0, 0.02))
    norm = c.draw.lognormvariate(0, 0.2)
    scale = c.clip_scale * c.draw.lognormvariate(0, 0.3) if c.clip_scale < 1 else min(1.0, 1 / norm)
    return m.StepCommitted(
        run="run", generation=GENERATION, step=step, committed_at=now, loss=math.nan if skipped else loss, weight=1e4,
        samples=sum(node.share for node in c.nodes), learning_rate=1e-4, grad_norm=math.nan if skipped else norm,
        cursor=step, global_batch=sum(node.share for node in c.nodes), plan_version=1, step_seconds=seconds,
        tokens_total=tokens, tokens=10_000, skipped="nan" if skipped else None, values={"clip_scale": scale},
    )  # fmt: skip


def _side_plans(c: SimulatedCluster, kept: SimulatedRecord, step: int, now: float, span: float) -> float:
    """An evaluation and a checkpoint, in seconds."""
    usual = 50 * (c.usual_seconds * (1 + c.link_part) + 0.007)
    pause = usual * c.checkpoint_part / (1 - c.checkpoint_part) * _noise(c)
    evaluation = min(span, usual) * 0.1
    for data in (e.Evaluated(2.5, evaluation), e.CheckpointWritten(step, 1_000_000_000, pause)):
        kept.events.append(
            m.Event(id=len(kept.events) + 1, at=now, severity="info", by="auto", data=data, run="run", step=step)
        )
    return evaluation + pause


def _reading(c: SimulatedCluster, node: SimulatedNode, now: float, *, is_planted: bool) -> m.HostReading:
    readings = QUIET | (node.readings if is_planted else {})
    values = {name: value * _noise(c) for name, value in readings.items()}
    gpu = m.GpuReading(
        "NVIDIA A100", utilization_percent=90.0, clock_mhz=1400.0 if is_planted and node.limits else 1700.0,
        temperature_celsius=60.0, clock_limits=node.limits if is_planted else (),
    )  # fmt: skip
    return m.HostReading(
        node=node.name, read_at=now, cpu_percent=60.0, memory_used_bytes=40_000_000_000,
        memory_total_bytes=64_000_000_000, disk_free_bytes=10**12, gpus=(gpu,), values=values,
    )  # fmt: skip


def facts(c: SimulatedCluster, kept: SimulatedRecord, last: int | None = None, newest: int = STEPS) -> DiagnosisFacts:
    """The newest steps up to `last`, and what belongs to them."""
    last = last or kept.steps[-1].step
    steps = kept.steps[max(0, last - newest) : last]
    at = steps[-1].committed_at
    count = len(c.nodes)
    return DiagnosisFacts(
        at=at, is_live=True, view=view(c, last), config=CONFIG, steps=tuple(steps),
        parts=tuple(kept.parts[count * (steps[0].step - 1) : count * last]), step_age_seconds=0.5,
        readings={node: tuple(one for one in rows if one.read_at <= at)[-200:] for node, rows in kept.readings.items()},
        events=tuple(event for event in kept.events if event.at <= at)[-100:],
        profiles=profiles(c) if c.has_profiles else {}, checkpoint_step=last - last % 50 or None,
    )  # fmt: skip


def view(c: SimulatedCluster, step: int) -> m.RunView:
    compute = m.Compute(dtype="bfloat16", attention="sdpa")
    ranks = tuple(
        m.RankView(rank=rank, node=node.name, state="run", since_at=BEGAN_AT, share=node.share,
                   micro_batch=node.micro, backend="torch", device="cuda:0 NVIDIA A100", compute=compute,
                   passes=node.curve.points if c.has_profiles else ())
        for rank, node in enumerate(c.nodes)
    )  # fmt: skip
    total = sum(node.share for node in c.nodes)
    return m.RunView(
        run="run", name="run", state="running", lead=c.nodes[0].name, engine="gloo", generation=GENERATION, step=step,
        steps=100_000, plan_version=1, global_batch=total, samples=10**6, cursor=step * total, learning_rate=1e-4,
        started_at=BEGAN_AT, ranks=ranks, directory="/runs/run",
    )  # fmt: skip


def profiles(c: SimulatedCluster) -> dict[int, ProfileSummary]:
    link = LinkRate(c.nodes[0].name, 0.8e9, 0.8e9, 0.001)
    return {
        rank: ProfileSummary(
            created_at=BEGAN_AT, passes=tuple(Pass(micro=size, seconds=node.curve.seconds(size)) for size in SIZES),
            links=(link,) if rank else (),
        )
        for rank, node in enumerate(c.nodes)
    }  # fmt: skip


CONFIG: Final[RunFile] = run_file.parse({
    "run": {"name": "run", "steps": 100_000},
    "model": {"path": "/model", "dtype": "bfloat16"},
    "data": {"path": "/data.txt", "sequence_length": 512},
    "batch": {"global": 64, "micro": 16},
    "optimizer": {"learning_rate": 1e-4},
    "checkpoint": {"every_steps": 50},
    "evaluate": {"every_steps": 50},
})  # fmt: skip


def with_config(known: DiagnosisFacts, **tables: dict[str, object]) -> DiagnosisFacts:
    raw = run_file.to_dict(known.config)
    changed = {**raw, **{name: {**raw.get(name, {}), **fields} for name, fields in tables.items()}}
    return dataclasses.replace(known, config=run_file.parse(changed))


def with_rank(known: DiagnosisFacts, rank: int, **changes: object) -> DiagnosisFacts:
    ranks = tuple(msgspec.structs.replace(one, **changes) if one.rank == rank else one for one in known.view.ranks)
    return dataclasses.replace(known, view=msgspec.structs.replace(known.view, ranks=ranks))
