"""Several ranks under one conductor: offers and forming, giving state, fences, and commands that change the group."""

import msgspec
import pytest
from tests.node_agent.support.group_orders import group, rows, texts
from tests.node_agent.support.simulation import Simulation, check_ledger, config, durable

from trainctl.node_agent.conductor import events as d
from trainctl.node_agent.conductor import views
from trainctl.node_agent.conductor.conductor import Conductor
from trainctl.node_agent.conductor.group import FAILURES
from trainctl.node_agent.conductor.stages import OFFER_SECONDS
from trainctl.node_agent.conductor.state import Progress
from trainctl.node_agent.planning.durable import Durable
from trainctl.node_agent.runs import restore
from trainctl.protocol import messages as m
from trainctl.protocol.messages.events import GenerationLeft

ABC = durable(("a", "b", "c"), 12)


def told(decisions, kind) -> list:
    messages = [decision.message for decision in decisions if isinstance(decision, d.Tell)]
    return [message for message in messages if isinstance(message, kind)]


def departures(simulation: Simulation) -> list[GenerationLeft]:
    return [event.data for event in simulation.happened if isinstance(event.data, GenerationLeft)]


def test_all_ranks_train_and_finish_alike():
    simulation = group().begin().run()
    assert simulation.ended.state == "finished"
    simulation.check_alike()
    check_ledger(simulation)
    assert "g1.1 formed, 3 ranks by gloo" in texts(simulation)
    assert simulation.parts == {(step, rank) for step in range(1, 21) for rank in range(3)}


def test_endpoints_are_asked_for_before_a_group_is_formed():
    conductor = Conductor("sim", config(batch=12), ABC, Progress())
    simulation = Simulation(config(batch=12), ABC)
    for rank in simulation.ranks.values():
        decisions = conductor.handle(rank.ready(), 0.0)
    offers = told(decisions, m.Offer)
    assert [offer.engine for offer in offers] == ["gloo"] * 3
    generation = offers[0].generation
    for rank in (2, 0, 1):
        answer = m.Offered(run="sim", rank=rank, generation=generation, endpoints=(f"host{rank}:1", f"host{rank}:2"))
        decisions = conductor.handle(answer, 0.0)
    (form, *others) = told(decisions, m.Form)
    assert others == [form, form]
    assert form.endpoints == tuple((f"host{rank}:1", f"host{rank}:2") for rank in range(3))
    assert (form.ranks, form.source, form.behind, form.layout_digest) == ((0, 1, 2), None, (), "l")
    assert conductor.stage == "forming"


SYNC = "to make the files alike, run trainctl cluster sync RUN.toml"


@pytest.mark.parametrize(
    ("digest", "files", "words"),
    [
        ("layout_digest", {}, "layout digests of b and a differ"),
        ("model_digest", {"model_files": (m.FileDigest("config.json", "1"), m.FileDigest("model.safetensors", "9"))},
         f"model digests of b and a differ: model.safetensors differs; {SYNC}"),
        ("data_digest", {"data_files": (m.FileDigest("more.txt", "5"),)},
         f"data digests of b and a differ: more.txt is only on b; {SYNC}"),
    ],
)  # fmt: skip
def test_unlike_ranks_are_refused_before_any_form(digest, files, words):
    simulation = group()
    common = {"model_files": (m.FileDigest("config.json", "1"), m.FileDigest("model.safetensors", "2"))}
    for rank in simulation.ranks.values():
        ready = msgspec.structs.replace(rank.ready(), **common)
        simulation.feed(msgspec.structs.replace(ready, **{digest: "other"}, **files) if rank.rank == 1 else ready)
    assert not any(isinstance(order, m.Offer | m.Form) for rank in simulation.ranks.values() for order in rank.down)
    simulation.run()
    assert simulation.ended == d.Ended("failed", words)


def test_a_group_without_a_common_engine_is_refused_by_name():
    simulation = group()
    for rank in simulation.ranks.values():
        engines = ("ring",) if rank.rank == 2 else ("gloo",)
        simulation.feed(msgspec.structs.replace(rank.ready(), engines=engines))
    simulation.run()
    assert simulation.ended.reason.startswith("group.engine: no engine fits all nodes; gloo: c has no torch")


