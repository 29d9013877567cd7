"""The separate work that an agent leads: its journal, its dealer and what is known of its nodes."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Literal

from trainctl.node_agent.work.checkpoint_files import Chosen
from trainctl.node_agent.work.dealer import Dealer
from trainctl.node_agent.work.journal import Journal
from trainctl.protocol import messages as m
from trainctl.protocol.config.run_tables import RunFile

MOST_FAILURES = 3
"""Workers that may end on a node without an answer; after that the node is left out."""


@dataclass
class WorkingNode:
    """What the lead knows about one node."""

    heard: float = float("-inf")  # by time.monotonic
    device: str = ""
    why: str = ""
    state: Literal["starting", "working", "silent", "failed"] = "starting"
    failures: int = 0  # workers that ended since the last answer
    asked: float = float("-inf")  # when it was asked to start its worker
    asking: "asyncio.Task[None] | None" = None

    @property
    def is_out(self) -> bool:
        return self.failures >= MOST_FAILURES


@dataclass
class OpenedWork:
    """The work that is open."""

    journal: Journal
    config: RunFile
    chosen: Chosen
    nodes: dict[str, WorkingNode]
    dealer: Dealer | None = None  # None: not all rows have arrived
    heard: float = field(default_factory=time.monotonic)  # when any node was heard

    @property
    def id(self) -> str:
        return self.journal.opened.request.work

    @property
    def is_active(self) -> bool:
        return self.journal.state in ("receiving", "running")

    def view(self) -> m.WorkView:
        """The state that clients get."""
        opened, journal, dealer = self.journal.opened, self.journal, self.dealer
        nodes = [
            m.WorkNode(
                node=name, state=node.state, device=node.device, rows=dealer.rows_of(name) if dealer else 0,
                rows_per_second=dealer.speed(name) if dealer else None, why=node.why,
            ) for name, node in self.nodes.items()
        ]  # fmt: skip
        return m.WorkView(
            work=self.id, kind=opened.request.kind, run=opened.request.run, checkpoint=opened.step,
            state=journal.state, rows=opened.request.rows, answered=dealer.answered_rows if dealer else 0,
            received_bytes=journal.received_bytes, nodes=tuple(nodes), reason=journal.reason,
        )  # fmt: skip

    def summary(self, lead: str) -> m.WorkSummary:
        """The same for a list; `lead` is this node."""
        view, dealer = self.view(), self.dealer
        speed = sum(node.rows_per_second or 0.0 for node in view.nodes if node.state == "working")
        speed_now = speed if speed and self.is_active else None
        return m.WorkSummary(
            lead=lead, view=view, file=self.journal.opened.request.file, slices=dealer.slices if dealer else 0,
            slices_answered=dealer.slices_answered if dealer else 0, rows_per_second=speed_now,
            seconds_left=(view.rows - view.answered) / speed_now if speed_now else None,
        )  # fmt: skip
