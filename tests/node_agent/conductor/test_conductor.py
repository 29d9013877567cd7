"""The conductor against simulated ranks: commands take effect at one step, a fence loses nothing, ends are reported."""

import msgspec
import pytest
from tests.node_agent.support.simulation import Simulation, check_ledger, config, durable

from trainctl.node_agent.autopilot.policy import bar_size
from trainctl.node_agent.conductor import events as d
from trainctl.node_agent.conductor import views
from trainctl.node_agent.planning.durable import PolicyState
from trainctl.protocol import messages as m
from trainctl.protocol.calibration.profile import Pass, ProfileSummary
from trainctl.protocol.config.run_tables import ChatMessage


def test_commands_take_effect_at_the_step_after_the_one_in_progress():
    simulation = Simulation(config()).begin().until_step(3)
    planned = simulation.plans[-1].step
    first = simulation.command("resize-batch", micro=3)
    second = simulation.command("resize-batch", micro=2)
    rate = simulation.command("set-lr", value=0.5, schedule="set")
    assert first not in simulation.ends
    simulation.run()
    end = simulation.ends[second]
    assert (end.state, end.before, end.after, end.step) == ("applied", "3", "2", planned + 1)
    assert [simulation.ends[id].plan_version for id in (first, second, rate)] == [2, 3, 4]
    plans = {plan.step: plan for plan in simulation.plans if plan.kind == "train"}
    assert {step for step, plan in plans.items() if plan.work[0].micro_batch == 2} == set(range(end.step, 21))
    assert {step for step, plan in plans.items() if plan.learning_rate == 0.5} == set(range(end.step, 21))
    assert (simulation.ended.state, len(simulation.commits)) == ("finished", 20)
    check_ledger(simulation)


def test_a_plan_is_issued_only_when_the_step_before_is_about_to_end():
    simulation = Simulation(config(steps=5)).begin()
    simulation.until(lambda: simulation.ranks[0].accumulated)
    assert [plan.step for plan in simulation.plans] == [1]
    simulation.talk()
    assert [plan.step for plan in simulation.plans] == [1, 2]


@pytest.mark.parametrize(
    ("verb", "args", "field"),
    [
        ("resize-batch", {"micro": 9}, "micro"),
        ("resize-batch", {"micro": 2, "node": "zzz"}, "node"),
        ("set-global-batch", {"value": 1}, "value"),
        ("resume", {}, "verb"),
    ],
)
def test_refusals_name_the_field(verb, args, field):
    simulation = Simulation(config(), durable(("a", "b"))).begin().until_step(2)
    id = simulation.command(verb, **args)
    assert (simulation.ends[id].state, simulation.ends[id].field) == ("rejected", field)
    check_ledger(simulation.run())


def test_if_plan_refuses_what_was_computed_against_an_older_plan():
    simulation = Simulation(config()).begin().until_step(1)
    version = simulation.conductor.durable.settings.plan_version
    first = simulation.command("resize-batch", if_plan=version, micro=2)
    second = simulation.command("resize-batch", if_plan=version, micro=3)
    assert simulation.ends[second].field == "if_plan"
    simulation.run()
    assert simulation.ends[first].state == "applied"


def test_paused_commands_apply_at_once_and_the_resumed_step_has_them():
    simulation = Simulation(config()).begin().until_step(4)
    pause = simulation.command("pause")
    simulation.run()
    assert simulation.conductor.state == "paused"
    stood = simulation.ends[pause].step
    assert stood == simulation.conductor.progress.step
    edit = simulation.command("resize-batch", micro=2)
    assert (simulation.ends[edit].state, simulation.ends[edit].step) == ("applied", stood + 1)
    evaluate = simulation.command("evaluate")
    smaller = simulation.command("resize-batch", micro=1, if_plan=simulation.ends[edit].plan_version)
    simulation.run()
    assert simulation.ends[evaluate].state == simulation.ends[smaller].state == "applied"
    generation = simulation.conductor.durable.generation
    resume = simulation.command("resume")
    simulation.run()
    assert simulation.ends[resume].step == stood + 1
    resumed = [plan for plan in simulation.plans if plan.step == stood + 1 and plan.kind == "train"][-1]
    assert resumed.work[0].micro_batch == 1
    assert resumed.generation > generation
    assert edit in resumed.commands
    assert simulation.ended.state == "finished"
    check_ledger(simulation)


def test_set_global_batch_keeps_the_cursor_whole_and_scales_when_told():
    simulation = Simulation(config()).begin().until_step(3)
    id = simulation.command("set-global-batch", value=16, schedule="scale")
    simulation.run()
    step = simulation.ends[id].step
    rates = {plan.step: plan.learning_rate for plan in simulation.plans if plan.kind == "train"}
    assert rates[step] == pytest.approx(2 * rates[step - 1])
    check_ledger(simulation)


