"""The objective that a run file asks for."""

from trainctl.protocol.config.objectives import objective_name
from trainctl.protocol.config.run_tables import RunFile
from trainctl.trainer.objectives.next_token import NextToken
from trainctl.trainer.objectives.objective import Objective
from trainctl.trainer.objectives.preferences import Dpo, Orpo


def objective_for(config: RunFile) -> Objective:
    """Return the objective of a run."""
    match objective_name(config.objective, config.data.kind):
        case "dpo":
            return Dpo(config.objective)
        case "orpo":
            return Orpo(config.objective)
        case name:
            return NextToken(name)
