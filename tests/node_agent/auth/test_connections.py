"""Who is answered: the connection that asked, whatever identity others take and whichever descriptor is used again."""

from trainctl.node_agent.auth.connections import Callers

ANNA, BOB = b"\0\0\0\0\x01", b"\0\0\0\0\x02"


def opened(*descriptors: int) -> Callers:
    made = Callers()
    for descriptor in descriptors:
        made.opened(descriptor)
    return made


def test_a_caller_is_found_as_long_as_its_connection_is_open() -> None:
    callers = opened(7)
    caller = callers.speak(ANNA, 7, "key")
    assert caller is not None and callers.find(caller) == (ANNA, "key")
    assert callers.speak(ANNA, 7, "key") == caller, "one connection, one caller"
    callers.closed(7)
    assert callers.find(caller) is None


def test_who_takes_an_identity_is_another_caller() -> None:
    callers = opened(7, 8)
    anna = callers.speak(ANNA, 7, "anna")
    assert callers.speak(ANNA, 8, "bob") is None, "it is in use"
    callers.closed(7)
    bob = callers.speak(ANNA, 8, "bob")
    assert anna is not None and callers.find(anna) is None
    assert bob is not None and callers.find(bob) == (ANNA, "bob")


def test_what_comes_after_its_connection_has_ended_is_not_answered() -> None:
    callers = opened()
    late = callers.speak(ANNA, 7, "anna")
    assert late is not None and callers.find(late) is None


def test_a_descriptor_that_is_used_again_is_the_newer_identitys() -> None:
    """Anna's last words are still to be read when Bob has her descriptor, in either order."""
    for spoken in ((ANNA, BOB), (BOB, ANNA)):
        callers = opened(7)
        callers.closed(7)
        callers.opened(7)
        said = {identity: callers.speak(identity, 7, "key") for identity in spoken}
        assert said[ANNA] is not None and callers.find(said[ANNA]) is None
        assert said[BOB] is not None and callers.find(said[BOB]) == (BOB, "key")
    numbers = opened(7)
    numbers.speak(b"\0\xff\xff\xff\xff", 7, "key")
    after = numbers.speak(b"\0\0\0\0\0", 7, "key")
    assert after is not None and numbers.find(after) is not None, "the numbers go round"


def test_no_identity_is_chosen() -> None:
    callers = opened(7)
    assert [callers.speak(chosen, 7, "key") for chosen in (b"anna", b"anna1", b"\0long-one", b"")] == [None] * 4
