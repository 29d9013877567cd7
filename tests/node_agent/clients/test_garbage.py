"""Mutated frames, as from a broken agent or a stranger, harm neither clients nor a lead."""

import asyncio
import contextlib

import msgspec
import psutil
import pytest
import zmq
import zmq.asyncio
from tests.protocol.support.mutations import Mutator
from tests.tiers import scale
from tests.waiting import HANG_SECONDS
from tools.protocol_docs import examples

from trainctl.node_agent.transport.peer_link import PeerLink
from trainctl.protocol import messages as m
from trainctl.protocol.client import client as c
from trainctl.protocol.client.live_queue import LiveQueue
from trainctl.protocol.errors import ProtocolError, RefusedError, VersionError
from trainctl.protocol.wire import codec, sockets

FRAMES = scale("frames")
BURST = 200
"""Fewer than a socket keeps, so that none is lost."""
ME = psutil.Process()


@pytest.fixture
def context():
    made = zmq.asyncio.Context()
    yield made
    made.destroy(linger=0)


def bound(context, kind):
    made = sockets.new_socket(context, kind)
    return made, f"tcp://127.0.0.1:{made.bind_to_random_port('tcp://127.0.0.1')}"


@pytest.mark.timeout(3600)
async def test_a_client_outlives_mutated_replies(context):
    server, address = bound(context, zmq.ROUTER)
    mutator, held = Mutator("agent to client", 1), []
    async with c.Client(address, timeout_seconds=HANG_SECONDS) as client:
        for _ in range(0, FRAMES, BURST):
            while True:  # what comes while it asks, and is for nobody, comes before the answer
                asked = asyncio.create_task(client.ask(m.RunsRequest))
                identity, frame = await server.recv_multipart()
                rid = codec.decode_control(frame).rid
                await server.send_multipart([identity, codec.encode(m.Runs(rid=rid, runs=()))])
                with contextlib.suppress(ProtocolError, RefusedError):
                    if (await asked).runs == ():  # else a mutated reply has the same number
                        break
            for made in mutator.frames(BURST):
                await server.send_multipart([identity, made])
            held.append(ME.memory_info().rss)
    assert held[-1] - held[0] < 10e6, "beside what the first burst made Python keep"


@pytest.mark.timeout(3600)
async def test_a_subscriber_outlives_mutated_messages(context):
    server, address = bound(context, zmq.XPUB)
    mutator, held = Mutator("published by an agent", 1), []
    event = examples.EXAMPLES["published by an agent"]["event"]
    live = LiveQueue(context, address, None)
    try:
        for number in range(0, FRAMES, BURST):
            for made in mutator.frames(BURST):
                await server.send_multipart([b"event", made])
            told = codec.encode(msgspec.structs.replace(event, seq=10**9 + number))
            while True:
                await server.send_multipart([b"event", told])
                with contextlib.suppress(VersionError):
                    if any(message.seq == 10**9 + number for message in await live.get(0.2)):
                        break
            held.append(ME.memory_info().rss)
    finally:
        live.close()
    assert len(held) == len(range(0, FRAMES, BURST))
    assert held[-1] - held[0] < 10e6, "beside what the first burst made Python keep"


class Lead:
    """Who listens to the follower: it hears of what is right alone."""

    def __init__(self):
        self.welcomes = []

    def hello(self, link):
        return m.PeerHello(link=link, lead="a", address="tcp://127.0.0.1:9", generation=None)

    async def welcomed(self, node, welcome):
        self.welcomes.append(welcome)

    async def superseded(self, refusal):
        """Nobody's run is conducted here."""

    def in_touch(self, node, why):
        """It is read from the link."""

    def read(self, reading):
        """Its machine is of no interest here."""

    def late(self, event):
        """No run was conducted here."""
        return True


@pytest.mark.timeout(3600)
async def test_a_lead_begins_again_with_a_follower_that_talks_nonsense(context):
    server, address = bound(context, zmq.ROUTER)
    mutator, lead, greeted = Mutator("follower to lead", 1), Lead(), 0
    link = PeerLink(context, "b", address, lead)
    serving = asyncio.create_task(link.serve())
    try:
        async with asyncio.timeout(HANG_SECONDS):
            while not lead.welcomes:
                identity, frame = await server.recv_multipart()
                message = codec.decode_control(frame)
                if not isinstance(message, m.PeerHello):
                    continue
                greeted += 1
                with contextlib.suppress(zmq.ZMQError):  # it hangs up at the first that is none of the protocol
                    for made in mutator.frames(BURST if greeted < 3 else 0):
                        await server.send_multipart([identity, made])
                    if greeted >= 3:
                        welcome = m.PeerWelcome(
                            link=message.link, node="b", boot="x", live_address="tcp://127.0.0.1:1", version="0"
                        )
                        await server.send_multipart([identity, codec.encode(welcome)])
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    assert (link.line.welcome.node, greeted) == ("b", 3)
