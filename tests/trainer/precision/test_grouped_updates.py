"""Parameters that are updated together get the bits that each gets by itself."""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainctl.protocol.config.run_tables import OptimizerTable
from trainctl.trainer.backends import torch_adamw
from trainctl.trainer.precision.torch_weights import KernelParts, OwnWeights, RoundedWeights, SplitWeights, TorchWeights

SHAPES = ((7, 5), (11,), (3, 40), (2,), (300, 7), (4, 4), (9,))
"""The fifth is larger than a piece."""


class Alone(SplitWeights):
    """Without groups."""

    def group(self, indices: range) -> None:  # type: ignore[override]
        return None


class RoundedAlone(RoundedWeights):
    """Without groups."""

    def group(self, indices: range) -> None:  # type: ignore[override]
        return None


def rounded(kind: type[RoundedWeights], parameters: list[torch.nn.Parameter]) -> RoundedWeights:
    return kind(parameters, 3)


ROUNDED = [functools.partial(rounded, kind) for kind in (RoundedWeights, RoundedAlone)]


def updated(kind: Callable[..., TorchWeights], monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Weights in 16 bits, their masters and moments after a few updates."""
    monkeypatch.setattr(torch_adamw, "_PIECE_VALUES_ON_CPU", 200)
    draw = torch.Generator().manual_seed(1)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=draw)) for shape in SHAPES]
    weights = kind(parameters)
    optimizer = torch_adamw.adamw(weights, OptimizerTable(learning_rate=1e-2, weight_decay=0.1))
    for _ in range(3):
        optimizer.update(1e-2, [torch.randn(shape, generator=draw) for shape in SHAPES], 0.5)
    moments = [moment for slot in ("exp_avg", "exp_avg_sq") for moment in optimizer.moments(slot)]
    return [*(p.detach() for p in parameters), *(weights.values(at) for at in range(len(SHAPES))), *moments]


@pytest.mark.parametrize("kinds", [[SplitWeights, Alone], ROUNDED], ids=["split", "rounded"])
def test_a_group_has_the_bits_of_its_parameters_alone(
    monkeypatch: pytest.MonkeyPatch, kinds: list[Callable[..., TorchWeights]]
) -> None:
    together, alone = (updated(kind, monkeypatch) for kind in kinds)
    assert together[0].dtype == torch.bfloat16
    for one, other in zip(together, alone, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("most", "found"),
    [(5, [(0, 2), (2, 3), (3, 6)]), (100, [(0, 6)]), (1, [(at, at + 1) for at in range(6)])],
)
def test_groups_hold_neighbours_up_to_the_size_of_a_piece(most: int, found: list[tuple[int, int]]) -> None:
    groups = torch_adamw._grouped([2, 3, 9, 1, 2, 2], most)
    assert [(group.start, group.stop) for group in groups] == found


def owned(parameters: list[torch.nn.Parameter]) -> OwnWeights:
    return OwnWeights(parameters)


@pytest.mark.parametrize("weights", [owned, SplitWeights, ROUNDED[0]], ids=["float32", "split", "rounded"])
@pytest.mark.parametrize("kind", ["adamw", "adamw-8bit"])
def test_gradients_are_multiplied_by_the_factor(weights: Callable[..., TorchWeights], kind: Any) -> None:
    """Weights hardly depend on it with AdamW, but the moments do."""
    draw = torch.Generator().manual_seed(1)
    values, gradients = ([torch.randn(shape, generator=draw) for shape in SHAPES] for _ in range(2))
    found = []
    for factor, scale in ((0.5, 1.0), (1.0, 0.5), (1.0, 1.0)):
        made = weights([torch.nn.Parameter(value.clone()) for value in values])
        optimizer = torch_adamw.adamw(made, OptimizerTable(kind=kind, learning_rate=1e-2))
        optimizer.update(1e-2, [gradient * scale for gradient in gradients], factor)
        found.append(torch.cat([moment.flatten() for moment in optimizer.moments("exp_avg")]))
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], found[2] / 2)


@pytest.mark.parametrize(
    ("missing", "cache", "says"),
    [
        (("C compiler", "triton"), "own", "this machine has no C compiler and no triton; install what is missing"),
        ((), "open", "can be written to by other users (chmod go-w); set TRITON_CACHE_DIR to a folder of your own"),
        ((), "own", "Triton can't compile its kernel: import of triton halted; None in sys.modules"),
        ((), "chosen", "Triton can't compile its kernel: import of triton halted; None in sys.modules"),
    ],
)
def test_without_a_kernel_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, missing: tuple[str, ...],
    cache: str, says: str,
) -> None:  # fmt: skip
    """Parameters of a CUDA device, as far as the choice looks at them."""
    weights = SplitWeights([torch.nn.Parameter(torch.zeros(8))])
    on_cuda = KernelParts(SimpleNamespace(device=torch.device("cuda")), None)  # type: ignore[arg-type]
    monkeypatch.setattr(weights, "kernel_parts", lambda update: [on_cuda])
    monkeypatch.setattr(torch_adamw, "lacking", lambda kind: missing)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "trainctl.trainer.precision.triton_update", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # so that it is put back
    if cache != "chosen":
        monkeypatch.delenv("TRITON_CACHE_DIR")
    if cache != "own":
        (tmp_path / "trainctl").mkdir()
        (tmp_path / "trainctl").chmod(0o777)
    assert torch_adamw._triton_update(weights) is None
    (said,) = caplog.messages
    assert said.startswith("AdamW runs one operation at a time, which takes several times as long: ")
    assert said.endswith(says)
