"""What a policy is given, and what it may propose: plain values, and no clock but in the facts."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from trainctl.node_agent.planning.durable import Durable
from trainctl.node_agent.planning.share_edits import Edit
from trainctl.protocol import messages as m
from trainctl.protocol.batch.apportion import Speed
from trainctl.protocol.config.policies import POLICIES, PolicyMode, PolicyName
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.messages import verbs


@dataclass(frozen=True)
class Stepped:
    """Every rank has reported its part of a train plan."""

    plan: m.StepPlan
    reports: Mapping[int, m.Report]  # by rank
    speeds: Mapping[int, Speed]  # by rank, of those that have been measured


@dataclass(frozen=True)
class Replayed:
    """A rank ran out of memory within a step, and ran the micro-batch again in smaller pieces."""

    plan: m.StepPlan
    report: m.Report


@dataclass(frozen=True)
class MemoryDeath:
    """A rank's process has ended for lack of memory; it is started again."""

    rank: int
    evidence: str


@dataclass(frozen=True)
class Measured:
    """All live ranks of a new run have been timed alone."""

    rates: Mapping[int, float]  # samples per second, by rank


Occasion = Stepped | Replayed | MemoryDeath | Measured


@dataclass(frozen=True)
class RunFacts:
    """What is known of the run when a policy is asked."""

    config: RunFile
    durable: Durable
    step: int  # last committed
    occasion: Occasion | None = None  # what makes it asked; None: only whether it is over


@dataclass(frozen=True)
class Proposal:
    """A command that a policy would send.

    With an `edit` its settings are taken at once and hold for the next plan, rank by rank; so does what must not wait
    for a step. Without one it goes the way of every command.
    """

    verb: str
    args: verbs.Args
    reason: str  # with the figures it rests on
    node: str | None = None
    edit: Edit | None = None
    severity: m.Severity = "info"


class Policy(ABC):
    """The root of all policies."""

    name: ClassVar[PolicyName]

    def is_over(self, facts: RunFacts) -> bool:
        """Whether it has nothing more to decide in this run."""
        return False

    @abstractmethod
    def propose(self, facts: RunFacts, memory: dict[str, float]) -> Proposal | None:
        """What it would do now, if anything. `memory` is its own, to read and to write; it outlives the agent."""


def mode_of(config: RunFile, durable: Durable, name: PolicyName) -> PolicyMode:
    """As commands left it, else as the run file has it, else as the policy begins."""
    kept, table = durable.policies.get(name), config.policy.get(name)
    if kept is not None and kept.mode is not None:
        return kept.mode
    return table.mode if table is not None else POLICIES[name].default