@pytest.mark.parametrize("paused", [False, True])
def test_stop_checkpoints_then_leaves(paused):
    simulation = Simulation(config()).begin().until_step(5)
    if paused:
        simulation.command("pause")
        simulation.run()
    id = simulation.command("stop")
    simulation.run()
    assert simulation.ended.state == "stopped"
    assert simulation.plans[-1].kind == "checkpoint"
    assert (simulation.ends[id].state, simulation.ends[id].step) == ("applied", simulation.plans[-1].step)
    check_ledger(simulation)


def test_periodic_evaluation_and_checkpoint_are_plans_of_their_own():
    tables = {"checkpoint": {"every_steps": 4, "at_end": True}, "evaluate": {"every_steps": 5}}
    simulation = Simulation(config(steps=10, **tables)).begin().run()
    kinds = [(plan.kind, plan.step) for plan in simulation.plans if plan.kind != "train"]
    assert kinds == [
        ("checkpoint", 4), ("evaluate", 5), ("checkpoint", 8), ("evaluate", 10), ("checkpoint", 10),
    ]  # fmt: skip
    check_ledger(simulation)


def test_an_evaluation_asked_for_before_it_is_known_that_nothing_is_held_out_fails_with_the_reason():
    """A fraction that is too small for the data leaves none."""
    simulation = Simulation(config(6, data={"path": "/data", "held_out": 0.01}))
    simulation.ranks[0].held_out = 0
    evaluate = simulation.command("evaluate")
    assert evaluate not in simulation.ends
    simulation.begin().run()
    assert simulation.ends[evaluate].state == "failed"
    assert simulation.ends[evaluate].reason.startswith(
        "there are no held-out samples: data.held_out = 0.01 comes to none"
    )
    assert (simulation.ended.state, simulation.evaluated) == ("finished", [])


def test_what_later_results_are_compared_with_comes_once_before_the_first_step_of_a_new_run():
    tables = {"evaluate": {"every_steps": 5, "at_start": True}, "samples": {"prompts": ["one"], "at_start": True}}
    simulation = Simulation(config(steps=10, **tables), durable(("a", "b"))).begin().run()
    kinds = [(plan.kind, plan.step) for plan in simulation.plans if plan.kind not in ("train", "probe")]
    assert sorted(kinds) == [("evaluate", 0), ("evaluate", 5), ("evaluate", 10), ("sample", 0)]
    assert [step for _, step in kinds] == [0, 0, 5, 10]
    check_ledger(simulation)


def test_samples_are_asked_of_one_rank_by_schedule_and_by_command_each_with_its_own_plan():
    tables = {"samples": {"prompts": ["one", "two"], "every_steps": 4, "max_tokens": 9, "seed": 3}}
    simulation = Simulation(config(steps=10, **tables), durable(("a", "b"))).begin().until_step(5)
    ids = [simulation.command("sample", prompt=text, chat=chat) for text, chat in (("x", False), ("y", True))]
    on_b, nowhere = (
        simulation.command("sample", temperature=0.5, use_generation_config=True, node=node) for node in "bc"
    )
    simulation.run()
    made = [plan for plan in simulation.plans if plan.kind == "sample"]
    assert [plan.step for plan in made if not plan.commands] == [4, 8, 10]
    assert all(len(plan.work) == 1 for plan in made)
    by_id = {plan.commands[0]: plan for plan in made if plan.commands}
    assert [by_id[id].sampling.prompts for id in ids] == [("x",), ((ChatMessage("user", "y"),),)]
    assert by_id[on_b].work[0].rank == 1
    assert by_id[on_b].sampling == m.Sampling(("one", "two"), 9, 0.5, 1.0, 3, use_generation_config=True)
    assert [simulation.ends[id].after for id in (*ids, on_b)] == ["yes", "yes", "one\nyes\n\ntwo\nyes"]
    assert (simulation.ends[nowhere].state, simulation.ends[nowhere].field) == ("rejected", "node")
    check_ledger(simulation)


def test_a_sample_is_not_repeated_by_the_next_generation():
    simulation = Simulation(config(), durable(("a", "b"))).begin().until_step(3)
    id = simulation.command("sample", prompt="x")
    simulation.until(lambda: any(plan.kind == "sample" for plan in simulation.sent_plans))
    simulation.kill(simulation.ranks[0])
    simulation.finish()
    assert simulation.ends[id].state == "failed"
    assert sum(plan.kind == "sample" for plan in simulation.sent_plans) == 1


def test_a_failed_trainer_fails_the_run_with_its_own_words():
    simulation = Simulation(config(), durable(("a", "b")))
    simulation.ranks[0].load()
    waiting = simulation.command("checkpoint")
    simulation.feed(m.TrainerFailed(run="sim", rank=1, reason="no such device: cuda:7"))
    simulation.run()
    assert simulation.ended.state == "failed"
    assert "cuda:7" in simulation.ended.reason
    assert simulation.ends[waiting].state == "failed"


