"""Undo: the inverse of what the conductor did brings its settings back, and what has none says why."""

from collections.abc import Sequence
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.node_agent.support.machines import LINUX
from tests.node_agent.support.simulation import config
from tests.tui.support.recorded import NOW, run_view

from trainctl.node_agent.planning import edits
from trainctl.node_agent.planning.durable import LrRule, RankSetting, Settings
from trainctl.node_agent.planning.share_edits import Facts
from trainctl.protocol import messages as m
from trainctl.protocol.messages import verbs
from trainctl.protocol.messages.events import (
    AnyEvent,
    CheckpointWritten,
    CommandApplied,
    CommandFailed,
    GlobalBatchChanged,
    LeadChanged,
    LearningRateChanged,
    MicroBatchChanged,
    Notice,
    Pairs,
    PolicyModeChanged,
    RunStateChanged,
    SharesChanged,
)
from trainctl.tui.commands import undo
from trainctl.tui.commands.command import make_order
from trainctl.tui.commands.verb_description import NoInverse


def group(**counts: int) -> Settings:
    ranks = {rank: RankSetting(node, share, 4) for rank, (node, share) in enumerate(counts.items())}
    return Settings(1, sum(counts.values()), ranks)


def view_of(settings: Settings, rate: float = 1e-3, state: m.RunState = "running") -> m.RunView:
    ranks = tuple(
        m.RankView(
            rank=rank, node=one.node, state=one.out or "run", since_at=NOW, share=one.share,  # type: ignore[arg-type]
            micro_batch=one.micro_in_force,
        )
        for rank, one in settings.ranks.items()
    )  # fmt: skip
    return run_view(
        1, state, ranks=ranks, global_batch=settings.global_batch, lead="a", learning_rate=rate,
        plan_version=settings.plan_version,
    )  # fmt: skip


def done(
    settings: Settings, verb: str, args: dict[str, Any], node: str | None = None, number: int = 1,
    id: str = "00000000-0000-4000-8000-000000000001", undoes: str | None = None,
) -> tuple[Settings, m.Event]:  # fmt: skip
    """The settings after a command, and its event as an agent tells it."""
    facts = Facts({}, settings.live.keys(), dict.fromkeys(settings.ranks, LINUX))
    edit = edits.apply(settings, verbs.check(verb, args, node), node, 5, config(), facts)
    event = m.Event(
        id=number, at=NOW + number, severity="info", by="anna", data=edit.change, step=100 + number, command=id,
        verb=verb, outcome="applied", undoes=undoes,
    )  # fmt: skip
    return edit.settings, event


def undone(settings: Settings, event: m.Event, rate: float = 1e-3) -> Settings:
    order = undo.of(event, view_of(settings, rate), [event]).order
    made = make_order(order.verb, dict(order.args), node=order.node, id=order.id)
    return done(settings, made.verb, dict(made.args), made.node, 2, made.id or "")[0]


def same(one: Settings, other: Settings) -> bool:
    plain = [msgspec.structs.replace(item, plan_version=0) for item in (one, other)]
    return plain[0] == plain[1]


COUNTS = st.lists(st.integers(4, 30), min_size=2, max_size=4).map(lambda n: dict(zip("abcd", n, strict=False)))


@given(COUNTS, st.randoms(use_true_random=False))
def test_undoing_a_split_or_a_size_gives_the_settings_back(counts: dict[str, int], draw: Any) -> None:
    settings = group(**counts)
    wanted = dict(zip(counts, draw.sample([*counts.values()], len(counts)), strict=True))
    split, event = done(settings, "rebalance", {"shares": wanted})
    if split.ranks != settings.ranks:
        assert same(undone(split, event), settings)
    resized, event = done(settings, "resize-batch", {"micro": draw.randint(1, 3)}, draw.choice([*counts]))
    assert same(undone(resized, event), settings)
    everywhere, event = done(settings, "resize-batch", {"micro": 2})
    assert same(undone(everywhere, event), settings)


def test_undoing_a_global_batch_gives_batch_and_rate_back() -> None:
    settings = group(a=8, b=8)
    for schedule in ("scale", "set"):
        larger, event = done(settings, "set-global-batch", {"value": 24, "schedule": schedule})
        assert same(undone(larger, event), settings)


