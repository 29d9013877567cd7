"""Policies' inputs and proposals: plain values, and no clock but in the facts."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import msgspec

from trainctl.node_agent.planning.durable import Durable
from trainctl.node_agent.planning.share_edits import Edit
from trainctl.protocol.analysis.curve import CurveJudge
from trainctl.protocol.batch.memory_estimate import MemoryModel
from trainctl.protocol.batch.step_model import StepModel
from trainctl.protocol.config.policies import POLICIES, PolicyMode, PolicyName
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.messages import Finding, FindingSeverity, PolicyFigure, Remedy, Report, StepPlan, verbs


class Stepped(msgspec.Struct, frozen=True, dict=True):
    """Every rank has reported its part of a train plan."""

    plan: StepPlan
    reports: Mapping[int, Report]  # by rank
    modelled: Callable[[], Mapping[int, StepModel]] = dict  # by rank, of those that have been measured
    peaks: Callable[[], Mapping[int, MemoryModel]] = dict  # by rank, of those known at several micro-batches
    sizes: Callable[[], Mapping[int, int]] = dict  # by rank, the largest micro-batch that may be chosen

    def __deepcopy__(self, memo: dict[int, Any]) -> "Stepped":
        """Itself: it never changes, and a copy would copy the conductor, which its functions lead to."""
        return self

    @cached_property
    def models(self) -> Mapping[int, StepModel]:
        """By rank, of those that have been measured; worked out when a policy asks for them first."""
        return self.modelled()

    @property
    def has_models(self) -> bool:
        """Return whether a policy has asked for this step's models: another one may then look at them at no cost."""
        return "models" in self.__dict__

    @cached_property
    def memory_models(self) -> Mapping[int, MemoryModel]:
        """By rank, of those whose peak is known at several micro-batches."""
        return self.peaks()

    @cached_property
    def most_micro(self) -> Mapping[int, int]:
        """The largest micro-batch of each rank whose own is chosen with its share."""
        return self.sizes()

    @property
    def report(self) -> Report:
        """The lowest rank's: sums, norm and skips are the same for all."""
        return self.reports[self.plan.work[0].rank]

    @property
    def loss(self) -> float | None:
        """Return the loss of the step; None without any weight."""
        report = self.report
        return report.loss_sum / report.weight if report.weight else None


@dataclass(frozen=True)
class Replayed:
    """A rank ran out of memory within a step, and ran the micro-batch again in smaller pieces."""

    plan: StepPlan
    report: Report


@dataclass(frozen=True)
class MemoryDeath:
    """A rank's process has ended for lack of memory; it is started again."""

    rank: int
    evidence: str
    micro_batch: int  # samples per forward/backward that it died with


@dataclass(frozen=True)
class Measured:
    """All live ranks of a new run have been timed alone."""

    rates: Mapping[int, float]  # samples per second, by rank


@dataclass(frozen=True)
class HeldOutLoss:
    """The loss on the held-out samples has been measured; the next step isn't planned yet."""

    step: int
    loss: float  # nats per unit of weight; NaN without any


Occasion = Stepped | Replayed | MemoryDeath | Measured | HeldOutLoss


class RunFacts(msgspec.Struct, frozen=True):
    """Facts about the run when a policy is asked."""

    config: RunFile
    durable: Durable
    step: int  # last committed
    occasion: Occasion | None = None  # what makes it asked; None: only whether it is over
    curve: CurveJudge = msgspec.field(default_factory=CurveJudge)  # with the step of the occasion, if it is one


@dataclass(frozen=True)
class Proposal:
    """A policy's finding, and the command that it would send.

    With an `edit` its settings are taken at once and hold for the next plan, rank by rank; so does what must not wait
    for a step. Without one it goes the way of every command, and only while no policy's command is open or has its
    effect measured.
    """

    verb: str
    args: verbs.Args
    reason: str  # with the figures it rests on
    node: str | None = None
    edit: Edit | None = None
    severity: FindingSeverity = "info"
    before: "Proposal | None" = None  # to be sent before it
    remember: Mapping[str, float] = field(default_factory=dict)  # into `Memory.kept`, once it is applied
    quiet: Mapping[str, float] = field(default_factory=dict)  # the same, once it is advised: it then paces itself
    advise_only: bool = False  # it is advised even if the policy is on
    is_urgent: bool = False  # it doesn't wait for the effects of other policies' commands

    @property
    def command(self) -> str:
        """Return the command as it is typed on the command line."""
        return verbs.written(self.verb, verbs.given(self.args), self.node)

    def finding(self, name: PolicyName) -> Finding:
        """Return the finding of the policy `name`, with the command as its remedy."""
        remedy = Remedy("", self.command, "" if self.advise_only else self.verb)
        return Finding(name, self.reason, self.severity, self.node or "", remedies=(remedy,))


