"""The objectives of a run: the next token; DPO, ORPO and SimPO over preferences, and what evaluations measure.

Both answers of a pair are rows of one batch: row 2k is the chosen answer of pair k, row 2k + 1 the rejected one.
"""

from collections.abc import Iterable
from typing import Any, assert_never

import numpy as np
from numpy.typing import NDArray

from trainctl.protocol.config.objectives import ObjectiveMetric, ObjectiveName, ObjectiveTable, objective_name
from trainctl.protocol.config.run_tables import RunFile
from trainctl.trainer.data.batch import Batch
from trainctl.trainer.objectives.objective import Objective, Outputs, Sums, Vocabulary


def objective_for(config: RunFile) -> Objective:
    """Return the objective of a run."""
    match objective_name(config.objective, config.data.kind):
        case "dpo":
            return Dpo(config.objective)
        case "orpo":
            return Orpo(config.objective)
        case "simpo":
            return Simpo(config.objective)
        case "pretrain" | "sft" | "seq2seq" as name:
            return NextToken(name)
        case name:
            assert_never(name)


class NextToken(Objective):
    """Cross-entropy of the next token, per counted token: pretraining, supervised fine-tuning, and encoder-decoder
    models. They differ in which targets count: everything, what the samples' masks choose, or a completion whose prompt
    goes through the encoder.

    `Outputs.losses` computes it: in `backends/torch_loss.py` and `backends/mlx_loss.py`."""

    def sums(self, outputs: Outputs) -> Sums:
        return Sums({"tokens": outputs.losses(summed=True)}, {})


class _Preference(Objective):
    """Objectives over pairs of answers, by the settings of a run file's table."""

    kind: ObjectiveName

    def __init__(self, table: ObjectiveTable) -> None:
        super().__init__(self.kind)
        self._table = table

    def weights(self, batch: Batch) -> dict[str, float]:
        return self.weights_of(batch.lengths)

    def weights_of(self, lengths: NDArray[np.int64]) -> dict[str, float]:
        return {"pairs": float(len(chosen(lengths)))}

    def held_out_sums(self, outputs: Outputs) -> dict[str, Any]:
        return vocabulary_sums(outputs, self.spec.held_out)


class Dpo(_Preference):
    """Direct preference optimization (Rafailov et al. 2023): chosen answers are preferred to rejected ones.

    A pair's log-ratios are those of its two answers, each the sum over the answer's tokens of log p - log p_reference.
    With r = beta (chosen log-ratio - rejected log-ratio), a pair's loss is, as in TRL 1.16:

        sigmoid  -log sigmoid(r)
        robust   (-(1 - e) log sigmoid(r) + e log sigmoid(-r)) / (1 - 2 e), e: label_smoothing (Chowdhury et al. 2024)
        hinge    max(0, 1 - r) (Zhao et al. 2023)
        ipo      (c - d - 1 / (2 beta))^2, c and d: log-ratios per token of chosen and rejected (Azar et al. 2023)

    Log-ratios are taken token by token and then summed: the difference of two sums of some hundred nats would keep few
    of float32's digits. A pair's weight is 1.
    """

    kind: ObjectiveName = "dpo"

    def sums(self, outputs: Outputs) -> Sums:
        reference = outputs.reference_losses()  # first: what it takes is free again before the graph is held
        beta, own = self._table.beta, outputs.losses()
        answers = -own.sum(-1)
        ratios = (reference - own).sum(-1)
        per_token = ratios / outputs.counted.sum(-1)
        gap = chosen(ratios) - rejected(ratios)
        metrics = {
            **reward_sums(beta * ratios),
            "logps/chosen": chosen(answers).sum(),
            "logps/rejected": rejected(answers).sum(),
            "logratio": 0.5 * per_token.sum(),
        }
        return Sums({"pairs": self._losses(outputs, gap, per_token).sum()}, metrics, beta * ratios)

    def _losses(self, outputs: Outputs, gap: Any, per_token: Any) -> Any:
        """Return a loss for each pair."""
        beta, flipped = self._table.beta, self._table.label_smoothing
        match self._table.loss:
            case "sigmoid":
                return -outputs.log_sigmoid(beta * gap)
            case "robust":
                right, wrong = outputs.log_sigmoid(beta * gap), outputs.log_sigmoid(-beta * gap)
                return ((flipped - 1) * right + flipped * wrong) / (1 - 2 * flipped)
            case "hinge":
                left = 1 - beta * gap
                return left * (left > 0)
            case "ipo":
                return (chosen(per_token) - rejected(per_token) - 1 / (2 * beta)) ** 2