@pytest.mark.parametrize(
    ("stage", "why"), [("offering", "c did not open endpoints in time"), ("forming", "a, b, c did not join in time")]
)
def test_who_does_not_answer_an_offer_or_does_not_join_is_named_and_fenced(stage, why):
    simulation = group().begin()
    simulation.until(lambda: simulation.conductor.stage == stage)
    simulation.ranks[2].down.clear()
    simulation.run()
    simulation.tick(60.0)
    assert f"g1.1 left: {why}" in texts(simulation)
    assert simulation.finish().ended.state == "finished"


def test_an_offer_ends_after_its_seconds_and_not_before():
    simulation = group().begin()
    simulation.until(lambda: simulation.conductor.stage == "offering")
    offered_at, generation = simulation.now, simulation.conductor.durable.generation
    simulation.ranks[2].down.clear()
    simulation.run()
    simulation.tick(offered_at + OFFER_SECONDS - 0.01 - simulation.now)
    assert (simulation.conductor.stage, departures(simulation)) == ("offering", [])
    simulation.tick(0.02)
    assert departures(simulation) == [GenerationLeft(generation, "c did not open endpoints in time")]
    assert simulation.conductor.stage == "fencing"


def test_nothing_is_planned_before_all_have_joined():
    simulation = group().begin()
    simulation.until(lambda: simulation.conductor.stage == "forming").talk()
    for rank in (*simulation.ranks.values(), *simulation.ranks.values()):
        rank.work()  # once to put in what all must agree on, once to find that all have
    for rank in simulation.ranks.values():
        assert not simulation.plans
        simulation.hear(rank)
    assert [(plan.kind, plan.step) for plan in simulation.plans] == [("probe", 0)]


def test_formations_that_fail_in_a_row_are_each_named_and_the_last_fails_the_run():
    simulation = group().begin()
    generations = []
    for attempt in range(FAILURES):
        simulation.until(lambda: simulation.conductor.stage in ("forming", "leaving"))
        assert simulation.conductor.stage == "forming", attempt
        generations.append(simulation.conductor.durable.generation)
        simulation.feed(m.GroupFailed(run="sim", rank=1, generation=generations[-1], reason=f"refused {attempt}"))
    simulation.run()
    assert departures(simulation) == [
        GenerationLeft(generation, f"b: refused {attempt}") for attempt, generation in enumerate(generations[:-1])
    ]
    assert simulation.ended.state == "failed"
    assert simulation.ended.reason == "8 formations failed in a row; the last one: b: refused 7"


def test_formations_that_a_rank_at_its_checkpoint_misses_are_not_counted():
    simulation = group().begin()
    for attempt in range(FAILURES + 1):
        simulation.until(lambda: simulation.conductor.stage in ("forming", "leaving"))
        assert simulation.conductor.stage == "forming", attempt
        simulation.feed(msgspec.structs.replace(simulation.ranks[2].alive(), phase="checkpoint"))
        generation = simulation.conductor.durable.generation
        simulation.feed(m.GroupFailed(run="sim", rank=1, generation=generation, reason="c did not join"))
    assert simulation.finish().ended.state == "finished"


def test_failures_are_counted_from_the_last_step():
    simulation = group(steps=30).begin()
    for step in range(1, 13):
        simulation.until_step(step)
        simulation.until(lambda: simulation.conductor.stage == "formed")
        generation = simulation.conductor.durable.generation
        simulation.feed(m.GroupFailed(run="sim", rank=1, generation=generation, reason="reset by peer"))
    assert simulation.finish().ended.state == "finished"
    check_ledger(simulation)


def resumed(*steps: int) -> Simulation:
    """Trainers just started, of a record at step 7; ranks with the steps they loaded."""
    simulation = Simulation(config(batch=12), durable(tuple("abc"[: len(steps)]), 12))
    simulation.conductor = Conductor("sim", simulation.config, simulation.journal, Progress(7, 84))
    simulation.world.states[7], simulation.world.batches[7] = "seven", (72, 12)
    for rank, step in zip(simulation.ranks.values(), steps, strict=True):
        rank.last_step, rank.cursor, rank.state = step, 12 * step, "seven" if step == 7 else "other"
    return simulation


