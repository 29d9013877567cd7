"""Which generations the charts mark: those of other ranks than before, by the events that report them."""

from typing import Any

import pytest
from tests.tui.support.recorded import NOW, comings_and_goings, run_view

from trainctl.protocol import messages as m
from trainctl.protocol.messages.events import AnyEvent, GenerationFormed, GenerationLeft, SharesChanged
from trainctl.tui.state.run_events import Change, changes_of_ranks


def told(*changes: tuple[AnyEvent, int]) -> list[m.Event]:
    """Events as a conductor sends them: (data, step)."""
    return [
        m.Event(id=number, at=NOW, severity="info", by="auto", data=data, step=step, run="r")
        for number, (data, step) in enumerate(changes)
    ]


def formed(number: int, ranks: int, **rest: Any) -> GenerationFormed:
    return GenerationFormed(m.Generation(1, number), ranks, **rest)


FIRST = (formed(1, 3), 0)
LOST = SharesChanged({"a": 4, "b": 4, "c": 4}, {"a": 6, "b": 6, "c": 0}, "was ended by signal 9", lost="c")
SECOND_LOST = SharesChanged({"a": 6, "b": 6}, {"a": 12, "b": 0}, "hangs", lost="b")
BACK = SharesChanged({"a": 6, "b": 6, "c": 0}, {"a": 4, "b": 4, "c": 4}, returned="c")


def test_a_loss_and_a_return_begin_at_the_first_step_without_and_with_the_rank() -> None:
    events = told(
        FIRST, (LOST, 6), (formed(2, 2), 6),
        (BACK, 31), (formed(3, 3, behind=("c",), source="a"), 30),
    )  # fmt: skip
    assert changes_of_ranks(events) == [Change(7, "g1.2"), Change(31, "g1.3")]
    recorded = changes_of_ranks(comings_and_goings(run_view(3), 1))
    assert recorded == [Change(70, "g1.3"), Change(78, "g1.4"), Change(116, "g1.5")]


def test_a_node_drained_by_a_command_shows_by_the_number_of_ranks() -> None:
    assert changes_of_ranks(told(FIRST, (formed(2, 1), 9))) == [Change(10, "g1.2")]


def test_one_lost_while_another_is_back_is_a_change_too() -> None:
    events = told(FIRST, (LOST, 6), (formed(2, 2), 6), (SECOND_LOST, 9),
                  (BACK, 9), (formed(4, 2), 9))  # fmt: skip
    assert changes_of_ranks(events)[-1] == Change(10, "g1.4")


def test_of_events_that_begin_later_only_what_they_tell_counts() -> None:
    later = (formed(7, 2), 40)
    assert changes_of_ranks(told(later)) == []
    assert changes_of_ranks(told((LOST, 40), later)) == [Change(41, "g1.7")]


@pytest.mark.parametrize(
    "events",
    [
        (FIRST, (formed(2, 3), 20)),
        (FIRST, (GenerationLeft(m.Generation(1, 2), "b did not join in time"), 20), (formed(3, 3, behind=("b",)), 20)),
        ((SharesChanged({"a": 4, "c": 4}, {"a": 8, "c": 0}, "exited with 1", lost="c"), 0), (formed(1, 2), 0)),
    ],
    ids=["resumed", "formed at the second try", "before the first step"],
)
def test_the_same_ranks_again_are_no_change(events: tuple[tuple[AnyEvent, int], ...]) -> None:
    assert changes_of_ranks(told(*events)) == []


def test_of_generations_at_one_step_the_newest_counts() -> None:
    events = told(FIRST, (LOST, 6), (formed(2, 2), 6), (SECOND_LOST, 6), (formed(3, 1), 6))
    assert changes_of_ranks(events) == [Change(7, "g1.3")]
