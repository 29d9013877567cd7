"""Gradients in 16 bits on torch, added to float32 ones with little memory beside them."""

from collections.abc import Sequence

import torch

_PIECE_VALUES = 1 << 20
"""Values widened at a time: 4 MiB in float32."""


def accumulate(totals: list[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    """Add gradients to contiguous float32 totals. The same bits as if all gradients were widened first. Any memory is
    allocated before the first addition, so a lack of it leaves the totals as they were."""
    if all(gradient.dtype == torch.float32 for gradient in gradients) or totals[0].device.type == "cuda":
        torch._foreach_add_(totals, [*gradients])  # CUDA's kernels widen each value as they add it
        return
    piece = torch.empty(min(_PIECE_VALUES, max(total.numel() for total in totals)), device=totals[0].device)
    for total, gradient in zip(totals, gradients, strict=True):
        _add(total.view(-1), gradient, piece)


def _add(total: torch.Tensor, gradient: torch.Tensor, piece: torch.Tensor) -> None:
    flat = gradient.reshape(-1)
    for start in range(0, total.numel(), piece.numel()):
        part = total[start : start + piece.numel()]
        part += piece[: part.numel()].copy_(flat[start : start + part.numel()])