def test_a_restarted_agent_finishes_the_same_batch():
    simulation = Simulation(config()).begin().until_step(3)
    simulation.until(lambda: simulation.ranks[0].accumulated)
    step = simulation.conductor.progress.step + 1
    simulation.restart_agent()
    simulation.talk().run()
    finishing = [plan for plan in simulation.plans if plan.finishes is not None]
    assert [plan.step for plan in finishing] == [step]
    assert finishing[0].work[0].ranges == ()
    assert simulation.ended.state == "finished"
    check_ledger(simulation)


def test_a_record_that_lost_every_step_has_the_run_go_back_to_a_checkpoint_of_its_trainers() -> None:
    simulation = Simulation(config(), durable(("a", "b"))).begin().until_step(4)
    generation = simulation.journal.generation
    for kept in (simulation.plans, simulation.commits, simulation.parts):
        kept.clear()
    simulation.journal = msgspec.structs.replace(durable(("a", "b")), generation=generation)
    simulation.restart_agent()
    simulation.run()
    assert simulation.ended is not None and "the record ends at step 0" in simulation.ended.reason
    assert simulation.conductor.goes_back


def test_a_stop_whose_checkpoint_fails_pauses_instead():
    simulation = Simulation(config()).begin().until_step(4)
    simulation.ranks[0].disk_full = True
    stop = simulation.command("stop")
    simulation.run()
    assert simulation.ends[stop].state == "failed"
    assert "paused instead" in simulation.ends[stop].reason
    assert simulation.conductor.state == "paused"
    without = simulation.command("stop", checkpoint=False)
    simulation.run()
    assert simulation.ends[without].state == "applied"
    assert simulation.ended.state == "stopped"


def test_a_stop_after_one_whose_checkpoint_failed_writes_it():
    simulation = Simulation(config()).begin().until_step(4)
    simulation.ranks[0].disk_full = True
    first = simulation.command("stop")
    simulation.run()
    simulation.ranks[0].disk_full = False
    second = simulation.command("stop")
    simulation.run()
    assert [simulation.ends[id].state for id in (first, second)] == ["failed", "applied"]
    assert simulation.ended.state == "stopped"
    assert simulation.conductor.durable.written == simulation.conductor.progress.step


def test_a_stop_without_a_checkpoint_goes_on_if_one_that_is_written_fails():
    simulation = Simulation(config()).begin().until_step(4)
    simulation.ranks[0].disk_full = True
    written, stop = simulation.command("checkpoint"), simulation.command("stop", checkpoint=False)
    simulation.run()
    assert [simulation.ends[id].state for id in (written, stop)] == ["failed", "applied"]
    assert simulation.ended.state == "stopped"


def paused_at_its_end() -> Simulation:
    simulation = Simulation(config(checkpoint={"at_end": True})).begin()
    simulation.ranks[0].disk_full = True
    simulation.run()
    assert simulation.conductor.state == "paused"
    assert simulation.conductor.progress.step == simulation.conductor.config.run.steps
    return simulation


def test_a_run_whose_last_checkpoint_fails_pauses_at_its_end_until_it_is_written() -> None:
    simulation = paused_at_its_end()
    simulation.now += 10
    simulation.feed(d.Ticked())
    assert simulation.conductor.state == "paused"
    simulation.ranks[0].disk_full = False
    resume = simulation.command("resume")
    simulation.run()
    assert simulation.ends[resume].state == "applied"
    assert simulation.ended.state == "finished"
    assert simulation.conductor.durable.written == simulation.conductor.progress.step


def test_a_run_that_is_paused_at_its_end_can_be_stopped_without_a_checkpoint() -> None:
    simulation = paused_at_its_end()
    stop = simulation.command("stop", checkpoint=False)
    simulation.run()
    assert (simulation.ends[stop].state, simulation.ended.state) == ("applied", "stopped")


def test_a_run_that_is_paused_at_its_end_stays_so_for_the_next_agent() -> None:
    simulation = paused_at_its_end()
    simulation.restart_agent()
    simulation.talk().run()
    assert simulation.conductor.state == "paused"
    refused = simulation.command("rollback", step=simulation.conductor.progress.step)
    assert simulation.ends[refused].state == "rejected"


def test_an_expired_edit_takes_no_other_command_with_it():
    simulation = Simulation(config()).begin().until_step(3)
    version = simulation.conductor.durable.settings.plan_version
    larger = simulation.command("set-global-batch", ttl=1.0, value=64)
    upon_it = simulation.command("resize-batch", micro=32)
    simulation.now += 2.0
    note, pause = simulation.command("note", text="still here"), simulation.command("pause", ttl=1.0)
    simulation.now += 2.0
    simulation.feed(d.Ticked())
    simulation.run()
    states = [simulation.ends[id].state for id in (larger, upon_it, note, pause)]
    assert states == ["expired", "failed", "applied", "expired"]
    assert simulation.ended.state == "finished"
    assert simulation.conductor.durable.settings.plan_version == version
    assert {plan.work[0].micro_batch for plan in simulation.plans} == {4}


