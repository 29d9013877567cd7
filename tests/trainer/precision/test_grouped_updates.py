"""Parameters that are updated together get the bits that each gets by itself."""

import pytest

from trainctl.protocol.config.run_tables import OptimizerTable

SHAPES = ((7, 5), (11,), (3, 40), (2,), (300, 7), (4, 4), (9,))
"""The fifth is larger than a piece."""


@pytest.fixture(autouse=True, scope="module")
def libraries():
    global torch, torch_adamw, torch_weights
    import torch

    from trainctl.trainer.backends import torch_adamw
    from trainctl.trainer.precision import torch_weights


def weights_of(kind, parameters):
    """Make weights of a kind, and of "rounded alone" and "split alone" those without groups."""
    if kind == "float32":
        return torch_weights.OwnWeights(parameters)
    name, _, alone = kind.partition(" ")
    plain = {"split": torch_weights.SplitWeights, "rounded": torch_weights.RoundedWeights}[name]
    made = type("Alone", (plain,), {"group": lambda self, indices: None}) if alone else plain
    return made(parameters, 3) if name == "rounded" else made(parameters)


def updated(kind, monkeypatch):
    """Return weights in 16 bits, their masters and moments after a few updates."""
    monkeypatch.setattr(torch_adamw, "_PIECE_VALUES_ON_CPU", 200)
    draw = torch.Generator().manual_seed(1)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=draw)) for shape in SHAPES]
    weights = weights_of(kind, parameters)
    optimizer = torch_adamw.adamw(weights, OptimizerTable(learning_rate=1e-2, weight_decay=0.1))
    for _ in range(3):
        optimizer.update(1e-2, [torch.randn(shape, generator=draw) for shape in SHAPES], 0.5)
    moments = [moment for slot in ("exp_avg", "exp_avg_sq") for moment in optimizer.moments(slot)]
    return [*(p.detach() for p in parameters), *(weights.values(at) for at in range(len(SHAPES))), *moments]


@pytest.mark.parametrize("kind", ["split", "rounded"])
def test_a_group_has_the_bits_of_its_parameters_alone(monkeypatch, kind):
    together, alone = updated(kind, monkeypatch), updated(f"{kind} alone", monkeypatch)
    assert together[0].dtype == torch.bfloat16
    assert all(torch.equal(one, other) for one, other in zip(together, alone, strict=True))


def test_groups_hold_neighbours_up_to_the_size_of_a_piece():
    groups = {most: torch_adamw._grouped([2, 3, 9, 1, 2, 2], most) for most in (1, 5, 100)}
    found = {most: [(group.start, group.stop) for group in made] for most, made in groups.items()}
    assert found == {1: [(at, at + 1) for at in range(6)], 5: [(0, 2), (2, 3), (3, 6)], 100: [(0, 6)]}


@pytest.mark.parametrize("weights", ["float32", "split", "rounded"])
@pytest.mark.parametrize("kind", ["adamw", "adamw-8bit"])
def test_gradients_are_multiplied_by_the_factor(weights, kind):
    """Weights hardly depend on it with AdamW, but the moments do."""
    draw = torch.Generator().manual_seed(1)
    values, gradients = ([torch.randn(shape, generator=draw) for shape in SHAPES] for _ in range(2))
    found = []
    for factor, scale in ((0.5, 1.0), (1.0, 0.5), (1.0, 1.0)):
        made = weights_of(weights, [torch.nn.Parameter(value.clone()) for value in values])
        optimizer = torch_adamw.adamw(made, OptimizerTable(kind=kind, learning_rate=1e-2))
        optimizer.update(1e-2, [gradient * scale for gradient in gradients], factor)
        found.append(torch.cat([moment.flatten() for moment in optimizer.moments("exp_avg")]))
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], found[2] / 2)
