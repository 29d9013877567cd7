"""Which generations the charts mark: those of other ranks than before, by the events that report them."""

import re

import pytest
from tests.prose_events import event as prose_event
from tests.tui.support.recorded import NOW, comings_and_goings, run_view

from trainctl.protocol import messages as m
from trainctl.tui.state.membership_changes import Change, changes_of_ranks


def told(*texts: tuple[str, int]) -> list[m.Event]:
    """Events as a conductor tells them: (text, step)."""
    return [
        prose_event(id=number, at=NOW, kind="run" if "formed" in text or "left" in text else "rank", severity="info",
                by="auto", text=text, step=step, run="r",
                    **dict(zip(("before", "after"), SHARES.findall(text), strict=False)))
        for number, (text, step) in enumerate(texts)
    ]  # fmt: skip


SHARES = re.compile(r"(?:\w=\d+ ?)+(?<! )")
FIRST = ("g1.1 formed, 3 ranks by gloo", 0)
LOST = "c is lost: was ended by signal 9; a=4 b=4 c=4 → a=6 b=6 c=0"
BACK = "c joins again: a=6 b=6 c=0 → a=4 b=4 c=4"


def test_a_loss_and_a_return_begin_at_the_first_step_without_and_with_the_rank() -> None:
    events = told(
        FIRST, (LOST, 6), ("g1.2 formed, 2 ranks by gloo", 6),
        (BACK, 31), ("g1.3 formed, 3 ranks by gloo; c given the state of a; the ranks waited 0.13 s", 30),
    )  # fmt: skip
    assert changes_of_ranks(events) == [Change(7, "g1.2"), Change(31, "g1.3")]
    recorded = changes_of_ranks(comings_and_goings(run_view(3), 1))
    assert recorded == [Change(70, "g1.3"), Change(78, "g1.4"), Change(116, "g1.5")]


def test_a_node_drained_by_a_command_shows_by_the_number_of_ranks() -> None:
    assert changes_of_ranks(told(FIRST, ("g1.2 formed, 1 rank", 9))) == [Change(10, "g1.2")]


def test_one_lost_while_another_is_back_is_a_change_too() -> None:
    events = told(FIRST, (LOST, 6), ("g1.2 formed, 2 ranks by gloo", 6), ("b is lost: hangs; a=6 b=6 → a=12 b=0", 9),
                  (BACK, 9), ("g1.4 formed, 2 ranks by gloo", 9))  # fmt: skip
    assert changes_of_ranks(events)[-1] == Change(10, "g1.4")


def test_of_events_that_begin_later_only_what_they_tell_counts() -> None:
    formed = ("g1.7 formed, 2 ranks by gloo", 40)
    assert changes_of_ranks(told(formed)) == []
    assert changes_of_ranks(told((LOST, 40), formed)) == [Change(41, "g1.7")]


@pytest.mark.parametrize(
    "events",
    [
        (FIRST, ("g1.2 formed, 3 ranks by gloo", 20)),
        (
            FIRST,
            ("g1.2 left: b did not join in time", 20),
            ("g1.3 formed, 3 ranks by gloo; b given the state of a", 20),
        ),
        (("c is lost: exited with 1; a=4 c=4 → a=8 c=0", 0), ("g1.1 formed, 2 ranks by gloo", 0)),
    ],
    ids=["resumed", "formed at the second try", "before the first step"],
)
def test_the_same_ranks_again_are_no_change(events: tuple[tuple[str, int], ...]) -> None:
    assert changes_of_ranks(told(*events)) == []


def test_of_generations_at_one_step_the_newest_counts() -> None:
    events = told(
        FIRST,
        (LOST, 6),
        ("g1.2 formed, 2 ranks by gloo", 6),
        ("b is lost: x; a=6 b=6 → a=12 b=0", 6),
        ("g1.3 formed, 1 rank", 6),
    )
    assert changes_of_ranks(events) == [Change(7, "g1.3")]
