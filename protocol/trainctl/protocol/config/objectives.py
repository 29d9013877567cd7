"""What a run is trained for, and the units that follow from it: one table."""

from typing import Final, NamedTuple

from trainctl.protocol.config.run_tables import RunFile


class Objective(NamedTuple):
    """What its loss is, and what that is divided by."""

    weight_unit: str
    loss_unit: str


OBJECTIVES: Final = {
    "pretrain": Objective("tokens", "nats per token"),  # every target counts
    "sft": Objective("tokens", "nats per token"),  # those count that the samples' masks say
}


def objective_of(config: RunFile) -> Objective:
    """The run file's."""
    return OBJECTIVES["pretrain" if config.data.kind == "text" else "sft"]
