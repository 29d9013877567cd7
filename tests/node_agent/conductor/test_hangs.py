"""Ranks that hang though they say that they are there, the last one with the run's state, and states in words."""

import msgspec
import pytest
from tests.node_agent.support.group_orders import go_on, group, hang, hang_in_its_part, texts, tick
from tests.node_agent.support.simulation import Simulation, check_ledger, config, durable

from trainctl.node_agent.conductor import events as d
from trainctl.node_agent.conductor import views
from trainctl.node_agent.planning import share_edits
from trainctl.protocol import messages as m


def shown(simulation: Simulation, rank: int, away: str = "") -> m.RankView:
    return views.rank_view(simulation.conductor, rank, None, away, None, 0.0)


def lost(simulation: Simulation) -> list[str]:
    return [text for text in texts(simulation) if " is lost: " in text]


def test_a_rank_that_gets_on_with_nothing_is_late_then_hung_then_replaced_and_finishes_with_the_others():
    simulation = group().begin().until_step(4)
    hang_in_its_part(simulation, 2)
    tick(simulation, 12)
    assert shown(simulation, 2).state == "late"
    assert shown(simulation, 2).why.startswith(
        f"step {simulation.conductor.progress.step + 1} is taking long (usually "
    )
    tick(simulation, 55)
    assert (shown(simulation, 2).state, shown(simulation, 0).state) == ("hung", "run")
    assert shown(simulation, 2).why == f"no progress in {simulation.conductor.ranks[2].doing}"
    tick(simulation, 50)
    assert not lost(simulation)
    tick(simulation, 10)
    (told,) = lost(simulation)
    assert told.startswith("c is lost: hung, no progress in idle of step ")
    assert simulation.ranks[2].gone or not simulation.ranks[2].hung, "killed, and perhaps started again by now"
    assert go_on(simulation).ended.state == "finished"
    check_ledger(simulation)


def test_one_that_is_slow_and_gets_on_is_only_late():
    simulation = group().begin().until_step(4)
    hang_in_its_part(simulation, 1)
    for _ in range(600):
        simulation.ranks[1].progress += 1  # a micro-batch
        simulation.tick(1.0)
        simulation.run()
    assert shown(simulation, 1).state == "late"
    assert not lost(simulation)
    simulation.ranks[1].hung = False
    assert simulation.run().ended.state == "finished"


@pytest.mark.parametrize(("mode", "state"), [("off", "late"), ("default", "run")])
def test_a_first_step_that_compiles_is_not_late(mode, state):
    simulation = group()
    for rank in simulation.ranks.values():
        rank.compute = m.Compute(dtype="float32", compile=mode)
    simulation.begin().until(lambda: simulation.conductor.stage == "formed")
    hang_in_its_part(simulation, 1)
    for _ in range(60):
        simulation.ranks[1].progress += 1
        simulation.tick(1.0)
        simulation.run()
    seen = shown(simulation, 1)
    assert seen.state == state and seen.why.startswith("compiling") == (state == "run")


@pytest.mark.parametrize("verb", ["drain", ""])
def test_the_next_process_of_a_rank_that_was_out_may_compile_again(verb):
    """It was drained by a command and ended, or left with its node."""
    simulation = group(steps=400).begin().until_step(4)
    if verb:
        simulation.command(verb, node="c")
        simulation.until_step(8).kill(simulation.ranks[2])
        simulation.talk()
        simulation.ranks[2].load = lambda: None
        simulation.command("admit", node="c")
        pass_seconds(simulation, 3)
        simulation.until_step(simulation.conductor.progress.step + 3)
        assert simulation.starts == 1 and shown(simulation, 2).state == "rejoining"
        assert simulation.conductor.durable.members == (0, 1), "it has not loaded"
        del simulation.ranks[2].load
    else:
        simulation.feed(d.Departing({2: "its agent was terminated"}))
        simulation.until(lambda: simulation.ranks[2].gone).talk()
        simulation.feed(d.Departing({}))
        simulation.feed(d.NodeReturned(2))
        pass_seconds(simulation, 3)
    simulation.until(lambda: 2 in simulation.conductor.shared.members and simulation.conductor.stage == "formed")
    stalls = simulation.conductor.deadlines.stalls
    assert stalls.is_first(2, "train") and stalls.limit_seconds(2, "train", 0.0) == 600


