"""Orders to the loops of attached runs: each command ends once, whatever is repeated, and as its loop says."""

import random

import pytest

from trainctl.node_agent.conductor.events import CommandEnded
from trainctl.node_agent.guests.guest_orders import LATE_SECONDS, MAX_OPEN, GuestOrders
from trainctl.protocol.errors import RefusedError
from trainctl.protocol.messages.events import CommandApplied, LearningRateChanged, RunStateChanged
from trainctl.protocol.messages.guests import Order, Outcome


def order(id: str, verb: str = "pause", expires_at: float = 100.0, **args: object) -> Order:
    return Order(id, verb, args, expires_at)


def test_an_order_waits_for_its_loop_and_ends_as_that_says() -> None:
    orders = GuestOrders()
    orders.give("a", order("1", "set-lr", value=0.5, schedule="set"))
    orders.give("b", order("2"))
    orders.give("a", order("1", "stop"))  # again: as it was
    assert [(one.id, one.verb) for one in orders.of("a")] == [("1", "set-lr")]
    assert orders.heard("b", [Outcome("1", "applied", 3)]) == ([], [])  # another run's
    ended, late = orders.heard("a", [Outcome("1", "applied", 3, before=0.1, after=0.5)])
    assert (late, orders.of("a")) == ([], [])
    assert ended == [CommandEnded("1", "applied", 3, made=LearningRateChanged(0.1, 0.5, "set"))]
    assert (ended[0].before, ended[0].after) == ("0.1", "0.5 constant")
    assert orders.heard("a", [Outcome("1", "applied", 3)]) == ([], [])


@pytest.mark.parametrize(
    ("verb", "outcome", "made"),
    [
        ("pause", Outcome("1", "applied", 7), RunStateChanged("running", "paused")),
        ("resume", Outcome("1", "applied", 7), RunStateChanged("paused", "running")),
        ("checkpoint", Outcome("1", "applied", 7, after="step-7"), CommandApplied(result="step-7")),
        ("resize-batch", Outcome("1", "applied", 7, before=8.0, after=4.0), CommandApplied(result="8 → 4")),
    ],
)
def test_what_was_done_is_said_in_the_words_of_its_verb(verb: str, outcome: Outcome, made: object) -> None:
    orders = GuestOrders()
    orders.give("a", order("1", verb))
    assert [ended.made for ended in orders.heard("a", [outcome])[0]] == [made]


def test_refusals_failures_and_the_end_of_a_run_end_its_orders() -> None:
    orders = GuestOrders()
    for id in "1234":
        orders.give("a", order(id))
    orders.give("b", order("5"))
    ended, _ = orders.heard("a", [Outcome("1", "rejected", reason="no optimizer"), Outcome("2", "failed")])
    assert [(one.id, one.state, one.reason) for one in ended] == [
        ("1", "rejected", "no optimizer"),
        ("2", "failed", "the training loop gave no reason"),
    ]
    assert [(one.id, one.state, one.reason) for one in orders.over("a", "the run ended")] == [
        ("3", "failed", "the run ended before the command took effect"),
        ("4", "failed", "the run ended before the command took effect"),
    ]
    assert [one.id for one in orders.of("b")] == ["5"]


def test_an_order_expires_once_and_what_it_did_all_the_same_is_said() -> None:
    orders = GuestOrders()
    orders.give("a", order("1", expires_at=100.0))
    orders.give("a", order("2", expires_at=200.0))
    assert orders.expire(100.0 + LATE_SECONDS) == []
    assert [(one.id, one.state) for one in orders.expire(100.1 + LATE_SECONDS)] == [("1", "expired")]
    assert orders.expire(150.0) == []
    ended, (late,) = orders.heard("a", [Outcome("1", "applied", 9), Outcome("2", "applied", 9)])
    assert [one.id for one in ended] == ["2"]
    assert (late.severity, late.step, late.verb, late.command) == ("warning", 9, "pause", "1")
    assert orders.heard("a", [Outcome("1", "applied", 9)]) == ([], [])


def test_too_many_orders_of_one_run_are_refused() -> None:
    orders = GuestOrders()
    for number in range(MAX_OPEN):
        orders.give("a", order(str(number)))
    with pytest.raises(RefusedError, match="try again later"):
        orders.give("a", order("more"))
    orders.give("a", order("0"))
    orders.give("b", order("more"))


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_lost_and_repeated_a_command_ends_once(seed: int) -> None:
    """An agent that restarts gives its open orders again; the loop carries out each once, and says so until it is
    heard."""
    chance, journal, done = random.Random(seed), dict[str, str](), dict[str, Outcome]()
    orders, now, ids = GuestOrders(), 0.0, [str(number) for number in range(10)]
    while len(journal) < len(ids):
        now += 1.0
        match chance.randrange(5):
            case 0 | 1:
                for one in orders.of("a"):  # sent, and sent again
                    done.setdefault(one.id, Outcome(one.id, chance.choice(("applied", "rejected")), int(now)))
            case 2:
                for ended in orders.heard("a", [one for one in done.values() if chance.random() < 0.5])[0]:
                    assert ended.id not in journal
                    journal[ended.id] = ended.state
            case 3:
                orders = GuestOrders()
                for id in ids:
                    if id not in journal:
                        orders.give("a", order(id, expires_at=1000.0))
            case _:
                id = chance.choice(ids)
                if id not in journal:
                    orders.give("a", order(id, expires_at=1000.0))
    assert journal == {id: done[id].state for id in ids}
