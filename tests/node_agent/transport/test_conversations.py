"""A conversation between two agents over a line that loses, repeats and cuts: nothing is taken twice or out of order,
and whatever is lost ends it."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainctl.node_agent.transport.conversations import SILENT_AFTER_SECONDS, STALE_SECONDS, Line, Numbers
from trainctl.protocol import messages as m

LINK = "a" * 16


def leave(link: str, seq: int) -> m.PeerRelay:
    return m.PeerRelay(link=link, seq=seq, rank=1, order=m.Leave(run="r", reason=str(seq)))


def exited(link: str, seq: int) -> m.PeerExit:
    return m.PeerExit(link=link, seq=seq, run="r", rank=1, clean=True, why="")


def welcome(link: str) -> m.PeerWelcome:
    return m.PeerWelcome(link=link, node="b", boot="x", live_address="tcp://127.0.0.1:1", version="0")


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.floats(0, 0.3))
def test_over_any_line_what_is_taken_is_a_beginning_of_what_was_sent(seed: int, loss: float) -> None:
    chance, here, there = random.Random(seed), Numbers(LINK), Numbers(LINK)
    taken, lost = [], False
    for _ in range(50):
        message = here.stamped(leave(LINK, 0))
        if chance.random() < loss:
            lost = True
            continue
        for _ in range(chance.choice([1, 1, 2])):
            judgement = there.judge(message)
            if judgement == "take":
                assert not lost
                taken.append(message.seq)
            else:
                assert judgement == ("gap" if lost else "drop")
        assert there.judge(leave("other", 4)) == "stranger"
        if lost:
            assert there.judge(m.PeerPing(link=LINK, seq=here.sent)) == "gap"
            break
    assert taken == list(range(1, len(taken) + 1))


def test_a_line_is_in_touch_from_the_welcome_on_and_begins_again_when_a_message_is_lost() -> None:
    line = Line()
    assert line.state == "unknown"
    line.begin("one", 0.0)
    assert line.take(exited("one", 1), 0.1) == "drop"  # before the welcome
    assert line.take(welcome("one"), 0.1) == "welcome"
    assert (line.state, line.open) == ("connected", True)
    assert line.take(welcome("one"), 0.2) == "drop"
    assert line.take(exited("one", 1), 0.2) == "take"
    assert line.take(m.PeerBeat(link="one", seq=3), 0.3) == "begin-again"
    assert (line.state, line.open) == ("connected", False)  # its agent is there: only the conversation is over
    line.begin("two", 0.4)
    assert line.take(exited("one", 2), 0.5) == "drop"
    assert line.take(welcome("two"), 0.5) == "welcome"
    assert line.take(exited("two", 1), 0.5) == "take"


def test_a_line_is_stale_and_then_overdue_after_silence() -> None:
    line = Line()
    line.begin("one", 9.0)
    line.lose("no agent answers")
    assert (line.state, line.why) == ("unknown", "no agent answers"), "it was never welcomed"
    line.begin("one", 10.0)
    assert not line.is_overdue(10.0 + SILENT_AFTER_SECONDS)
    assert line.is_overdue(10.1 + SILENT_AFTER_SECONDS)
    line.take(welcome("one"), 13.0)
    line.take(m.PeerBeat(link="one", seq=0), 14.0)
    assert not line.is_overdue(14.0 + SILENT_AFTER_SECONDS)
    assert not line.is_stale(14.0 + STALE_SECONDS)
    assert line.is_stale(14.1 + STALE_SECONDS), "an order would be read when it is no longer meant"
    line.lose("cut")
    assert line.is_stale(14.0)
    assert (line.state, line.why, line.open) == ("silent", "cut", False)


@pytest.mark.parametrize(
    ("code", "state"), [("unknown-link", "connected"), ("busy", "silent"), ("older-term", "silent")]
)
def test_a_refusal_ends_the_conversation_and_says_why(code: str, state: str) -> None:
    line = Line()
    line.begin("one", 0.0)
    line.take(welcome("one"), 0.0)
    assert line.take(m.PeerRefusal(link="one", code=code, text="no"), 0.1) == "begin-again"  # type: ignore[arg-type]
    assert (line.state, line.open) == (state, False)
    assert line.why == ("no" if state == "silent" else "")
