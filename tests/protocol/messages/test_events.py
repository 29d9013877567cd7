"""Events and evaluations in words: which nodes each is about, what it says, and which pairs are reported."""

import math
import random
from typing import get_args

from tools.protocol_docs import examples

from trainctl.protocol import messages as m
from trainctl.protocol.messages import PAIRS_FOLLOWED, WORST_PAIRS, EvaluatedPair, event_prose, followed_pairs
from trainctl.protocol.messages import events as run_events
from trainctl.protocol.messages.base import Generation
from trainctl.protocol.messages.events import GlobalBatchChanged, LearningRateChanged, MicroBatchChanged, SharesChanged

EVEN = {"a": 8, "b": 8, "c": 8}


def test_an_event_is_about_the_nodes_in_its_data() -> None:
    for data, nodes in (
        (run_events.CommandFailed("no room, unlike mac1", node="mac10"), {"mac10"}),
        (SharesChanged({"a": 8, "b": 2}, {"a": 11}, lost="b:1", returned="c"), {"a", "b", "c"}),
        (MicroBatchChanged((("a", 8), ("a", 8)), (("a", 4), ("a", 4))), {"a"}),
        (run_events.GenerationFormed(Generation(1, 2), 3, behind=("b",), source="a"), {"a", "b"}),
        (run_events.StateShared("a", 0.5, "b:10"), {"a", "b"}),
        (run_events.ProbePassed("a:0", "a:1", 0.0, 1e-4, 256, 1.0), {"a"}),
        (run_events.RankChanged(("a:0", "b"), "lost", "by a"), {"a", "b"}),
        (run_events.AlertRaised("1", "a", "b is slow"), {"a"}),
        (run_events.NoteWritten("restarted mac1"), set()),
    ):
        assert run_events.nodes_of(data) == nodes


def test_each_kind_says_something_of_its_own_on_one_line() -> None:
    published = examples.EXAMPLES["published by an agent"]
    kinds = [event for name, event in published.items() if name.startswith("event") and isinstance(event, m.Event)]
    for event in kinds:
        assert event.text.strip() == event.text != "", event
        assert event.text.isprintable() and "None" not in event.text, event
        assert event.kind in get_args(run_events.Category), event
    assert len({event.text for event in kinds}) == len({type(event.data) for event in kinds}) + 1  # one is a command's


def test_words_name_what_changed_and_what_did_not() -> None:
    for data, verb, words in (
        (
            SharesChanged(EVEN, {**EVEN, "a": 11, "b": 5}, "by speed"),
            "rebalance",
            "rebalanced: a 8 → 11, b 8 → 5 (by speed)",
        ),
        (SharesChanged(EVEN, EVEN), "rebalance", "rebalanced: all shares unchanged"),
        (SharesChanged({"a": 4, "b": 4}, {"a": 8, "b": 0}, node="b"), "drain", "drained b: a 4 → 8, b 4 → 0"),
        (
            SharesChanged({"a": 4, "b": 4}, {"a": 8, "b": 0}, "hung", lost="b"),
            None,
            "b is lost: hung; a 4 → 8, b 4 → 0",
        ),
        (SharesChanged({"a": 8, "b": 0}, {"a": 4, "b": 4}, returned="b"), None, "b rejoins: a 8 → 4, b 0 → 4"),
        (MicroBatchChanged((("a", 4), ("b", 4)), (("a", 2), ("b", 2))), "resize-batch", "micro-batch: a, b 4 → 2"),
        (MicroBatchChanged((("a", 2), ("b", 4)), (("a", 2), ("b", 2))), None, "micro-batch: a 2, unchanged; b 4 → 2"),
        (LearningRateChanged(3e-4, 1e-4, "set"), "set-lr", "learning rate: 3e-4 → 1e-4 constant"),
        (run_events.PolicyModeChanged("replays", "off", "off"), "autopilot", "policy replays: off, unchanged"),
    ):
        assert event_prose.text(data, verb, "applied" if verb else None) == words
    refused = run_events.CommandFailed("99 is over a's share of 8 samples", "micro", "a")
    said = event_prose.text(refused, "resize-batch", "rejected")
    assert said == "resize-batch a rejected: micro: 99 is over a's share of 8 samples"
    assert event_prose.brief(refused) == "micro: 99 is over a's share of 8 samples"


def test_before_and_after_differ_only_where_something_changed() -> None:
    for data, before, after in (
        (LearningRateChanged(1e-3, 1e-3, "scale"), "0.001", "0.001"),
        (LearningRateChanged(1e-3, 1e-3, "scale", was_constant=True), "0.001 constant", "0.001 constant"),
        (LearningRateChanged(1e-3, 1e-3, "set"), "0.001", "0.001 constant"),
        (GlobalBatchChanged(12, 12, "scale"), "12", "12"),
        (MicroBatchChanged((("a", 4),), (("a", 2),)), "4", "2"),
    ):
        assert event_prose.before_after(data) == (before, after)


def test_the_first_and_the_worst_are_kept_whoever_had_them() -> None:
    chance = random.Random(3)
    pairs = [EvaluatedPair(index, chance.gauss(0, 1), 0.0) for index in range(200)]
    pairs[150] = EvaluatedPair(150, math.nan, 0.0)
    whole = followed_pairs(pairs)
    worst = sorted(pairs, key=lambda pair: -math.inf if pair.index == 150 else pair.margin)[:WORST_PAIRS]
    assert {pair.index for pair in whole} == {*range(PAIRS_FOLLOWED), *(pair.index for pair in worst)}
    shares = [followed_pairs(pairs[start::3]) for start in range(3)]
    joined = followed_pairs([pair for share in shares for pair in share])
    assert [pair.index for pair in joined] == [pair.index for pair in whole]
