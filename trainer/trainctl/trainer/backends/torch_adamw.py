"""Trained weights on torch, and AdamW: torch's own, or bitsandbytes' with moments of 8 bits or in memory that a CUDA
device pages to the host.

An 8-bit moment is stored in blocks of 256 values (Dettmers et al. 2022): a code for each value, which selects one of
256 fixed numbers, and the block's largest magnitude, which they are multiplied by.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from trainctl.protocol.config.run_tables import OptimizerTable
from trainctl.trainer.backends.backend import ADAMW_SLOTS, is_decayed

_BLOCK_VALUES = 256
"""Values that share a largest magnitude: bitsandbytes' constant."""
_FEWEST_VALUES = 4096
"""Fewest values of a parameter whose moments bitsandbytes keeps in 8 bits: the library's default."""
_NEIGHBOURS = (0, 1, -1, 2, -2)
"""Distances, in the last place of a float32, at which a block's largest magnitude is looked for."""

_PIECE_VALUES, _PIECE_VALUES_ON_CPU = 1 << 24, 1 << 20
"""Values updated at a time by bitsandbytes. A GPU needs more to be worth a launch."""
_WIDENED_VALUES = 1 << 20
"""Values widened at a time: 4 MiB in float32."""

Gradients = Sequence[torch.Tensor]


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
    piece = torch.empty(min(_WIDENED_VALUES, max(total.numel() for total in totals)), device=totals[0].device)
    flats = [gradient.reshape(-1) for gradient in gradients]  # of some a copy
    for total, flat in zip(totals, flats, strict=True):
        sums = total.view(-1)
        for start in range(0, sums.numel(), piece.numel()):
            part = sums[start : start + piece.numel()]
            part += piece[: part.numel()].copy_(flat[start : start + part.numel()])


class AdamW(ABC):
    """The update of some weights; decay on matrices only. Its moments are allocated at once, so that a lack of memory
    shows at load."""

    library: str  # whose kernels compute it
    _weights: TorchWeights
    _optimizer: Any  # the library's
    _states: list[dict[str, Any]]  # what it keeps of each parameter, or piece of one

    def update(self, learning_rate: float, gradients: Gradients, factor: float) -> None:
        """Update by `factor` times float32 gradients in the order of the weights, whose contents are undefined
        afterwards."""
        torch._foreach_mul_([*gradients], factor)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._step(gradients)
        self._weights.publish()

    @abstractmethod
    def _step(self, gradients: Gradients) -> None: ...

    @property
    def updates(self) -> int:
        """Number of updates in the life of the moments."""
        return int(self._states[0]["step"])

    @updates.setter
    def updates(self, count: int) -> None:
        for state in self._states:
            step = state["step"]
            state["step"] = torch.full_like(step, count) if isinstance(step, torch.Tensor) else count

    @property
    @abstractmethod
    def held_bytes(self) -> int:
        """Bytes of the moments on the device."""

    @abstractmethod
    def moments(self, slot: str) -> list[torch.Tensor]:
        """Return the moment of each parameter, in float32; `slot`: one of `ADAMW_SLOTS`."""

    @abstractmethod
    def set_moments(self, slot: str, values: Sequence[torch.Tensor]) -> None:
        """Take over what `moments` gave: the same updates follow, to the bit."""


def adamw(weights: TorchWeights, table: OptimizerTable) -> AdamW:
    """Return the optimizer that a run file asks for."""
    return _Fused(weights, table) if table.kind == "adamw" else _BitsAndBytes(weights, table)


def _groups(
    parameters: Sequence[torch.nn.Parameter], decayed: Sequence[bool], table: OptimizerTable
) -> list[dict[str, Any]]:
    pairs = [*zip(parameters, decayed, strict=True)]
    groups = (
        {"params": [p for p, decays in pairs if decays], "weight_decay": table.weight_decay},
        {"params": [p for p, decays in pairs if not decays], "weight_decay": 0.0},
    )
    return [group for group in groups if group["params"]]


class _Fused(AdamW):
    """torch's, which reads and writes each value once."""

    library = "torch"

    def __init__(self, weights: TorchWeights, table: OptimizerTable) -> None:
        masters = weights.masters
        betas, groups = (table.beta1, table.beta2), _groups(masters, [is_decayed(p.shape) for p in masters], table)
        self._weights = weights
        self._optimizer = torch.optim.AdamW(groups, lr=table.learning_rate, betas=betas, eps=table.epsilon, fused=True)
        for parameter in masters:
            moments = {slot: torch.zeros_like(parameter) for slot in ADAMW_SLOTS}
            self._optimizer.state[parameter] = {"step": torch.zeros((), device=parameter.device), **moments}
        self._states = [self._optimizer.state[parameter] for parameter in masters]

    def _step(self, gradients: Gradients) -> None:
        for master, gradient in zip(self._weights.masters, gradients, strict=True):
            master.grad = gradient
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    @property
    def held_bytes(self) -> int:
        return sum(state[slot].nbytes for state in self._states for slot in ADAMW_SLOTS)

    def moments(self, slot: str) -> list[torch.Tensor]:
        return [state[slot] for state in self._states]

    def set_moments(self, slot: str, values: Sequence[torch.Tensor]) -> None:
        torch._foreach_copy_(self.moments(slot), [*values])


