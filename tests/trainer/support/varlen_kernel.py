"""A kernel for packed documents, made of plain attention."""

import itertools
from collections.abc import Callable
from typing import Any

Compute = Callable[..., Any]


def by_document(
    query: Any,
    key: Any,
    value: Any,
    starts: Any,
    ends: Any,
    longest: int,
    longest_key: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool = False,
) -> Any:
    """Attend as torch documents `varlen_attn` with the window of causal attention."""
    import torch

    assert starts is ends
    assert starts.dtype == torch.int32
    assert starts.is_contiguous()
    assert window_size == (-1, 0)
    assert query.shape[1] == key.shape[1] or enable_gqa
    bounds = starts.tolist()
    sizes = [end - begin for begin, end in itertools.pairwise(bounds)]
    assert (sum(sizes), max(sizes)) == (len(query), longest)
    assert longest == longest_key
    parts = [[each[begin:end].transpose(0, 1) for each in (query, key, value)] for begin, end in
             itertools.pairwise(bounds)]  # fmt: skip
    attend = torch.nn.functional.scaled_dot_product_attention
    return torch.cat([
        attend(*part, is_causal=True, scale=scale, enable_gqa=enable_gqa).transpose(0, 1) for part in parts
    ])  # fmt: skip


class Kernel:
    """`varlen_attn` on one device; counts its calls."""

    def __init__(self, device: str, compute: Compute) -> None:
        self.device, self.compute, self.calls = device, compute, 0

    def __call__(self, *given: Any, **how: Any) -> Any:
        self.calls += 1
        return self.compute(*given, **how)
