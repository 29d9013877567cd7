"""Orders are carried out once, and outcomes are sent until the agent has them."""

import msgspec
import pytest

from trainctl.guest import orders
from trainctl.guest.orders import Offers, Orders
from trainctl.guest.rows import steps_line
from trainctl.protocol.messages.guests import StepsLine


def order(verb: str, id: str = "c1", **args: object) -> dict[str, object]:
    return {"id": id, "verb": verb, "args": args}


def test_an_id_is_taken_once_and_its_outcome_sent_again() -> None:
    inbox = Orders()
    for _ in range(101):
        inbox.take(order("pause"))
    assert len(inbox.arrived) == 1 and not inbox.due(9)
    inbox.finish(inbox.arrived.popleft()["id"], "applied", 8, "", (1e-3, "new"))
    assert not inbox.due(7)
    (outcome,) = inbox.due(8)
    assert (outcome["before"], outcome["after"]) == (1e-3, "new")
    inbox.sent([outcome])
    assert not inbox.due(9)
    inbox.take(order("pause"))
    assert inbox.due(9) == [outcome] and not inbox.arrived


def test_an_order_whose_time_is_up_is_not_begun() -> None:
    offers, late = Offers(), order("pause") | {"expires_at": 1.0}
    assert offers.refusal(late).startswith("its time was up")
    assert not offers.refusal(late | {"expires_at": 1e12}) and not offers.refusal(late | {"expires_at": None})


@pytest.mark.parametrize("changed", [(True, False), (64, 10**400), ("a\udcff", [1])])
def test_the_agent_reads_what_an_offered_function_returned(changed: tuple[object, object]) -> None:
    inbox = Orders()
    inbox.finish("c1", "applied", 1, "", changed)
    (outcome,) = msgspec.json.decode(steps_line((), inbox.due(1)), type=StepsLine, strict=False).outcomes
    assert outcome.before in ("True", 64, "a?") and outcome.after in ("False", str(10**400)[:200], "[1]")


def test_the_newest_outcomes_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "MAX_OUTCOMES", 3)
    inbox = Orders()
    for number in range(5):
        inbox.finish(f"c{number}", "applied", 1)
    inbox.sent(inbox.due(1))
    for number in range(5):
        inbox.take(order("pause", f"c{number}"))
    assert [one["id"] for one in inbox.arrived] == ["c0", "c1"] and len(inbox.due(1)) == 3


def test_the_end_fails_what_was_not_carried_out() -> None:
    inbox = Orders()
    inbox.take(order("pause", "waiting"))
    inbox.finish("late", "applied", 6)
    inbox.finish("done", "applied", 5)
    inbox.give_up(5, "over")
    assert {one["id"]: one["state"] for one in inbox.due(5)} == {
        "waiting": "failed",
        "late": "failed",
        "done": "applied",
    }


def test_what_is_not_offered_is_refused_with_its_reason() -> None:
    offers = Offers()
    for verb in ("pause", "resume", "note"):
        assert offers.refusal(order(verb)) == ""
    assert "no optimizer" in offers.refusal(order("set-lr", value=1e-3))
    assert "no checkpoint function" in offers.refusal(order("stop"))
    assert "checkpoint=false" in offers.refusal(order("stop"))
    assert offers.refusal(order("stop", checkpoint=False)) == ""
    assert offers.refusal(order("rebalance")) == "the loop does not offer rebalance"
    offers.offer("set-lr", print, "")
    offers.offer("checkpoint", print, "")
    assert offers.refusal(order("stop")) == offers.refusal(order("set-lr", value=0)) == ""
    assert "no learning rate" in offers.refusal(order("set-lr", value=float("nan")))
    assert "neither scale nor set" in offers.refusal(order("set-lr", value=1, schedule="linear"))
    offers.offer("pause", None, "several ranks")
    assert offers.verbs()["pause"] == "several ranks" and offers.verbs()["set-lr"] == ""