def test_where_all_hang_it_is_what_they_have_in_common_and_nobody_is_replaced():
    simulation = group().begin().until_step(4)
    hang_in_its_part(simulation, *simulation.ranks)
    tick(simulation, 1000)
    assert {shown(simulation, rank).state for rank in simulation.ranks} == {"hung"}
    assert not lost(simulation)
    for rank in simulation.ranks.values():
        rank.hung = False
    assert simulation.run().ended.state == "finished"


def test_who_did_nothing_in_a_long_pause_is_not_taken_for_hung_when_it_ends():
    simulation = group(checkpoint={"every_steps": 2}).begin().until_step(5)
    simulation.command("pause")
    simulation.run()
    tick(simulation, 700)
    simulation.command("resume")
    while simulation.conductor.stage != "forming":
        simulation.stride()
        simulation.tick()
    simulation.tick()
    assert not lost(simulation)
    assert simulation.conductor.final is None
    assert go_on(simulation).ended.state == "finished"
    assert not lost(simulation)


def test_one_that_hangs_while_a_group_is_formed_is_replaced_before_the_run_fails():
    simulation = group().begin().until_step(5)
    simulation.until(lambda: len({rank.last_step for rank in simulation.ranks.values()}) == 1)
    hang(simulation, 1)
    simulation.break_group(simulation.ranks[0])
    tick(simulation, 200)
    assert lost(simulation)[0].startswith("b is lost: hung, no progress in ")
    assert go_on(simulation).ended.state == "finished"
    check_ledger(simulation)


def alone(steps: int = 400, every: int = 2) -> Simulation:
    """A run of two ranks, the first of which has just died: only the other has the state."""
    simulation = group("ab", steps=steps, checkpoint={"every_steps": every}).begin().until_step(5)
    simulation.kill(simulation.ranks[0])
    return simulation.until(lambda: any("formed, 1 rank" in text for text in texts(simulation)))


@pytest.mark.parametrize("restarted", [False, True])
def test_the_last_one_that_is_silent_for_long_is_given_up_for_a_checkpoint(restarted):
    simulation = alone()
    simulation.stop(simulation.ranks[1])
    if restarted:
        simulation.restart_agent()
    tick(simulation, 59)
    assert simulation.conductor.final is None
    ends = "; after 60 s the run goes back to the newest checkpoint"
    assert shown(simulation, 1, "silent").why == f"silent; no other rank has the run's state{ends}"
    tick(simulation, 3)
    assert simulation.conductor.goes_back
    assert any("b, the last rank with the run's state, has been silent" in text for text in texts(simulation))
    assert simulation.ranks[1].gone
    tick(simulation, 5)
    assert simulation.ended.state == "failed"


def test_the_last_one_out_of_reach_is_given_up_later_than_a_silent_one_and_that_is_told():
    simulation = alone()
    simulation.disconnect(simulation.ranks[1])
    tick(simulation, 290)
    assert simulation.conductor.final is None
    until = "; after 300 s the run goes back to the newest checkpoint"
    assert texts(simulation).count(f"b, the last rank with the run's state, is unreachable: waiting for it{until}") == 1
    tick(simulation, 15)
    assert simulation.conductor.goes_back


@pytest.mark.parametrize("why", ["; no other node is reachable", "; there is no checkpoint"])
def test_where_nothing_is_to_be_had_instead_the_state_is_not_given_up(why):
    simulation = alone(every=0 if "checkpoint" in why else 2)
    simulation.disconnect(simulation.ranks[1])
    if "no other" in why:
        simulation.disconnect(simulation.ranks[0])
    tick(simulation, 1000)
    assert simulation.conductor.final is None
    assert shown(simulation, 1, "no agent").why == f"no agent; no other rank has the run's state{why}"
    for rank in simulation.ranks.values():
        simulation.reconnect(rank)
    assert go_on(simulation).ended.state == "finished"