def test_undoing_a_rate_scales_the_rest_of_the_schedule_back() -> None:
    settings = group(a=8, b=8)
    scaled, event = done(settings, "set-lr", {"value": 3.217e-4, "schedule": "scale"})
    assert undone(scaled, event, rate=3.217e-4).lr.number == pytest.approx(settings.lr.number, rel=1e-6)
    constant = msgspec.structs.replace(settings, lr=LrRule("constant", 2e-4))
    for schedule in ("set", "scale"):
        other, event = done(constant, "set-lr", {"value": 5e-4, "schedule": schedule})
        assert undone(other, event).lr == constant.lr
    fixed, event = done(settings, "set-lr", {"value": 5e-4, "schedule": "set"})
    with pytest.raises(NoInverse, match="the schedule can't be restored"):
        undo.of(event, view_of(fixed), [event])


def test_a_drain_is_undone_by_an_admit_and_the_other_way_round() -> None:
    settings = group(a=8, b=8)
    without, event = done(settings, "drain", {}, "b")
    inverse = undo.of(event, view_of(without), [event])
    assert (inverse.order.verb, inverse.order.node) == ("admit", "b")
    assert "may differ from the old one" in " ".join(inverse.remarks)
    back, admitted = done(without, "admit", {}, "b", 2)
    assert undo.of(admitted, view_of(back), [event, admitted]).order.verb == "drain"
    with pytest.raises(NoInverse, match="b is run, not drained"):
        undo.of(event, view_of(back), [event, admitted])


def plain(verb: str, data: AnyEvent = CommandApplied(), **other: Any) -> m.Event:  # noqa: B008  frozen
    rest: dict[str, Any] = {"outcome": "applied", "step": 50, "by": "anna", **other}
    return m.Event(id=1, at=NOW + 1, severity="info", verb=verb, data=data, **rest)


CHANGES: dict[str, AnyEvent] = {
    "rebalance": SharesChanged({"a": 1}, {"a": 2}),
    "resize-batch": MicroBatchChanged((("a", 1),), (("a", 2),)),
    "set-lr": LearningRateChanged(1.0, 2.0, "scale"),
    "set-global-batch": GlobalBatchChanged(1, 2, "set"),
    "promote": LeadChanged("a", "b", 2),
} | dict.fromkeys(("pause", "resume", "stop"), RunStateChanged("running", "paused"))


def resized(before: Pairs, after: Pairs, **other: Any) -> m.Event:
    return plain("resize-batch", MicroBatchChanged(before, after), **other)


def split(before: dict[str, int], after: dict[str, int]) -> m.Event:
    return plain("rebalance", SharesChanged(before, after))


def test_pause_stop_and_promote_have_inverses_too() -> None:
    view = view_of(group(a=8, b=8))

    def order(event: m.Event, state: m.RunState = "running") -> tuple[str, Any, str | None]:
        made = undo.of(event, msgspec.structs.replace(view, state=state), [event]).order
        return made.verb, made.args, made.node

    assert order(plain("pause", RunStateChanged("running", "paused")), "paused")[0] == "resume"
    assert order(plain("resume", RunStateChanged("paused", "running")))[0] == "pause"
    resumed = ("start-run", {"resume": view.run}, None)
    assert order(plain("stop", RunStateChanged("running", "stopped")), "stopped") == resumed
    assert order(plain("promote", LeadChanged("b", "a", 2))) == ("promote", {}, "b")


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (plain("checkpoint", CheckpointWritten(50)), "a written checkpoint stays"),
        (plain("resize-batch", CommandFailed("no"), outcome="rejected", step=None), "it changed nothing: rejected"),
        (split({"a": 9, "b": 7}, {"a": 9, "b": 7}), "it changed nothing: already set"),
        (split({"a": 8, "c": 8}, {"a": 4, "c": 12}), "c is not in the group now"),
        (split({"a": 4, "b": 4}, {"a": 5, "b": 3}), "they were shares of 8 samples, but the batch now has 16"),
        (split({"a": 8, "b": 8}, {"a": 4, "b": 12}), "the shares are already restored"),
        (resized((("a", 2), ("b", 3)), (("a", 4), ("b", 4))), "several commands .* a 2, b 3"),
        (resized((("a", 8),), (("a", 4),), by="auto", outcome=None), "out of memory at that size"),
        (plain("pause", RunStateChanged("running", "paused")), "the run is already running"),
        (plain("resize-batch", run="other"), "it belongs to another run"),
        (m.Event(id=1, at=NOW, severity="info", by="auto", data=Notice("g1.2 formed")), "it isn't a change"),
    ],
)
def test_what_has_no_inverse_says_why(event: m.Event, why: str) -> None:
    with pytest.raises(NoInverse, match=why):
        undo.of(event, view_of(group(a=8, b=8)), [event])


