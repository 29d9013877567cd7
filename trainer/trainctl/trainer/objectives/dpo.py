"""Direct preference optimization (Rafailov et al. 2023): chosen answers are preferred to rejected ones.

A pair's log-ratios are those of its two answers, each the sum over the answer's tokens of log p - log p_reference. With
r = beta (chosen log-ratio - rejected log-ratio), a pair's loss is, as in TRL 1.16:

    sigmoid  -log sigmoid(r)
    robust   (-(1 - e) log sigmoid(r) + e log sigmoid(-r)) / (1 - 2 e),  e = label_smoothing  (Chowdhury et al. 2024)
    hinge    max(0, 1 - r)                                                                     (Zhao et al. 2023)
    ipo      (c - d - 1 / (2 beta))^2, with c and d the log-ratios per token of chosen and rejected (Azar et al. 2023)

Log-ratios are taken token by token and then summed: the difference of two sums of some hundred nats would keep few of
float32's digits. A pair's weight is 1, and both halves are rows of one batch: 2k is the chosen answer, 2k + 1 the
rejected one.
"""

from typing import Any, Final

from trainctl.protocol.config.objectives import ObjectiveTable
from trainctl.trainer.data.batch import Batch
from trainctl.trainer.objectives.objective import Objective, Outputs, Sums
from trainctl.trainer.objectives.rewards import chosen, rejected, reward_sums
from trainctl.trainer.objectives.vocabulary import vocabulary_sums


class Dpo(Objective):
    """By the settings of a run file's table."""

    def __init__(self, table: ObjectiveTable) -> None:
        super().__init__("dpo")
        self._table = table

    def configured(self, table: ObjectiveTable) -> "Dpo":
        return Dpo(table)

    def weights(self, batch: Batch) -> dict[str, float]:
        return {"pairs": float(len(batch))}

    def held_out_sums(self, outputs: Outputs) -> dict[str, Any]:
        return vocabulary_sums(outputs, self.row.held_out)

    def sums(self, outputs: Outputs) -> Sums:
        reference = outputs.reference_losses()  # first: what it takes is free again before the graph is held
        beta, own = self._table.beta, outputs.token_losses()
        answers = -own.sum(-1)
        ratios = (reference - own).sum(-1)
        per_token = ratios / outputs.counted.sum(-1)
        gap = chosen(ratios) - rejected(ratios)
        metrics = {
            **reward_sums(beta * ratios),
            "logps/chosen": chosen(answers).sum(), "logps/rejected": rejected(answers).sum(),
            "logratio": 0.5 * per_token.sum(),
        }  # fmt: skip
        return Sums({"pairs": self._losses(outputs, gap, per_token).sum()}, metrics, beta * ratios)

    def _losses(self, outputs: Outputs, gap: Any, per_token: Any) -> Any:
        """One for each pair."""
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


OBJECTIVE: Final = Dpo(ObjectiveTable())