def resize(
    micro: int, node: str, reason: str, severity: FindingSeverity = "info", edit: Edit | None = None
) -> Proposal:
    """Another micro-batch for a node, in samples."""
    return Proposal("resize-batch", verbs.ResizeBatch(micro=micro), reason, node, edit, severity)


def percent(part: float) -> str:
    """`95 %` of 0.95."""
    return f"{100 * part:.0f} %"


@dataclass(frozen=True)
class Assessment:
    """Policy's view of the run now, and the command that it would propose next."""

    figures: tuple[PolicyFigure, ...]
    why: str  # reason for the command, or what makes the policy act
    command: str = ""  # that it would propose now, as typed on the command line; empty: none
    acts_at_once: bool = False  # the command doesn't wait for the effects of other policies' commands


def assess(figures: Sequence[PolicyFigure], found: Proposal | Finding | None, otherwise: str) -> Assessment:
    """Return the assessment by figures and their result; `otherwise`: what makes the policy act, if there is none."""
    match found:
        case Proposal():
            at_once = found.is_urgent or found.edit is not None
            return Assessment(tuple(figures), found.reason, found.command, at_once)
        case Finding():
            return Assessment(tuple(figures), found.title)
        case None:
            return Assessment(tuple(figures), otherwise)


@dataclass
class Memory:
    """Memory of a policy across occasions.

    `kept` is for bars and quotas: it is journaled, and outlives generations, the agent, a new lead and a resume.
    `evidence` is for observations. Another generation has other ranks or shares, so it begins without any of those.
    """

    kept: dict[str, float] = field(default_factory=dict)
    evidence: dict[str, Any] = field(default_factory=dict)

    def observe(self, name: str, value: float, newest: int) -> Sequence[float]:
        """The newest values of an observation, oldest first, with this one."""
        values: deque[float] | None = self.evidence.get(name)
        if values is None or values.maxlen != newest:
            values = self.evidence[name] = deque(values or (), maxlen=newest)
        values.append(value)
        return values

    def last(self, name: str, default: float = 0.0) -> float:
        """The last value of an observation."""
        values: deque[float] | None = self.evidence.get(name)
        return values[-1] if values else default

    def forget(self, *names: str) -> None:
        """Drop the observations under these names."""
        for name in names:
            self.evidence.pop(name, None)


class Policy(ABC):
    """The root of all policies."""

    name: ClassVar[PolicyName]
    occasions: ClassVar[type] = object
    """The only kind of occasions about which it is asked; by default all."""

    def is_over(self, facts: RunFacts) -> bool:
        """Return whether it has nothing more to decide in this run."""
        return False

    def gone_back(
        self, config: RunFile, kept: Mapping[str, float], evaluations: Sequence[tuple[int, float]]
    ) -> Mapping[str, float]:
        """Return the values to keep in a run that continues from a checkpoint; `evaluations` are all up to that step as
        pairs of step and loss, oldest first. Bars and quotas stay."""
        return kept

    @abstractmethod
    def propose(self, facts: RunFacts, memory: Memory) -> Proposal | Finding | None:
        """Return what it would do now, or a finding that no command changes; None: nothing. `memory` is its own, to
        read and to write."""

    @abstractmethod
    def sees(self, facts: RunFacts, memory: Memory) -> Assessment:
        """Return the policy's figures against its limits, and what it would do at the next occasion.

        It is asked only when a person looks: `facts.occasion` is then the last step of this generation, if there is
        one, and `memory` is a copy.
        """


def mode_of(config: RunFile, durable: Durable, name: PolicyName) -> PolicyMode:
    """Return a policy's mode: the one that commands left, else the run file's, else the policy's default."""
    kept = durable.policies.get(name)
    if kept is not None and kept.mode is not None:
        return kept.mode
    return config.policy.of(name).mode or POLICIES[name].default


_BARRED, _UNTIL = "barred ", "until "
"""Beginnings of the names, before the rank, of what `micro-batch` keeps of sizes that ran out of memory."""


def bar_size(rank: int, size: int, until: int) -> dict[str, float]:
    """Return what keeps a rank from micro-batches of this many samples, or more, before a step."""
    return {f"{_BARRED}{rank}": float(size), f"{_UNTIL}{rank}": float(until)}


def barred_size(kept: Mapping[str, float], rank: int, step: int) -> int | None:
    """Return the least micro-batch in samples that a rank must not have at this step; None: any may be tried."""
    return int(kept[f"{_BARRED}{rank}"]) if step < kept.get(f"{_UNTIL}{rank}", 0.0) else None


def was_barred(kept: Mapping[str, float], rank: int) -> bool:
    """Return whether a size has ever been barred, so that the micro-batch has been larger."""
    return f"{_BARRED}{rank}" in kept


def shorten_bars(kept: dict[str, float], step: int, steps: int) -> None:
    """End each bar after a whole one, of `steps`, in a run that has gone back."""
    for name in kept:
        if name.startswith(_UNTIL):
            kept[name] = min(kept[name], float(step + steps))