def test_the_last_one_that_hangs_is_given_up_later_than_any_other():
    simulation = alone()
    simulation.lost.add(0)  # nobody comes to its aid
    hang(simulation, 1)
    tick(simulation, 500)
    assert simulation.conductor.final is None
    tick(simulation, 200)
    assert simulation.conductor.goes_back
    assert any("b, the last rank with the run's state, hung, no progress in " in text for text in texts(simulation))


@pytest.mark.parametrize("every", [0, 2])
def test_the_last_one_that_is_heard_from_and_answers_no_fence_is_shown_as_hung_and_given_up_for_a_checkpoint(every):
    simulation = alone(every=every)
    simulation.lost.add(0)
    simulation.ranks[1].take_order = simulation.ranks[1].down.popleft
    hang(simulation, 1)
    simulation.feed(d.RankReturned(1))
    assert simulation.conductor.stage == "fencing"
    tick(simulation, 250)
    assert (simulation.conductor.final, simulation.conductor.stage) == (None, "fencing")
    until = "" if every else "; there is no checkpoint"
    words = f"no progress in idle of step {simulation.ranks[1].last_step}; no other rank has the run's state{until}"
    assert (shown(simulation, 1).state, shown(simulation, 1).why) == ("hung", words)
    tick(simulation, 250)
    assert simulation.conductor.goes_back == bool(every)
    given_up = "b, the last rank with the run's state, hung, no progress in "
    assert any(given_up in text for text in texts(simulation)) == bool(every)


def loading(**tables) -> Simulation:
    """All have loaded but c, which hangs."""
    simulation = group(steps=8, **tables)
    simulation.ranks[2].load = lambda: None
    simulation.begin()
    for _ in range(3):
        simulation.stride()
    return simulation


def pass_seconds(simulation: Simulation, seconds: int) -> None:
    """Where a load that never ends would go on and on without time passing."""
    for _ in range(seconds):
        simulation.tick(1.0)
        simulation.talk()


def test_a_first_load_that_hangs_is_ended_and_started_again_and_the_run_begins():
    simulation = loading()
    pass_seconds(simulation, 595)
    assert not simulation.happened
    assert shown(simulation, 2).state == "starting"
    pass_seconds(simulation, 10)
    assert "c's trainer has made no progress for too long while loading and is killed" in texts(simulation)
    assert "c's trainer restarts, attempt 2 of 5" in texts(simulation)
    assert simulation.starts == 1
    del simulation.ranks[2].load
    assert go_on(simulation).ended.state == "finished"
    check_ledger(simulation)


def test_who_waited_long_for_one_that_loads_is_not_taken_for_hung_when_the_group_forms():
    simulation = loading()
    for _ in range(200):
        simulation.ranks[2].progress += 1
        pass_seconds(simulation, 1)
    del simulation.ranks[2].load
    while simulation.conductor.stage != "forming":
        simulation.stride()
    simulation.tick()
    assert not lost(simulation)
    assert {shown(simulation, rank).state for rank in simulation.ranks} == {"ready"}
    assert go_on(simulation).ended.state == "finished"


def test_tokenizing_is_shown_and_is_progress_while_it_loads():
    simulation = loading()
    rank = simulation.ranks[2]
    for percent in range(0, 100, 10):
        rank.progress, rank.detail = rank.progress + 1, f"tokenizing {percent}% of 1,200.0 MB"
        pass_seconds(simulation, 500)
        assert (shown(simulation, 2).state, shown(simulation, 2).why) == ("starting", rank.detail)
    assert not simulation.happened


def test_after_five_starts_the_run_fails_by_that_ranks_own_error():
    simulation = loading(run={"name": "sim", "steps": 8, "load_seconds": 20.0})
    while simulation.conductor.final is None:
        assert simulation.now < 300
        pass_seconds(simulation, 1)
    assert simulation.starts == 4
    assert simulation.conductor.reason == (
        "c: its trainer was started 5 times and hung each time while loading; the last time it was ended by signal 9"
    )
    assert go_on(simulation).ended.state == "failed"


def test_one_that_computes_the_reference_and_ends_each_time_ends_the_run():
    simulation = loading()
    simulation.feed(d.Computing(2))
    for start in range(2, 7):
        simulation.kill(simulation.ranks[2])
        pass_seconds(simulation, 60)
        assert (f"c's trainer restarts, attempt {start} of 5" in texts(simulation)) == (start < 6)
    assert simulation.conductor.reason == (
        "c: its trainer was started 5 times and ended each time while loading; the last time it was ended by signal 9"
    )


