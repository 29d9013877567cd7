"""Policies on a run: off, advising or on, by a person's word, and over kills."""

import dataclasses
from typing import Any

import msgspec
import pytest
from tests.node_agent.support.policy_facts import full, starved
from tests.node_agent.support.simulation import Simulation, config, durable

from trainctl.node_agent.conductor import events as d
from trainctl.node_agent.conductor import views
from trainctl.node_agent.conductor.proposals import EFFECT_STEPS
from trainctl.node_agent.planning.durable import PolicyState
from trainctl.protocol import messages as m
from trainctl.protocol.config.policies import POLICIES
from trainctl.protocol.messages import events as e
from trainctl.protocol.messages import verbs


def timed(**tables: Any) -> Simulation:
    """Two ranks, one twice as fast, whose shares a measurement is to find."""
    made = Simulation(config(20, 12, group={"first_shares": "timed"}, **tables), durable(("a", "b"), 12))
    made.ranks[1].speed = 50.0
    return made


def shares(simulation: Simulation) -> dict[str, int]:
    return {of.node: of.share for of in simulation.conductor.durable.settings.live.values()}


def said(simulation: Simulation, by: str) -> list[str]:
    return [event.text for event in simulation.happened if event.by == f"auto:{by}"]


def modes(simulation: Simulation) -> dict[str, str]:
    view = views.run_view(simulation.conductor, 0.0, "", (), "a")
    return {policy.name: policy.mode for policy in view.policies}


@pytest.mark.parametrize(("mode", "shares_after"), [("on", (8, 4)), ("advise", (6, 6)), ("off", (6, 6))])
def test_a_policy_acts_advises_or_does_nothing_by_its_mode(mode: str, shares_after: tuple[int, int]) -> None:
    simulation = timed(policy={"first-shares": {"mode": mode}}).begin().run()
    assert tuple(shares(simulation).values()) == shares_after
    assert ("measure" in {plan.kind for plan in simulation.plans}) == (mode != "off")
    said_by_mode = {
        "on": ["rebalanced: a 6 → 8, b 6 → 4 (initial shares by measured samples per second: a 100/s, b 50/s)"],
        "advise": ["policy first-shares: advises rebalance a=8 b=4 (initial shares by measured samples"],
    }
    expected = said_by_mode.get(mode, [])
    found = said(simulation, "first-shares")
    assert len(found) == len(expected) and all(
        text.startswith(start) for text, start in zip(found, expected, strict=True)
    )
    assert mode != "on" or simulation.journal.changed_at == 0, "other policies wait for its effect too"


def test_a_rebalance_before_it_acts_has_it_advise_and_stands() -> None:
    simulation = timed()
    simulation.command("rebalance", shares={"a": 3, "b": 9})
    simulation.begin().run()
    change, advice = said(simulation, "first-shares")
    assert change == "policy first-shares: on → advise (anna sent rebalance)"
    assert "advises rebalance" in advice
    assert shares(simulation) == {"a": 3, "b": 9}
    assert modes(simulation)["first-shares"] == "advise"


def test_a_rebalance_after_it_has_acted_changes_no_mode() -> None:
    simulation = timed().begin().until_step(2)
    simulation.command("rebalance", shares={"a": 3, "b": 9})
    simulation.run()
    assert modes(simulation)["first-shares"] == "on"


@pytest.mark.parametrize(("mode", "micro", "count"), [("on", 2, 1), ("advise", 4, 1), ("off", 4, 0)])
def test_what_died_of_memory_comes_back_by_its_mode(mode: str, micro: int, count: int) -> None:
    simulation = starved(mode)
    assert simulation.conductor.durable.settings.ranks[1].micro_batch == micro
    assert len(said(simulation, "out-of-memory")) == count
    if mode == "advise":
        (text,) = said(simulation, "out-of-memory")
        assert text.startswith("policy out-of-memory: advises resize-batch micro=2 --node b (out of memory, the kernel")


