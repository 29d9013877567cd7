"""What a checkpoint's manifest says of its run."""

from trainctl.protocol.config import run_file
from trainctl.protocol.record.checkpoint_metadata import Environment, Performance
from trainctl.trainer.checkpoints import metadata


def test_the_recipe_has_everything_but_the_environment_of_nodes() -> None:
    """It may hold keys of other services, and a checkpoint is given away."""
    raw = {
        "run": {"name": "r", "steps": 5}, "model": {"path": "/m"}, "data": {"path": "/d"}, "batch": {"global": 8},
        "optimizer": {"learning_rate": 1e-3},
        "nodes": {"a": {"backend": "torch", "env": {"HF_TOKEN": "hf_secret"}}},
    }  # fmt: skip
    config = run_file.parse(raw)
    where = Environment(node="a", program="1", python="3.11", library="torch", device="cpu", system="Linux")
    done = Performance()
    recipe = metadata.metadata(config, ("r", None, None), done, where).recipe
    assert "hf_secret" not in repr(recipe)
    assert recipe["nodes"]["a"]["backend"] == "torch"
    assert config.nodes["a"].env == {"HF_TOKEN": "hf_secret"}, "the run still has it"
