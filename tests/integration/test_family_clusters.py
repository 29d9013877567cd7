"""Each tested family on two nodes, one with torch and one with MLX, through agents and the probe."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.run_files import on
from tests.cluster.waits import all_steps, wait_for_end
from tests.integration.support.clusters import Cluster
from tests.integration.support.exactness import worst_deviation
from tests.integration.support.reference import one_rank_curve
from tests.trainer.support.families import FAMILIES, SMALL, save

from trainctl.protocol.config.families import TESTED

STEPS = 5
UNLIKE = {"alpha": {"backend": "torch", "share": 8, "micro": 3}, "beta": {"backend": "mlx", "share": 4, "micro": 4}}


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short counts, which a model can learn."""
    chance, lines = random.Random(2), []
    for _ in range(100):
        start, length = chance.randrange(1, SMALL["vocab_size"] // 2), chance.choice([3, 5, 9, 20])
        lines.append(json.dumps({"tokens": [start + at % 5 for at in range(length)]}))
    path = tmp_path_factory.mktemp("counts") / "counts.jsonl"
    path.write_text("\n".join(lines), "utf-8")
    return path


@pytest.mark.tier("soak")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_run_on_torch_and_mlx_has_the_losses_of_one_rank(
    cluster: Cluster, run_config: Callable[..., dict[str, Any]], samples: Path, tmp_path: Path, name: str
) -> None:
    model, allowed = save(name, tmp_path / "model"), TESTED[FAMILIES[name].kind].gradient
    data = {"path": str(samples), "kind": "samples", "sequence_length": 24}
    settings = {"model__path": str(model), "data": data, "run__steps": STEPS}
    with cluster.client() as client:
        begun = client.send("start-run", {"config": run_config(**settings, nodes=on("alpha", "beta", **UNLIKE))})
        assert begun.state == "applied", begun.reason
        view = wait_for_end(client)
        assert (view.state, view.step) == ("finished", STEPS), view.reason
        steps = all_steps(client, begun.run)
    deviation = worst_deviation(steps, one_rank_curve(run_config(**settings, nodes=on("alpha"))))
    print(f"{name}: worst relative deviation {deviation:.1e}")
    assert deviation < allowed