def test_the_size_that_is_barred_is_the_one_that_died_though_it_has_been_halved_by_then() -> None:
    simulation = Simulation(config(200, 12), durable(("a", "b"), 12)).begin().until_step(3)
    simulation.command("pause")
    simulation.until(lambda: simulation.conductor.durable.mode == "paused")
    simulation.command("resume")
    simulation.until(lambda: simulation.conductor.durable.generation.n >= 2)
    simulation.starve(simulation.ranks[1])
    simulation.until(lambda: simulation.conductor.durable.settings.ranks[1].out == "lost")
    assert simulation.conductor.durable.settings.ranks[1].micro_batch == 2
    assert simulation.conductor.durable.policies["micro-batch"].memory["barred 1"] == 4


@pytest.mark.parametrize("mode", ["off", "advise"])
def test_a_size_that_is_run_again_each_step_is_advised_once_for_a_plan(mode: str) -> None:
    simulation = Simulation(config(200, 12, policy={"replays": {"mode": mode}}), durable(("a", "b"), 12)).begin()
    said_up = simulation.ranks[1].up
    for step in (2, 3, 4):
        simulation.until_step(step)
        simulation.until(lambda: any(isinstance(each, m.Report) and each.kind == "train" for each in said_up))
        at = next(n for n, each in enumerate(said_up) if isinstance(each, m.Report) and each.kind == "train")
        said_up[at] = msgspec.structs.replace(said_up[at], replays=1, micro_batch=1)
    simulation.run(100)
    why = "the rank ran out of memory and repeated a micro-batch in smaller pieces"
    advice = f"policy replays: advises resize-batch micro=1 --node b ({why})"
    assert said(simulation, "replays") == ([advice] if mode == "advise" else [])
    assert simulation.conductor.durable.settings.ranks[1].micro_batch == 4


def test_the_verb_changes_a_mode_at_once_and_says_what_it_was() -> None:
    simulation = timed()
    id = simulation.command("autopilot", name="first-shares", mode="off")
    end = simulation.ends[id]
    assert (end.state, end.step, end.made) == ("applied", 0, e.PolicyModeChanged("first-shares", "on", "off"))
    assert (end.before, end.after) == ("first-shares on", "first-shares off")
    assert modes(simulation)["first-shares"] == "off" and modes(simulation)["replays"] == "on"
    simulation.begin().run()
    assert not said(simulation, "first-shares")


def test_a_mode_outlives_the_agent_and_a_new_lead() -> None:
    simulation = timed().begin().until_step(2)
    simulation.command("autopilot", name="replays", mode="off")
    simulation.restart_agent()
    simulation.run(50)
    assert modes(simulation)["replays"] == "off"
    simulation.promote(simulation.ranks[0])
    simulation.run(50)
    assert modes(simulation)["replays"] == "off"


def applied(simulation: Simulation, by: str) -> list[int]:
    """The steps of a policy's commands."""
    sent = [id for id, command in simulation.sent.items() if command.by == f"auto:{by}"]
    return [simulation.ends[id].step for id in sent if id in simulation.ends and simulation.ends[id].state == "applied"]


def test_an_agent_restart_keeps_the_steps_between_two_changes() -> None:
    simulation = full().until_step(16)
    (first,) = applied(simulation, "micro-batch")
    assert first in range(11, 15)
    simulation.restart_agent()
    simulation.until_step(60)
    assert simulation.journal.changed_at == applied(simulation, "micro-batch")[-1]
    assert applied(simulation, "micro-batch")[1] >= first + EFFECT_STEPS


def test_evidence_of_an_earlier_generation_counts_no_more() -> None:
    simulation = full().until_step(8)
    simulation.break_group(simulation.ranks[0])
    formed = simulation.conductor.durable.generation
    simulation.until(lambda: simulation.conductor.durable.generation > formed)
    begun = simulation.conductor.progress.step
    simulation.until_step(begun + 20)
    assert applied(simulation, "micro-batch")[0] > begun + 10


def test_a_command_carries_its_reason_also_after_the_agent_was_killed() -> None:
    simulation = full()
    simulation.until(lambda: bool(simulation.proposed))
    (proposed,) = simulation.proposed
    simulation.proposed.clear()
    simulation.restart_agent()
    lost = d.Commanded(**dataclasses.asdict(proposed) | {"args": proposed.args, "reason": ""}, expires=1e9, again=True)
    simulation.sent[proposed.id] = lost
    simulation.feed(lost)
    simulation.until(lambda: proposed.id in simulation.ends)
    made = simulation.ends[proposed.id].made
    assert isinstance(made, e.MicroBatchChanged)
    assert made.cause == "mean peak memory over 10 steps: 95 % of the cap; target 90 %"


