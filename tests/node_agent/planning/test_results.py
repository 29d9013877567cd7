"""Tests of whether ranks hold the same model: which differ, by how much, and why in all likelihood."""

import math
import random
import struct

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given
from tests.node_agent.support.simulation import Simulation, check_ledger, config, durable

from trainctl.node_agent.conductor import events as d
from trainctl.node_agent.planning import results
from trainctl.protocol import messages as m

LIMIT = 1e-4
NOISE = LIMIT / results.NOISE_MULTIPLE
PRECISION = results.Precision("float32", tf32=False)
BASE = [-5.0, -1.0, -2.0, -0.5]


def said(values=BASE, norms=(1.0, 2.0), lengths=(2, 2), **fields) -> m.Probed:
    figures = {"family": "llama", "tokens_digest": "t", "lengths": lengths, "noise": NOISE, **fields}
    return m.Probed(
        run="r", rank=0, generation=m.Generation(1, 1), seq=1, kind="probe", step=0, loss_sum=0.0, weight=0.0,
        own_weight=0.0, own_samples=0, log_probabilities=pack(values), weight_norms=pack(norms), **figures,
    )  # fmt: skip


def pack(values) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def moved(by: float, *places: int) -> list[float]:
    return [value + by if place in places else value for place, value in enumerate(BASE)]


@given(odd=st.integers(0, 4), count=st.integers(3, 5), seed=st.integers(0, 999), far=st.floats(3 * LIMIT, 5))
def test_one_rank_beyond_the_others_rounding_is_the_one_named(odd, count, seed, far):
    """The others' rounding, the token at which it is off, and the ranks' order are random."""
    chance, odd = random.Random(seed), odd % count
    ranks = {rank: [value + chance.uniform(-LIMIT / 4, LIMIT / 4) for value in BASE] for rank in range(count)}
    ranks[odd][chance.randrange(len(BASE))] += far
    order = list(ranks)
    chance.shuffle(order)
    (found,) = results.compare({rank: said(ranks[rank]) for rank in order}, (), PRECISION)
    assert found.rank == odd and found.largest > LIMIT and found.other != odd
    del ranks[odd]
    assert all(
        found.largest <= LIMIT for found in results.compare({rank: said(ranks[rank]) for rank in ranks}, (), PRECISION)
    )


def test_a_new_rank_is_compared_with_the_nearest_that_trains():
    """Replicas drift apart by rounding as they train; a newcomer has been given one's weights."""
    ranks = {0: said(), 1: said(moved(0.01, 1)), 2: said(moved(0.01, 1)), 3: said(moved(0.5, 1))}
    found = results.compare(ranks, (0, 1), PRECISION)
    assert [(each.rank, each.other) for each in found] == [(2, 1), (3, 1)]
    assert found[0].largest == 0.0
    assert found[1].largest == pytest.approx(0.49)
    (heavier,) = results.compare({0: said(), 1: said(norms=(1.0, 2.02))}, (), PRECISION)
    assert heavier.largest == 0.0 and heavier.is_refused, "weights that are one per cent apart"


def test_what_is_no_number_differs_from_a_number_and_not_from_its_like():
    nan, infinite = [math.nan, *BASE[1:]], [-math.inf, *BASE[1:]]
    assert results.compare({0: said(), 1: said(nan)}, (), PRECISION)[0].largest == math.inf
    assert results.compare({0: said(infinite), 1: said(nan)}, (), PRECISION)[0].largest == math.inf
    for alike in (nan, infinite):
        assert results.compare({0: said(alike), 1: said(alike)}, (), PRECISION)[0].largest == 0.0


@pytest.mark.parametrize(
    ("own", "other", "tf32", "limit"),
    [
        (3e-5, 5e-5, False, 1e-3),  # the larger noise counts
        (1e-5, 5e-3, False, 2e-3),  # but not one that is a fault itself
        (1e-8, 0.0, False, results.MIN_TOLERANCE),
        (4e-3, 2e-3, False, results.MAX_TOLERANCE[False]),
        (0.5, 0.4, False, 0.5 * results.MIN_MULTIPLE),  # rounding is never refused
        (math.nan, 0.0, False, results.MAX_TOLERANCE[False]),
        (0.04, 0.01, True, 0.8),
    ],
)
def test_the_tolerance_is_a_multiple_of_the_noise(own, other, tf32, limit):
    """An earlier version says none: its data type decides."""
    assert results.tolerance(said(noise=None), said(), PRECISION) == LIMIT
    for pair in ((own, other), (other, own)):
        ranks = [said(noise=noise) for noise in pair]
        assert results.tolerance(*ranks, results.Precision("bfloat16", tf32)) == pytest.approx(limit)


