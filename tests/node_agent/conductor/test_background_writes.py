"""Checkpoints in the background: training continues, one is written at a time, its outcome counts while it stands."""

import msgspec
import pytest
from tests.node_agent.support.group_orders import texts
from tests.node_agent.support.simulated_ranks import RUN
from tests.node_agent.support.simulation import Simulation, config, durable

from trainctl.node_agent.conductor import events as d
from trainctl.node_agent.conductor import views
from trainctl.node_agent.conductor.background_writes import MIN_STALL_SECONDS
from trainctl.protocol import messages as m

FOREVER = 10**9


def group(nodes: str = "ab", steps: int = 400, **checkpoint: object) -> Simulation:
    tables = {"checkpoint": {"at_end": False, **checkpoint}}
    made = Simulation(config(steps, 12, **tables), durable(tuple(nodes), 12))
    for rank in made.ranks.values():
        rank.background = True
    return made.begin()


def writing(simulation: Simulation) -> Simulation:
    """Until a plan to write has been reported; the writers then stand still."""
    simulation.until(lambda: any(rank.writing for rank in simulation.ranks.values()))
    hold(simulation)
    return simulation.until(lambda: hold(simulation) or simulation.conductor.durable.writing is not None)


def hold(simulation: Simulation) -> None:
    for rank in simulation.ranks.values():
        rank.write_left = FOREVER


def pass_time(simulation: Simulation, seconds: int) -> None:
    """The writers stand still meanwhile."""
    for _ in range(seconds):
        simulation.tick(1.0)
        simulation.talk()
        hold(simulation)


def let_go(simulation: Simulation) -> None:
    for rank in simulation.ranks.values():
        rank.write_left = 0


def written(simulation: Simulation) -> list[str]:
    return [text for text in texts(simulation) if text.startswith("checkpoint step-")]


def test_steps_continue_and_the_command_is_applied_when_all_copies_are_complete() -> None:
    simulation = group().until_step(3)
    id = simulation.command("checkpoint")
    writing(simulation)
    at = simulation.conductor.durable.writing
    assert at is not None
    assert at.ranks == (0, 1)
    simulation.until_step(at.step + 10)
    assert id not in simulation.ends
    assert not written(simulation)
    let_go(simulation)
    simulation.until(lambda: id in simulation.ends)
    assert (simulation.ends[id].state, simulation.ends[id].step) == ("applied", at.step)
    assert len(written(simulation)) == 2
    assert simulation.conductor.durable.checkpoints == (at.step,)


def test_those_due_meanwhile_become_one() -> None:
    simulation = group(every_steps=4).until_step(3)
    writing(simulation)
    step = simulation.conductor.durable.writing.step
    ids = [simulation.command("checkpoint"), simulation.command("checkpoint")]
    simulation.until_step(step + 9)
    assert [plan.step for plan in simulation.sent_plans if plan.kind == "checkpoint"] == [step]
    let_go(simulation)
    simulation.until(lambda: all(id in simulation.ends for id in ids))
    first, second = (plan for plan in simulation.sent_plans if plan.kind == "checkpoint")
    assert second.commands == tuple(ids)
    assert second.step > first.step + 8


@pytest.mark.parametrize("ending", ["finished", "stopped"])
def test_the_end_waits_for_the_write_and_for_its_own(ending: str) -> None:
    simulation = group(steps=8, every_steps=5, at_end=True)
    writing(simulation)
    if ending == "stopped":
        stop = simulation.command("stop")
    simulation.run(2000)
    assert simulation.ended is None
    for second in range(100):  # it makes progress, so nothing gives it up
        for rank in simulation.ranks.values():
            rank.write_left = 1 + second % 9
        simulation.tick(1.0)
        hold(simulation)
        simulation.talk()
    assert simulation.ended is None
    for _ in range(20):
        let_go(simulation)
        simulation.run(2000)
    assert simulation.ended is not None
    assert simulation.ended.state == ending
    last = simulation.conductor.progress.step
    assert simulation.conductor.durable.written == last
    if ending == "stopped":
        assert simulation.ends[stop].state == "applied"