def test_ranks_without_the_checkpoint_are_given_the_state_of_one_that_has_it():
    simulation = resumed(0, 7, 4).begin()
    simulation.until(lambda: simulation.conductor.stage == "forming")
    form = next(order for order in simulation.ranks[0].down if isinstance(order, m.Form))
    assert (form.step, form.cursor, form.source, form.behind) == (7, 84, 1, (0, 2))
    simulation.until(lambda: simulation.conductor.stage == "formed")
    assert texts(simulation) == ["g1.1 formed, 3 ranks by gloo; a, c synced from b"]
    assert {rank.state for rank in simulation.ranks.values()} == {"seven"}


def test_a_run_that_nobody_has_the_state_of_goes_back():
    simulation = resumed(0, 4).begin().run()
    assert simulation.ended == d.Ended("failed", "no node has the state of step 7 any more")
    assert simulation.conductor.goes_back


def test_a_sum_that_some_had_and_others_not_is_made_good_by_giving_the_state():
    simulation = group().begin().until_step(4)
    lucky, unlucky = simulation.ranks[0], [simulation.ranks[1], simulation.ranks[2]]
    step = simulation.conductor.progress.step + 1
    simulation.until(lambda: all(rank.accumulated and rank.last_step == step - 1 for rank in simulation.ranks.values()))
    while lucky.last_step < step:
        lucky.work()
    for rank in unlucky:
        rank.failed = True
    unlucky[0]._say(m.GroupFailed, unlucky[0].generation, reason="connection closed by peer")
    simulation.run()
    assert any("; b, c synced from a; the ranks waited " in text for text in texts(simulation))
    assert simulation.ended.state == "finished"
    assert {(step, rank) for rank in range(3)} & simulation.parts == {(step, 0)}  # theirs was never made
    check_ledger(simulation)


@pytest.mark.parametrize(("step_seconds", "waits", "overdue"), [(None, 9.0, 2.0), (30.0, 140.0, 20.0)])
def test_a_sum_that_hangs_is_fenced_when_it_is_overdue_by_what_steps_take(step_seconds, waits, overdue):
    simulation = group().begin()
    for rank in simulation.ranks.values():
        rank.step_seconds = step_seconds or rank.step_seconds
    simulation.until_step(4).until(lambda: all(rank.accumulated for rank in simulation.ranks.values()))
    simulation.ranks[2].failed = True  # it hangs without a word
    simulation.run()
    simulation.tick(waits)
    assert simulation.conductor.stage == "formed"
    simulation.tick(overdue)
    assert simulation.conductor.stage == "fencing"
    assert "c did not finish the sum" in texts(simulation)[-1]
    assert simulation.finish().ended.state == "finished"


def test_a_rank_that_still_accumulates_is_never_overdue():
    simulation = group().begin().until_step(4)
    ranks = simulation.ranks.values()
    simulation.until(lambda: all(rank.last_step == 4 for rank in ranks) and not all(rank.accumulated for rank in ranks))
    simulation.talk()
    simulation.tick(1e6)
    assert simulation.conductor.stage == "formed"


def test_all_that_hold_parts_of_one_batch_finish_it():
    simulation = group().begin().until_step(4)
    simulation.command("resize-batch", micro=1)
    simulation.until_step(6)
    simulation.until(lambda: 0 < sum(piece.count for piece in simulation.ranks[1].held) < 4)
    step = simulation.conductor.progress.step + 1
    held = {rank.rank: rank.held for rank in simulation.ranks.values()}
    simulation.feed(d.RankReturned(1))
    simulation.talk()
    simulation.until(lambda: simulation.conductor.stage == "formed")
    plan = simulation.sent_plans[-1]
    assert (plan.kind, plan.step) == ("train", step)
    assert plan.finishes is not None
    left = {position for work in plan.work for piece in work.ranges for position in range(piece.start, piece.stop)}
    done = {p for pieces in held.values() for piece in pieces for p in range(piece.start, piece.stop)}
    assert not left & done
    assert len(left | done) == 12
    assert simulation.run().ended.state == "finished"