@pytest.mark.parametrize(
    ("verb", "args"), [("resize-batch", {"micro": 4}), ("set-lr", {"value": 1e-3, "schedule": "scale"})]
)
def test_what_changes_nothing_is_applied_without_a_new_plan_version(verb, args):
    """So it refuses nobody's --if-plan."""
    simulation = Simulation(config()).begin().until_step(1)
    for one, values in (("resize-batch", {"micro": 4}), ("set-lr", {"value": 1e-3, "schedule": "set"})):
        simulation.command(one, **values)
    simulation.until_step(4)
    settings = simulation.conductor.durable.settings
    id = simulation.command(verb, **args)
    other = simulation.command("pause", if_plan=settings.plan_version)
    simulation.until(lambda: {id, other} <= set(simulation.ends))
    end = simulation.ends[id]
    assert (end.state, end.before) == ("applied", end.after)
    assert end.plan_version == settings.plan_version
    assert simulation.ends[other].state == "applied"
    assert simulation.conductor.durable.settings == settings


def test_a_batch_fenced_twice_is_finished_whole():
    """A finishing plan holds only the rest: a second fence deals out from the whole batch."""
    simulation = Simulation(config(batch=12), durable(("a", "b"), batch=12)).begin().until_step(2)
    simulation.command("resize-batch", micro=1)
    simulation.until_step(5)
    step = simulation.conductor.progress.step + 1
    simulation.until(lambda: all(rank.last_step == step - 1 for rank in simulation.ranks.values()))
    for held in (2, 4):
        simulation.until(lambda held=held: sum(piece.count for piece in simulation.ranks[0].held) >= held)
        simulation.feed(d.RankReturned(1))
        simulation.talk()
    simulation.run()
    finishing = [plan for plan in simulation.sent_plans if plan.finishes is not None]
    assert [plan.step for plan in finishing] == [step, step]
    assert finishing[0].finishes == finishing[1].finishes
    check_ledger(simulation)


def test_a_calibrated_rank_s_curve_is_shown_and_rebalances_before_the_first_step() -> None:
    """Rank b takes three times as long for each pass."""
    simulation = Simulation(config(), durable(("a", "b")))
    for rank, times in ((0, 1.0), (1, 3.0)):
        passes = tuple(Pass(micro, times * (0.001 + 0.01 * micro)) for micro in (1, 2, 4, 8))
        simulation.ranks[rank].profile = ProfileSummary(created_at=1.0, passes=passes)
    id = simulation.begin().until(lambda: simulation.conductor.stage == "formed").command("rebalance", auto=True)
    simulation.until_step(2)
    assert simulation.ends[id].state == "applied"
    assert [setting.share for setting in simulation.conductor.durable.settings.live.values()] == [6, 2]
    view = views.rank_view(simulation.conductor, 1, None, "", None, 0.0)
    assert dict(view.passes)[8] == pytest.approx(0.243)


def test_a_micro_batch_left_open_is_chosen_with_the_share_as_bars_allow() -> None:
    """Each doubling of the micro-batch is faster, and 8 has run out of memory."""
    kept = durable(("a", "b"), 32)
    free = {"micro_batch": 2, "auto_micro": True}
    ranks = {rank: msgspec.structs.replace(of, **free) for rank, of in kept.settings.ranks.items()}
    settings = msgspec.structs.replace(kept.settings, ranks=ranks)
    bar = {"micro-batch": PolicyState(memory=bar_size(1, 8, 500))}
    simulation = Simulation(config(batch=32), msgspec.structs.replace(kept, settings=settings, policies=bar))
    passes = tuple(Pass(micro, 0.05 + 0.01 * micro) for micro in (1, 2, 4, 8))
    for rank in simulation.ranks.values():
        rank.profile = ProfileSummary(created_at=1.0, passes=passes)
    simulation.begin().until(lambda: simulation.conductor.stage == "formed").command("rebalance", auto=True)
    simulation.until_step(2)
    made = simulation.conductor.durable.settings.ranks
    assert made[0].micro_batch == 8
    assert 4 < made[1].micro_batch < 8


def test_a_run_that_was_told_to_leave_when_the_agent_was_killed_is_finished_not_failed():
    simulation = Simulation(config(steps=5)).begin()
    while not simulation.ranks[0].gone:
        simulation.stride()
    simulation.restart_agent()
    simulation.run()
    assert simulation.ended.state == "finished"
