"""The objectives that a run is trained for, the units and metrics that follow from it, and what a run file may set: one
table."""

from dataclasses import dataclass
from typing import Annotated, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta

from trainctl.protocol.config.validation_errors import REFUSED

ObjectiveName = Literal["pretrain", "sft", "dpo", "orpo", "simpo", "seq2seq"]
PreferenceLoss = Literal["sigmoid", "ipo", "robust", "hinge"]
Reference = Literal["auto", "adapter-off", "cached"]

_SORTS: Final = (
    "it sorts the log-ratios of a micro-batch's pairs, so the loss would change with the micro-batch and the shares"
)
_REFUSED_LOSSES: Final = {"aot": _SORTS, "aot_unpaired": _SORTS, "aot_pair": _SORTS}
_REFUSED_OBJECTIVES: Final = {
    "kto": "it compares each answer with the mean KL over its micro-batch, so the loss would change with the"
    ' micro-batch and the shares; use "dpo", "orpo" or "simpo"',
    "bco": "it compares each answer with a running mean over the micro-batches, so the loss would change with the"
    ' micro-batch and the shares; use "dpo", "orpo" or "simpo"',
}
"""By TRL's names. Only a loss that is a sum over single samples is the same however the batch is cut."""


PAIRS, SAMPLES = "pairs", "samples"
ANSWER_TOKENS: Final = "answer_tokens"
"""A weight that only evaluations have: the targets that count."""
HELD_OUT: Final = "eval/"
"""Prefix of the names of metrics of the held-out samples."""


class ObjectiveMetric(NamedTuple):
    """A named sum over the batch, shown per unit of one of the objective's weights."""

    name: str
    weight: str
    title: str
    help: str

    @property
    def unit(self) -> str:
        return f"per {self.weight.replace('_', ' ').removesuffix('s')}"


@dataclass(frozen=True)
class UsualRange:
    """The usual values of a setting, wide enough for all sizes of models."""

    low: float
    high: float
    where: str
    source: str
    first: float = 0.0  # value that `init` writes


class ObjectiveSpec(NamedTuple):
    """Everything about an objective but its formula, which is in trainer/objectives/losses.py."""

    weights: tuple[str, ...]  # each divides a term of the loss; metrics and rates are per unit of the first
    loss_unit: str
    rates: tuple[UsualRange, UsualRange]  # peak learning rates of AdamW for all weights, and for adapters
    needs_mask: bool = False  # whether only data of rows or samples say which targets count
    metrics: tuple[ObjectiveMetric, ...] = ()
    sequences: int = 1  # of a sample: 2 for a pair of a chosen and a rejected answer, or a prompt and its completion
    encodes_prompts: bool = False  # whether prompts are the input of an encoder, apart from their completions
    settings: tuple[str, ...] = ()  # fields of `[objective]` that act on it
    held_out: tuple[ObjectiveMetric, ...] = ()  # those that only an evaluation measures, where the run can

    @property
    def weight_unit(self) -> str:
        return self.weights[0]

    @property
    def sample_unit(self) -> str:
        """Return what samples are called: pairs, or samples."""
        return PAIRS if self.has_pairs else SAMPLES

    @property
    def has_pairs(self) -> bool:
        """Return whether samples are pairs of answers."""
        return self.sequences > 1 and not self.encodes_prompts

    @property
    def evaluated(self) -> tuple[ObjectiveMetric, ...]:
        """Return what an evaluation measures beside the loss, by the names of a step's."""
        return (*self.metrics, *self.held_out)


