"""Events of runs that other nodes led, until those nodes have taken them: a run's lead numbers its events."""

import contextlib
from collections.abc import Collection

import msgspec

from trainctl.node_agent.records.agent_db import AgentDb
from trainctl.protocol import messages as m

MOST = 16
"""Events in one answer to a ping. The next ones are sent once these are taken."""


class _Waiting(msgspec.Struct):
    lead: str
    event: m.LateEvent


class LateEvents:
    """Those that wait. They outlive the agent, as their lead's machine may be switched off."""

    def __init__(self, db: AgentDb) -> None:
        self._db, self._waiting = db, list[_Waiting]()
        with contextlib.suppress(msgspec.MsgspecError):
            self._waiting = msgspec.json.decode(db.late_events or "[]", type=list[_Waiting])

    def add(self, lead: str, event: m.LateEvent) -> None:
        """To be sent to the node that led the run."""
        self._keep([*self._waiting, _Waiting(lead, event)])

    def for_lead(self, lead: str) -> tuple[m.LateEvent, ...]:
        """Return what an answer to a ping of this node says, oldest first."""
        return tuple(one.event for one in self._waiting if one.lead == lead)[:MOST]

    def remove(self, lead: str, branches: Collection[str]) -> None:
        """This node has taken the events of these branches."""
        left = [one for one in self._waiting if one.lead != lead or one.event.data.branch not in branches]
        if len(left) < len(self._waiting):
            self._keep(left)

    def _keep(self, waiting: list[_Waiting]) -> None:
        self._waiting = waiting
        self._db.late_events = msgspec.json.encode(waiting).decode()
