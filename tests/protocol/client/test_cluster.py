"""Whom `attach_cluster` follows where several runs are live: a guest on another node turns it to nobody."""

import asyncio
import contextlib
from typing import Any

import msgspec
from tests.tui.support.guests import view_of
from tests.tui.support.scripted import scripted
from tests.waiting import HANG_SECONDS
from tools.protocol_docs import examples

from trainctl.protocol import messages as m
from trainctl.protocol.client.cluster import attach_cluster

SHOWN: dict[str, Any] = examples.EXAMPLES["published by an agent"]
HOSTED, READING = SHOWN["run-view"], SHOWN["host-reading"]
GUEST = msgspec.structs.replace(view_of(HOSTED), run="notebook-1", lead="mbp")


async def test_a_guest_on_another_node_does_not_make_that_node_the_conducting_one() -> None:
    with (
        scripted(lambda _: [other.snapshot(node=msgspec.structs.replace(other.snapshot().node, node="mbp"))]) as other,
        scripted(lambda _: [asked.snapshot(peers=(peer,))]) as asked,
    ):
        peer = m.PeerView("mbp", other.address, other.live_address, "connected", 0.0)
        snapshots: list[str] = []
        async with (
            asyncio.timeout(HANG_SECONDS),
            contextlib.aclosing(attach_cluster(asked.address, 0)) as items,
        ):
            async for node, item in items:
                snapshots += [node] if isinstance(item, m.Snapshot) else []
                if isinstance(item, m.NodeView) and node == "mbp":
                    other.publish(GUEST)
                    other.publish(msgspec.structs.replace(READING, node="mbp"))
                if isinstance(item, m.HostReading) and item.seq == 2:
                    other.publish(msgspec.structs.replace(HOSTED, lead="mbp"))
                if isinstance(item, m.Snapshot) and node == "mbp":
                    break
        assert snapshots == ["studio", "mbp"], "the hosted run there did, and what came before it did not"
        assert other.seq == 3
