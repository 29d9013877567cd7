"""Odds-ratio preference optimization (Hong et al. 2024): supervised fine-tuning on chosen answers, and a preference.

It needs no reference model.

With c and d the log-probabilities per token of the chosen and the rejected answer, and odds(x) = exp(x) / (1 - exp(x)),
the loss is, as in TRL 1.16:

    NLL per token of the prompts with their chosen answers - beta log sigmoid(log odds(c) - log odds(d)) per pair

So it has two weights: the tokens of prompts and chosen answers, and the pairs.
"""

from typing import Any, Final

from trainctl.protocol.config.objectives import ObjectiveTable
from trainctl.trainer.data.batch import Batch
from trainctl.trainer.objectives.objective import Objective, Outputs, Sums
from trainctl.trainer.objectives.rewards import chosen, rejected, reward_sums
from trainctl.trainer.objectives.vocabulary import vocabulary_sums


class Orpo(Objective):
    """By the settings of a run file's table."""

    def __init__(self, table: ObjectiveTable) -> None:
        super().__init__("orpo")
        self._table = table

    def configured(self, table: ObjectiveTable) -> "Orpo":
        return Orpo(table)

    def weights(self, batch: Batch) -> dict[str, float]:
        return {"pairs": float(len(batch)), "tokens": float(chosen(batch.lengths).sum())}

    def held_out_sums(self, outputs: Outputs) -> dict[str, Any]:
        return vocabulary_sums(outputs, self.row.held_out)

    def sums(self, outputs: Outputs) -> Sums:
        every, beta = outputs.every_loss(), self._table.beta
        likelihood = chosen(every).sum()
        per_token = -(every * outputs.counted).sum(-1) / outputs.counted.sum(-1)
        odds = outputs.log_odds(per_token)
        gap = chosen(odds) - rejected(odds)
        ratios = outputs.log_sigmoid(gap)
        metrics: dict[str, Any] = {
            **reward_sums(beta * per_token),
            "logps/chosen": chosen(per_token).sum(), "logps/rejected": rejected(per_token).sum(),
            "nll_loss": likelihood, "log_odds_ratio": ratios.sum(), "log_odds_chosen": gap.sum(),
        }  # fmt: skip
        return Sums({"pairs": -beta * ratios.sum(), "tokens": likelihood}, metrics, beta * per_token)


OBJECTIVE: Final = Orpo(ObjectiveTable())
