"""A group that continues a checkpoint on another setup says so, once; the same setup is no event."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from tests.node_agent.support.simulation import Simulation, config, durable

from trainctl.node_agent.planning.compatibility import RankSetup, Resumed
from trainctl.protocol import messages as m
from trainctl.protocol.messages import events as e

STEP = 20


def each(setups: Mapping[int, RankSetup], **changes: Any) -> dict[int, RankSetup]:
    return {rank: msgspec.structs.replace(setup, **changes) for rank, setup in setups.items()}


def elsewhere(simulation: Simulation) -> list[e.SetupChanged]:
    return [event.data for event in simulation.happened if isinstance(event.data, e.SetupChanged)]


COMPUTE = m.Compute("float32", weights="float32")


@pytest.mark.parametrize(("before", "changes"), [
    (lambda setups: setups, ()),
    (lambda setups: each(setups, backend="mlx"), ("a, b: torch instead of mlx",)),
    (lambda setups: {0: setups[0]}, ("the ranks are those of a, b instead of a",)),
])  # fmt: skip
def test_a_resumed_group_says_once_what_is_other_than_it_was(before, changes):
    first = Simulation(config(30, 12), durable(("a", "b"), 12)).begin().until_step(2)
    setups = first.conductor.durable.setups
    assert {rank: setup.node for rank, setup in setups.items()} == {0: "a", 1: "b"}
    assert not elsewhere(first)
    then = before(each(setups, compute=COMPUTE))
    kept = msgspec.structs.replace(durable(("a", "b"), 12), resumed=Resumed(STEP, then))
    again = Simulation(config(30, 12), kept)
    for rank in again.ranks.values():
        rank.compute = COMPUTE
    again.begin().until_step(2)
    again.kill(again.ranks[1])  # the group forms again
    again.until_step(12)
    assert [(made.step, made.changes) for made in elsewhere(again)] == ([(STEP, changes)] if changes else [])
    assert again.conductor.durable.resumed is None