def given_up() -> Simulation:
    """b's sum of step 5 has failed; a and c had it, and hold parts of step 6, which are given up for b's sake."""
    simulation = group().begin().until_step(4)
    ranks = simulation.ranks
    simulation.until(lambda: all(rank.accumulated and rank.last_step == 4 for rank in ranks.values())).talk()
    for rank in (ranks[0], ranks[2]):
        while rank.held_step < 6:
            rank.work()
    ranks[1].failed = True
    ranks[1]._say(m.GroupFailed, ranks[1].generation, reason="connection closed by peer")
    return simulation


def test_an_edit_applied_after_a_batch_was_given_up_is_not_lost_in_finishing_it():
    simulation = given_up()
    drain = simulation.command("drain", node="c")
    simulation.until(lambda: simulation.conductor.durable.settings.ranks[2].out)
    simulation.restart_agent()
    simulation.run()
    assert simulation.ends[drain].step == 6
    assert rows(simulation, 6) == {0: 6, 1: 6}
    simulation.check_commands()
    check_ledger(simulation)


def test_a_paused_run_stays_so_whatever_its_ranks_still_hold():
    simulation = given_up()
    simulation.command("pause")
    simulation.run()
    simulation.feed(d.RankReturned(1))
    simulation.run()
    simulation.restart_agent()
    simulation.run()
    assert (simulation.conductor.state, simulation.conductor.progress.step) == ("paused", 5)
    simulation.command("resume")
    assert simulation.run().ended.state == "finished"
    check_ledger(simulation)


def test_first_shares_are_timed_before_the_first_step():
    simulation = group(batch=28, group={"first_shares": "timed"})
    for rank, speed in zip(simulation.ranks.values(), (100.0, 50.0, 25.0), strict=True):
        rank.speed = speed
    simulation.begin().until_step(2)
    first = simulation.sent_plans[1]
    assert (first.kind, first.step, first.cursor) == ("measure", 0, 0)
    assert [work.ranges for work in first.work] == [(m.Range(0, 8),)] * 3  # two micro-batches of 4
    assert rows(simulation, 1) == {0: 16, 1: 8, 2: 4}
    assert simulation.sent_plans[2].plan_version == 2
    (event,) = [happened for happened in simulation.happened if happened.verb == "rebalance"]
    assert (event.before, event.after) == ("a=10 b=9 c=9", "a=16 b=8 c=4")
    assert "a 100/s, b 50/s, c 25/s" in event.text
    simulation.restart_agent()
    simulation.run()
    assert [plan.kind for plan in simulation.sent_plans].count("measure") == 1
    check_ledger(simulation)


@pytest.mark.parametrize(
    ("given", "first_shares", "shares"),
    [
        ((None, None, None), "even", (10, 9, 9)),
        ((10, 10, 8), "timed", (10, 10, 8)),
        ((20, None), "timed", (20, 8)),
        ((10, None, None, None), "timed", (10, 10, 5, 3)),
    ],
)
def test_only_shares_that_the_run_file_leaves_open_are_dealt_by_speed(given, first_shares, shares):
    """The batch of 28 is shared by nodes of falling speed."""
    tables = {node: {} if share is None else {"share": share} for node, share in zip("abcd", given, strict=False)}
    made = config(batch=28, nodes=tables, group={"first_shares": first_shares})
    simulation = Simulation(made, Durable(restore._first_settings(made), m.Generation(1, 0), 0, probed=()))
    for number, rank in enumerate(simulation.ranks.values()):
        rank.speed = 100.0 / 2**number
    simulation.begin().until_step(1)
    assert rows(simulation, 1) == dict(enumerate(shares))
    assert ("measure" in {plan.kind for plan in simulation.sent_plans}) == (len(given) == 4)
    check_ledger(simulation)


def test_shares_stay_even_where_nothing_could_be_timed():
    simulation = group(group={"first_shares": "timed"})
    simulation.ranks[1].speed = 0.0
    simulation.begin().until(lambda: len(simulation.sent_plans) == 3)
    assert simulation.sent_plans[2].kind == "train"
    assert "initial shares stay even: no measured rate for b" in texts(simulation)