def test_a_write_without_progress_fails_its_command_and_not_the_run() -> None:
    simulation = group("a").until_step(3)
    id = simulation.command("checkpoint")
    writing(simulation)
    pass_time(simulation, int(MIN_STALL_SECONDS) - 5)
    assert id not in simulation.ends
    pass_time(simulation, 20)
    assert simulation.ends[id].state == "failed"
    assert "made no progress for 6" in simulation.ends[id].reason
    assert simulation.conductor.state == "running"


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize(("copy_to", "writers"), [("/backup", [(0, 1), (1, 0)]), ("", [(0, 1)])])
def test_a_checkpoint_whose_first_writer_failed_is_written_first_by_another_that_copies_it(
    background: bool, copy_to: str, writers: list[tuple[int, int]]
) -> None:
    simulation = group(every_steps=20, copy_to=copy_to)
    for rank in simulation.ranks.values():
        rank.background = background
    simulation.ranks[0].disk_full = True
    simulation.until_step(39)
    assert [plan.writers for plan in simulation.sent_plans if plan.kind == "checkpoint"] == writers
    simulation.ranks[0].disk_full = False
    simulation.until_step(79)
    later = [plan.writers for plan in simulation.sent_plans if plan.kind == "checkpoint"][len(writers) :]
    assert later == [(1, 0), (0, 1)]


@pytest.mark.parametrize("other_is_done", [False, True])
@pytest.mark.parametrize("agent_dies", ["never", "before", "after"])
def test_a_checkpoint_whose_first_writer_is_killed_is_written_first_by_another_that_copies_it(
    agent_dies: str, other_is_done: bool
) -> None:
    simulation = group(every_steps=100, copy_to="/backup")
    writing(simulation)
    if other_is_done:
        simulation.ranks[1].write_left = 0
        simulation.ranks[1].write()
        simulation.until(lambda: simulation.conductor.durable.writing.written)
    simulation.kill(simulation.ranks[0])
    if agent_dies == "before":
        simulation.restart_agent()
    simulation.until(lambda: (at := simulation.conductor.durable.writing) is None or at.ranks == (1,))
    assert (simulation.conductor.durable.writing is None) == other_is_done
    if agent_dies == "after":
        simulation.restart_agent()
    let_go(simulation)
    simulation.until_step(199)
    assert [plan.writers for plan in simulation.sent_plans if plan.kind == "checkpoint"] == [(0, 1), (1,)]


def test_a_stop_ends_though_the_write_makes_no_progress() -> None:
    simulation = group("a", at_end=True).until_step(3)
    stop = simulation.command("stop")
    writing(simulation)
    pass_time(simulation, 40)
    assert simulation.ends[stop].state == "failed"
    assert "a did not answer for 3" in simulation.ends[stop].reason
    assert simulation.conductor.final == "stopped"


def test_a_writer_that_is_lost_has_it_planned_again_and_what_it_says_later_counts_no_more() -> None:
    simulation = group("abc").until_step(3)
    id = simulation.command("checkpoint")
    writing(simulation)
    before = simulation.conductor.durable.writing
    for rank in (0, 1):
        simulation.kill(simulation.ranks[rank])
    simulation.until(lambda: (at := simulation.conductor.durable.writing) is not None and at.seq > before.seq)
    again = simulation.conductor.durable.writing
    assert 2 in again.ranks
    info = m.CheckpointInfo("p", before.step, 1, 0.0)
    late = m.Checkpointed(
        run=RUN, rank=0, generation=before.generation, seq=before.seq, step=before.step, checkpoint=info
    )
    simulation.feed(late)
    assert not written(simulation)
    let_go(simulation)
    simulation.until(lambda: id in simulation.ends)
    assert simulation.ends[id].step == again.step


def test_a_checkpoint_of_a_retracted_step_is_not_accepted() -> None:
    """The only rank that had made the step, and was copying it, is lost."""
    simulation = group().until_step(3)
    conductor = simulation.conductor
    simulation.command("checkpoint")
    writing(simulation)
    before = conductor.durable.writing
    conductor.progress.step = before.step - 1  # as a retraction leaves it
    conductor.pipeline.writes.retract()
    assert conductor.durable.writing is None
    info = m.CheckpointInfo("p", before.step, 1, 0.0)
    conductor.writes.on_checkpointed(
        m.Checkpointed(run=RUN, rank=0, generation=before.generation, seq=before.seq, step=before.step, checkpoint=info)
    )
    assert conductor.durable.checkpoints == ()
    assert conductor.durable.written == 0


def test_the_next_conductor_knows_what_is_being_written() -> None:
    simulation = group().until_step(3)
    id = simulation.command("checkpoint")
    writing(simulation)
    step = simulation.conductor.durable.writing.step
    simulation.restart_agent()
    assert simulation.conductor.durable.writing.step == step
    let_go(simulation)
    for rank in simulation.ranks.values():
        rank.write()
        rank.up.clear()  # what it said is lost; its heartbeats repeat it
        rank.up.append(rank.alive())
    simulation.tick(1.5)
    simulation.until(lambda: id in simulation.ends)
    assert (simulation.ends[id].state, simulation.ends[id].step) == ("applied", step)


