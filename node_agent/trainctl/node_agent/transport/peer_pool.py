"""The other agents of the cluster: a link to each, what clients see of them, and asking them to host a run."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from trainctl.node_agent.transport.peer_link import CredentialsFor, PeerLink, PeerListener
from trainctl.protocol.config import run_file
from trainctl.protocol.config.cluster_file import NodeEntry
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import Generation, PeerHost, PeerView, RunState
from trainctl.protocol.wire import codec

TOUCH_SECONDS = 3.0
"""Seconds within which a lost link that reconnects doesn't count as a lost node."""
HOST_SECONDS = 10.0
"""Seconds a node may take to check a run file and start its trainer."""


class Peers:
    """All other nodes of the cluster, whether they take part in a run or not."""

    def __init__(
        self, context: Any, nodes: Mapping[str, NodeEntry], lead: PeerListener, credentials: CredentialsFor
    ) -> None:
        """`credentials` gives what to speak to a node's agent with, and raises InvalidInputError if it can't be."""
        self.links = {
            node: PeerLink(context, node, entry.address, lead, entry.key, credentials) for node, entry in nodes.items()
        }

    def renew(self) -> None:
        """Begin all conversations again: keys have changed."""
        for link in self.links.values():
            link.renew()

    async def serve(self) -> None:
        """Keep in touch with all of them."""
        if not self.links:
            await asyncio.Event().wait()
        await asyncio.gather(*(link.serve() for link in self.links.values()))

    @property
    def views(self) -> tuple[PeerView, ...]:
        return tuple(link.view for link in self.links.values())

    @property
    def silent(self) -> dict[str, str]:
        """The nodes whose agents aren't in touch, and why."""
        return {node: link.line.why for node, link in self.links.items() if link.line.state != "connected"}

    def lacking(self) -> str:
        """Return what is missing for a majority of the cluster's nodes, this one included, to be reachable; or
        empty."""
        count = len(self.links) + 1
        out = [node for node, link in self.links.items() if link.is_out(TOUCH_SECONDS)]
        if 2 * (count - len(out)) > count:
            return ""
        return (
            f"{count - len(out)} of {count} nodes reachable, a majority is {count // 2 + 1}; missing: {', '.join(out)}"
        )

    def address(self, node: str) -> str | None:
        """Return the address at which a node's agent takes requests, None for one that is no other of this cluster."""
        return self.links[node].address if node in self.links else None

    def is_open(self, node: str) -> bool:
        """Return whether another node's agent is connected now."""
        return node in self.links and self.links[node].line.open

    async def host(
        self,
        run: str,
        ranks: Mapping[int, str],
        config: RunFile,
        generation: Generation,
        resume_step: Callable[[str], int | None],
        *,
        call_off: RunState,
    ) -> None:
        """Have the other nodes host their ranks, all or none. Raises InvalidInputError naming node and field.

        `resume_step` gives the step of the checkpoint that a node is to load, if it is to load one.
        Where one refuses or says nothing in time, the others are sent the run's state `call_off`.
        """
        raw = run_file.to_message(config)
        asked = {rank: node for rank, node in ranks.items() if node in self.links}
        made = PeerHost(link="0" * 16, seq=1, run=run, rank=0, config=raw, generation=generation)
        orders = {
            node: msgspec.structs.replace(made, rank=rank, resume_step=resume_step(node))
            for rank, node in asked.items()
        }
        answers = await asyncio.gather(*(self._ask(node, order) for node, order in orders.items()))
        refusals = [answer for answer in answers if answer is not None]
        if refusals:
            for rank, node in asked.items():
                await self.links[node].end_rank(run, rank, call_off, str(refusals[0]))
            raise refusals[0]

    async def _ask(self, node: str, message: PeerHost) -> InvalidInputError | None:
        link, where = self.links[node], f"config: nodes.{node}"
        if (size := len(codec.encode(message))) > codec.CONTROL_FRAME_BYTES:
            return InvalidInputError(
                "config", f"{size:,} bytes; an agent accepts at most {codec.CONTROL_FRAME_BYTES:,}"
            )
        answer = await link.host(message, HOST_SECONDS)
        if answer is not None:
            problem = run_file.with_remedy(answer.problem, answer.field, node)
            return InvalidInputError(answer.field, f"{node}: {problem}") if answer.field else None
        if link.line.state == "connected":
            return InvalidInputError(where, f"{node} did not answer within {HOST_SECONDS:g} s")
        return InvalidInputError(where, f"{node} is unreachable: {link.line.why}")
