"""Chosen and rejected rows of a batch of pairs, and the metrics of their rewards.

Row 2k of a batch is the chosen answer of pair k, row 2k + 1 the rejected one.
"""

from typing import Any


def chosen(rows: Any) -> Any:
    """Of each pair, what the chosen answer has."""
    return rows[0::2]


def rejected(rows: Any) -> Any:
    """Of each pair, what the rejected answer has."""
    return rows[1::2]


def reward_sums(rewards: Any) -> dict[str, Any]:
    """The metrics `rewards/*`, summed over the pairs, from the reward of each answer, [B]."""
    better, worse = chosen(rewards), rejected(rewards)
    return {
        "rewards/chosen": better.sum(), "rewards/rejected": worse.sum(),
        "rewards/accuracies": ((better > worse) * 1.0).sum(), "rewards/margins": (better - worse).sum(),
    }  # fmt: skip