def layered(*layers, noise=(1e-6, 1e-5)) -> m.Probed:
    return said(layers=pack([value for layer in layers for value in layer]), layer_noise=pack(noise))


def test_the_first_layer_beyond_its_own_noise_is_named():
    usual = layered((1.0, 2.0), (3.0, 4.0))
    assert results.first_layer(usual, layered((1.0, 2.0001), (9.0, 4.0))) == (0, 2)
    assert results.first_layer(usual, layered((1.0, 2.00001), (3.0, 4.1))) == (1, 2)
    assert results.first_layer(usual, layered((1.0, 2.0), (3.0, math.nan))) == (1, 2)
    assert results.first_layer(usual, layered((1.0, 2.00001), (3.0, 4.0001))) == (2, 2)  # only what follows them
    assert results.first_layer(usual, said()) is None
    assert results.first_layer(usual, layered((1.0,), (3.0,))) is None
    assert results.first_layer(said(layer_noise=pack([1.0])), said(layer_noise=pack([1.0]))) is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"values": moved(0.016, 1, 3)}, "RoPE settings"),
        ({"values": moved(0.016, 0, 1, 2, 3)}, "the model's code"),
        (
            {"values": moved(0.016, 0, 1, 3), "norms": (1.0, 2.002)},
            "weights (a parameter's norm has a relative difference of 0.001",
        ),
        ({"values": moved(0.016, 1, 3), "norms": (1.0,)}, "the weights"),
        (
            {"values": moved(7e-4, 0, 1), "tf32": True},
            "set tf32 = false in [model], and unset MLX_ENABLE_TF32 and NVIDIA_TF32_OVERRIDE on odd",
        ),
        ({"values": moved(0.2, 0, 1), "tf32": True}, "the model's code"),
        ({"values": moved(0.016, 0), "tokens_digest": "u"}, "tokenizer"),
        ({"values": BASE[:3], "lengths": (2, 1)}, "tokenizer"),
        ({"values": [math.nan] * 4}, "the model's code"),
    ],
)
def test_the_likely_cause_is_named(fields, words):
    assert words in results.likely_cause(said(), said(**fields), ("usual", "odd"))
    assert words in results.likely_cause(said(**fields), said(), ("odd", "usual"))
    assert results.compare({0: said(), 1: said(**fields)}, (), PRECISION)[0].largest > LIMIT


def group(names: str = "abc", **models: float) -> Simulation:
    """Ranks whose log-probabilities are off by what is given for their node."""
    made = Simulation(config(20, 12), durable(tuple(names), 12))
    for rank, node in enumerate(names):
        made.ranks[rank].model = made.ranks[rank].next_model = models.get(node, 0.0)
    return made.begin()


def texts(simulation: Simulation) -> list[str]:
    return [happened.text for happened in simulation.happened]


def probed_steps(simulation: Simulation) -> list[int]:
    return [plan.step for plan in simulation.sent_plans if plan.kind == "probe"]


def test_ranks_that_agree_are_probed_once_before_the_first_step():
    simulation = group(b=3e-5).until_step(3)
    assert [plan.kind for plan in simulation.sent_plans[:2]] == ["probe", "train"]
    (event,) = [happened for happened in simulation.happened if happened.kind == "probe"]
    assert (event.severity, event.step, event.data.difference) == ("good", 0, pytest.approx(3e-5, rel=0.01))
    assert "at most 3e-05 between b and a (tolerance 0.0001, 3 tokens)" in event.text
    assert simulation.finish().ended.state == "finished"
    assert probed_steps(simulation) == [0]


def test_a_run_that_is_to_begin_with_unlike_models_is_refused_by_name():
    assert group("ab", a=0.016).run().ended.reason.startswith("probe: b differs from a by 0.016 ")
    simulation = group(c=0.016).run()
    assert (simulation.ended.state, simulation.commits) == ("failed", [])
    assert simulation.ended.reason.startswith(
        "probe: c differs from a by 0.016 in a token's log-probability (tolerance 0.0001; from layer 1 of 2 on); "
    )