def loading_alone(**tables) -> Simulation:
    """The only rank that takes part hangs while it loads, and is ended after 20 s."""
    simulation = group("a", steps=8, run={"name": "sim", "steps": 8, "load_seconds": 20.0}, **tables)
    simulation.ranks[0].load = lambda: None
    return simulation.begin()


def test_the_only_rank_that_hangs_five_times_while_loading_ends_the_run_with_its_last_process():
    simulation = loading_alone()
    while simulation.conductor.final is None:
        assert simulation.now < 300
        pass_seconds(simulation, 1)
    assert simulation.ended == d.Ended("failed", simulation.conductor.reason)
    assert simulation.ended.reason.startswith("a: its trainer was started 5 times and hung each time")


def in_backoff(simulation: Simulation) -> Simulation:
    """Its only process has been ended, and another one is due in a while."""
    while not simulation.conductor.ranks[0].ended:
        assert simulation.now < 60
        pass_seconds(simulation, 1)
    return simulation


def test_a_stop_before_the_only_rank_is_started_again_ends_the_run_at_once():
    simulation = in_backoff(loading_alone())
    stop = simulation.command("stop")
    assert simulation.ends[stop].state == "applied"
    assert simulation.ended == d.Ended("stopped", "")
    pass_seconds(simulation, 30)
    assert simulation.starts == 0


def test_a_rollback_before_the_only_rank_is_started_again_ends_the_run_at_once():
    simulation = loading_alone()
    simulation.conductor.shared.keep(checkpoints=(1,))
    rollback = in_backoff(simulation).command("rollback", step=1)
    assert simulation.ends[rollback].state == "applied"
    assert simulation.ended == d.Ended("failed", "rollback to step 1")
    assert simulation.conductor.goes_back


def test_a_drained_rank_that_ends_before_the_only_live_one_is_started_again_ends_no_run():
    begun = durable(("a", "b"))
    settings = share_edits.lose(begun.settings, 1).settings
    ranks = {**settings.ranks, 1: msgspec.structs.replace(settings.ranks[1], out="drained")}
    settings = msgspec.structs.replace(settings, ranks=ranks)
    table = config(8, run={"name": "sim", "steps": 8, "load_seconds": 20.0})
    simulation = Simulation(table, msgspec.structs.replace(begun, settings=settings))
    simulation.ranks[0].load = lambda: None
    in_backoff(simulation.begin())
    simulation.kill(simulation.ranks[1])
    simulation.talk()
    assert simulation.conductor.ranks[1].ended and simulation.conductor.final is None
    del simulation.ranks[0].load
    assert go_on(simulation).ended.state == "finished"
    assert simulation.starts == 1


def test_a_node_that_is_gone_before_it_has_loaded_is_not_waited_for_without_end():
    simulation = loading()
    simulation.disconnect(simulation.ranks[2])
    pass_seconds(simulation, 298)
    assert simulation.conductor.final is None
    pass_seconds(simulation, 4)
    assert simulation.conductor.reason == "c has been silent for 300 s and has not loaded; no agent answers"
    simulation.reconnect(simulation.ranks[2])
    assert go_on(simulation).ended.state == "failed"


@pytest.mark.parametrize("kind", ["step", "checkpoint"])
def test_a_node_is_draining_until_what_is_under_way_is_done(kind):
    simulation = group(steps=60, checkpoint={"every_steps": 4}).begin().until_step(3)
    if kind == "checkpoint":
        simulation.until(lambda: simulation.sent_plans[-1].kind == "checkpoint")
    else:
        simulation.until_step(5).until(lambda: simulation.sent_plans[-1].step == 6).talk()
    drain = simulation.command("drain", node="c")
    view = shown(simulation, 2)
    assert (view.state, view.share) == ("draining", 4)
    assert view.why == ("until step 6 is done" if kind == "step" else "until the checkpoint at step 4 is done")
    simulation.until(lambda: drain in simulation.ends)
    assert shown(simulation, 2).state == "drained"
