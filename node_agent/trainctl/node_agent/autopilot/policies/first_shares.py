"""First shares of the nodes that the run file gives none, by what each managed alone before step 1."""

from trainctl.node_agent.autopilot.policy import Assessment, Measured, Memory, Policy, Proposal, RunFacts
from trainctl.node_agent.planning import share_edits
from trainctl.protocol import messages as m
from trainctl.protocol.batch.split import apportion
from trainctl.protocol.messages import verbs


class FirstShares(Policy):
    """It deals out what the shares of the run file leave, once."""

    name = "first-shares"
    occasions = Measured

    def is_over(self, facts: RunFacts) -> bool:
        is_timed = facts.config.group.first_shares == "timed"
        return facts.step > facts.durable.first_step or facts.durable.timed or not is_timed or len(_open(facts)) < 2

    def propose(self, facts: RunFacts, memory: Memory) -> Proposal | None:
        if not isinstance(facts.occasion, Measured):
            return None
        settings, rates = facts.durable.settings, facts.occasion.rates
        shares = {rank: setting.share for rank, setting in settings.live.items()}
        free = {rank: rates[rank] for rank in _open(facts) if rank in rates}
        edit = share_edits.edit(settings, shares | apportion(sum(shares[rank] for rank in free), free))
        timed = ", ".join(f"{settings.label(rank)} {rate:,.3g}/s" for rank, rate in rates.items())
        by_node: dict[str, int | str] = {}
        for setting in edit.settings.live.values():
            by_node[setting.node] = int(by_node.get(setting.node, 0)) + setting.share
        reason = f"initial shares by measured samples per second: {timed}"
        return Proposal("rebalance", verbs.Rebalance(shares=by_node), reason, edit=edit)

    def sees(self, facts: RunFacts, memory: Memory) -> Assessment:
        figure = m.PolicyFigure("ranks whose share the run file leaves open", len(_open(facts)))
        why = "sets the shares once the ranks have been measured"
        if self.is_over(facts):
            why = "has nothing more to decide: the first shares are set"
        return Assessment((figure,), why)


def _open(facts: RunFacts) -> list[int]:
    """Live ranks whose share the run file leaves open."""
    given = {name for name, table in facts.config.nodes.items() if table.share is not None}
    return [rank for rank, setting in facts.durable.settings.live.items() if setting.node not in given]


POLICY = FirstShares()
