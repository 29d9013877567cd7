"""What a rank's part of an evaluation comes to, micro-batch by micro-batch."""

from trainctl.protocol.config.objectives import ANSWER_TOKENS
from trainctl.protocol.messages import EvaluatedPair, followed_pairs
from trainctl.trainer.collective.group import Tail
from trainctl.trainer.data.batch import Batch
from trainctl.trainer.data.permutation import Indices
from trainctl.trainer.objectives.objective import Objective, Sums


class HeldOutSums:
    """Sums over held-out samples, by name."""

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self.losses = dict.fromkeys(objective.row.weights, 0.0)
        self.weights = dict.fromkeys((*objective.row.weights, ANSWER_TOKENS), 0.0)
        self.metrics: dict[str, float] = {}
        self.samples = 0
        self._pairs: list[EvaluatedPair] = []

    def add(self, indices: Indices, batch: Batch, found: Sums) -> None:
        """A micro-batch of some held-out samples, with what `Backend.evaluate` found."""
        weights = {ANSWER_TOKENS: batch.weight, **self._objective.weights(batch)}
        for totals, parts in ((self.losses, found.losses), (self.weights, weights), (self.metrics, found.metrics)):
            for name, value in parts.items():
                totals[name] = totals.get(name, 0.0) + value
        self.samples += len(batch)
        if found.rewards is not None:
            made = zip(indices.tolist(), *(found.rewards[half::2].tolist() for half in (0, 1)), strict=True)
            self._pairs = [*followed_pairs([*self._pairs, *(EvaluatedPair(*values) for values in made)])]

    @property
    def pairs(self) -> tuple[EvaluatedPair, ...]:
        """The first and the worst of the rank's, by index."""
        return tuple(self._pairs)

    @property
    def weight(self) -> float:
        """The first one, which the loss is reported per."""
        return self.weights[self._objective.row.weight_unit]

    @property
    def loss_sum(self) -> float:
        """The rank's own mean loss, each term divided by its own weight, times `weight`."""
        own = {name: self.weights[name] for name in self._objective.row.weights}
        return Tail(self.losses, own, {}, 0, 0).loss_sum
