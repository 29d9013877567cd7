"""AdamW on torch: torch's own, or bitsandbytes' with moments of 8 bits or in memory that a CUDA device pages to the
host.

An 8-bit moment is stored in blocks of 256 values (Dettmers et al. 2022): a code for each value, which selects one of
256 fixed numbers, and the block's largest magnitude, which they are multiplied by.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from trainctl.protocol.config.run_tables import OptimizerTable
from trainctl.protocol.errors import check_installed
from trainctl.trainer.backends.base import ADAMW_SLOTS

_BLOCK_VALUES = 256
"""Values that share a largest magnitude: bitsandbytes' constant."""
_NEIGHBOURS = (0, 1, -1, 2, -2)
"""Distances, in the last place of a float32, at which a block's largest magnitude is looked for."""

Parameters = Sequence[torch.nn.Parameter]


class AdamW(ABC):
    """The update of some parameters by their `.grad`; decay on matrices only. Its moments are allocated at once, so
    that a lack of memory shows at load."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def update(self, learning_rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    @property
    @abstractmethod
    def updates(self) -> int:
        """How often it was called in the life of the moments."""

    @updates.setter
    @abstractmethod
    def updates(self, count: int) -> None: ...

    @abstractmethod
    def moments(self, slot: str) -> list[torch.Tensor]:
        """Those of `ADAMW_SLOTS` of each parameter, in float32."""

    @abstractmethod
    def set_moments(self, slot: str, values: Sequence[torch.Tensor]) -> None:
        """Take over what `moments` gave: the same updates follow, to the bit."""


def check_optimizer(table: OptimizerTable, where: str) -> None:
    """Raises InvalidInputError for an optimizer of bitsandbytes where that isn't installed."""
    if table.kind != "adamw":
        check_installed("bitsandbytes", "bitsandbytes", f"{where}: optimizer.kind", repr(table.kind))


def adamw(parameters: Parameters, table: OptimizerTable) -> AdamW:
    """The optimizer that a run file asks for."""
    return _Fused(parameters, table) if table.kind == "adamw" else _BitsAndBytes(parameters, table)


def _groups(parameters: Parameters, table: OptimizerTable) -> list[dict[str, Any]]:
    matrices, others = [p for p in parameters if p.ndim >= 2], [p for p in parameters if p.ndim < 2]
    found = ({"params": matrices, "weight_decay": table.weight_decay}, {"params": others, "weight_decay": 0.0})
    return [group for group in found if group["params"]]


class _Fused(AdamW):
    """torch's, which reads and writes each value once."""

    def __init__(self, parameters: Parameters, table: OptimizerTable) -> None:
        betas = (table.beta1, table.beta2)
        groups = _groups(parameters, table)
        super().__init__(torch.optim.AdamW(groups, lr=table.learning_rate, betas=betas, eps=table.epsilon, fused=True))
        for parameter in parameters:
            moments = {slot: torch.zeros_like(parameter) for slot in ADAMW_SLOTS}
            self._optimizer.state[parameter] = {"step": torch.zeros((), device=parameter.device), **moments}
        self._states = [self._optimizer.state[parameter] for parameter in parameters]

    @property
    def updates(self) -> int:
        return int(self._states[0]["step"].item())

    @updates.setter
    def updates(self, count: int) -> None:
        for state in self._states:
            state["step"].fill_(count)

    def moments(self, slot: str) -> list[torch.Tensor]:
        return [state[slot] for state in self._states]

    def set_moments(self, slot: str, values: Sequence[torch.Tensor]) -> None:
        torch._foreach_copy_(self.moments(slot), [*values])


class _BitsAndBytes(AdamW):
    """bitsandbytes'. Of a parameter with fewer than 4,096 values, the moments stay in float32."""

    def __init__(self, parameters: Parameters, table: OptimizerTable) -> None:
        import bitsandbytes

        library: Any = bitsandbytes.optim
        self._paged = table.kind.startswith("paged-") and parameters[0].device.type == "cuda"
        super().__init__(
            library.AdamW(
                _groups(parameters, table), lr=table.learning_rate, betas=(table.beta1, table.beta2), eps=table.epsilon,
                optim_bits=8 if table.kind.endswith("-8bit") else 32, is_paged=self._paged,
            )
        )  # fmt: skip
        for row, group in enumerate(self._optimizer.param_groups):
            for column, parameter in enumerate(group["params"]):
                self._optimizer.init_state(group, parameter, row, column)
        self._states = [self._optimizer.state[parameter] for parameter in parameters]

    @property
    def updates(self) -> int:
        return int(self._states[0]["step"])

    @updates.setter
    def updates(self, count: int) -> None:
        for state in self._states:
            state["step"] = count

    def moments(self, slot: str) -> list[torch.Tensor]:
        return [_unpacked(*stored) if stored[1] is not None else stored[0] for stored in self._stored(slot)]

    def set_moments(self, slot: str, values: Sequence[torch.Tensor]) -> None:
        for (moment, largest, numbers), value in zip(self._stored(slot), values, strict=True):
            if largest is None:
                moment.copy_(value)
            else:
                codes, magnitudes = _packed(value.to(moment.device), numbers.to(moment.device))
                moment.copy_(codes)
                largest.copy_(magnitudes)

    def _stored(self, slot: str) -> Iterator[tuple[torch.Tensor, Any, Any]]:
        """Of each parameter: the moment, or its codes with the blocks' largest magnitudes and the numbers that codes
        select. A paged tensor is one of the host's to torch, so the device must be done with it."""
        if self._paged:
            torch.cuda.synchronize()
        index = 1 + ADAMW_SLOTS.index(slot)
        for state in self._states:
            yield state[f"state{index}"], state.get(f"absmax{index}"), state.get(f"qmap{index}")


def _unpacked(codes: torch.Tensor, largest: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The values, in float32."""
    values = torch.nn.functional.embedding(codes.flatten().int(), numbers.to(codes.device)[:, None])
    scales = largest.to(codes.device).repeat_interleave(_BLOCK_VALUES)[: codes.numel()]
    return (values.flatten() * scales).view(codes.shape)


def _packed(values: torch.Tensor, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes and largest magnitudes that make `values`, if there are any; otherwise those nearest to them.

    The numbers reach 1, but not -1. So in a block whose extreme is negative, the magnitude is that extreme over the
    lowest number, but for rounding.
    """
    padding = -values.numel() % _BLOCK_VALUES
    blocks = torch.nn.functional.pad(values.flatten(), (0, padding)).view(-1, _BLOCK_VALUES)
    highest, lowest = blocks.amax(1), blocks.amin(1)
    limits = (numbers[1:] + numbers[:-1]) / 2
    magnitudes = torch.maximum(highest, -lowest)
    codes = _nearest(blocks, magnitudes, limits)
    if numbers[0] < 0:
        beyond = lowest / numbers[0]
        for distance in _NEIGHBOURS:
            other = (beyond.view(torch.int32) + distance).view(torch.float32)
            found = _nearest(blocks, other, limits)
            equal = (numbers[found.int()] * other[:, None] == blocks).all(1)
            codes, magnitudes = torch.where(equal[:, None], found, codes), torch.where(equal, other, magnitudes)
    return codes.flatten()[: values.numel()].view(values.shape), magnitudes


def _nearest(blocks: torch.Tensor, magnitudes: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
    """The codes, [blocks, 256] in bytes; in a block of zeros, those of 0."""
    shares = blocks / torch.where(magnitudes > 0, magnitudes, 1)[:, None]
    return torch.bucketize(shares, limits).to(torch.uint8)