def test_auto_shares_follow_the_rates_of_the_steps():
    simulation = group()
    for rank, speed in zip(simulation.ranks.values(), (300.0, 200.0, 100.0), strict=True):
        rank.speed = speed
    early = simulation.command("rebalance", auto=True)
    assert simulation.ends[early].field == "auto"
    simulation.begin().until_step(4)
    id = simulation.command("rebalance", auto=True)
    simulation.run()
    assert (simulation.ends[id].before, simulation.ends[id].after) == ("a=4 b=4 c=4", "a=6 b=4 c=2")
    assert rows(simulation, simulation.ends[id].step) == {0: 6, 1: 4, 2: 2}


def test_a_drained_node_idles_from_one_step_on_and_comes_back_with_the_state():
    simulation = group().begin().until_step(4)
    drain = simulation.command("drain", node="b")
    simulation.until(lambda: drain in simulation.ends)
    end = simulation.ends[drain]
    assert (end.state, end.before, end.after) == ("applied", "a=4 b=4 c=4", "a=6 b=0 c=6")
    assert rows(simulation, end.step - 1) == {0: 4, 1: 4, 2: 4}
    assert rows(simulation, end.step) == {0: 6, 2: 6}
    generations = [commit.generation for commit in simulation.commits[end.step - 2 : end.step]]
    assert generations[0] < generations[1]
    simulation.until_step(10)
    assert (simulation.ranks[1].last_step, simulation.ranks[1].group) == (end.step - 1, None)
    view = views.rank_view(simulation.conductor, 1, 1, "", None, 0.0)
    assert (view.state, view.share) == ("drained", 0)
    admit = simulation.command("admit", node="b")
    simulation.run()
    assert simulation.ends[admit].after == "a=4 b=4 c=4"
    assert any("; b synced from a" in text for text in texts(simulation))
    assert simulation.ended.state == "finished"
    simulation.check_alike()
    check_ledger(simulation)


def test_one_that_is_left_alone_needs_no_engine():
    simulation = group("ab").begin().until_step(3)
    simulation.command("drain", node="a")
    simulation.until(lambda: simulation.conductor.shared.engine == "none")
    refused = simulation.command("drain", node="b")
    assert simulation.ends[refused].field == "node"
    assert simulation.run().ended.state == "finished"


def test_drain_waits_for_the_step_in_progress_and_admit_may_follow_at_once():
    simulation = group().begin().until_step(4)
    drain, admit = simulation.command("drain", node="b"), simulation.command("admit", node="b")
    simulation.run()
    assert simulation.ends[drain].step == simulation.ends[admit].step
    assert all(len(rows(simulation, step)) == 3 for step in range(1, 21))


def test_a_paused_run_drains_at_once_and_forms_when_it_goes_on():
    simulation = group().begin().until_step(4)
    simulation.command("pause")
    simulation.run()
    stood = simulation.conductor.progress.step
    drain = simulation.command("drain", node="a")
    assert (simulation.ends[drain].state, simulation.ends[drain].step) == ("applied", stood + 1)
    evaluate = simulation.command("evaluate")
    simulation.run()
    assert simulation.ends[evaluate].state == "applied"
    assert {work.rank for work in simulation.sent_plans[-1].work} == {1, 2}
    simulation.command("resume")
    simulation.run()
    assert rows(simulation, stood + 1) == {1: 6, 2: 6}
    check_ledger(simulation)


def test_a_drained_trainer_may_end_and_is_started_again_when_it_is_admitted():
    simulation = group().begin().until_step(4)
    simulation.command("drain", node="c")
    simulation.until_step(8)
    simulation.end_rank(simulation.ranks[2], clean=False)
    simulation.talk()
    assert "c is drained; its trainer was ended by signal 9" in texts(simulation)
    assert views.rank_view(simulation.conductor, 2, None, "", None, 0.0).state == "lost"
    admit = simulation.command("admit", node="c")
    assert simulation.ends[admit].after == "restarted; it will rejoin when its model is loaded"
    assert simulation.run().ended.state == "finished"