class Orpo(_Preference):
    """Odds-ratio preference optimization (Hong et al. 2024): fine-tuning on chosen answers, and a preference.

    It needs no reference model.

    With c and d the log-probabilities per token of the chosen and the rejected answer, and
    odds(x) = exp(x) / (1 - exp(x)), the loss is, as in TRL 1.16:

        NLL per token of the prompts with their chosen answers - beta log sigmoid(log odds(c) - log odds(d)) per pair

    So it has two weights: the tokens of prompts and chosen answers, and the pairs.
    """

    kind: ObjectiveName = "orpo"

    def weights_of(self, lengths: NDArray[np.int64]) -> dict[str, float]:
        return {**super().weights_of(lengths), "tokens": float(chosen(lengths).sum())}

    def sums(self, outputs: Outputs) -> Sums:
        every, beta = outputs.losses(every=True), self._table.beta
        likelihood = chosen(every).sum()
        per_token = -(every * outputs.counted).sum(-1) / outputs.counted.sum(-1)
        odds = outputs.log_odds(per_token)
        gap = chosen(odds) - rejected(odds)
        ratios = outputs.log_sigmoid(gap)
        metrics: dict[str, Any] = {
            **reward_sums(beta * per_token),
            "logps/chosen": chosen(per_token).sum(),
            "logps/rejected": rejected(per_token).sum(),
            "nll_loss": likelihood,
            "log_odds_ratio": ratios.sum(),
            "log_odds_chosen": gap.sum(),
        }
        return Sums({"pairs": -beta * ratios.sum(), "tokens": likelihood}, metrics, beta * per_token)


class Simpo(_Preference):
    """Simple preference optimization (Meng, Xia and Chen 2024): the reward of an answer is its log-probability per
    token times beta, and that of the chosen one shall be higher by gamma. It needs no reference model.

    With c and d the log-probabilities per token of the chosen and the rejected answer, a pair's loss is

        -log sigmoid(beta (c - d) - gamma)

    A pair's weight is 1.
    """

    kind: ObjectiveName = "simpo"

    def sums(self, outputs: Outputs) -> Sums:
        per_token = -outputs.losses().sum(-1) / outputs.counted.sum(-1)
        rewards = self._table.beta * per_token
        metrics = {
            **reward_sums(rewards),
            "logps/chosen": chosen(per_token).sum(),
            "logps/rejected": rejected(per_token).sum(),
        }
        losses = -outputs.log_sigmoid(chosen(rewards) - rejected(rewards) - self._table.gamma)
        return Sums({"pairs": losses.sum()}, metrics, rewards)


def chosen(rows: Any) -> Any:
    """Return the rows of the chosen answers."""
    return rows[0::2]


def rejected(rows: Any) -> Any:
    """Return the rows of the rejected answers."""
    return rows[1::2]


def reward_sums(rewards: Any) -> dict[str, Any]:
    """Return the metrics `rewards/*`, summed over the pairs, from the reward of each answer, [B]."""
    better, worse = chosen(rewards), rejected(rewards)
    return {
        "rewards/chosen": better.sum(),
        "rewards/rejected": worse.sum(),
        "rewards/accuracies": ((better > worse) * 1.0).sum(),
        "rewards/margins": (better - worse).sum(),
    }


def vocabulary_sums(outputs: Outputs, metrics: Iterable[ObjectiveMetric]) -> dict[str, Any]:
    """Return the sums over the counted targets: `entropy` in nats, `mean_token_accuracy`, and, if it is one of the
    metrics and there is a reference, `kl`, which is KL(model || reference) in nats."""
    sums: dict[str, Any] = {}
    for part in outputs.vocabulary(with_reference=any(metric.name == "kl" for metric in metrics)):
        for name, value in _sums(part).items():
            sums[name] = sums[name] + value if name in sums else value
    return sums


def _sums(part: Vocabulary) -> dict[str, Any]:
    own = part.logits - part.logits.logsumexp(-1, True)  # log-probabilities, [N, V]
    likely = own.exp()
    sums = {
        "entropy": -(likely * own).sum(),
        "mean_token_accuracy": ((part.logits.argmax(-1) == part.targets) * 1.0).sum(),
    }
    if part.reference is not None:
        other = part.reference - part.reference.logsumexp(-1, True)
        sums["kl"] = (likely * (own - other)).sum()
    return sums