_REWARDS: Final = (
    ObjectiveMetric(
        "rewards/chosen",
        "pairs",
        "chosen reward",
        "Reward of chosen answers. dpo: beta times the log-ratio to the"
        " reference. orpo and simpo: beta times the log-probability per token.",
    ),
    ObjectiveMetric("rewards/rejected", "pairs", "rejected reward", "As rewards/chosen, of rejected answers."),
    ObjectiveMetric(
        "rewards/accuracies", "pairs", "reward accuracy", "Fraction of pairs whose chosen answer has the higher reward."
    ),
    ObjectiveMetric("rewards/margins", "pairs", "reward margin", "Chosen reward minus rejected reward."),
    ObjectiveMetric(
        "logps/chosen",
        "pairs",
        "chosen log-prob",
        "Log-probability of chosen answers in nats. dpo: of the whole answer. orpo and simpo: per token.",
    ),
    ObjectiveMetric("logps/rejected", "pairs", "rejected log-prob", "As logps/chosen, of rejected answers."),
)
_LOGRATIO: Final = ObjectiveMetric(
    "logratio", "pairs", "log-ratio", "Mean over an answer's tokens of its log-ratio to the reference, in nats."
)
_ODDS: Final = (
    ObjectiveMetric(
        "nll_loss", "tokens", "NLL", "Negative log-likelihood per token of prompts with their chosen answers, in nats."
    ),
    ObjectiveMetric(
        "log_odds_ratio",
        "pairs",
        "log-sigmoid odds",
        "log sigmoid of log_odds_chosen; orpo's loss has minus beta of it.",
    ),
    ObjectiveMetric(
        "log_odds_chosen", "pairs", "log odds ratio", "log(odds of the chosen answer / odds of the rejected one)."
    ),
)
_VOCABULARY: Final = (
    ObjectiveMetric("entropy", ANSWER_TOKENS, "entropy", "Mean entropy of the answers' tokens, in nats."),
    ObjectiveMetric(
        "mean_token_accuracy",
        ANSWER_TOKENS,
        "token accuracy",
        "Fraction of the answers' tokens that are the likeliest.",
    ),
)
_KL: Final = ObjectiveMetric(
    "kl",
    ANSWER_TOKENS,
    "KL",
    "KL divergence from the reference at the answers' tokens, over the whole vocabulary, in nats per token.",
)
"""By TRL's names, but for `logratio` and `kl`."""

_HANDBOOK: Final = "alignment-handbook 2023, recipes of zephyr"
_ADAPTER_RATES: Final = UsualRange(1e-6, 1e-2, "AdamW for adapters", f"{_HANDBOOK}: 2e-4", 2e-4)
_TEXT_RATES: Final = (
    UsualRange(1e-6, 1e-2, "AdamW for all weights on text", "Brown et al. 2020: 6e-5 to 6e-4", 3e-4),
    _ADAPTER_RATES,
)
_ANSWER_RATES: Final = (
    UsualRange(1e-7, 1e-3, "AdamW for all weights on answers", f"{_HANDBOOK}: 2e-5", 2e-5),
    _ADAPTER_RATES,
)
_DPO_RATES: Final = (
    UsualRange(1e-8, 1e-5, "dpo of all weights", f"{_HANDBOOK}: 5e-7", 5e-7),
    UsualRange(1e-7, 1e-3, "dpo of adapters", f"{_HANDBOOK}: 5e-6", 5e-6),
)
_ORPO_RATES: Final = (
    UsualRange(1e-7, 1e-4, "orpo of all weights", f"{_HANDBOOK}: 5e-6", 5e-6),
    UsualRange(1e-6, 1e-3, "orpo of adapters", f"{_HANDBOOK}: 5e-6 for all weights", 5e-5),
)
_SIMPO_RATES: Final = (
    UsualRange(1e-8, 1e-5, "simpo of all weights", "Meng et al. 2024: 3e-7 to 1e-6", 5e-7),
    UsualRange(1e-7, 1e-3, "simpo of adapters", "Meng et al. 2024: 3e-7 to 1e-6 for all weights", 5e-6),
)
_SEQ2SEQ_RATES: Final = (
    UsualRange(1e-6, 1e-2, "AdamW for an encoder-decoder model", "transformers' page on T5: 1e-4 to 3e-4", 2e-5),
    _ADAPTER_RATES,
)

