"""The loss of language models: cross-entropy of the next token, per counted token."""

from trainctl.trainer.objectives.objective import Objective, Outputs, Sums


class NextToken(Objective):
    """Pretraining, supervised fine-tuning, and encoder-decoder models. They differ in which targets count: everything,
    what the samples' masks choose, or a completion whose prompt goes through the encoder."""

    def sums(self, outputs: Outputs) -> Sums:
        return Sums({"tokens": outputs.loss_sum()}, {})
