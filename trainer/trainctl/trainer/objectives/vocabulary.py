"""What an evaluation measures over the whole vocabulary: entropy, accuracy, and the divergence from the reference."""

from collections.abc import Iterable
from typing import Any

from trainctl.protocol.config.objectives import ObjectiveMetric
from trainctl.trainer.objectives.objective import Outputs, Vocabulary


def vocabulary_sums(outputs: Outputs, metrics: Iterable[ObjectiveMetric]) -> dict[str, Any]:
    """The sums over the counted targets: `entropy` in nats, `mean_token_accuracy`, and if it is one of the metrics and
    there is a reference `kl`, which is KL(model || reference) in nats."""
    found: dict[str, Any] = {}
    for part in outputs.vocabulary(with_reference=any(metric.name == "kl" for metric in metrics)):
        for name, value in _sums(part).items():
            found[name] = found[name] + value if name in found else value
    return found


def _sums(part: Vocabulary) -> dict[str, Any]:
    own = part.logits - part.logits.logsumexp(-1, True)  # log-probabilities, [N, V]
    likely = own.exp()
    found = {
        "entropy": -(likely * own).sum(),
        "mean_token_accuracy": ((part.logits.argmax(-1) == part.targets) * 1.0).sum(),
    }
    if part.reference is not None:
        other = part.reference - part.reference.logsumexp(-1, True)
        found["kl"] = (likely * (own - other)).sum()
    return found
