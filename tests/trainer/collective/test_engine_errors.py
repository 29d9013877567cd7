"""What an engine's error says to a person, for texts that the engines gave when a peer was killed or never came."""

import pytest

from trainctl.trainer.collective.engines import lost_peer, plain_error

PAIR = "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:"
CRASHED = (
    "This is typically caused by a remote worker crashing. "
    "Check the logs of the remote worker before reporting an error. GLHF! 🏖️"
)
HUNG = CRASHED.replace("crashing", "hanging or bugs in the application")
RESET = (
    f"{PAIR}537] Read error [127.0.0.1]:36246: Connection reset by peer. {HUNG}"  # 36246 is 38541 with swapped bytes
)
CLOSED = f"{PAIR}553] Connection closed by peer [127.0.0.1]:48831. {CRASHED}"
STORE_GONE = (
    "DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed. "
    "Did the remote server shutdown or crash?"
)
STORE_ABSENT = (
    "DistNetworkError: The client socket has timed out after 8000ms while trying to connect to (127.0.0.1, 53533)."
)
RING = "RuntimeError: [ring] connection to a peer was lost"
HERE = (("127.0.0.1:35797",), ("127.0.0.1:39625",), ("127.0.0.1:38389",))
APART = (("10.0.0.1:35797",), ("127.0.0.1:39625",), ("10.0.0.3:38389",))


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        (RESET, "connection to c was reset"),
        (CLOSED, "connection to c was closed"),
        (STORE_GONE, "connection to c was closed"),
        (STORE_ABSENT, "c did not answer in time"),
        (RING, "connection to c was lost"),
        ("RuntimeError: [ring] Couldn't connect (error: 111)", "could not connect to c"),
        ("RuntimeError: something new. GLHF!", "the sum failed (details in the log of b)"),
    ],
)
def test_an_engines_error_in_plain_words(text, meaning):
    assert plain_error(text, "c", "b", "the sum") == meaning
    if " c " in meaning:
        assert plain_error(text, None, "b", "the sum") == meaning.replace(" c ", " a peer ")


@pytest.mark.parametrize("text", [RESET, CLOSED, RING, STORE_GONE])
def test_of_two_ranks_the_peer_is_the_other(text):
    assert lost_peer(text, 0, HERE[:2], {}) == 1
    assert lost_peer(text, 1, HERE[:2], {}) == 0


def test_a_peer_is_known_by_the_port_of_its_process_in_either_order_of_bytes():
    ports = {0: [45999], 1: [38983, 60096], 2: [38541, 36414]}
    assert lost_peer(RESET, 0, HERE, ports) == 2
    assert lost_peer(RESET.replace("36246", "38541"), 0, HERE, ports) == 2
    assert lost_peer(CLOSED, 0, HERE, ports) is None, "a port of nobody's"
    assert lost_peer(RESET, 0, HERE, {}) is None
    assert lost_peer(RESET, 2, HERE, {**ports, 2: ports[1], 1: ports[2]}) == 1


def test_a_peer_on_a_machine_of_its_own_is_known_by_its_address():
    assert lost_peer(CLOSED, 0, APART, {}) == 1
    assert lost_peer(CLOSED.replace("127.0.0.1", "10.0.0.3"), 0, APART, {}) == 2
    assert lost_peer(CLOSED.replace("127.0.0.1", "10.0.0.9"), 0, APART, {}) is None


def test_the_store_is_the_first_ranks():
    assert lost_peer(STORE_GONE, 2, HERE, {}) == 0
    assert lost_peer(STORE_ABSENT, 1, HERE, {}) == 0
    assert lost_peer(RING, 1, HERE, {}) is None
