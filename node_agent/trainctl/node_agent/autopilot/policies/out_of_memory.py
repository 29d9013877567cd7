"""After a death for lack of memory: half the micro-batch, before the rank comes back."""

from trainctl.node_agent.autopilot.policy import Assessment, Memory, MemoryDeath, Policy, Proposal, RunFacts, resize
from trainctl.node_agent.planning import share_edits
from trainctl.protocol import messages as m


class OutOfMemory(Policy):
    """Nothing is left to halve at a micro-batch of 1."""

    name = "out-of-memory"
    occasions = MemoryDeath

    def propose(self, facts: RunFacts, memory: Memory) -> Proposal | None:
        if not isinstance(facts.occasion, MemoryDeath):
            return None
        settings, rank = facts.durable.settings, facts.occasion.rank
        edit = share_edits.halve(settings, rank)
        if edit.settings is settings:
            return None
        after = edit.settings.ranks[rank]
        return resize(after.micro_batch, after.node, f"out of memory, {facts.occasion.evidence}", "warning", edit)

    def sees(self, facts: RunFacts, memory: Memory) -> Assessment:
        largest = max(setting.micro_in_force for setting in facts.durable.settings.ranks.values())
        figure = m.PolicyFigure("largest micro-batch", largest, unit="samples")
        return Assessment((figure,), "halves the micro-batch of a trainer that runs out of memory")


POLICY = OutOfMemory()
