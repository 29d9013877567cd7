"""The metrics that history can be asked for."""

from trainctl.protocol.messages.trainer import PHASES

METRICS: dict[str, tuple[str, bool]] = {
    "loss": ("nats per token", False),
    "grad_norm": ("", False),
    "learning_rate": ("", False),
    "step_seconds": ("s", False),
    "tokens_per_second": ("tokens/s", False),
    "loss_not_finite": ("1 at such a step", False),
    "grad_norm_not_finite": ("1 at such a step", False),
    "tokens_total": ("tokens, min and max at a bucket's ends", False),
    "committed_at": ("Unix s, min and max at a bucket's ends", False),
    "eval_loss": ("nats per token", False),
    "rank_step_seconds": ("s", True),
    "busy_seconds": ("s", True),
    "own_tokens_per_second": ("tokens/s", True),
    **{f"{name}_seconds": ("s", True) for name in PHASES},
    "memory_bytes": ("B", True),
    "memory_peak_bytes": ("B", True),
    "drift": ("relative", True),
}
"""What history can be asked for: name -> (unit, whether it is kept per rank)."""
