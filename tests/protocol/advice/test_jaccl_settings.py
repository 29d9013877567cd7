"""The device matrix and the coordinator of MLX's engine jaccl, from the networks of Thunderbolt cables."""

import json

import pytest

from trainctl.protocol.advice.group_links import JacclNode, jaccl_settings
from trainctl.protocol.errors import InvalidInputError

Cable = tuple[str, str, str, str]  # node, interface, node, interface
MESH: tuple[Cable, ...] = (
    ("a", "en5", "b", "en5"), ("a", "en4", "c", "en4"), ("a", "en3", "d", "en3"),
    ("b", "en3", "c", "en3"), ("b", "en4", "d", "en4"), ("c", "en5", "d", "en5"),
)  # fmt: skip


def group(*cables: Cable, names: str = "abcd", interface: str = "") -> list[JacclNode]:
    """Macs in one LAN and with these cables, whose networks MLX's script would set up."""
    found = {
        name: {"lo0": ["127.0.0.1/8"], "bridge0": ["169.254.1.2/16"], "en0": [f"10.0.7.{ord(name)}/24"]}
        for name in names
    }
    for number, (one, left, other, right) in enumerate(cables):
        found[one].setdefault(left, []).append(f"192.168.0.{4 * number + 1}/30")
        found[other].setdefault(right, []).append(f"192.168.0.{4 * number + 2}/30")
    return [JacclNode(name, interface, found[name]) for name in names]


def test_the_matrix_of_mlx_documentation_and_that_of_a_ring() -> None:
    """Four Macs, fully connected: the file that MLX's page on distributed communication shows."""
    settings = jaccl_settings(group(*MESH))
    assert json.loads(settings.devices_json()) == [
        [None, "rdma_en5", "rdma_en4", "rdma_en3"],
        ["rdma_en5", None, "rdma_en3", "rdma_en4"],
        ["rdma_en4", "rdma_en3", None, "rdma_en5"],
        ["rdma_en3", "rdma_en4", "rdma_en5", None],
    ]
    assert (settings.topology, settings.coordinator) == ("mesh", "10.0.7.97:32323")
    assert jaccl_settings(group(*MESH, interface="en5"), port=5000).coordinator == "192.168.0.1:5000"
    ring = [cable for cable in MESH if cable[:3:2] != ("a", "c")]  # b and d are joined, but no neighbours
    settings = jaccl_settings(group(*ring))
    assert settings.topology == "ring"
    assert json.loads(settings.devices_json())[1] == ["rdma_en5", None, "rdma_en3", None]
    # Of several cables, the k-th name of a pair is the same cable at both ends.
    twice = (("a", "en5", "b", "en2"), ("a", "en4", "b", "en3"))
    settings = jaccl_settings(group(*twice, names="ab"))
    assert json.loads(settings.devices_json()) == [[None, ["rdma_en5", "rdma_en4"]], [["rdma_en2", "rdma_en3"], None]]
    uneven = group(*twice, ("a", "en1", "c", "en1"), ("b", "en1", "c", "en2"), names="abc")
    assert json.loads(jaccl_settings(uneven).devices_json())[0] == [None, "rdma_en5", "rdma_en1"]


def test_what_is_missing_is_named() -> None:
    for nodes, says in (
        (group(*MESH[:3]), "no Thunderbolt network of two addresses joins b and c, b and d, c and d"),
        (group(names="ab"), "no Thunderbolt network of two addresses joins a and b"),  # a LAN is no cable
        (group(names="a"), "one node has no other to be joined to"),
        (group(*MESH, interface="en9"), "a, which has rank 0, has no IPv4 address on en9; all ranks must reach one"),
    ):
        with pytest.raises(InvalidInputError, match=says):
            jaccl_settings(nodes)