@pytest.mark.parametrize("ending", ["finished", "stopped"])
def test_the_end_of_a_drained_rank_is_no_order_of_the_former_conductor_to_end(ending: str) -> None:
    simulation = group("abc", steps=8, every_steps=5)
    simulation.command("drain", node="c")
    writing(simulation)
    if ending == "stopped":
        simulation.command("stop")
    else:
        simulation.until_step(8)
    simulation.restart_agent()
    simulation.feed(d.RankEnded(2, clean=True, why="exited with 0"))
    simulation.run(200)
    assert simulation.conductor.durable.writing is not None
    assert simulation.conductor.final is None
    let_go(simulation)
    assert simulation.finish().ended.state == ending
    assert simulation.conductor.durable.writing is None


def test_the_view_says_how_far_it_is() -> None:
    simulation = group("a").until_step(3)
    simulation.command("checkpoint")
    writing(simulation)
    simulation.ranks[0].write_left = 6
    simulation.feed(simulation.ranks[0].of_write())
    step = simulation.conductor.durable.writing.step
    other = m.CheckpointProgress(run=RUN, rank=0, step=step - 1, done_bytes=9, total_bytes=10)
    simulation.feed(other)  # of another write
    view = views.rank_view(simulation.conductor, 0, 1, "", None, 0.0)
    assert (view.state, view.why) == ("run", f"writing the checkpoint of step {step}, 40%")


def test_older_checkpoints_that_cannot_be_removed_are_an_event_and_fail_nothing() -> None:
    simulation = group("a").until_step(3)
    id = simulation.command("checkpoint")
    writing(simulation)
    at = simulation.conductor.durable.writing
    info = m.CheckpointInfo("p", at.step, 1, 0.0, unpruned="Operation not permitted")
    simulation.feed(
        m.Checkpointed(run=RUN, rank=0, generation=at.generation, seq=at.seq, step=at.step, checkpoint=info)
    )
    assert simulation.ends[id].state == "applied"
    said = "a couldn't remove older checkpoints: Operation not permitted; the next one tries again"
    assert said in texts(simulation)


def test_a_copy_elsewhere_is_shown_and_its_end_is_an_event() -> None:
    simulation = group("a").until_step(3)
    said = m.CheckpointCopy(run=RUN, rank=0, step=2, to="nas:runs", state="copying")
    simulation.feed(said)
    assert simulation.conductor.writes.doing(0) == "copying the checkpoint of step 2 to nas:runs"
    simulation.feed(msgspec.structs.replace(said, state="failed", problem="rsync exited with 5", seconds=2.0))
    assert simulation.conductor.writes.doing(0) == ""
    failed = "a couldn't copy step-2 to nas:runs: rsync exited with 5; the next checkpoint will be copied"
    assert failed in texts(simulation)
    simulation.feed(msgspec.structs.replace(said, state="copied", seconds=2.0))
    assert "a copied step-2 to nas:runs, took 2.00 s" in texts(simulation)
    assert simulation.conductor.durable.checkpoints == ()


def test_a_rank_that_was_ended_by_a_signal_has_saved_the_last_step() -> None:
    simulation = group("a").until_step(5)
    step = simulation.conductor.progress.step
    said = m.Checkpointed(
        run=RUN, rank=0, generation=None, seq=None, step=step, checkpoint=m.CheckpointInfo("p", step, 1, 0.0)
    )
    for _ in range(2):
        simulation.feed(said)
    assert len(written(simulation)) == 1
    assert simulation.conductor.durable.written == step


def test_a_retraction_lets_the_checkpoint_of_the_step_before_be_completed() -> None:
    """The only rank that made the last step is lost; the one before it stands, and so does its checkpoint."""
    simulation = group("abc").until_step(3)
    id = simulation.command("checkpoint")
    writing(simulation)
    step = simulation.conductor.durable.writing.step
    ranks = simulation.ranks.values()
    simulation.until(lambda: all(rank.accumulated and rank.last_step == step for rank in ranks))
    last = simulation.ranks[2]
    while simulation.conductor.progress.step == step:
        last.work()
        while last.up:
            simulation.hear(last)
    simulation.kill(last)
    simulation.until(lambda: simulation.retracted)
    let_go(simulation)
    simulation.until(lambda: id in simulation.ends)
    assert (simulation.ends[id].state, simulation.ends[id].step) == ("applied", step)
    assert [plan.step for plan in simulation.sent_plans if plan.kind == "checkpoint"] == [step]
