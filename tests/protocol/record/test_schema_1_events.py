"""Events that a record of schema 1 keeps as prose: what they say comes out as data."""

import pytest

from trainctl.protocol.messages import events as e
from trainctl.protocol.messages.base import Generation
from trainctl.protocol.record import schema_1_events


def shares(**of: int) -> dict[str, int]:
    return of


@pytest.mark.parametrize(
    ("kind", "text", "verb", "before", "after", "data"),
    [
        ("command", "rebalance a=8 b=4 → a=6 b=6", "rebalance", "a=8 b=4", "a=6 b=6",
         e.SharesChanged(shares(a=8, b=4), shares(a=6, b=6))),
        ("command", "drain b a=8 b=4 → a=12 b=0", "drain", "a=8 b=4", "a=12 b=0",
         e.SharesChanged(shares(a=8, b=4), shares(a=12, b=0), node="b")),
        ("command", "drain b b lost → b drained", "drain", "b lost", "b drained",
         e.NodeStateChanged("b", "lost", "drained")),
        ("command", "resize-batch studio 8 → 4", "resize-batch", "8", "4",
         e.MicroBatchChanged((("studio", 8),), (("studio", 4),))),
        ("command", "resize-batch a=8 b=8 → a=4 b=4", "resize-batch", "a=8 b=8", "a=4 b=4",
         e.MicroBatchChanged((("a", 8), ("b", 8)), (("a", 4), ("b", 4)))),
        ("command", "set-lr 0.001 constant → 0.002 scaled", "set-lr", "0.001 constant", "0.002 scaled",
         e.LearningRateChanged(0.001, 0.002, "scale", was_constant=True)),
        ("command", "set-global-batch 12 → 24, learning rate scaled with it", "set-global-batch", "12",
         "24, learning rate scaled with it", e.GlobalBatchChanged(12, 24, "scale")),
        ("command", "promote b a conducts → b conducts, term 2", "promote", "a conducts", "b conducts, term 2",
         e.LeadChanged("a", "b", 2)),
        ("command", "pause running → paused", "pause", "running", "paused", e.RunStateChanged("running", "paused")),
        ("command", "mute disk for 60 min", "mute", None, "disk for 60 min", e.CommandApplied("", "disk for 60 min")),
        ("command", "evaluate loss 2.3100", "evaluate", None, "loss 2.3100", e.Evaluated(2.31)),
        ("rank", "c is lost: was ended by signal 9; a=4 c=4 → a=8 c=0", "rebalance", "a=4 c=4", "a=8 c=0",
         e.SharesChanged(shares(a=4, c=4), shares(a=8, c=0), "was ended by signal 9", lost="c")),
        ("rank", "c joins again: a=8 c=0 → a=4 c=4", "admit", "a=8 c=0", "a=4 c=4",
         e.SharesChanged(shares(a=8, c=0), shares(a=4, c=4), returned="c")),
        ("rank", "the trainer of c (rank 2) is started again, 1 of 5", None, None, None,
         e.RankChanged(("c (rank 2)",), "restarted", "1 of 5")),
        ("rank", "b, c have not finished their part of step 7 after 12 s", None, None, None,
         e.RankChanged(("b", "c"), "slow", "step 7 after 12 s")),
        ("run", "g1.3 formed, 3 ranks by gloo; c given the state of a; the ranks waited 0.13 s", None, None, None,
         e.GenerationFormed(Generation(1, 3), 3, (), "gloo", ("c",), "a", 0.13)),
        ("run", "g1.1 left: c did not join in time", None, None, None,
         e.GenerationLeft(Generation(1, 1), "c did not join in time")),
        ("run", "finished at step 1,200", None, None, None, e.RunStateChanged("", "finished", step=1200)),
        ("checkpoint", "checkpoint step-40, 1,082.1 MB, loop paid 14 ms", None, None, None,
         e.CheckpointWritten(40, 1_082_100_000, 0.014)),
        ("evaluation", "held-out loss nan, took 1.9 s", None, None, None, e.Evaluated(float("nan"), 1.9)),
        ("agent", "the agent of beta is silent: no answer", None, None, None,
         e.NodeState("beta", "silent", "no answer")),
        ("alert", "mbp +142 ms in backward", None, None, "clock:mbp:1",
         e.AlertRaised("clock:mbp:1", "mbp", "+142 ms in backward")),
        ("alert", "mbp clock is over after 3 min", None, None, "clock:mbp:1",
         e.AlertCleared("clock:mbp:1", "mbp", "clock", 180.0)),
        ("note", "g1.3 formed, 3 ranks", None, None, None, e.NoteWritten("g1.3 formed, 3 ranks")),
        ("run", "something that no pattern knows", None, None, None, e.Notice("something that no pattern knows")),
        ("rank", "x → y", None, None, None, e.Notice("x → y", "rank")),
    ],
)  # fmt: skip
def test_each_text_of_0_1_0_becomes_data(
    kind: str, text: str, verb: str | None, before: str | None, after: str | None, data: e.AnyEvent
) -> None:
    made = schema_1_events.convert(kind, text, verb, before, after, "applied" if kind == "command" else None)
    assert repr(made) == repr(data)  # NaN differs from itself


@pytest.mark.parametrize("text", ["evaluation", "held-out loss x", "held-out loss 1, took x s", ""])
def test_what_is_malformed_is_kept_as_it_is(text: str) -> None:
    assert schema_1_events.convert("evaluation", text, None, None, None, None) == e.Notice(text, "evaluation")


def test_a_refusal_keeps_its_node_its_field_and_its_reason() -> None:
    text = "resize-batch studio rejected: micro: 99 is over studio's share: too much"
    made = schema_1_events.convert("command", text, "resize-batch", None, None, "rejected")
    assert made == e.CommandFailed("99 is over studio's share: too much", "micro", "studio")


def test_an_undoing_command_of_0_1_0_names_what_it_undid() -> None:
    token = schema_1_events.token("run-1", 7, None)
    assert schema_1_events.undoes(f"01234567-89ab-8d0e-8abc-{token}") == token
    assert schema_1_events.undoes("01234567-89ab-4d0e-8abc-0123456789ab") is None
    assert schema_1_events.undoes(None) is None
