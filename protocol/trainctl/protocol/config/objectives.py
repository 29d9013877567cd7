"""What a run is trained for, the units and metrics that follow from it, and what a run file may set: one table."""

from typing import Final, Literal, NamedTuple

import msgspec

ObjectiveName = Literal["pretrain", "sft"]


class ObjectiveMetric(NamedTuple):
    """A named sum over the batch, shown per unit of one of the objective's weights."""

    name: str
    weight: str
    title: str
    help: str


class Objective(NamedTuple):
    """What its loss is, and what that is divided by."""

    weights: tuple[str, ...]  # each divides a term of the loss; metrics and rates are per unit of the first
    loss_unit: str
    needs_mask: bool = False  # whether only data of rows or samples say which targets count
    metrics: tuple[ObjectiveMetric, ...] = ()

    @property
    def weight_unit(self) -> str:
        return self.weights[0]


OBJECTIVES: Final[dict[ObjectiveName, Objective]] = {
    "pretrain": Objective(("tokens",), "nats per token"),  # every target counts
    "sft": Objective(("tokens",), "nats per token", needs_mask=True),  # those count that the samples' masks say
}


class ObjectiveTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[objective]` of a run file."""

    kind: Literal["auto"] | ObjectiveName = "auto"  # auto: pretrain on text, sft on rows and samples


def objective_name(table: ObjectiveTable, data_kind: str) -> ObjectiveName:
    """The objective that a run file asks for, on data of a kind."""
    if table.kind != "auto":
        return table.kind
    return "pretrain" if data_kind == "text" else "sft"


def objective_of(table: ObjectiveTable, data_kind: str) -> Objective:
    """Its row of the table."""
    return OBJECTIVES[objective_name(table, data_kind)]