def test_a_trainer_that_ends_before_there_was_a_group_fails_the_run():
    simulation = group()
    simulation.ranks[0].load()
    simulation.end_rank(simulation.ranks[1], clean=False)
    assert simulation.run().ended == d.Ended("failed", "rank 1 (b) was ended by signal 9")


def test_weights_are_synchronised_between_steps_and_the_drift_is_told():
    simulation = group(steps=10, group={"sync_weights_every": 4}).begin().run()
    assert [(plan.step, len(plan.work)) for plan in simulation.sent_plans if plan.kind == "sync"] == [(4, 3), (8, 3)]
    assert simulation.drifts == [d.Drifted(step, {0: 0.0, 1: 1e-6, 2: 2e-6}) for step in (4, 8)]
    assert "all ranks synced to a's weights; largest drift 2e-06, on c" in texts(simulation)


def test_a_fence_in_the_ending_does_not_evaluate_twice_nor_forget_the_checkpoint():
    simulation = group(steps=4, checkpoint={"at_end": True}).begin()
    simulation.until(lambda: simulation.sent_plans and simulation.sent_plans[-1].kind == "checkpoint")
    simulation.feed(d.RankReturned(1))
    simulation.run()
    kinds = [plan.kind for plan in simulation.sent_plans if plan.kind != "train"]
    assert kinds == ["probe", "evaluate", "checkpoint", "checkpoint"]
    assert simulation.ended.state == "finished"


def test_a_drained_rank_hears_of_generations_and_its_return_fences_nobody():
    simulation = group().begin().until_step(4)
    simulation.command("drain", node="a")
    simulation.until_step(7)
    before = simulation.conductor.durable.generation
    assert simulation.ranks[0].highest == before
    simulation.disconnect(simulation.ranks[0])
    simulation.reconnect(simulation.ranks[0])
    simulation.run(30)
    assert simulation.conductor.durable.generation == before


def test_a_lost_rank_whose_answer_to_a_fence_was_lost_is_fenced_again():
    """Only its answer has the reports that were lost with its agent."""
    simulation = group().begin().until_step(4)
    lost = simulation.ranks[2]
    simulation.disconnect(lost)
    simulation.tick(6.0)
    assert simulation.conductor.durable.settings.ranks[2].out == "lost"
    conductor = simulation.conductor
    assert len(told(conductor.handle(lost.alive(), simulation.now), m.Fence)) == 1
    assert told(conductor.handle(lost.alive(), simulation.now), m.Fence) == []
    assert len(told(conductor.handle(d.RankReturned(2), simulation.now), m.Fence)) == 1


def test_a_rank_of_a_higher_generation_is_believed():
    """A power cut may take the newest generation from the record, but not from the ranks."""
    simulation = group().begin().until_step(4)
    simulation.restart_agent()
    for rank in simulation.ranks.values():
        rank.highest = m.Generation(1, 70)
        rank.up.clear()
        rank.up.append(rank.alive())
    simulation.talk()
    assert simulation.conductor.durable.generation > m.Generation(1, 70)
    assert simulation.run().ended.state == "finished"


def test_the_view_names_engine_and_mixture():
    simulation = group()
    simulation.ranks[2].backend = "mlx"
    simulation.begin().until_step(2)
    view = views.run_view(simulation.conductor, 0.0, "/run", (), lead="b")
    assert (view.engine, view.mixed, view.lead) == ("gloo", True, "b")
    simulation.command("drain", node="c")
    simulation.until_step(6)
    assert views.run_view(simulation.conductor, 0.0, "/run", (), "b").mixed is False


def test_what_is_said_of_an_older_generation_changes_nothing():
    simulation = group().begin().until_step(3)
    simulation.until(lambda: simulation.conductor.stage == "formed")
    old = m.Generation(1, 0)
    for stale in (
        m.GroupFailed(run="sim", rank=1, generation=old, reason="late"),
        m.Formed(run="sim", rank=1, generation=old),
        m.Offered(run="sim", rank=1, generation=old, endpoints=("x:1",)),
        m.Fenced(run="sim", rank=1, generation=old, last_step=9),
    ):
        assert simulation.conductor.handle(stale, 0.0) == []