def test_every_verb_is_thought_of() -> None:
    view = view_of(group(a=8, b=8))
    for verb in verbs.VERBS:
        for state in get_args(m.RunState):
            in_state = msgspec.structs.replace(view, state=state)
            try:
                undo.of(plain(verb, CHANGES.get(verb, CommandApplied())), in_state, [])
            except NoInverse as reason:
                assert "can't be undone" not in str(reason)


def test_the_undoing_event_tells_which_it_undid_and_can_be_undone_itself() -> None:
    settings = group(a=8, b=8)
    after, event = done(settings, "resize-batch", {"micro": 2}, "a")
    order = undo.of(event, view_of(after), [event]).order
    back, undoing = done(after, "resize-batch", dict(order.args), "a", 2, "other", order.undoes)
    both: Sequence[m.Event] = [event, undoing]
    assert undo.undid(both) == {undoing.id: event}
    with pytest.raises(NoInverse, match="anna already undid it, @102"):
        undo.of(event, view_of(back), both)
    assert undo.of(undoing, view_of(back), both).order.args == {"micro": 2}
    refused = msgspec.structs.replace(undoing, outcome="rejected", step=None, data=CommandFailed("not now"))
    assert undo.of(event, view_of(after), [event, refused]).order == order


def test_what_changed_since_is_told() -> None:
    settings = group(a=8, b=8)
    first, event = done(settings, "resize-batch", {"micro": 2}, "a")
    other, elsewhere = done(first, "resize-batch", {"micro": 2}, "b", 2, "x")
    assert undo.of(event, view_of(other), [event, elsewhere]).since == ()
    last, again = done(other, "resize-batch", {"micro": 1}, "a", 3, "y")
    assert undo.of(event, view_of(last), [event, elsewhere, again]).since == (again,)
    assert [item.event for item in undo.newest(view_of(last), [event, elsewhere, again])] == [again, elsewhere, event]


def policy_event(by: str, data: AnyEvent, verb: str, outcome: m.CommandState | None = None) -> m.Event:
    return m.Event(id=7, at=NOW, severity="info", by=by, data=data, step=3, verb=verb, outcome=outcome)


@pytest.mark.parametrize(("by", "outcome"), [("anna", "applied"), ("auto:first-shares", None)])
def test_a_mode_goes_back_to_what_it_was(by: str, outcome: m.CommandState | None) -> None:
    event = policy_event(by, PolicyModeChanged("first-shares", "on", "advise"), "autopilot", outcome)
    view = msgspec.structs.replace(view_of(group(a=8, b=8)), policies=(m.PolicyView("first-shares", "advise"),))
    order = undo.of(event, view, [event]).order
    assert (order.verb, order.args) == ("autopilot", {"name": "first-shares", "mode": "on"})
    verbs.check(order.verb, dict(order.args))
    again = msgspec.structs.replace(view, policies=(m.PolicyView("first-shares", "on"),))
    with pytest.raises(undo.NoInverse, match="first-shares is already on again"):
        undo.of(event, again, [event])


def test_what_a_policy_did_is_undone_but_for_a_size_that_ran_out_of_memory() -> None:
    shares = policy_event("auto:first-shares", SharesChanged({"a": 8, "b": 8}, {"a": 11, "b": 5}), "rebalance")
    order = undo.of(shares, view_of(group(a=11, b=5)), [shares]).order
    assert (order.verb, order.args, order.undoes) == ("rebalance", {"shares": {"a": 8, "b": 8}}, "7")
    halved = policy_event("auto:out-of-memory", MicroBatchChanged((("b", 4),), (("b", 2),)), "resize-batch")
    with pytest.raises(undo.NoInverse, match="choose a different one with resize-batch"):
        undo.of(halved, view_of(group(a=8, b=8)), [halved])
