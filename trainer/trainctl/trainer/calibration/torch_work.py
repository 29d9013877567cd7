"""Matrix products and copies by torch."""

import contextlib
from collections.abc import Callable, Iterator

import torch

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class TorchWork:
    """On one device of torch."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)

    def dtypes(self) -> tuple[str, ...]:
        return tuple(_DTYPES)

    def product(self, dtype: str, size: int) -> Callable[[], None]:
        """Of random values: constant ones need less power, and a GPU would then be up to 13 % faster."""
        one = torch.randn(size, size, dtype=_DTYPES[dtype], device=self._device)
        other, into = one.flip(0), torch.empty_like(one)

        def run() -> None:
            torch.mm(one, other, out=into)
            self._wait()

        return run

    def copy(self, size_bytes: int) -> Callable[[], None]:
        block, into = (torch.ones(size_bytes // 4, device=self._device) for _ in range(2))

        def run() -> None:
            into.copy_(block)
            self._wait()

        return run

    @contextlib.contextmanager
    def one_core(self) -> Iterator[bool]:
        if self._device.type != "cpu":
            yield False
            return
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield True
        finally:
            torch.set_num_threads(before)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        elif self._device.type == "mps":
            torch.mps.synchronize()
