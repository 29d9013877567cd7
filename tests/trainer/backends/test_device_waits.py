"""How often a step waits for its device: each read of a number from it, and each synchronisation, is counted."""

import pytest


@pytest.fixture
def reads():
    """Counts reads of single numbers, by which a host waits."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    kinds = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)

    class Reads(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += func in kinds
            return func(*args, **(kwargs or {}))

    return Reads()


@pytest.mark.parametrize("micro", [2, 12])
def test_a_step_on_torch_waits_once(new_rig, reads, monkeypatch, micro):
    import torch

    rig = new_rig("torch", samples=True)
    rig.train(1, 4)
    lists, to_list = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: lists.append(tensor) or to_list(tensor))
    with reads:
        rig.train(2, micro)
    assert reads.count + len(lists) == 1


def test_each_phase_on_mlx_evaluates_at_most_once(new_rig, monkeypatch):
    import mlx.core as mx

    rig, found, evaluate = new_rig("mlx", samples=True), [], mx.eval
    rig.train(1, 4)
    monkeypatch.setattr(mx, "eval", lambda *arrays: found.append(arrays) or evaluate(*arrays))
    rig.train(2, 4)
    three = len(found)
    rig.train(3, 2)
    each = 4  # publishing the model and the loss; the gradient; the sum
    assert (three, len(found) - three) == (3 * each + 2, 6 * each + 2), "with one for the norm and one for the update"
