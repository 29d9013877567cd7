"""An update takes gradients times a factor, whatever the weights and moments are kept in."""

import pytest

from trainctl.protocol.config.run_tables import OptimizerTable

SHAPES = ((7, 5), (11,), (3, 40), (2,), (300, 7), (4, 4), (9,))


@pytest.fixture(autouse=True, scope="module")
def libraries():
    global torch, torch_adamw
    import torch

    from trainctl.trainer.backends import torch_adamw


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["adamw", "adamw-8bit"])
def test_gradients_are_multiplied_by_the_factor(weights, kind):
    """Weights hardly depend on it with AdamW, but the moments do."""
    draw = torch.Generator().manual_seed(1)
    values, gradients = ([torch.randn(shape, generator=draw) for shape in SHAPES] for _ in range(2))
    found = []
    for factor, scale in ((0.5, 1.0), (1.0, 0.5), (1.0, 1.0)):
        made = torch_adamw.TorchWeights(
            [torch.nn.Parameter(value.clone()) for value in values], getattr(torch, weights)
        )
        optimizer = torch_adamw.adamw(made, OptimizerTable(kind=kind, learning_rate=1e-2))
        optimizer.update(1e-2, [gradient * scale for gradient in gradients], factor)
        found.append(torch.cat([moment.flatten() for moment in optimizer.moments("exp_avg")]))
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], found[2] / 2)
