"""Ranks whose nodes shut down: they leave at one boundary, end when the others have a group, and rejoin later."""

import msgspec
import pytest
from tests.node_agent.support.group_orders import rows
from tests.node_agent.support.simulation import Simulation, check_ledger, config, durable

from trainctl.node_agent.conductor import events as d
from trainctl.node_agent.conductor import views
from trainctl.node_agent.planning import share_edits

WHY = "its agent was terminated"


def group() -> Simulation:
    return Simulation(config(20, 12), durable(("a", "b", "c"), 12))


def shut_down(simulation: Simulation, *ranks: int) -> Simulation:
    simulation.feed(d.Departing(dict.fromkeys(ranks, WHY)))
    return simulation


def state(simulation: Simulation, rank: int) -> str:
    return views.rank_view(simulation.conductor, rank, 1, "", None, 0.0).state


@pytest.mark.parametrize("leaving", [(0,), (0, 2)])
def test_ranks_leave_at_one_boundary_and_end_once_the_others_have_a_group(leaving):
    simulation = shut_down(group().begin().until_step(4), *leaving)
    simulation.until(lambda: all(simulation.ranks[rank].gone for rank in leaving))
    assert simulation.conductor.durable.members == tuple({0, 1, 2} - {*leaving})
    simulation.until_step(12)
    sizes = [len(rows(simulation, step)) for step in range(1, 12)]
    assert sorted(sizes, reverse=True) == sizes
    assert {3, 3 - len(leaving)} == {*sizes}
    assert {state(simulation, rank) for rank in leaving} == {"drained"}
    drained = [event for event in simulation.happened if event.verb == "drain"]
    assert [event.text.partition(":")[0] for event in drained] == [f"drained {'abc'[rank]}" for rank in leaving]
    assert all(WHY in event.text for event in drained) and not simulation.retracted
    assert simulation.run().ended.state == "finished"
    check_ledger(simulation)


def test_it_waits_for_its_node_and_has_its_share_again_then():
    simulation = shut_down(group().begin().until_step(4), 1)
    assert state(simulation, 1) == "draining"
    simulation.until(lambda: simulation.ranks[1].gone)
    simulation.until_step(10)
    simulation.tick(120.0)
    assert simulation.starts == 0
    shut_down(simulation)
    simulation.feed(d.NodeReturned(1))
    simulation.tick(1.0)
    assert simulation.starts == 1
    simulation.run()
    assert any(event.text.startswith("b rejoins") for event in simulation.happened)
    assert rows(simulation, 20) == {0: 4, 1: 4, 2: 4}
    simulation.check_alike()
    check_ledger(simulation)


def test_a_resumed_run_starts_no_trainer_on_a_node_that_is_leaving_while_the_others_load():
    begun = durable(("a", "b", "c"), 12)
    kept = msgspec.structs.replace(begun, settings=share_edits.lose(begun.settings, 1).settings)
    simulation = shut_down(Simulation(config(20, 12), kept), 1)
    simulation.ranks[1].gone = True
    simulation.feed(d.RankEnded(1, False, "is no longer known to its agent"))
    for _ in range(8):
        simulation.tick(15.0)
    assert simulation.conductor.stage == "loading"
    assert (simulation.starts, state(simulation, 1)) == (0, "drained")
    shut_down(simulation)
    simulation.feed(d.NodeReturned(1))
    simulation.tick(1.0)
    assert simulation.starts == 1


def test_the_last_ranks_do_not_leave_the_run_without_any():
    simulation = shut_down(group().begin().until_step(4), 0, 1, 2)
    simulation.until_step(8)
    assert len(simulation.conductor.durable.settings.live) == 3
    shut_down(simulation, 0, 1)
    simulation.until(lambda: simulation.ranks[0].gone and simulation.ranks[1].gone)
    shut_down(simulation, 0, 1, 2)
    assert simulation.run().ended.state == "finished"
    assert rows(simulation, 20) == {2: 12}


def test_a_paused_run_lets_them_go_at_once():
    simulation = group().begin().until_step(4)
    simulation.command("pause")
    simulation.run()
    shut_down(simulation, 2).run()
    assert simulation.ranks[2].gone
    simulation.command("resume")
    assert simulation.run().ended.state == "finished"
    assert rows(simulation, 20) == {0: 6, 1: 6}
    check_ledger(simulation)


def test_a_rank_that_a_person_drained_ends_at_once_and_stays_drained():
    simulation = group().begin().until_step(4)
    simulation.command("drain", node="c")
    simulation.until(lambda: simulation.conductor.durable.members == (0, 1))
    shut_down(simulation, 2)
    simulation.until(lambda: simulation.conductor.ranks[2].ended)
    assert simulation.conductor.progress.step < 19 and not simulation.conductor.durable.departed
    shut_down(simulation)
    simulation.feed(d.NodeReturned(2))
    simulation.tick(120.0)
    assert (simulation.starts, simulation.conductor.durable.settings.ranks[2].out) == (0, "drained")
    simulation.command("admit", node="c")
    simulation.tick(1.0)
    simulation.run()
    assert rows(simulation, 20) == {0: 4, 1: 4, 2: 4}
    check_ledger(simulation)


@pytest.mark.parametrize("loads", [True, False])
def test_a_rank_that_rejoins_waits_for_its_node(loads):
    simulation = group().begin().until_step(4)
    simulation.kill(simulation.ranks[2])
    simulation.until(lambda: simulation.conductor.durable.members == (0, 1))
    simulation.tick(2.0 if loads else 0.0)
    assert simulation.starts == loads
    shut_down(simulation, 2)
    simulation.until(lambda: simulation.ranks[2].gone)
    simulation.until_step(12)
    simulation.tick(120.0)
    assert (simulation.starts, state(simulation, 2)) == (loads, "drained")
    shut_down(simulation)
    simulation.feed(d.NodeReturned(2))
    simulation.feed(d.RankEnded(2, clean=True, why="exited"))  # of the former trainer, reported late
    simulation.tick(1.0)
    simulation.run()
    assert simulation.starts == loads + 1
    assert rows(simulation, 20) == {0: 4, 1: 4, 2: 4}
    check_ledger(simulation)


def test_the_next_conductor_knows_who_left():
    simulation = shut_down(group().begin().until_step(4), 1)
    simulation.until(lambda: simulation.ranks[1].gone)
    simulation.restart_agent()
    simulation.until_step(12)
    simulation.tick(120.0)
    assert (simulation.starts, state(simulation, 1)) == (0, "drained")
    simulation.feed(d.NodeReturned(1))
    simulation.tick(1.0)
    simulation.run()
    assert rows(simulation, 20) == {0: 4, 1: 4, 2: 4}


def test_a_rank_whose_node_leaves_is_not_admitted_before_that_is_back():
    """Its trainer may live on for a while, also if a person has drained it: once admitted, it would be ended."""
    simulation = group().begin().until_step(4)
    simulation.command("drain", node="c")
    simulation.until_step(7)
    simulation.conductor.shared.keep(departed=(2,))  # as once it was lost with its node
    refused = simulation.command("admit", node="c")
    assert simulation.ends[refused].state == "rejected"
    simulation.feed(d.NodeReturned(2))
    taken = simulation.command("admit", node="c")
    simulation.until(lambda: taken in simulation.ends)
    assert simulation.ends[taken].state == "applied"