def test_a_command_that_is_lost_on_its_way_is_proposed_again() -> None:
    simulation = full()
    simulation.until(lambda: bool(simulation.proposed))
    simulation.proposed.clear()  # as on a full disk
    simulation.until_step(40)
    assert applied(simulation, "micro-batch")


def test_three_failed_commands_in_a_row_turn_a_policy_to_advise() -> None:
    simulation = full()
    for _ in range(3):
        simulation.until(lambda: bool(simulation.proposed))
        id = simulation.proposed[0].id
        late = dataclasses.asdict(simulation.proposed[0]) | {"args": simulation.proposed.pop(0).args}
        simulation.sent[id] = d.Commanded(**late, expires=simulation.now)
        simulation.feed(simulation.sent[id])
        simulation.tick(1.0)
        assert simulation.ends[id].state == "expired"
    (turned,) = [event for event in simulation.happened if isinstance(event.data, e.PolicyModeChanged)]
    assert turned.text.startswith("policy micro-batch: on → advise (3 commands in a row failed, the last one: ")
    simulation.until_step(simulation.conductor.progress.step + 30)
    assert not applied(simulation, "micro-batch")
    assert "advises resize-batch micro=3" in said(simulation, "micro-batch")[-1]


DECIDED: dict[str, dict[str, Any]] = {
    "rebalance": {"shares": {"a": 3, "b": 9}}, "resize-batch": {"micro": 3}, "set-lr": {"value": 1e-4},
    "rollback": {"step": 5}, "drain": {"node": "b"}, "admit": {"node": "b"},
}  # fmt: skip
"""Arguments that a person sends, by verb."""


@pytest.mark.parametrize(("name", "verb"), [(name, verb) for name, of in POLICIES.items() for verb in of.yields_to])
def test_a_person_who_decides_instead_turns_a_policy_to_advise(name: str, verb: str) -> None:
    held_out = {"evaluate": {"every_steps": 20}, "data": {"path": "/data", "held_out": 0.1}}
    tables = {"checkpoint": {"every_steps": 5}, "policy": {name: {"mode": "on"}}, **held_out}
    group = {"first_shares": "timed"} if name == "first-shares" else {}
    simulation = Simulation(config(60, 12, group=group, **tables), durable(("a", "b"), 12))
    if name != "first-shares":
        simulation.begin().until_step(8)
    if verb == "admit":  # of a drained node
        simulation.command("drain", node="b")
        simulation.until(lambda: simulation.conductor.durable.settings.ranks[1].out == "drained")
        simulation.command("autopilot", name=name, mode="on")
    simulation.command(verb, **DECIDED[verb])
    assert modes(simulation)[name] == "advise"
    assert simulation.journal.policies[name].mode == "advise"
    assert said(simulation, name)[-1:] == [f"policy {name}: on → advise (anna sent {verb})"]


def test_a_person_who_leaves_the_split_to_the_program_turns_no_policy_to_advise() -> None:
    simulation = Simulation(config(60, 12, policy={"rebalance": {"mode": "on"}}), durable(("a", "b"), 12))
    id = simulation.begin().until_step(12).command("rebalance", auto=True)
    simulation.run()
    assert simulation.ends[id].state == "applied"
    assert modes(simulation)["rebalance"] == "on"


def test_a_rollback_that_a_policy_sent_spends_its_quota_even_if_the_agent_is_killed_before_its_outcome() -> None:
    simulation = Simulation(config(60, 12, checkpoint={"every_steps": 5}), durable(("a", "b"), 12)).begin()
    state = simulation.until_step(8).conductor.shared
    state.keep(policies={"spike": PolicyState(sent=("id",), pending={"times": 1.0})})
    simulation.crash_after = 1  # the journal
    args = verbs.Rollback(step=5)
    simulation.feed(d.Commanded("id", "rollback", args, "auto:spike", None, None, 1e9))
    assert simulation.journal.rollback is not None
    assert simulation.journal.policies["spike"].memory == {"times": 1.0}


