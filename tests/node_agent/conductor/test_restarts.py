"""Ranks that die, hang or are unreachable: the others finish the same batch, and who is back is given the state."""

import pytest
from tests.node_agent.support.group_orders import go_on, group, rows, texts
from tests.node_agent.support.simulation import Simulation, check_ledger

from trainctl.node_agent.conductor import views
from trainctl.protocol import messages as m


def state(simulation: Simulation, rank: int) -> m.RankState:
    return views.rank_view(simulation.conductor, rank, None, "", None, 0.0).state


def why(simulation: Simulation, rank: int) -> str:
    return views.rank_view(simulation.conductor, rank, None, "", None, 0.0).why


def hold(simulation: Simulation) -> None:
    """Without a rank that goes on by itself, so that time can pass within the run."""
    simulation.command("pause")
    simulation.run()


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_killed_at_any_moment_a_rank_costs_no_step(victim):
    for strides in range(40):
        simulation = group().begin().until_step(3).run(strides)
        simulation.kill(simulation.ranks[victim])
        assert go_on(simulation).ended.state == "finished"
        assert [commit.step for commit in simulation.commits] == [*range(1, 21)]
        check_ledger(simulation)


def test_its_samples_go_to_the_others_and_come_back_with_it():
    simulation = group(steps=60).begin().until_step(3)
    simulation.kill(simulation.ranks[2])
    simulation.until(lambda: "g1.3 formed, 2 ranks by gloo; the ranks waited " in " ".join(texts(simulation)))
    lost = simulation.conductor.progress.step
    assert texts(simulation)[-2] == "c is lost: was ended by signal 9; a 4 → 6, b 4 → 6, c 4 → 0"
    assert state(simulation, 2) == "lost"
    simulation.until_step(lost + 3)
    simulation.tick(1.1)
    assert "c's trainer restarts, attempt 1 of 5" in texts(simulation)
    assert state(simulation, 2) == "rejoining"
    simulation.until(lambda: not simulation.conductor.durable.settings.ranks[2].out)
    assert "c rejoins: a 6 → 4, b 6 → 4, c 0 → 4" in texts(simulation)
    simulation.run()
    assert any("formed, 3 ranks by gloo; c synced from a" in text for text in texts(simulation))
    assert rows(simulation, lost + 2) == {0: 6, 1: 6}
    assert rows(simulation, 60) == {0: 4, 1: 4, 2: 4}
    simulation.check_alike()


def test_all_that_were_lost_have_their_own_shares_back_in_whatever_order():
    simulation = group(steps=400, batch=24).begin().until_step(3)
    simulation.command("rebalance", shares={"a": 4, "b": 12, "c": 8})
    simulation.until(lambda: rows(simulation, simulation.conductor.progress.step) == {0: 4, 1: 12, 2: 8})
    for victim in (1, 2):
        simulation.kill(simulation.ranks[victim])
        simulation.until(lambda victim=victim: state(simulation, victim) == "lost")
    assert simulation.conductor.durable.settings.ranks[0].share == 24
    simulation.tick(1.1)
    simulation.until(lambda: not any(setting.out for setting in simulation.conductor.durable.settings.ranks.values()))
    shares = {rank: setting.share for rank, setting in simulation.conductor.durable.settings.ranks.items()}
    assert shares == {0: 4, 1: 12, 2: 8}


def test_one_that_hangs_is_killed_and_named_and_the_others_wait_no_longer_than_its_silence():
    simulation = group().begin().until_step(3)
    simulation.stop(simulation.ranks[1])
    simulation.run()
    assert simulation.ended is None
    simulation.tick(5.0)
    assert any(text.startswith("b is lost: has been silent for 5 s") for text in texts(simulation))
    assert simulation.ranks[1].gone
    assert why(simulation, 1) == "has been silent for 5 s"
    simulation.until(lambda: simulation.conductor.ranks[1].ended)
    assert why(simulation, 1) == "was ended by signal 9", "the newest that is known"
    assert go_on(simulation).ended.state == "finished"
    check_ledger(simulation)


