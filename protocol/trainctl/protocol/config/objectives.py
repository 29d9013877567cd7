"""What a run is trained for, the units and metrics that follow from it, and what a run file may set: one table."""

from typing import Annotated, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta

ObjectiveName = Literal["pretrain", "sft", "dpo", "seq2seq"]
PreferenceLoss = Literal["sigmoid", "ipo", "robust", "hinge"]


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
    sequences: int = 1  # of a sample: 2 for a pair of a chosen and a rejected answer, or a prompt and its completion
    encodes_prompts: bool = False  # whether prompts are the input of an encoder, apart from their completions

    @property
    def weight_unit(self) -> str:
        return self.weights[0]


_PREFERENCE_METRICS: Final = (
    ObjectiveMetric(
        "rewards/chosen", "pairs", "chosen reward", "beta times the log-ratio of chosen answers to the reference."
    ),
    ObjectiveMetric(
        "rewards/rejected", "pairs", "rejected reward", "beta times the log-ratio of rejected answers to the reference."
    ),
    ObjectiveMetric(
        "rewards/accuracies", "pairs", "reward accuracy", "Fraction of pairs whose chosen answer has the higher reward."
    ),
    ObjectiveMetric("rewards/margins", "pairs", "reward margin", "Chosen reward minus rejected reward."),
    ObjectiveMetric("logps/chosen", "pairs", "chosen log-prob", "Log-probability of chosen answers, in nats."),
    ObjectiveMetric("logps/rejected", "pairs", "rejected log-prob", "Log-probability of rejected answers, in nats."),
    ObjectiveMetric(
        "logratio", "pairs", "log-ratio", "Mean over an answer's tokens of its log-ratio to the reference, in nats."
    ),
)
"""By TRL's names, but for `logratio`."""

OBJECTIVES: Final[dict[ObjectiveName, Objective]] = {
    "pretrain": Objective(("tokens",), "nats per token"),  # every target counts
    "sft": Objective(("tokens",), "nats per token", needs_mask=True),  # those count that the samples' masks say
    "seq2seq": Objective(("tokens",), "nats per token", needs_mask=True, sequences=2, encodes_prompts=True),
    "dpo": Objective(("pairs",), "per pair", needs_mask=True, metrics=_PREFERENCE_METRICS, sequences=2),
}


class ObjectiveTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[objective]` of a run file."""

    kind: Literal["auto"] | ObjectiveName = "auto"  # auto: pretrain on text, sft on rows and samples
    loss: PreferenceLoss = "sigmoid"  # of dpo
    beta: Annotated[float, Meta(gt=0, le=100)] = 0.1  # of dpo: higher keeps the model closer to the reference
    label_smoothing: Annotated[float, Meta(ge=0, lt=0.5)] = (
        0.0  # of loss = "robust": fraction of pairs labelled wrongly
    )


def objective_name(table: ObjectiveTable, data_kind: str) -> ObjectiveName:
    """The objective that a run file asks for, on data of a kind."""
    if table.kind != "auto":
        return table.kind
    return "pretrain" if data_kind == "text" else "sft"


def objective_of(table: ObjectiveTable, data_kind: str) -> Objective:
    """Its row of the table."""
    return OBJECTIVES[objective_name(table, data_kind)]


PREFERENCE_SETTINGS: Final = ("loss", "beta", "label_smoothing")
"""Fields of the table that only preference objectives have."""
