"""Trained weights on torch, and gradients in 16 bits added to float32 ones."""

from collections.abc import Sequence

import torch

_PIECE_VALUES = 1 << 20
"""Values widened at a time: 4 MiB in float32."""


class TorchWeights:
    """The trained parameters of a model in the order of their names, and their masters: float32 values that the
    optimizer updates. A parameter in 16 bits has one beside it; another is its own."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], dtype: torch.dtype | None) -> None:
        """`dtype`: the parameters, float32 until now, become it; None: they stay as they are."""
        self.parameters = self.masters = [*parameters]
        for parameter in self.parameters:
            parameter.data = parameter.data.contiguous()
        if dtype not in (None, torch.float32):
            self.masters = [torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters]
            for parameter in self.parameters:
                parameter.data = parameter.data.to(dtype)

    @property
    def kept_bytes(self) -> int:
        """Bytes that masters take beside the model's parameters."""
        return 0 if self.masters is self.parameters else sum(master.nbytes for master in self.masters)

    @torch.no_grad()
    def load(self, values: Sequence[torch.Tensor]) -> None:
        """Take over the masters' values, from a checkpoint or another rank."""
        torch._foreach_copy_([*self.masters], [*values])
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Make the model compute with masters that have been updated."""
        if self.masters is not self.parameters:
            torch._foreach_copy_([*self.parameters], [*self.masters])


def accumulate(totals: list[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    """Add gradients to contiguous float32 totals, with the same bits as if all gradients were widened first. Memory is
    allocated before the first addition, so a lack of it leaves the totals as they were."""
    if {gradient.dtype for gradient in gradients} == {torch.float32} or totals[0].device.type == "cuda":
        torch._foreach_add_(totals, [*gradients])  # CUDA's kernels widen each value as they add it
        return
    piece = torch.empty(min(_PIECE_VALUES, max(total.numel() for total in totals)), device=totals[0].device)
    flats = [gradient.reshape(-1) for gradient in gradients]  # of some a copy
    for total, flat in zip(totals, flats, strict=True):
        sums = total.view(-1)
        for start in range(0, sums.numel(), piece.numel()):
            part = sums[start : start + piece.numel()]
            part += piece[: part.numel()].copy_(flat[start : start + part.numel()])