def test_three_steps_that_arent_finite_write_a_checkpoint_and_pause() -> None:
    simulation = Simulation(config(60, 12), durable(("a", "b"), 12)).begin().until_step(5)
    for rank in simulation.ranks.values():
        rank.says = {"skipped": "nan"}
    simulation.run()
    assert simulation.conductor.state == "paused"
    assert 8 <= simulation.conductor.progress.step <= 10
    texts = said(simulation, "non-finite")
    assert texts[0].startswith("policy non-finite: sends checkpoint (3 steps in a row were not finite, up to step ")
    assert texts[1].startswith("policy non-finite: sends pause (3 steps in a row were not finite")
    assert "checkpoint" in {plan.kind for plan in simulation.sent_plans}
    for rank in simulation.ranks.values():
        rank.says = {}
    simulation.finish()
    assert len(said(simulation, "non-finite")) == 2


def test_caches_are_cleared_by_the_ranks_of_a_node_or_by_all() -> None:
    simulation = Simulation(config(30, 12), durable(("a", "b"), 12)).begin().until_step(3)
    ids = [simulation.command("defragment", node="b")]
    simulation.until(lambda: ids[0] in simulation.ends)
    ids.append(simulation.command("defragment"))
    simulation.until(lambda: ids[1] in simulation.ends)
    made = [plan for plan in simulation.sent_plans if plan.kind == "defragment"]
    assert [[work.rank for work in plan.work] for plan in made] == [[1], [0, 1]]
    assert [simulation.ends[id].state for id in ids] == ["applied", "applied"]
    end = simulation.ends[simulation.command("defragment", node="c")]
    assert (end.state, end.field) == ("rejected", "node")


def evaluated(steps: int = 60, **policies: dict[str, Any]) -> Simulation:
    """A run whose held-out loss never improves, evaluated every second step."""
    tables = {"evaluate": {"every_steps": 2}, "data": {"path": "/data", "held_out": 0.1}, "policy": policies}
    return Simulation(config(steps, 12, **tables), durable(("a", "b"), 12)).begin()


def rates(simulation: Simulation) -> list[float]:
    """The learning rate of each step in units of the first."""
    return [commit.learning_rate / 1e-3 for commit in simulation.commits]


def test_a_plateau_lowers_the_rate_of_the_very_next_step_for_all_ranks() -> None:
    simulation = evaluated(30, plateau={"mode": "on"}).run()
    assert rates(simulation) == [1.0] * 12 + [0.5] * 14 + [0.25] * 4
    assert said(simulation, "plateau")[0] == (
        "learning rate: 0.001 → 5e-4 scaled (no improvement over 2 of step 2 in 5 evaluations)"
    )


def test_what_was_counted_outlives_the_agent_and_its_node() -> None:
    simulation = evaluated(30, plateau={"mode": "on"}).until_step(9)
    simulation.restart_agent()
    simulation.until_step(11)
    simulation.promote(simulation.ranks[0])
    simulation.finish()
    assert rates(simulation)[:20] == [1.0] * 12 + [0.5] * 8


def test_an_early_stop_ends_the_run_with_a_checkpoint() -> None:
    policies = {"plateau": {"mode": "on"}, "early-stop": {"mode": "on", "patience": 8}}
    simulation = evaluated(**policies).run()
    assert simulation.ended is not None and simulation.ended.state == "stopped"
    assert 18 <= len(simulation.commits) <= 20
    assert "checkpoint" in {plan.kind for plan in simulation.sent_plans}
    assert said(simulation, "early-stop")[0].startswith(
        "policy early-stop: sends stop (no improvement over 2 of step 2"
    )


def test_modes_that_would_end_a_run_before_its_rate_is_lowered_are_refused() -> None:
    simulation = evaluated(**{"early-stop": {"mode": "on", "patience": 3}}).until_step(2)
    end = simulation.ends[simulation.command("autopilot", name="plateau", mode="on")]
    assert (end.state, end.field) == ("rejected", "mode")
    assert end.reason.startswith("policy.early-stop.patience: 3 must be above policy.plateau.patience = 5")
    assert modes(simulation)["plateau"] == "off"
