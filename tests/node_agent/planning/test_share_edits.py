"""Rebalance, drain and admit: absolute shares that sum to G, texts that undo, refusals that name the argument."""

import msgspec
import pytest
from tests.node_agent.support.machines import LINUX, LINUX_TORCH
from tests.node_agent.support.simulation import config

from trainctl.node_agent.planning import edits
from trainctl.node_agent.planning.durable import RankSetting, Settings
from trainctl.node_agent.planning.share_edits import Edit, Facts
from trainctl.protocol.batch.pass_curve import PassCurve
from trainctl.protocol.batch.step_model import StepModel
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import event_prose, verbs

OTHER_DATA = msgspec.structs.replace(LINUX, data_digest="other")
NO_ENGINE = msgspec.structs.replace(LINUX, engines=())


def group(**counts: int) -> Settings:
    """Nodes with their shares; 0 for a drained one."""
    ranks = {
        rank: RankSetting(node, share, 4, "" if share else "drained")
        for rank, (node, share) in enumerate(counts.items())
    }
    return Settings(1, sum(counts.values()), ranks)


def rates(by_rank: dict[int, float]) -> dict[int, StepModel]:
    return {rank: StepModel.linear(rate) for rank, rate in by_rank.items()}


def apply(settings: Settings, verb: str, node: str | None = None, facts: Facts | None = None, **args) -> Edit:
    everyone = dict.fromkeys(settings.ranks, LINUX)
    known = facts or Facts({}, settings.live.keys(), everyone)
    return edits.apply(settings, verbs.check(verb, args, node), node, 5, config(), known)


def said(edit: Edit) -> tuple[str, str]:
    """Before and after, as a command's reply has them."""
    return event_prose.before_after(edit.change)


@pytest.mark.parametrize(
    ("before", "wanted", "text"),
    [
        ({"a": 8, "b": 8}, {"a": 12, "b": 4}, "a=8 b=8 → a=12 b=4"),
        ({"a": 8, "b": 8}, {"a": "62.5%", "b": "37.5%"}, "a=8 b=8 → a=10 b=6"),
        ({"a": 4, "b": 6, "c": 2}, {"a": "50%"}, "a=4 b=6 c=2 → a=6 b=5 c=1"),  # 4.5 and 1.5
        ({"a": 4, "b": 6, "c": 2}, {"a": 1, "b": "50%"}, "a=4 b=6 c=2 → a=1 b=6 c=5"),
        ({"a": 4, "b": 4, "c": 4}, {"a": "33.333%", "b": "33.333%", "c": "33.333%"}, "a=4 b=4 c=4 → a=4 b=4 c=4"),
        ({"a": 10, "b": 6, "c": 0}, {"b": 10}, "a=10 b=6 → a=6 b=10"),
        ({"a": 10, "b": 6}, {"b": "0.1%"}, "a=10 b=6 → a=15 b=1"),
    ],
)
def test_shares_as_wanted(before, wanted, text):
    settings = group(**before)
    made = apply(settings, "rebalance", shares=wanted)
    assert " → ".join(said(made)) == text
    assert sum(setting.share for setting in made.settings.ranks.values()) == settings.global_batch
    assert made.settings.plan_version == settings.plan_version + (said(made)[0] != said(made)[1])


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"z": 4}, "no node 'z' in this run; the nodes are a, b, c"),
        ({"c": 4}, "c is drained"),
        ({"a": 10, "b": 5}, "sum to 15 of 16 samples; the shares of all nodes must sum to 16"),
        ({"a": 16}, "leave nothing for b"),
        ({"a": "60%", "b": "50%"}, "17.6 of 16"),
        ({"a": "0%"}, "drain a"),
    ],
)
def test_impossible_shares_are_refused_by_field(wanted, words):
    with pytest.raises(InvalidInputError) as raised:
        apply(group(a=10, b=6, c=0), "rebalance", shares=wanted)
    assert raised.value.where == "shares"
    assert words in raised.value.problem


def refuse(settings: Settings, verb: str, node: str | None, facts: Facts | None = None, **args) -> tuple[str, str]:
    """Return the field and the problem that a refusal names."""
    with pytest.raises(InvalidInputError) as raised:
        apply(settings, verb, node, facts, **args)
    return raised.value.where, raised.value.problem


READY = {0: LINUX, 1: LINUX_TORCH, 2: LINUX}


@pytest.mark.parametrize(
    ("counts", "verb", "node", "facts", "words"),
    [
        ((10, 6, 0), "drain", "z", None, "no node 'z'"),
        ((10, 6, 0), "drain", "c", None, "c is already drained"),
        ((10, 6, 0), "admit", "a", None, "a is not drained"),
        ((16, 0, 0), "drain", "a", None, "a is the last live node"),
        ((8, 8, 0), "drain", "a", Facts({}, {0}, READY), "only a has the state of the last step"),
        ((1, 1, 0), "admit", "c", None, "2 samples are too few for 3 ranks"),
        ((8, 8, 0), "admit", "c", Facts({}, {0, 1}, {0: LINUX, 1: LINUX}), "c's trainer is not ready to join"),
        ((8, 8, 0), "admit", "c", Facts({}, {0, 1}, READY | {2: OTHER_DATA}), "data digests of c and a differ"),
        ((8, 8, 0), "admit", "c", Facts({}, {0, 1}, READY | {2: NO_ENGINE}), "c has no torch"),
        ((8, 8, 0), "admit", "c", Facts({}, {0, 1}, READY, {2: 5.5}), "c's trainer has been silent for 6 s"),
    ],
)
def test_nodes_that_cannot_be_drained_or_admitted_are_refused(counts, verb, node, facts, words):
    field, problem = refuse(group(**dict(zip("abc", counts, strict=True))), verb, node, facts)
    assert field == "node" and words in problem