class _BitsAndBytes(AdamW):
    """bitsandbytes', on a piece of a parameter at a time: on a CPU it takes several float32 values for each one that it
    updates. A piece is whole blocks, so each value is updated as in the whole. Of a parameter with fewer than 4,096
    values, the moments stay in float32."""

    library = "bitsandbytes"

    def __init__(self, weights: TorchWeights, table: OptimizerTable) -> None:
        import bitsandbytes

        library: Any = bitsandbytes.optim
        self._weights, held = weights, weights.masters
        on_cpu = held[0].device.type == "cpu"
        self._paged = table.kind.startswith("paged-") and held[0].device.type == "cuda"
        self._pieces = [
            (index, start, stop)
            for index, parameter in enumerate(held)
            for start, stop in _bounds(parameter.numel(), _PIECE_VALUES_ON_CPU if on_cpu else _PIECE_VALUES)
        ]
        self._views = [
            torch.nn.Parameter(held[index].detach().view(-1)[start:stop]) for index, start, stop in self._pieces
        ]
        decayed = [is_decayed(weights.parameters[index].shape) for index, _, _ in self._pieces]
        self._optimizer = library.AdamW(
            _groups(self._views, decayed, table),
            lr=table.learning_rate,
            betas=(table.beta1, table.beta2),
            eps=table.epsilon,
            optim_bits=8 if table.kind.endswith("-8bit") else 32,
            is_paged=self._paged,
        )
        places: dict[torch.nn.Parameter, tuple[Any, int, int]] = {}
        for row, group in enumerate(self._optimizer.param_groups):
            for column, parameter in enumerate(group["params"]):
                self._optimizer.init_state(group, parameter, row, column)
                places[parameter] = (group, row, column)
        self._places = [places[parameter] for parameter in self._views]  # group, and its row and column
        self._states = [self._optimizer.state[parameter] for parameter in self._views]

    @torch.no_grad()
    def _step(self, gradients: Gradients) -> None:
        pieces = zip(self._pieces, self._views, self._places, strict=True)
        for (index, start, stop), master, (group, row, column) in pieces:  # as the library's own `step` does
            master.grad = gradients[index].reshape(-1)[start:stop]
            self._optimizer.prefetch_state(master)
            self._optimizer.update_step(group, master, row, column)
            if self._paged:  # its copies run beside torch's
                torch.cuda.synchronize()
            master.grad = None

    @property
    def held_bytes(self) -> int:
        names = ("state1", "state2", "absmax1", "absmax2")
        sizes = (state[name].nbytes for state in self._states for name in names if name in state)
        return 0 if self._paged else sum(sizes)

    def moments(self, slot: str) -> list[torch.Tensor]:
        pieces: list[list[torch.Tensor]] = [[] for _ in self._weights.parameters]
        for (index, _, _), stored in zip(self._pieces, self._stored(slot), strict=True):
            pieces[index].append(_unpacked(*stored) if stored[1] is not None else stored[0])
        whole = (parts[0] if len(parts) == 1 else torch.cat(parts) for parts in pieces)
        return [values.view(p.shape) for values, p in zip(whole, self._weights.parameters, strict=True)]

    def set_moments(self, slot: str, values: Sequence[torch.Tensor]) -> None:
        for (index, start, stop), (moment, largest, numbers) in zip(self._pieces, self._stored(slot), strict=True):
            value = values[index].reshape(-1)[start:stop]
            if largest is None:
                moment.copy_(value)
            else:
                codes, magnitudes = _packed(value.to(moment.device), numbers.to(moment.device))
                moment.copy_(codes)
                largest.copy_(magnitudes)

    def _stored(self, slot: str) -> Iterator[tuple[torch.Tensor, Any, Any]]:
        """Yield for each piece the moment, or its codes with the blocks' largest magnitudes and the numbers that codes
        select. A paged tensor is one of the host's to torch, so the device must be done with it."""
        if self._paged:
            torch.cuda.synchronize()
        index = 1 + ADAMW_SLOTS.index(slot)
        for state in self._states:
            yield state[f"state{index}"], state.get(f"absmax{index}"), state.get(f"qmap{index}")


def _bounds(count: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield the bounds of pieces of so many values; the last one may have more, never so few that its moments would
    stay in float32."""
    start = 0
    while count - start > most + _FEWEST_VALUES:
        yield start, start + most
        start += most
    yield start, count


def _unpacked(codes: torch.Tensor, largest: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return the values, in float32."""
    values = torch.nn.functional.embedding(codes.flatten().int(), numbers.to(codes.device)[:, None])
    scales = largest.to(codes.device).repeat_interleave(_BLOCK_VALUES)[: codes.numel()]
    return (values.flatten() * scales).view(codes.shape)


def _packed(values: torch.Tensor, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes and largest magnitudes that make `values`, if there are any; otherwise those nearest to them.

    The numbers reach 1, but not -1. So in a block whose extreme is negative, the magnitude is that extreme over the
    lowest number, but for rounding."""
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
            nearest = _nearest(blocks, other, limits)
            equal = (numbers[nearest.int()] * other[:, None] == blocks).all(1)
            codes, magnitudes = torch.where(equal[:, None], nearest, codes), torch.where(equal, other, magnitudes)
    return codes.flatten()[: values.numel()].view(values.shape), magnitudes


def _nearest(blocks: torch.Tensor, magnitudes: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
    """Return the codes, [blocks, 256] in bytes; in a block of zeros, those of 0."""
    shares = blocks / torch.where(magnitudes > 0, magnitudes, 1)[:, None]
    return torch.bucketize(shares, limits).to(torch.uint8)