OBJECTIVES: Final[dict[ObjectiveName, ObjectiveSpec]] = {
    "pretrain": ObjectiveSpec(("tokens",), "nats per token", _TEXT_RATES),  # every target counts
    "sft": ObjectiveSpec(("tokens",), "nats per token", _ANSWER_RATES, needs_mask=True),  # by the samples' masks
    "dpo": ObjectiveSpec(
        ("pairs",),
        "per pair",
        _DPO_RATES,
        needs_mask=True,
        metrics=(*_REWARDS, _LOGRATIO),
        sequences=2,
        settings=("loss", "beta", "label_smoothing", "reference"),
        held_out=(*_VOCABULARY, _KL),
    ),
    "orpo": ObjectiveSpec(
        ("pairs", "tokens"),
        "nats per token + per pair",
        _ORPO_RATES,
        needs_mask=True,
        metrics=(*_REWARDS, *_ODDS),
        sequences=2,
        settings=("beta",),
        held_out=_VOCABULARY,
    ),
    "simpo": ObjectiveSpec(
        ("pairs",),
        "per pair",
        _SIMPO_RATES,
        needs_mask=True,
        metrics=_REWARDS,
        sequences=2,
        settings=("beta", "gamma"),
        held_out=_VOCABULARY,
    ),
    "seq2seq": ObjectiveSpec(
        ("tokens",), "nats per token", _SEQ2SEQ_RATES, needs_mask=True, sequences=2, encodes_prompts=True
    ),
}


class ObjectiveTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[objective]` of a run file."""

    kind: Annotated[Literal["auto"] | ObjectiveName, Meta(extra={REFUSED: _REFUSED_OBJECTIVES})] = (
        "auto"  # auto: pretrain on text, sft on rows and samples
    )
    loss: Annotated[PreferenceLoss, Meta(extra={REFUSED: _REFUSED_LOSSES})] = "sigmoid"  # of dpo
    beta: Annotated[float, Meta(gt=0, le=100)] = 0.1  # of dpo: higher stays closer to the reference; of orpo: lambda
    gamma: Annotated[float, Meta(ge=0, le=100)] = 0.5  # of simpo: the chosen answer's lead
    label_smoothing: Annotated[float, Meta(ge=0, lt=0.5)] = (
        0.0  # of loss = "robust": fraction of pairs labelled wrongly
    )
    reference: Reference = "auto"  # of dpo: computed in each step with the adapter off, or once; auto: cached if full


def objective_name(table: ObjectiveTable, data_kind: str) -> ObjectiveName:
    """Return the objective that a run file asks for, on data of a kind."""
    if table.kind != "auto":
        return table.kind
    return "pretrain" if data_kind == "text" else "sft"


def objective_of(table: ObjectiveTable, data_kind: str) -> ObjectiveSpec:
    """Return the table's row of the objective that a run file asks for."""
    return OBJECTIVES[objective_name(table, data_kind)]


def caches_reference(table: ObjectiveTable, *, has_adapter: bool) -> bool:
    """Return whether the reference's log-probabilities are computed once, before the first step, and kept."""
    if table.kind == "auto" or "reference" not in OBJECTIVES[table.kind].settings:
        return False
    return table.reference == "cached" or (table.reference == "auto" and not has_adapter)


def which_have(setting: str) -> str:
    """Return the objectives that a field of the table acts on, for an error."""
    return " or ".join(f'"{name}"' for name, row in OBJECTIVES.items() if setting in row.settings)


def sample_unit(kind: str) -> str:
    """Return what samples are called if `objective.kind` is this."""
    return next((row.sample_unit for name, row in OBJECTIVES.items() if name == kind), SAMPLES)


def sequences_of(kind: str) -> int:
    """Return how many sequences a sample has if `objective.kind` is this."""
    return next((row.sequences for name, row in OBJECTIVES.items() if name == kind), 1)
