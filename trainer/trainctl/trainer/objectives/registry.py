"""The objective of a run by its name."""

import importlib

from trainctl.protocol.config.objectives import objective_name
from trainctl.protocol.config.run_tables import RunFile
from trainctl.trainer.objectives.objective import Objective


def objective_for(config: RunFile) -> Objective:
    """The one that `config` asks for: OBJECTIVE of the module of its name."""
    name = objective_name(config.objective, config.data.kind)
    found: Objective = importlib.import_module(f"trainctl.trainer.objectives.{name}").OBJECTIVE
    return found.configured(config.objective)