def test_a_step_that_only_the_lost_had_made_is_retracted_and_made_again():
    simulation = group().begin().until_step(5)
    simulation.until(lambda: simulation.conductor.progress.step == 7 and simulation.ranks[2].last_step == 6)
    made = simulation.commits[-1]
    for rank in simulation.ranks.values():
        if rank.last_step == made.step:
            simulation.kill(rank)
        else:
            rank.failed = True  # the sum that it was in
    assert any(not rank.gone for rank in simulation.ranks.values())
    assert go_on(simulation).ended.state == "finished"
    assert [step.step for step in simulation.retracted] == [7]
    assert "step 7 retracted and repeated: only ranks that were lost had completed it" in texts(simulation)
    again = next(commit for commit in simulation.commits if commit.step == 7)
    assert again.generation > made.generation
    assert (again.cursor, again.tokens_total, again.tokens) == (made.cursor, made.tokens_total, 2)
    check_ledger(simulation)


def test_a_trainer_that_dies_again_and_again_is_given_up_with_its_last_words():
    simulation = group(steps=4).begin()
    simulation.until_step(1)
    hold(simulation)
    simulation.kill(simulation.ranks[0])
    simulation.run()
    waits = []
    for _ in range(5):
        begun = simulation.now
        while simulation.ranks[0].gone:
            assert simulation.now - begun < 61
            simulation.tick(0.5)
        waits.append(round(simulation.now - begun))
        simulation.end_rank(simulation.ranks[0], clean=False)
        simulation.hear(simulation.ranks[0])
    assert waits == [1, 2, 4, 8, 16]
    words = "a failed: started 5 times without taking part in 8 steps; the last time it was ended by signal 9"
    assert words in texts(simulation)
    assert state(simulation, 0) == "failed"
    simulation.command("resume")
    assert go_on(simulation).ended.state == "finished"
    assert simulation.starts == 5


@pytest.mark.parametrize(("steps", "seconds", "steady"), [(2, 0.0, False), (2, 60.0, True), (12, 0.0, True)])
def test_a_trainer_that_dies_soon_after_its_first_steps_is_given_up_and_one_that_stayed_is_not(
    steps: int, seconds: float, steady: bool
):
    simulation = group(steps=10_000).begin().until_step(1)
    for _ in range(6):
        simulation.kill(simulation.ranks[2])
        simulation.until(lambda: state(simulation, 2) in ("lost", "failed"))
        while state(simulation, 2) not in ("run", "failed"):
            simulation.tick(1.0)
            simulation.run(20)
        simulation.until_step(simulation.conductor.progress.step + steps)
        if seconds:
            simulation.tick(seconds)
            simulation.until_step(simulation.conductor.progress.step + 2)
    attempts = [text for text in texts(simulation) if text.startswith("c's trainer restarts")]
    assert attempts == [
        f"c's trainer restarts, attempt {1 if steady else number} of 5" for number in range(1, 6 + steady)
    ]
    assert state(simulation, 2) == ("run" if steady else "failed")


def lost_in_a_pause(steps: int) -> Simulation:
    """The trainer of b has been killed and started again while the run was paused."""
    simulation = group(steps=steps).begin().until_step(1)
    hold(simulation)
    simulation.kill(simulation.ranks[1])
    simulation.run()
    simulation.tick(1.1)
    return simulation


def test_one_that_comes_back_with_other_data_stays_out():
    simulation = lost_in_a_pause(steps=4)
    other = m.Ready(
        **{name: getattr(simulation.ranks[0].ready(), name) for name in m.Ready.__struct_fields__}
        | {"rank": 1, "data_digest": "other"}
    )
    simulation.feed(other)
    simulation.command("resume")
    assert go_on(simulation).ended.state == "finished"
    assert any("b cannot rejoin: data digests of b and a differ" in text for text in texts(simulation))


