"""Reports and comparisons of real runs: what was planted in one of them is found, with the step where it shows."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.run_files import FOREVER, RING, on_mlx
from tests.cluster.waits import wait_for_end, wait_for_step
from tests.integration.support.clusters import Cluster
from tests.tui.support import page_checks
from tests.tui.support.cli_calls import call

SHARES, MOVED = {"alpha": 8, "beta": 4}, {"alpha": 4, "beta": 8}


def trained(cluster: Cluster, config: dict[str, Any]) -> Path:
    """The directory of a finished run."""
    with cluster.client() as client:
        begun = client.send("start-run", {"config": config})
        assert begun.state == "applied" and begun.run is not None, begun.reason
        view = wait_for_end(client)
        assert view.state == "finished", view.reason
    return cluster.run_paths("alpha", begun.run).directory


def rebalanced(cluster: Cluster, config: dict[str, Any]) -> tuple[Path, int]:
    """The directory of a run whose samples moved, and at which step; it is stopped some steps later."""
    with cluster.client() as client:
        begun = client.send("start-run", {"config": config | {"run": config["run"] | {"steps": FOREVER}}})
        assert begun.state == "applied" and begun.run is not None, begun.reason
        wait_for_step(client, 3)
        moved = client.send("rebalance", {"shares": MOVED})
        assert moved.state == "applied" and moved.step is not None, moved.reason
        wait_for_step(client, moved.step + 6)
        assert client.send("stop", {}).state == "applied"
        assert wait_for_end(client).state == "stopped"
    return cluster.run_paths("alpha", begun.run).directory, moved.step


def differences(one: Path, other: Path) -> dict[str, Any]:
    done = call("diff", one, other, "--json")
    found: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == int(not found["same"])
    return found


@pytest.mark.timeout(600)
def test_planted_differences_of_real_runs_are_found_with_their_step(cluster, run_config, small_assets, tmp_path):
    """Samples moved during the run, which is the same bit for bit before; another seed and row of the data; another
    library."""
    text = (small_assets / "text" / "a.txt").read_text("utf-8")
    data = tmp_path / "text" / "a.txt"
    data.parent.mkdir()
    data.write_text(text, "utf-8")
    config = run_config(
        data__path=str(data.parent), checkpoint__at_end=True, optimizer__schedule="constant",
        nodes=on_mlx(*SHARES, **{node: {"share": share} for node, share in SHARES.items()}), group=RING,
    )  # fmt: skip
    moved, step = rebalanced(cluster, config)
    config["run"]["steps"] = step + 10
    base = trained(cluster, config)
    found = differences(base, moved)
    assert ([one["name"] for one in found["recipe"]], found["data"], found["versions"]) == (["run.steps"], [], [])
    assert [one["step"] for one in found["plans"] if one["b"] == "alpha 4, beta 8"] == [step]
    first = found["curve"]["first"]
    assert step > 3 and first is not None and first["step"] >= step
    page = tmp_path / "page.html"
    assert call("report", moved, "--html", page).returncode == 0
    assert "rebalanced: alpha 8 → 4, beta 4 → 8" in page_checks.check(page.read_text("utf-8")).text

    data.write_text(text.replace("import", "impart", 1), "utf-8")
    found = differences(base, trained(cluster, config | {"run": config["run"] | {"seed": 4}}))
    assert [(one["name"], one["a"], one["b"]) for one in found["recipe"]] == [("run.seed", "3", "4")]
    assert [one["name"] for one in found["data"]] == ["digest"]
    assert (found["curve"]["first"]["step"], found["versions"], found["plans"]) == (1, [], [])

    other = shutil.copytree(base, tmp_path / "other")
    for manifest in other.glob("checkpoints/*/manifest.json"):
        manifest.write_text(re.sub(r'"mlx [^"]*"', '"mlx 0.0.1"', manifest.read_text("utf-8")), "utf-8")
    found = differences(base, other)
    assert [(one["name"], one["b"]) for one in found["versions"]] == [("library on alpha", "mlx 0.0.1")]
    assert (found["curve"]["first"], found["curve"]["common_steps"], found["unknown"]) == (None, step + 10, [])
