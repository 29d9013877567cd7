"""What has no link yet, because nothing has numbered it, never comes to a socket."""

import pytest
import zmq.asyncio

from trainctl.node_agent.roles.inbound_links import InboundLinks
from trainctl.node_agent.transport.peer_link import PeerLink
from trainctl.protocol import messages as m

HELLO = m.PeerHello(link="a" * 16, lead="a", address="tcp://127.0.0.1:1")
WELCOME = m.PeerWelcome(link=HELLO.link, node="b", boot="x", live_address="tcp://127.0.0.1:1", version="0")
EXIT = m.PeerExit(link="", seq=0, run="r", rank=1, clean=True, why="")


async def test_an_answer_is_numbered_on_its_way_and_goes_no_other_way() -> None:
    said: list[m.FromPeer] = []

    async def say(identity: bytes, message: m.FromPeer) -> None:
        said.append(message)

    links = InboundLinks(say)
    await links.greet(b"1", HELLO, WELCOME)
    assert await links.answer("a", EXIT)
    assert [(message.link, getattr(message, "seq", None)) for message in said] == [(HELLO.link, None), (HELLO.link, 1)]
    with pytest.raises(AssertionError):
        await links._send(b"1", EXIT)
    assert len(said) == 2


async def test_an_order_without_a_link_is_not_sent() -> None:
    with zmq.asyncio.Context() as context:
        link = PeerLink(context, "b", "tcp://127.0.0.1:1", lead=None)  # type: ignore[arg-type]
        order = m.PeerRelay(link="", seq=0, rank=1, order=m.Leave(run="r", reason=""))
        assert not await link.send(order)  # nobody is there
        with pytest.raises(AssertionError):
            await link._transmit(order)
