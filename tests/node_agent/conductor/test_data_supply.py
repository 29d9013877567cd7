"""A growing file: steps wait for their samples, everything else doesn't, and ranks must have the same of it."""

from tests.node_agent.support.simulation import Simulation, check_ledger, config, durable

from trainctl.node_agent.conductor.views import run_view

DATA = {"path": "/rows.jsonl", "kind": "rows", "growing": True}


def growing(nodes: tuple[str, ...] = ("a", "b"), chunks: int = 2, **tables) -> Simulation:
    """Chunks of 7 samples; steps of 8."""
    made = Simulation(config(6, data=DATA, **tables), durable(nodes))
    made.world.chunks = chunks
    return made.begin()


def test_steps_wait_for_the_samples_that_all_ranks_have():
    simulation = growing().run()
    assert len(simulation.commits) == 1  # 16 samples are needed for the second, 14 are there
    said = "waiting for data: 14 samples sealed, the next step needs 16"
    assert (simulation.conductor.reason, simulation.conductor.state) == (said, "running")
    view = run_view(simulation.conductor, 0.0, "", (), "a")
    assert (view.samples, view.reason) == (14, said)
    simulation.world.chunks = 5
    simulation.run()
    assert len(simulation.commits) == 4
    simulation.world.data_ended = True
    simulation.run()
    assert simulation.ended.state == "finished" and not simulation.conductor.reason
    check_ledger(simulation)


def test_one_rank_that_has_less_holds_all_back():
    simulation = growing()
    simulation.until(lambda: simulation.conductor.progress.step == 1)
    simulation.ranks[1].seal = lambda: None
    simulation.world.chunks = 3
    for _ in range(200):
        simulation.stride()
    assert simulation.conductor.progress.step == 1
    assert simulation.conductor.ranks[0].sealed.samples == 21


def test_no_rank_hangs_by_waiting():
    simulation = growing(group={"hung_seconds": 4.0}).run()
    for _ in range(100):
        simulation.tick(3.0)
        simulation.run()
    assert not simulation.conductor.hangs.hung and not simulation.conductor.hangs.late and not simulation.starts


def test_edits_take_effect_during_the_wait():
    simulation = growing().run()
    rate, batch = simulation.command("set-lr", value=0.5, schedule="set"), simulation.command("checkpoint")
    simulation.run()
    assert [simulation.ends[id].state for id in (rate, batch)] == ["applied", "applied"]
    smaller = simulation.command("set-global-batch", value=6)  # 14 samples are enough for that
    simulation.run()
    assert simulation.ends[smaller].state == "applied" and len(simulation.commits) == 2
    assert simulation.commits[1].learning_rate == 0.5 and simulation.commits[1].global_batch == 6
    simulation.world.data_ended = True
    simulation.run()
    check_ledger(simulation)
    simulation.check_commands()


def test_a_rank_with_other_data_is_refused_and_the_others_go_on():
    simulation = growing()
    simulation.until(lambda: simulation.conductor.progress.step == 1)
    simulation.ranks[1].other_from = 3
    simulation.world.chunks = 3
    simulation.until(lambda: simulation.conductor.ranks[0].sealed.chunks == 3 or len(simulation.commits) > 1)
    simulation.world.data_ended = True
    simulation.run()
    out = [rank for rank, setting in simulation.conductor.durable.settings.ranks.items() if setting.out == "failed"]
    assert len(out) == 1
    assert "the growing data of " in simulation.conductor.ranks[out[0]].why
    assert "differ within their first 3 chunks" in simulation.conductor.ranks[out[0]].why
    assert simulation.ended.state == "finished"


def test_ranks_that_begin_with_other_data_begin_no_run():
    simulation = Simulation(config(6, data=DATA), durable(("a", "b")))
    simulation.world.chunks, simulation.ranks[1].other_from = 1, 1
    simulation.started = True
    for rank in simulation.ranks.values():
        rank.seal()
    simulation.run()
    assert simulation.ended.state == "failed"
    assert "differ within their first 1 chunks" in simulation.conductor.reason
