"""The facts of a report: plain values, which pages and JSON are made from. What isn't known is None or empty."""

from collections.abc import Iterable
from typing import Final, Literal, Protocol, TypeVar

import msgspec

from trainctl.protocol.messages import Compute, Diagnosis, RankStep, RunRates, RunView, Sample, Series, StepCommitted
from trainctl.protocol.messages.event_prose import rank_label
from trainctl.protocol.record.checkpoints import Environment
from trainctl.protocol.record.whole_run import PlanSpan, WholeRunReader
from trainctl.tui.state.step_phases import Compilation
from trainctl.tui.text.run_lines import EnergyFigures

InterventionKind = Literal[
    "split", "settings", "membership", "rollback", "state", "command", "fault", "note", "checkpoint"
]
COMPUTING: Final = ("forward", "backward", "optimizer")
"""Phases of a step in which a rank computes; in the others it waits for data or for other ranks."""


class Intervention(msgspec.Struct, frozen=True):
    """Something that changed the run, or happened to it."""

    kind: (
        InterventionKind  # split: shares or micro-batches; settings: batch or learning rate; state: pause, end, resume
    )
    step: int
    at: float  # Unix seconds
    by: str  # a user, a node, `auto`, or `auto:` with a policy name
    text: str
    event: int  # number of the event
    effect: str = ""  # measured change of the run's rate; empty: it isn't one that changes it


class PolicyNote(msgspec.Struct, frozen=True):
    """A command that a policy sent or advised."""

    policy: str
    step: int
    at: float
    text: str
    acted: bool  # False: it only advised
    effect: str  # measured change of the run's rate, or why there is none; empty: it only advised


class Incident(msgspec.Struct, frozen=True):
    """A fault, or a return to a checkpoint, up to when the run continued."""

    step: int
    at: float
    texts: tuple[str, ...]  # what happened, in order
    waited_seconds: float | None  # in which the run didn't train; None: the incident stops no rank, or it isn't known
    steps_again: int  # steps that were made again, or taken back
    seconds_again: float  # that they had taken
    lost: tuple[str, ...] = ()  # ranks that left the group for it: a node, or node:rank
    rate_change: float | None = None  # relative, measured: -0.2 is 20 % slower; None: not measured
    back_step: int | None = None  # when all that it lost were back; None: never, or nothing was lost


class HeldOutLoss(msgspec.Struct, frozen=True):
    """The newest and the lowest held-out loss, of steps that stand."""

    step: int
    loss: float
    best_step: int
    best_loss: float


class TimePart(msgspec.Struct, frozen=True):
    """A part of the run's time."""

    name: str
    seconds: float
    detail: str = ""


class SharesFrom(msgspec.Struct, frozen=True):
    """Samples of each rank in a step, from this step on."""

    step: int
    plan_version: int
    samples: dict[str, int]  # by rank as people name it: a node, or node:rank


class RankFacts(msgspec.Struct, frozen=True):
    """A rank on one node, over the whole run."""

    rank: int
    node: str
    name: str  # a node, or node:rank where the node has several
    backend: str
    device: str
    compute: Compute | None
    micro_batch: int | None
    steps: int
    samples: int
    tokens: float
    seconds: float  # of its steps, with waits
    phases: dict[str, float]  # seconds
    means: dict[str, float]  # of metrics of efficiency, over all steps
    compiled: Compilation | None = None  # the longest; None: nothing was compiled, or it isn't known where

    @property
    def busy(self) -> float | None:
        """Part of its steps' time in which it computed; None without a step."""
        seconds = sum(self.phases.values())
        return sum(self.phases[name] for name in COMPUTING) / seconds if seconds > 0 else None


class DataFacts(msgspec.Struct, frozen=True):
    """The data that the run trained on."""

    digest: str = ""  # SHA-256 of the data's files; empty: not recorded
    samples: int | None = None  # in an epoch
    layout_digest: str = ""  # of the trained parameters' names and shapes
    base_digest: str = ""  # with adapters: of the frozen model and the adapters' scale


class RunFacts(msgspec.Struct, frozen=True):
    """All facts of a run, as its record has them. Times are Unix seconds."""

    run: str
    read_to: float  # time of the newest fact
    view: RunView | None
    last: StepCommitted | None
    started_at: float | None  # when the run was started for the first time; None: the record has no step
    first_at: float | None  # commit of the first step
    rates: RunRates | None
    efficiency: float | None  # part of the ranks' time in steps in which they computed
    curves: dict[str, Series]  # of the run, by metric
    efficiency_curve: tuple[tuple[int, float], ...]  # pairs (first step of a bucket, efficiency)
    shares: tuple[SharesFrom, ...]
    ranks: tuple[RankFacts, ...]
    time: tuple[TimePart, ...]
    interventions: tuple[Intervention, ...]
    incidents: tuple[Incident, ...]
    policies: tuple[PolicyNote, ...]
    samples: tuple[Sample, ...]  # the first and the last answers to each prompt
    recipe: dict[str, str]  # the run file's fields with their values, as TOML
    changed: tuple[str, ...]  # fields without a default, or with another value
    resolved: dict[str, str]  # what the run chose where the run file leaves it open
    lineage: tuple[str, ...]
    environments: tuple[Environment, ...]  # of the checkpoints on this machine, the newest of each node
    data: DataFacts
    diagnosis: Diagnosis
    evaluations: int
    held_out: HeldOutLoss | None
    checkpoints: int
    steps_again: int  # steps that were made again, or taken back
    seconds_again: float  # that they had taken
    cost: "CostFacts | None"
    energy: EnergyFigures


class CostFacts(msgspec.Struct, frozen=True):
    """The cost of the run."""

    currency: str
    spent: float
    per_1000: float | None  # per 1,000 samples or pairs
    unpriced: tuple[str, ...]  # nodes without a price, whose cost is missing


class _Ranked(Protocol):
    @property
    def rank(self) -> int: ...


T = TypeVar("T", bound=_Ranked)


def named(ranks: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Return values by name, from pairs (node, rank): the node, or node:rank where the node has several."""
    pairs = list(ranks)
    return {rank_label(node, ranked.rank, (other for other, _ in pairs)): ranked for node, ranked in pairs}


def parts_of(reader: WholeRunReader, span: PlanSpan) -> dict[str, RankStep]:
    """Return the parts, by name, of one step of a plan version: of its second step, unless that finished a batch for a
    lost rank, whose samples are then missing."""
    found: tuple[RankStep, ...] = ()
    for step in dict.fromkeys((min(span.first + 1, span.last), span.last, span.first)):
        found = reader.rank_steps(step)
        committed, _ = reader.steps(step - 1, 1)
        if not any(part.replays for part in found) and _is_whole(found, committed[0]):
            break
    return named([(part.node, part) for part in found])


def _is_whole(parts: Iterable[RankStep], step: StepCommitted) -> bool:
    return step.global_batch is None or sum(part.samples for part in parts) == step.global_batch
