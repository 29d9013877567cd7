"""Which nodes an event is about: by its data, not by what its text happens to have in it."""

import pytest

from trainctl.protocol.messages import events as e
from trainctl.protocol.messages.base import Generation


@pytest.mark.parametrize(
    ("data", "nodes"),
    [
        (e.CommandFailed("no room, unlike mac1", node="mac10"), {"mac10"}),
        (e.SharesChanged({"a": 8, "b": 2}, {"a": 11}, lost="b:1", returned="c"), {"a", "b", "c"}),
        (e.MicroBatchChanged((("a", 8), ("a", 8)), (("a", 4), ("a", 4))), {"a"}),
        (e.LeadChanged("a", ""), {"a"}),
        (e.GenerationFormed(Generation(1, 2), 3, behind=("b",), source="a"), {"a", "b"}),
        (e.StateShared("a", 0.5, "b:10"), {"a", "b"}),
        (e.ProbePassed("a:0", "a:1", 0.0, 1e-4, 256, 1.0), {"a"}),
        (e.RankChanged(("a:0", "b"), "lost", "by a"), {"a", "b"}),
        (e.SharesUnmeasured(("a",)), {"a"}),
        (e.AlertRaised("1", "a", "b is slow"), {"a"}),
        (e.AlertRaised("1", "", "a is slow"), set()),
        (e.NoteWritten("restarted mac1"), set()),
    ],
)
def test_an_event_is_about_the_nodes_in_its_data(data: e.AnyEvent, nodes: set[str]) -> None:
    assert e.nodes_of(data) == nodes
