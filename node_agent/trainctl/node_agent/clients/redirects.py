"""Redirects: commands for another node's agent, about a run that it leads or for that node by name."""

from trainctl.node_agent.alerts.service import AlertService
from trainctl.node_agent.clients.query_context import QueryContext
from trainctl.node_agent.records.agent_db import FollowedRun
from trainctl.node_agent.roles.follower import Follower
from trainctl.node_agent.roles.lead import Lead
from trainctl.node_agent.runs.context import AgentContext
from trainctl.protocol import messages as m
from trainctl.protocol.messages import verbs


class Redirects:
    """Looks at what this agent leads, follows and has handed over."""

    def __init__(
        self, context: AgentContext, lead: Lead, follower: Follower, alerts: AlertService, query_context: QueryContext
    ) -> None:  # fmt: skip
        self._context, self._lead, self._follower = context, lead, follower
        self._alerts, self._query_context = alerts, query_context

    def of(self, command: m.Command) -> m.Refusal | None:
        """Where a command should go, None where it is for this agent."""
        verb = verbs.VERBS.get(command.verb)
        if verb is not None and verb.to_node and (verb.needs_node or command.node is not None):
            return self._to_node(command)
        if self._alerts.knows(command):
            return None
        known = self._led_by(command)
        if known is None or (_starts_run(command) and not self._lead.peers.is_open(known.lead)):
            return None
        text = f"{known.lead} leads {known.run}; its agent is at {known.address}"
        return self._not_lead(command, text, known.lead, known.address)

    def _led_by(self, command: m.Command) -> FollowedRun | None:
        """The run that a command is about, if another node leads it."""
        if (followed := self._follower.followed) is not None:
            return followed.known
        if _starts_run(command):
            known = command.args.get("resume") or command.args.get("branch")
            return self._context.db.followed(known.partition("@")[0]) if isinstance(known, str) else None
        return self._query_context.handed_over() if self._lead.run is None else None

    def _to_node(self, command: m.Command) -> m.Refusal | None:
        address = self._lead.peers.address(command.node) if command.node is not None else None
        if command.node is None or address is None:
            return None
        text = f"only {command.node} can do this; its agent is at {address}"
        return self._not_lead(command, text, command.node, address)

    def _not_lead(self, command: m.Command, text: str, node: str, address: str) -> m.Refusal:
        entry = self._context.cluster.nodes.get(node)
        key = entry.key if entry is not None else None
        return m.Refusal(rid=command.rid, code="not-lead", text=text, lead=address, lead_key=key)


def _starts_run(command: m.Command) -> bool:
    return verbs.args_type(command.verb) is verbs.StartRun