def test_a_fence_begins_the_probe_again_and_none_follows_one_that_passed():
    simulation = group()
    simulation.until(lambda: probed_steps(simulation) == [0])
    simulation.feed(d.RankReturned(1))
    simulation.until_step(4)
    assert probed_steps(simulation) == [0, 0]
    simulation.feed(d.RankReturned(1))
    simulation.restart_agent()
    assert simulation.finish().ended.state == "finished"
    assert probed_steps(simulation) == [0, 0]
    check_ledger(simulation)


def come_back(simulation: Simulation, model: float) -> None:
    """Rank 2's process is killed, and another one joins that holds `model`, or is refused."""
    before = len(probed_steps(simulation))
    simulation.ranks[2].next_model = model
    simulation.kill(simulation.ranks[2])
    simulation.until(lambda: 2 not in simulation.conductor.durable.settings.live)
    simulation.tick(5.0)
    simulation.until(lambda: len(probed_steps(simulation)) > before)


def test_a_rank_that_comes_back_is_probed_before_its_next_step():
    simulation = group().until_step(4)
    come_back(simulation, 0.0)
    assert len([text for text in texts(simulation) if text.startswith("probe passed")]) == 1
    simulation.finish()
    assert "between c and a" in [text for text in texts(simulation) if text.startswith("probe passed")][1]
    check_ledger(simulation)


def test_one_that_comes_back_with_another_model_is_refused_and_the_others_go_on():
    simulation = group().until_step(4)
    come_back(simulation, 0.016)
    simulation.until(lambda: simulation.ranks[2].gone).talk()
    assert simulation.conductor.durable.settings.ranks[2].out == "failed"
    step = simulation.conductor.progress.step
    simulation.until_step(step + 2)
    (event,) = [happened for happened in simulation.happened if happened.text.startswith("c is refused")]
    assert event.text.startswith("c is refused: probe: c differs from a by 0.016 ")
    assert event.data.after == {"a": 6, "b": 6, "c": 0} and (event.kind, event.severity) == ("probe", "error")
    assert simulation.conductor.ranks[2].why.startswith("probe: c differs from a")
    assert len(probed_steps(simulation)) == 2
    assert simulation.starts == 1  # it isn't started again by itself
    simulation.ranks[2].next_model = 0.0
    id = simulation.command("admit", node="c")
    simulation.tick(5.0)
    assert simulation.ends[id].state == "applied"
    simulation.until(lambda: 2 in simulation.conductor.durable.settings.live)
    assert simulation.finish().ended.state == "finished"
    assert len(probed_steps(simulation)) == 3
    check_ledger(simulation)


def test_of_two_admissions_only_that_of_the_refused_rank_fails():
    simulation = group("abcd").until_step(3)
    for node in "cd":
        simulation.command("drain", node=node)
    simulation.until(lambda: simulation.conductor.durable.members == (0, 1))
    simulation.ranks[2].model = 0.016
    ids = [simulation.command("admit", node=node) for node in "cd"]
    simulation.until(lambda: all(id in simulation.ends for id in ids))
    assert [simulation.ends[id].state for id in ids] == ["failed", "applied"]
    assert simulation.ends[ids[0]].reason.startswith("probe: c differs from a by 0.016 ")
    check_ledger(simulation)
    assert simulation.finish().ended.state == "finished"


def preflight(simulation: Simulation, rank: int, **fields) -> None:
    """A heartbeat of a rank that is going to calibrate."""
    ready = msgspec.structs.replace(simulation.ranks[rank].ready(), **fields.pop("ready", {}))
    report = m.Preflight(ready, said(**fields))
    alive = m.Alive(run="r", rank=rank, generation=None, step=0, phase="starting", preflight=report)
    simulation.feed(alive)


def test_ranks_are_judged_before_they_calibrate():
    simulation = Simulation(config(20, 12), durable(("a", "b", "c"), 12))
    preflight(simulation, 0)
    preflight(simulation, 1, values=moved(0.016, 2))
    assert simulation.conductor.stage == "loading"  # of three, the odd one out is still to be found
    preflight(simulation, 2)
    assert simulation.conductor.stage == "leaving"
    assert simulation.run().ended.reason.startswith("probe: b differs from a by 0.016 ")


def test_files_that_differ_are_named_before_all_ranks_have_loaded():
    simulation = Simulation(config(20, 12), durable(("a", "b", "c"), 12))
    preflight(simulation, 0)
    preflight(simulation, 1, ready={"model_digest": "other"})
    assert simulation.conductor.stage == "leaving"
    assert simulation.run().ended.reason.startswith("model digests of b and a differ")