def test_what_was_before_undoes_what_came_after():
    first = group(a=5, b=9, c=2)
    made = apply(first, "rebalance", shares={"b": 3})
    typed = verbs.parse_args("rebalance", dict(pair.split("=") for pair in said(made)[0].split()))
    undone = apply(made.settings, "rebalance", **typed)
    assert said(undone)[1] == said(made)[0]
    assert undone.settings.ranks == first.ranks


PEAKS = PassCurve(tuple((size, size / rate) for size, rate in ((1, 180), (4, 278), (8, 265), (16, 240), (32, 210))))
"""Passes of a device that is fastest at 4 samples."""


def chosen(settings: Settings, **most: int) -> Edit:
    """After `rebalance auto=true`, where the ranks are calibrated and may have at most so many samples in a pass."""
    models = {0: StepModel(PEAKS), 1: StepModel(PEAKS, slowdown=3.0)}
    facts = Facts(models, most_micro={rank: most[settings.ranks[rank].node] for rank in models})
    return apply(settings, "rebalance", facts=facts, auto=True)


def automatic(settings: Settings) -> Settings:
    ranks = {rank: msgspec.structs.replace(of, micro_batch=16, auto_micro=True) for rank, of in settings.ranks.items()}
    return msgspec.structs.replace(settings, ranks=ranks)


def test_a_micro_batch_that_the_run_file_leaves_open_is_chosen_with_the_share():
    made = chosen(automatic(group(a=16, b=16)), a=32, b=2)
    micros = [setting.micro_batch for setting in made.settings.ranks.values()]
    assert micros == [5, 2], "five passes of 5, and four of at most 2"
    assert said(made) == ("a=16 b=16", "a=25 b=7")
    assert event_prose.brief(made.change) == "a 16 → 25, b 16 → 7; micro-batch a 16 → 5; b 16 → 2"


def test_a_micro_batch_that_a_person_has_set_stays():
    settings = automatic(group(a=16, b=16))
    by_person = apply(settings, "resize-batch", "a", micro=8).settings
    made = chosen(by_person, a=32, b=32).settings
    assert [setting.micro_batch for setting in made.ranks.values()] == [8, 4]
    policy = Facts({}, (), dict.fromkeys(settings.ranks, LINUX), by_person=False)
    by_policy = apply(settings, "resize-batch", "a", policy, micro=8).settings
    assert [setting.auto_micro for setting in by_policy.ranks.values()] == [True, True]


def test_auto_goes_by_the_ranks_own_rates():
    facts = Facts(rates({0: 300.0, 1: 100.0, 2: 7.0}))
    assert said(apply(group(a=8, b=8, c=0), "rebalance", facts=facts, auto=True))[1] == "a=12 b=4"
    field, problem = refuse(group(a=8, b=8), "rebalance", None, Facts(rates({0: 3.0})), auto=True)
    assert (field, problem[:26]) == ("auto", "b has no measured rate yet")


def test_a_drained_rank_has_no_part_in_a_batch_of_another_size():
    made = apply(group(a=10, b=6, c=0), "set-global-batch", value=32)
    shares = [(setting.share, setting.out) for setting in made.settings.ranks.values()]
    assert shares == [(20, ""), (12, ""), (0, "drained")]
    assert refuse(group(a=10, b=6, c=0), "resize-batch", "c", micro=2)[0] == "node"
    assert said(apply(group(a=10, b=6, c=0), "resize-batch", micro=2))[1] == "a=2 b=2"


def test_a_node_of_several_ranks_shares_among_them_as_before():
    ranks = {0: RankSetting("a", 6, 4), 1: RankSetting("a", 2, 2), 2: RankSetting("b", 8, 4)}
    made = apply(Settings(1, 16, ranks), "rebalance", shares={"a": 4})
    assert said(made)[1] == "a=4 b=12"
    assert [made.settings.ranks[rank].share for rank in range(3)] == [3, 1, 12]


def test_drain_gives_the_share_to_the_others_in_proportion():
    made = apply(group(a=4, b=6, c=2), "drain", "a")
    assert said(made) == ("a=4 b=6 c=2", "a=0 b=9 c=3")
    assert made.settings.ranks[0] == RankSetting("a", 0, 4, "drained")
    assert list(made.settings.live) == [1, 2]


def test_admit_goes_by_the_last_rates_or_evenly():
    settings, there = group(a=8, b=4, c=0), {0: LINUX, 1: LINUX, 2: LINUX}
    by_rate = apply(settings, "admit", "c", Facts(rates({0: 100.0, 1: 50.0, 2: 50.0}), {0, 1}, there))
    assert said(by_rate) == ("a=8 b=4 c=0", "a=6 b=3 c=3")
    assert said(apply(settings, "admit", "c", Facts(rates({0: 100.0, 1: 50.0}), {0, 1}, there)))[1] == "a=5 b=3 c=4"
    assert by_rate.settings.ranks[2] == RankSetting("c", 3, 4)


def test_a_micro_batch_over_the_share_is_refused_though_it_is_kept_through_a_smaller_one():
    made = apply(group(a=8, b=8), "rebalance", shares={"a": 14}).settings
    assert [(setting.micro_in_force, setting.micro_batch) for setting in made.ranks.values()] == [(4, 4), (2, 4)]
    field, problem = refuse(made, "resize-batch", "b", micro=3)
    assert field == "micro" and problem.startswith("3 is over b's share of 2")
    smaller = apply(made, "resize-batch", "b", micro=1)
    assert said(smaller) == ("2", "1")