def test_a_run_that_goes_on_after_a_pause_takes_the_lost_back_with_the_same_generation():
    simulation = lost_in_a_pause(steps=8).run()
    assert state(simulation, 1) == "rejoining"
    before = simulation.conductor.durable.generation
    simulation.command("resume")
    assert go_on(simulation).ended.state == "finished"
    formed = [text for text in texts(simulation) if "formed" in text]
    assert formed[-1].startswith(f"{before.next()} formed, 3 ranks by gloo; b synced from a; the ranks waited ")


def test_a_node_out_of_reach_is_lost_and_its_trainer_joins_as_it_is_when_it_is_back():
    simulation = group(steps=400).begin().until_step(3)
    simulation.disconnect(simulation.ranks[2])
    simulation.run(30)
    simulation.tick(5.0)
    simulation.until(lambda: any("formed, 2 ranks" in text for text in texts(simulation)))
    assert not simulation.ranks[2].gone, "it can't be told"
    simulation.reconnect(simulation.ranks[2])
    simulation.until(lambda: any("3 ranks by gloo; c synced from a" in text for text in texts(simulation)))
    assert simulation.starts == 0
    assert go_on(simulation).ended.state == "finished"


def test_a_lost_node_may_be_drained_so_that_it_stays_out():
    simulation = group(steps=60).begin().until_step(3)
    simulation.kill(simulation.ranks[2])
    simulation.until(lambda: state(simulation, 2) == "lost")
    refused = simulation.command("admit", node="c")
    assert simulation.ends[refused].reason == "c is lost; it rejoins automatically when it is back"
    drain = simulation.command("drain", node="c")
    simulation.run(300)
    assert simulation.ends[drain].state == "applied"
    assert go_on(simulation).ended.state == "finished"
    assert (simulation.starts, simulation.conductor.durable.settings.ranks[2].out) == (0, "drained")


def test_a_run_that_is_about_to_go_back_can_be_stopped():
    simulation = group("ab").begin().until_step(3)
    simulation.kill(simulation.ranks[1])
    simulation.until(lambda: any("formed, 1 rank" in text for text in texts(simulation)))
    simulation.tick(1.1)
    simulation.kill(simulation.ranks[0])
    simulation.until(lambda: simulation.conductor.stage == "leaving")
    assert simulation.conductor.goes_back
    stop = simulation.command("stop")
    assert (simulation.ends[stop].state, simulation.ends[stop].before) == ("applied", "going back")
    assert go_on(simulation).ended.state == "stopped"
    assert not simulation.conductor.goes_back


def given_up(steps: int = 400) -> Simulation:
    """A run whose rank of c has died as often as it was started."""
    simulation = group(steps=steps).begin().until_step(1)
    simulation.kill(simulation.ranks[2])
    for _ in range(6):
        simulation.until(lambda: simulation.ranks[2].gone)
        while simulation.ranks[2].gone and state(simulation, 2) != "failed":
            simulation.tick(1.0)
            simulation.run(3)
        if state(simulation, 2) == "failed":
            break
        simulation.kill(simulation.ranks[2])
    assert state(simulation, 2) == "failed"
    return simulation


def test_a_node_that_was_given_up_is_tried_again_when_it_is_admitted():
    simulation = given_up()
    stale = simulation.command("admit", node="c", if_plan=999)
    assert (simulation.ends[stale].state, simulation.ends[stale].field) == ("rejected", "if_plan")
    admit = simulation.command("admit", node="c")
    assert simulation.ends[admit].after == "restarted; it will rejoin when its model is loaded"
    simulation.tick(0.1)
    simulation.until(lambda: not simulation.conductor.durable.settings.ranks[2].out)
    assert go_on(simulation).ended.state == "finished"


def test_a_node_that_was_given_up_is_not_admitted_to_a_run_that_stops():
    """No trainer is started for such a run, so that it would not rejoin."""
    simulation = given_up()
    simulation.command("stop")
    assert simulation.conductor.state == "stopping"
    admit = simulation.command("admit", node="c")
    assert (simulation.ends[admit].state, simulation.ends[admit].field) == ("rejected", "run")
    assert simulation.conductor.durable.settings.ranks[2].out == "failed"
