"""However a batch is dealt to ranks and engines, the losses are those of one rank with all of it.

`make test` has mixed backends, `make test-all` each mix of them on one engine, `make soak` on both.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from tests.trainer.support.curves import STEPS, worst
from tests.trainer.support.ranks import Ranks

from trainctl.protocol import messages as m
from trainctl.trainer.backends.base import Backend
from trainctl.trainer.collective.group import ReducerGroup, Tail

ENGINES = ("gloo", "ring")
MIXES = {
    "torch": (("torch", "torch", "torch"), "torch", 1e-5),
    "mlx": (("mlx", "mlx", "mlx"), "mlx", 1e-5),
    "mixed": (("torch", "mlx", "torch"), "torch", 5e-5),
}
TIERS = {("ring", "mixed"): "test", ("gloo", "torch"): "all", ("gloo", "mlx"): "all"}
CASES = [
    pytest.param(engine, mix, marks=pytest.mark.tier(TIERS.get((engine, mix), "soak")))
    for engine in ENGINES for mix in MIXES
]  # fmt: skip
NewRanks = Callable[..., Ranks]


def dealt(step: int) -> tuple[Sequence[int], Sequence[int]]:
    """Shares and micro-batches of a step: two rebalances and two resizes on the way."""
    shares = (6, 4, 2) if step <= 12 else (3, 4, 5) if step <= 25 else (1, 9, 2)
    micros = (4, 3, 2) if step <= 8 else (2, 3, 1) if step <= 20 else (5, 4, 3)
    return shares, micros


def losses(ranks: Ranks, steps: int = STEPS) -> list[float]:
    """Of so many steps; all ranks must report the same."""
    curve = []
    for step in range(1, steps + 1):
        shares, micros = dealt(step)
        reports = ranks.train(ranks.plan(step, shares, micros))
        assert all(isinstance(report, m.Report) for report in reports), reports
        assert [report.own_samples for report in reports] == [*shares]
        assert sum(report.own_weight for report in reports) == reports[0].weight
        assert len({report.values["sum_bytes"] for report in reports}) == 1
        assert min(report.values["sum_bytes_per_second"] for report in reports) > 0
        assert sum(report.own_tokens for report in reports) == reports[0].tokens >= reports[0].weight
        (loss,) = {report.loss_sum / report.weight for report in reports}
        curve.append(loss)
    return curve


@pytest.mark.parametrize(("engine", "mix"), CASES)
def test_three_ranks_draw_the_curve_of_one(
    new_ranks: NewRanks, new_rig: Callable[..., Any], curve: Callable[..., list[float]], engine: m.Engine, mix: str
) -> None:
    backends, reference, tolerance = MIXES[mix]
    ranks = new_ranks(engine, backends)
    assert ranks.form() == []
    found = {False: losses(ranks)}
    for rank, backend in zip(ranks.ranks, backends, strict=True):
        rank.change_rig(functools.partial(new_rig, backend, rank=rank.number, samples=True))
    found[True] = losses(ranks)
    for samples, drawn in found.items():
        alone = curve(reference, samples=samples, resized=False)
        assert alone[-1] < 0.75 * alone[0], "it has to learn for this to mean anything"
        assert worst(drawn, alone) < tolerance, samples


class Misweighted(ReducerGroup):
    """What others do: rank r's gradients times `own(its weight, ranks)` before the sum, the sum times
    `back(global weight, ranks)`."""

    own: Callable[[float, int], float]
    back: Callable[[float, int], float]

    def all_reduce(self, backend: Backend, tail: Tail) -> Tail:
        factor, copies = self.own(tail.weight, len(self._form.ranks)), backend.copy_of("accumulators")
        backend.copy_in("accumulators", {name: array * np.float32(factor) for name, array in copies.items()})
        self.total = super().all_reduce(backend, tail)
        return self.total

    def deliver(self, backend: Backend) -> None:
        self._buffer.floats[: self._layout.elements] *= self.back(self.total.weight, len(self._form.ranks))
        super().deliver(backend)


def one(weight: float, ranks: int) -> float:
    return 1.0


WEIGHINGS: dict[str, tuple[Callable[[float, int], float], Callable[[float, int], float]]] = {
    "as it is": (one, one),
    "mean of means": (lambda weight, ranks: 1 / (weight * ranks), lambda weight, ranks: weight),
    "divided by ranks": (one, lambda weight, ranks: 1 / ranks),
}


def test_averaging_means_or_dividing_by_ranks_would_not_pass(
    new_ranks: NewRanks, new_rig: Callable[..., Any], curve: Callable[..., list[float]]
) -> None:
    ranks = new_ranks("gloo", ("torch", "torch", "torch"), samples=True)
    assert ranks.form() == []
    apart = {}
    for name, (own, back) in WEIGHINGS.items():
        for rank in ranks.ranks:
            rank.change_rig(functools.partial(new_rig, "torch", rank=rank.number, samples=True))
            assert rank.group is not None
            rank.group.__class__ = Misweighted
            vars(rank.group).update(own=own, back=back)
        apart[name] = worst(losses(ranks, 15), curve("torch", samples=True, resized=False)[:15])
    assert apart["as it is"] < 1e-5
    assert min(apart["mean of means"], apart["divided by ranks"]) > 100 * 1e-5, apart
