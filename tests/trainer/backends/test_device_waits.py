"""How often a step waits for its device: each read of a number from it, and each synchronisation, is counted."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)


class Reads(TorchDispatchMode):
    """Counts reads of single numbers, by which a host waits."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in READS
        return func(*args, **(kwargs or {}))


def waits(rig: Any, monkeypatch: pytest.MonkeyPatch, step: int, micro: int) -> int:
    lists = []
    to_list = torch.Tensor.tolist

    def counted(tensor: torch.Tensor) -> Any:
        lists.append(tensor)
        return to_list(tensor)

    with monkeypatch.context() as patch, Reads() as reads:
        patch.setattr(torch.Tensor, "tolist", counted)
        rig.train(step, micro)
    return reads.count + len(lists)


@pytest.mark.parametrize("samples", [False, True], ids=["blocks", "masked"])
def test_a_step_on_torch_waits_once(
    new_rig: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, samples: bool
) -> None:
    rig = new_rig("torch", samples=samples)
    rig.train(1, 4)
    assert waits(rig, monkeypatch, 2, 2) == 1, "6 micro-batches"
    assert waits(rig, monkeypatch, 3, 12) == 1


@pytest.mark.parametrize("samples", [False, True], ids=["blocks", "masked"])
def test_each_phase_on_mlx_evaluates_at_most_once(
    new_rig: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, samples: bool
) -> None:
    import mlx.core as mx

    rig = new_rig("mlx", samples=samples)
    rig.train(1, 4)
    found: list[None] = []
    evaluate = mx.eval

    def counted(*arrays: Any) -> None:
        found.append(None)
        evaluate(*arrays)

    with monkeypatch.context() as patch:
        patch.setattr(mx, "eval", counted)
        rig.train(2, 4)
        three = len(found)
        rig.train(3, 2)
    each = 4  # publishing the model and the loss; the gradient; the sum
    assert (three, len(found) - three) == (3 * each + 2, 6 * each + 2), "with one for the norm and one for the update"
