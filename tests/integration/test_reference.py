"""A reference's log-probabilities on a cluster: three ranks on two libraries compute them together, and once."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.integration.conftest import wait_for_end
from tests.integration.support.clusters import NODES, Cluster, on
from tests.trainer.support.chat_model import make_chat_model, write_rows
from tests.trainer.support.preferences import preferences

PAIRS = 120
_COMPUTED = re.compile(r"reference: computed ([\d,]+) of ([\d,]+) pairs here")


@pytest.fixture
def config(run_config: Callable[..., dict[str, Any]], tmp_path: Path) -> dict[str, Any]:
    """All weights, by preferences, on torch and MLX; held-out pairs have a file of their own."""
    held_out = write_rows(tmp_path / "held-out.jsonl", preferences(9))
    data = {"path": str(write_rows(tmp_path / "pairs.jsonl", preferences(PAIRS))), "held_out_path": str(held_out)}
    return run_config(
        model__path=str(make_chat_model(tmp_path / "model")), data={"kind": "rows", "sequence_length": 256, **data},
        objective={"kind": "dpo"}, run__steps=3, group={"first_shares": "even"},
        optimizer={"learning_rate": 1e-4}, evaluate={"every_steps": 3}, nodes=on(*NODES, gamma={"backend": "mlx"}),
    )  # fmt: skip


def test_each_pair_is_computed_once_and_all_ranks_have_the_same_bits(cluster: Cluster, config: dict[str, Any]) -> None:
    usable = len(preferences(PAIRS)), len(preferences(9))
    computed = run(cluster, config)
    assert [sum(numbers) for numbers in zip(*computed.values(), strict=True)] == [*usable]
    kept = values(cluster, NODES[0])
    assert len(kept) == 2 and all(values(cluster, node) == kept for node in NODES)
    for folder in caches(cluster, "gamma"):
        shutil.rmtree(folder)
    assert run(cluster, config) == dict.fromkeys(NODES, (0, 0))
    assert values(cluster, "gamma") == kept
    for folder in (*caches(cluster, "alpha"), *caches(cluster, "beta")):
        shutil.rmtree(folder)  # the lead and another node lack them: gamma gives what it has
    assert sum(map(sum, run(cluster, config).values())) <= sum(usable)
    assert len({tuple(values(cluster, node).items()) for node in NODES}) == 1


def run(cluster: Cluster, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """From its start to its end: how many pairs each node computed, for training and for evaluation."""
    with cluster.client() as client:
        begun = client.send("start-run", {"config": config})
        assert begun.state == "applied", begun.reason
        view = wait_for_end(client)
    assert (view.state, view.step) == ("finished", 3), view.reason
    computed = {}
    for rank, node in enumerate(NODES):
        paths = cluster.run_paths(node, begun.run)
        found = _COMPUTED.findall(paths.log(rank).read_text("utf-8"))
        computed[node] = tuple(int(number) for number, _ in found)
        assert not (paths.directory / "references").exists()
    return computed


def caches(cluster: Cluster, node: str) -> list[Path]:
    return sorted((cluster[node].directory / "data").glob("reference-*"))


def values(cluster: Cluster, node: str) -> dict[str, bytes]:
    return {folder.name: (folder / "values.bin").read_bytes() for folder in caches(cluster, node)}
