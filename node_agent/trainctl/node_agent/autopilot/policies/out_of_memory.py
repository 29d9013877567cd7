"""After a death for lack of memory: half the micro-batch, before the rank comes back."""

from trainctl.node_agent.autopilot.policy import Memory, MemoryDeath, Policy, Proposal, RunFacts
from trainctl.node_agent.planning import share_edits
from trainctl.protocol.messages import verbs


class OutOfMemory(Policy):
    """Nothing is left to halve at a micro-batch of 1."""

    name = "out-of-memory"

    def propose(self, facts: RunFacts, memory: Memory) -> Proposal | None:
        if not isinstance(facts.occasion, MemoryDeath):
            return None
        settings, rank = facts.durable.settings, facts.occasion.rank
        edit = share_edits.halve(settings, rank)
        if edit.settings is settings:
            return None
        after = edit.settings.ranks[rank]
        args = verbs.ResizeBatch(micro=after.micro_batch)
        reason = f"out of memory, {facts.occasion.evidence}"
        return Proposal("resize-batch", args, reason, after.node, edit, "warning")


POLICY = OutOfMemory()
