"""Events in words: each kind says something of its own, on one line, and a command's change its verb once."""

from typing import get_args

import pytest
from tools.protocol_docs import examples

from trainctl.protocol import messages as m
from trainctl.protocol.messages import event_prose
from trainctl.protocol.messages import events as e

KINDS = [
    message
    for name, message in examples.EXAMPLES["published by an agent"].items()
    if name.startswith("event") and isinstance(message, m.Event)
]
SHARES = {"torch-a": 8, "mlx-c": 8, "torch-b": 8}


def test_each_kind_is_one_line_of_text() -> None:
    for event in KINDS:
        assert event.text.strip() == event.text != "", event
        assert event.text.isprintable() and "None" not in event.text, event
        assert event.kind in get_args(e.Category), event


def test_no_two_kinds_say_the_same() -> None:
    assert len({event.text for event in KINDS}) == len({type(event.data) for event in KINDS}) + 1  # one is a command's


@pytest.mark.parametrize(
    ("data", "verb", "words"),
    [
        (
            e.SharesChanged(SHARES, {**SHARES, "torch-a": 11, "mlx-c": 5}, "initial shares by measured speed"),
            "rebalance",
            "rebalanced: torch-a 8 → 11, mlx-c 8 → 5 (initial shares by measured speed)",
        ),
        (e.SharesChanged(SHARES, SHARES), "rebalance", "rebalanced: all shares unchanged"),
        (e.SharesChanged({"a": 4, "b": 4}, {"a": 8, "b": 0}, node="b"), "drain", "drained b: a 4 → 8, b 4 → 0"),
        (e.SharesChanged({"a": 8, "b": 0}, {"a": 4, "b": 4}, node="b"), "admit", "admitted b: a 8 → 4, b 0 → 4"),
        (e.SharesChanged({"a": 4, "b": 4}, {"a": 8, "b": 0}, "hung", lost="b"), None,
         "b is lost: hung; a 4 → 8, b 4 → 0"),
        (e.SharesChanged({"a": 8, "b": 0}, {"a": 4, "b": 4}, returned="b"), None, "b rejoins: a 8 → 4, b 0 → 4"),
        (e.MicroBatchChanged((("a", 4), ("b", 4)), (("a", 2), ("b", 2))), "resize-batch", "micro-batch: a, b 4 → 2"),
        (e.MicroBatchChanged((("a", 2), ("b", 4)), (("a", 2), ("b", 2))), "resize-batch",
         "micro-batch: a 2, unchanged; b 4 → 2"),
        (e.LearningRateChanged(3e-4, 1e-4, "set"), "set-lr", "learning rate: 3e-4 → 1e-4 constant"),
        (e.RunStateChanged("running", "paused"), "pause", "pause: running → paused"),
        (e.PolicyModeChanged("replays", "on", "off"), "autopilot", "policy replays: on → off"),
        (e.PolicyModeChanged("replays", "off", "off"), "autopilot", "policy replays: off, unchanged"),
        (e.PolicyModeChanged("first-shares", "on", "advise", "anna sent rebalance"), None,
         "policy first-shares: on → advise (anna sent rebalance)"),
        (e.PolicyAdvised("first-shares", "rebalance a=8 b=4", "a 100/s, b 50/s"), None,
         "policy first-shares: advises rebalance a=8 b=4 (a 100/s, b 50/s)"),
        (e.CommandApplied("a", "defragmented"), "defragment", "defragment a: defragmented"),
        (e.CommandApplied(), "note", "note"),
        (e.CheckpointWritten(40), None, "checkpoint step-40"),
        (e.Profiled("a", 0, 5, 7, "rank-0.steps-5-7.trace.json.gz", 1_204_300, "", (), 0.041), None,
         "a profiled steps 5 to 7: 1.2 MB, loop paused 41 ms"),
        (e.ProfileFailed("a", "its trainer ended"), None, "no profile from a: its trainer ended"),
    ],
)  # fmt: skip
def test_the_words_of_what_people_read_most(data: e.AnyEvent, verb: str | None, words: str) -> None:
    assert event_prose.text(data, verb, "applied" if verb else None) == words


def test_a_command_that_was_refused_says_by_what_and_why() -> None:
    refused = e.CommandFailed("99 is over a's share of 8 samples", "micro", "a")
    said = event_prose.text(refused, "resize-batch", "rejected")
    assert said == "resize-batch a rejected: micro: 99 is over a's share of 8 samples"
    assert event_prose.brief(refused) == "micro: 99 is over a's share of 8 samples"


@pytest.mark.parametrize(
    ("data", "before", "after"),
    [
        (e.LearningRateChanged(1e-3, 1e-3, "scale"), "0.001", "0.001"),
        (e.LearningRateChanged(1e-3, 1e-3, "scale", was_constant=True), "0.001 constant", "0.001 constant"),
        (e.LearningRateChanged(1e-3, 1e-3, "set"), "0.001", "0.001 constant"),
        (e.GlobalBatchChanged(12, 12, "scale"), "12", "12"),
        (e.MicroBatchChanged((("a", 4),), (("a", 2),)), "4", "2"),
    ],
)
def test_before_and_after_differ_only_where_something_changed(data: e.AnyEvent, before: str, after: str) -> None:
    assert event_prose.before_after(data) == (before, after)
