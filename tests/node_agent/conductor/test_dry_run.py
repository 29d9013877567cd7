"""Dry runs: they say what the command then does, refuse what it is refused for, and change nothing."""

from typing import Any

import msgspec
import pytest
from tests.node_agent.support.simulation import Simulation, config, durable

from trainctl.node_agent.conductor import events as conductor_events
from trainctl.node_agent.conductor.views import dry_run
from trainctl.protocol import messages as m
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import verbs
from trainctl.protocol.messages.event_prose import result

COMMANDS: list[tuple[str, dict[str, Any], str | None]] = [
    ("resize-batch", {"micro": 2}, "a"),
    ("resize-batch", {"micro": 100}, "a"),
    ("resize-batch", {"micro": 2}, "nobody"),
    ("set-global-batch", {"value": 24, "schedule": "scale"}, None),
    ("set-global-batch", {"value": 1}, None),
    ("set-lr", {"value": 5e-4}, None),
    ("set-lr", {"value": 99.0}, None),
    ("rebalance", {"shares": {"a": 9, "b": 2, "c": 1}}, None),
    ("rebalance", {"shares": {"a": 9, "b": 9, "c": 9}}, None),
    ("drain", {}, "b"),
    ("admit", {}, "b"),
    ("evaluate", {}, None),
    ("checkpoint", {}, None),
    ("sample", {}, None),
    ("profile", {"steps": 3}, None),
    ("profile", {"steps": 16}, None),
    ("pause", {}, None),
    ("resume", {}, None),
    ("rollback", {"steps": 3}, None),
    ("stop", {}, None),
    ("autopilot", {"name": "drain", "mode": "on"}, None),
    ("note", {"text": "hello"}, None),
]


def started(seed: int = 1) -> Simulation:
    run = config(30, 12, policy={"rebalance": {"mode": "on"}})
    return Simulation(run, durable(("a", "b", "c"), 12), seed).begin()


def asked(simulation: Simulation, verb: str, args: dict[str, Any], node: str | None = None, **fields: Any) -> m.DryRun:
    request = m.DryRunRequest(rid="r", verb=verb, args=args, node=node, **fields)
    return dry_run(simulation.conductor, request, simulation.now)


def commanded(
    simulation: Simulation, verb: str, args: dict[str, Any], node: str | None
) -> conductor_events.CommandEnded:
    """Send the command, and return how it ended."""
    command = conductor_events.Commanded("real", verb, verbs.check(verb, args, node), "anna", node, None, float("inf"))
    simulation.sent["real"] = command
    simulation.feed(command)
    simulation.until(lambda: "real" in simulation.ends or simulation.ended is not None)
    return simulation.ends["real"]


@pytest.mark.parametrize("step", [0, 10, 28])
@pytest.mark.parametrize(("verb", "args", "node"), COMMANDS)
def test_it_says_what_the_command_then_does(verb: str, args: dict[str, Any], node: str | None, step: int) -> None:
    simulation = started().until_step(step)
    said = asked(simulation, verb, args, node)
    ended = commanded(simulation, verb, args, node)
    if ended.state != "applied":
        assert (said.refused, said.field) == (ended.reason, ended.field)
        return
    assert said.refused == ""
    if isinstance(verbs.check(verb, args, node), verbs.EditArgs):
        assert ended.made is not None and (said.before, said.after) == result(ended.made)
        assert said.step == ended.step
        assert said.ranks or verb == "set-lr"


def test_asking_changes_nothing_of_what_the_run_does() -> None:
    quiet, questioned = started(), started()
    for simulation in (quiet, questioned):
        for step in range(1, 30):
            simulation.until_step(step)
            for verb, args, node in COMMANDS if simulation is questioned else ():
                asked(simulation, verb, args, node)
    assert questioned.conductor.durable == quiet.conductor.durable
    assert [event.text for event in questioned.happened] == [event.text for event in quiet.happened]


def test_it_predicts_each_rank_and_names_the_policies_that_yield() -> None:
    simulation = started().until_step(12)
    said = asked(simulation, "rebalance", {"shares": {"a": 8, "b": 3, "c": 1}})
    assert [(one.node, one.share_before, one.share) for one in said.ranks] == [("a", 4, 8), ("b", 4, 3), ("c", 4, 1)]
    assert said.step_seconds is not None and said.step_seconds_before is not None
    assert said.step_seconds > said.step_seconds_before, "all are as fast as each other"
    assert said.advising == ("rebalance",)
    assert asked(simulation, "rebalance", {"auto": True}).advising == ()


def test_it_stands_on_edits_that_wait_and_on_the_plan_that_was_asked_for() -> None:
    simulation = started().until_step(5)
    first = conductor_events.Commanded(
        "one", "set-global-batch", verbs.SetGlobalBatch(24), "", None, None, float("inf")
    )
    simulation.sent["one"] = first
    simulation.feed(first)
    assert asked(simulation, "resize-batch", {"micro": 7}, "a").refused == "", "its share has grown to 8"
    version = simulation.conductor.durable.settings.plan_version
    stale = asked(simulation, "pause", {}, if_plan=version - 1)
    assert stale.field == "if_plan" and stale.refused.startswith("the plan has changed")


def test_arguments_that_no_run_takes_are_refused() -> None:
    simulation = started().until_step(2)
    with pytest.raises(InvalidInputError):
        asked(simulation, "resize-batch", {"micro": "many"})
    assert msgspec.structs.asdict(asked(simulation, "stop", {}))["refused"] == ""
