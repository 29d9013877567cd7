"""One Triton kernel for all parameters on an NVIDIA GPU: weights and moments of torch's AdamW. Left out without one."""

from typing import Any

import numpy as np
import pytest

from trainctl.protocol.config.run_tables import OptimizerTable
from trainctl.trainer.backends.base import ADAMW_SLOTS
from trainctl.trainer.precision.stochastic_rounding import key_of, rounded

pytestmark = pytest.mark.needs("cuda", "cuda-compiler")
ALIGNED = ((64, 48), (128,), (3, 4096), (16,), (1000, 16))
ODD = ((7, 5), (11,), (3, 1000), (2,), (300, 7))
TABLE = OptimizerTable(learning_rate=1e-2, weight_decay=0.1)
SEED, UPDATES, FACTOR = 3, 5, 0.5


@pytest.fixture(autouse=True, scope="module")
def libraries():
    global torch, torch_adamw, RoundedWeights, SplitWeights
    import torch

    from trainctl.trainer.backends import torch_adamw
    from trainctl.trainer.precision.torch_weights import RoundedWeights, SplitWeights


def given(shapes, seed):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draw).cuda() for shape in shapes]


def reference(values):
    """Float32 weights and torch's optimizer."""
    held = [torch.nn.Parameter(value.clone()) for value in values]
    groups: list[dict[str, Any]] = [{"params": [p for p in held if p.ndim > 1]}]
    groups.append({"params": [p for p in held if p.ndim < 2], "weight_decay": 0.0})
    betas = (TABLE.beta1, TABLE.beta2)
    return held, torch.optim.AdamW(
        groups, lr=TABLE.learning_rate, betas=betas, eps=TABLE.epsilon, weight_decay=TABLE.weight_decay
    )


def step(optimizer, held, gradients):
    for p, gradient in zip(held, gradients, strict=True):
        p.grad = gradient * FACTOR
    optimizer.step()


def with_kernel(weights):
    made = torch_adamw.adamw(weights, TABLE)
    assert made.library == "triton"
    return made


@pytest.mark.parametrize("shapes", [ALIGNED, ODD], ids=["aligned", "odd"])
def test_split_weights_and_moments_are_those_of_torch(shapes):
    values = given(shapes, 1)
    held, plain = reference(values)
    weights = SplitWeights([torch.nn.Parameter(value) for value in values])
    optimizer = with_kernel(weights)
    for update in range(UPDATES):
        step(plain, held, given(shapes, 10 + update))
        optimizer.update(TABLE.learning_rate, given(shapes, 10 + update), FACTOR)
    assert optimizer.updates == UPDATES
    for index, p in enumerate(held):
        master, computed = weights.values(index), weights.parameters[index].detach().float()
        torch.testing.assert_close(master, p.detach(), rtol=1e-6, atol=1e-6)
        assert torch.equal((computed - master).abs(), (master.bfloat16().float() - master).abs()), "as near as can be"
        for slot in ADAMW_SLOTS:
            torch.testing.assert_close(optimizer.moments(slot)[index], plain.state[p][slot], rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("shapes", [ALIGNED, ODD], ids=["aligned", "odd"])
def test_weights_are_rounded_by_the_specified_generator(shapes):
    """Bits differ only where a value differs in its last place, by torch's order of operations."""
    weights = RoundedWeights([torch.nn.Parameter(value) for value in given(shapes, 1)], SEED)
    optimizer, differing, count = with_kernel(weights), 0, 0
    held, plain = reference([p.detach().float() for p in weights.parameters])
    for update in range(1, UPDATES + 1):
        for p, computed in zip(held, weights.parameters, strict=True):
            p.data = computed.detach().float()
        step(plain, held, given(shapes, 10 + update))
        optimizer.update(TABLE.learning_rate, given(shapes, 10 + update), FACTOR)
        for index, p in enumerate(held):
            expected = rounded(p.detach().cpu().numpy().ravel(), key_of(SEED, update, index))
            found = weights.parameters[index].detach().view(torch.int16).cpu().numpy().ravel().view(np.uint16)
            differing, count = differing + int((found != expected).sum()), count + found.size
    assert differing <= 1e-3 * count
