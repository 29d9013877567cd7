"""The loss of causal language models: cross-entropy of the next token, per counted token."""

from trainctl.trainer.objectives.objective import Objective, Outputs, Sums


class NextToken(Objective):
    """Objectives that differ only in which targets count."""

    def sums(self, outputs: Outputs) -> Sums:
        return Sums({"tokens": outputs.loss_sum()}, {})
