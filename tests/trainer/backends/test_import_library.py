"""A process that computes on MLX doesn't import torch, and collections of garbage skip what it has imported."""

SCRIPT = """
    import gc
    import sys
    from pathlib import Path

    import msgspec

    from trainctl.protocol.config.run_tables import RunFile
    from trainctl.trainer.backends.load import import_library
    from trainctl.trainer.backends.load import load

    folder = Path(sys.argv[1])
    config = msgspec.convert({
        "run": {"name": "t", "steps": 1}, "model": {"path": str(folder / "model")}, "batch": {"global": 2},
        "data": {"path": str(folder / "text"), "tokenizer": "bytes", "sequence_length": 16},
        "optimizer": {"learning_rate": 1e-3}, "nodes": {"here": {"backend": "mlx"}},
    }, RunFile)
    import_library(config, "here", "run file")
    backend = load(config, config.nodes["here"], "run file")
    print(backend.name, "transformers" in sys.modules, "torch" in sys.modules)
    print(gc.get_freeze_count() > 5 * len(gc.get_objects()))
    import torch
    print(torch.ones(3).sum().item())
"""


def test_mlx_is_loaded_without_torch_which_can_still_be_imported(run_python):
    assert run_python(SCRIPT).splitlines() == ["mlx True False", "True", "3.0"]
