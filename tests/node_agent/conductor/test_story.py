"""Why a rank left, from the events that its conductor makes, without those about others."""

import pytest
from tests.node_agent.support.simulation import Simulation, config, durable

from trainctl.protocol.analysis import story
from trainctl.protocol.errors import InvalidInputError

NODES = {0: "a", 1: "b", 2: "c"}


def texts(told: story.Story) -> list[str]:
    return [event.text for event in told.events]


def test_a_ranks_story_is_how_it_left_and_came_back() -> None:
    simulation = Simulation(config(40, 12), durable(("a", "b", "c"), 12)).begin().until_step(3)
    simulation.kill(simulation.ranks[2])
    simulation.until(lambda: 2 not in simulation.conductor.durable.members)
    simulation.tick(2.0)
    simulation.until(lambda: 2 in simulation.conductor.durable.members)
    simulation.command("rebalance", shares={"a": 5, "b": 3})
    simulation.until_step(20)
    told = texts(story.tell(simulation.happened, "rank:2", NODES))
    left = next(number for number, text in enumerate(told) if "was ended by signal 9" in text)
    back = next(number for number, text in enumerate(told) if "restarts" in text)
    assert left < back < len(told) - 1, told
    others = texts(story.tell(simulation.happened, "rank:0", NODES))
    assert not any("restarts" in text for text in others)


def test_a_steps_story_is_what_happened_at_it() -> None:
    simulation = Simulation(config(12, 12, checkpoint={"every_steps": 5}), durable(("a", "b"), 12)).begin()
    simulation.until_step(8)
    told = story.tell(simulation.happened, "step:5", {0: "a", 1: "b"})
    assert told.steps == (5,)
    assert {event.step for event in told.events} == {5}


@pytest.mark.parametrize(
    ("about", "problem"), [("rank:7", "no rank 7"), ("abc", "nothing is recorded about a command abc")]
)
def test_what_no_event_is_about_is_refused(about: str, problem: str) -> None:
    with pytest.raises(InvalidInputError, match=problem):
        story.tell((), about, NODES)
