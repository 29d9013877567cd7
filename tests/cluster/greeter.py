"""A lead or a claimant made by hand: its messages are what a test says, right or wrong."""

import zmq
from tests.waiting import PATIENT_MILLISECONDS

from trainctl.protocol import messages as m
from trainctl.protocol.wire import codec, sockets

LEAD = "omega"


class Greeter:
    """A node's agent as another one's hears it."""

    def __init__(self, context: zmq.Context, address: str, link: str) -> None:
        self.link, self.socket = link, sockets.new_socket(context, zmq.DEALER)
        self.socket.connect(address)

    def say(self, message: m.ToPeer) -> None:
        assert self.socket.poll(PATIENT_MILLISECONDS, zmq.POLLOUT)
        self.socket.send(codec.encode(message))

    def hear(self, kind: type[m.Message]) -> m.Message:
        """The next message but beats, which is to be of this kind."""
        while True:
            assert self.socket.poll(PATIENT_MILLISECONDS), f"no {kind.__name__}"
            message = codec.decode_peer(self.socket.recv())
            if isinstance(message, m.PeerBeat) and kind is not m.PeerBeat:
                continue
            assert isinstance(message, kind), message
            return message

    def next_refusal(self) -> m.PeerRefusal | None:
        """Return a refusal if one has come; what a trainer says meanwhile is passed over."""
        while self.socket.poll(100):
            if isinstance(message := codec.decode_peer(self.socket.recv()), m.PeerRefusal):
                return message
        return None

    def greet(self, run: str | None = None, term: int = 1) -> None:
        self.say(m.PeerHello(
            link=self.link, lead=LEAD, address="tcp://127.0.0.1:9", generation=m.Generation(term, 0), run=run
        ))  # fmt: skip

    def relay(self, seq: int, order: m.ToTrainer, rank: int = 1) -> None:
        self.say(m.PeerRelay(link=self.link, seq=seq, rank=rank, order=order))


def claim(context: zmq.Context, address: str, name: str, view: m.RunView) -> m.PeerConsent:
    """Return what an agent says to a node of this name which claims the run in the next term, and is gone at once."""
    claimant = Greeter(context, address, name * 3)
    claimant.say(m.PeerHello(link=claimant.link, lead=name, address="tcp://127.0.0.1:9"))
    claimant.hear(m.PeerWelcome)
    hosted, term = m.HostedRank(view.run, 1, None, view.step, view.generation, 0, 0), view.generation.term + 1
    claimant.say(m.PeerClaim(link=claimant.link, seq=1, run=view.run, term=term, hosted=hosted))
    consent = claimant.hear(m.PeerConsent)
    claimant.socket.close(linger=0)
    assert isinstance(consent, m.PeerConsent)
    return consent
