"""Drains the node whose rank makes each step longer than it would be without it; the loss doesn't change.

Such a rank takes longer for a single sample than the others take for the whole batch. What the group's sum takes is
expected to be the same without it.
"""

import dataclasses

from trainctl.node_agent.autopilot.policy import (
    Assessment,
    Memory,
    Policy,
    Proposal,
    RunFacts,
    Stepped,
    assess,
    percent,
)
from trainctl.node_agent.planning import share_edits
from trainctl.protocol.batch.split import lower_bound, slowest, split
from trainctl.protocol.messages import PolicyFigure, verbs

LOOK_STEPS = 20
"""Steps between two looks."""
PATIENCE_STEPS = 8
"""Further steps for which a look waits for one whose models another policy has made: `rebalance` does at least every 8
steps, and to make those of 1,000 ranks takes 20 ms."""
_LOOKED = "looked"
"""Name of the observation: the step of the last look."""
_COSTLY = "costly"
"""Name of the observation: the node, and the step since which every look has found it."""


@dataclasses.dataclass(frozen=True)
class Costly:
    """A node without which steps would be shorter."""

    node: str
    seconds: float  # of a step, with the best split that has it
    without: float  # the same, with the best split without it

    @property
    def part(self) -> float:
        """By what part steps are longer with it."""
        return self.seconds / self.without - 1


class Drain(Policy):
    """It judges what ranks cost now, by the models of their last steps, not whether they have become slower."""

    name = "drain"

    def propose(self, facts: RunFacts, memory: Memory) -> Proposal | None:
        if not isinstance(facts.occasion, Stepped) or not _may_look(facts.step, facts.occasion, memory):
            return None
        memory.evidence[_LOOKED] = facts.step
        found = _costly(facts, facts.occasion)
        if found is None or not _is_worth_it(facts, found):
            memory.forget(_COSTLY)
            return None
        node, since = memory.evidence.get(_COSTLY, ("", 0))
        if node != found.node or since > facts.step:
            since = facts.step
        memory.evidence[_COSTLY] = found.node, since
        return _wanted(facts, found) if facts.step - since >= facts.config.policy.drain.steps else None

    def sees(self, facts: RunFacts, memory: Memory) -> Assessment:
        table = facts.config.policy.drain
        found = _costly(facts, facts.occasion) if isinstance(facts.occasion, Stepped) else None
        node, since = memory.evidence.get(_COSTLY, ("", facts.step))
        if found is None or node != found.node:
            since = facts.step
        figures = [
            PolicyFigure("part by which a node makes steps longer", found.part if found else None, table.gain, "part"),
            PolicyFigure(
                "time lost to it until the end", _lost(facts, found) if found else None, table.move_seconds, "s"
            ),
            PolicyFigure("steps that have shown it", facts.step - since, table.steps, acts="at"),
        ]
        is_due = found is not None and _is_worth_it(facts, found) and facts.step - since >= table.steps
        otherwise = "drains a node without which the best split would be shorter; no node is one now"
        if found is not None:
            otherwise = (
                f"drains {found.node} once {table.steps} steps in a row have shown that it costs more than it gives"
            )
        return assess(figures, _wanted(facts, found) if found is not None and is_due else None, otherwise)


def _may_look(step: int, stepped: Stepped, memory: Memory) -> bool:
    since: int = step - memory.evidence.get(_LOOKED, 0)
    return since < 0 or since >= LOOK_STEPS + (0 if stepped.has_models else PATIENCE_STEPS)


def _costly(facts: RunFacts, stepped: Stepped) -> Costly | None:
    """The node with the rank that is slowest with one sample, if the others would do all in less. What all of them
    can't go below is a bound for the others too, and is found soonest."""
    settings, models = facts.durable.settings, stepped.models
    live, total = settings.live, settings.global_batch
    if not models.keys() >= live.keys():
        return None
    seconds, slow = max([(models[rank].seconds(1, 1), rank) for rank in live])
    if seconds <= share_edits.least_seconds(settings, models, stepped.most_micro):
        return None
    costs = share_edits.costs(settings, models, stepped.most_micro)
    node = live[slow].node
    others = {rank: cost for rank, cost in costs.items() if live[rank].node != node}
    if not others or lower_bound(total, [cost.rated for cost in others.values()]) >= seconds:
        return None
    without = slowest(split(total, others), others)
    # If the others can do all sooner than that, they can do less sooner: with the node, its one sample is what counts.
    return Costly(node, seconds, without) if seconds > without else None


def _lost(facts: RunFacts, found: Costly) -> float:
    """Seconds until the end of the run."""
    return (found.seconds - found.without) * (facts.config.run.steps - facts.step)


def _is_worth_it(facts: RunFacts, found: Costly) -> bool:
    table = facts.config.policy.drain
    return found.part > table.gain and _lost(facts, found) > table.move_seconds


def _wanted(facts: RunFacts, found: Costly) -> Proposal:
    times = f"with the best split steps take {found.seconds:.3g} s with {found.node}, {found.without:.3g} s without it"
    lost = f"it costs {_lost(facts, found):,.0f} s until the end, {percent(found.part)} of each step"
    return Proposal("drain", verbs.Drain(), f"{times}; {lost}", found.node, severity="warning")
