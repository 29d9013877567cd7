"""The import of a process's array library: with MLX, torch is left out."""

from trainctl.protocol.config.run_tables import NodeTable, RunFile
from trainctl.trainer.backends.load import backend_of
from trainctl.trainer.common.without_torch import import_without_torch


def import_library(config: RunFile, node: str, where: str) -> None:
    """Import what `node` computes with. Call it in a process that has one backend, before anything else imports
    transformers. A torch that has been imported, as for a reducer on gloo, costs nothing more. Raises InvalidInputError
    if the library isn't installed."""
    if backend_of(config, config.nodes.get(node, NodeTable()), where) == "mlx":
        import_without_torch("mlx_lm")
