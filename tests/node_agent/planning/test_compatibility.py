"""The choice of an engine, and refusals that name the node and what it lacks."""

import pytest
from tests.node_agent.support.machines import LINUX, LINUX_MLX, LINUX_TORCH, MAC, MAC_TORCH

from trainctl.node_agent.planning import compatibility
from trainctl.protocol.config.run_tables import GroupTable
from trainctl.protocol.errors import InvalidInputError


@pytest.mark.parametrize(
    ("wanted", "nodes", "engine"),
    [
        ("auto", (LINUX, LINUX_TORCH), "gloo"),
        ("auto", (LINUX, MAC), "ring"),
        ("auto", (MAC, MAC), "ring"),
        ("auto", (LINUX, LINUX_MLX), "ring"),
        ("ring", (LINUX, LINUX), "ring"),
        ("gloo", (LINUX, LINUX_TORCH), "gloo"),
        ("gloo", (MAC, MAC_TORCH), "gloo"),
    ],
)
def test_engine_chosen(wanted, nodes, engine):
    assert compatibility.choose(GroupTable(engine=wanted), dict(zip("ab", nodes, strict=True))) == engine


@pytest.mark.parametrize(
    ("wanted", "nodes", "words"),
    [
        ("gloo", (LINUX, LINUX_MLX), "gloo: b has no torch"),
        ("ring", (LINUX, LINUX_TORCH), "ring: b has no mlx"),
        ("gloo", (LINUX, MAC), "b is on Darwin and a on Linux"),
        ("auto", (LINUX_MLX, LINUX_TORCH), "gloo: a has no torch.*ring: b has no mlx"),
        ("auto", (MAC_TORCH, MAC), "gloo: a is not on Linux; ring: a has no mlx"),
    ],
)
def test_refusal_names_the_node_and_what_it_lacks(wanted, nodes, words):
    with pytest.raises(InvalidInputError, match=rf"group\.engine: .*{words}"):
        compatibility.choose(GroupTable(engine=wanted), dict(zip("ab", nodes, strict=True)))
