"""However a batch is dealt to ranks and engines, the losses are those of one rank with all of it.

`make test` has mixed backends, `make test-all` each mix of them on one engine, `make soak` on both.
"""

import functools

import pytest
from tests.trainer.support.curves import worst

from trainctl.protocol import messages as m

ENGINES = ("gloo", "ring")
MIXES = {
    "torch": (("torch", "torch", "torch"), "torch", 1e-5),
    "mlx": (("mlx", "mlx", "mlx"), "mlx", 1e-5),
    "mixed": (("torch", "mlx", "mlx"), "torch", 5e-5),
}
TIERS = {("ring", "mixed"): "test", ("gloo", "torch"): "all", ("gloo", "mlx"): "all"}
CASES = [
    pytest.param(engine, mix, marks=pytest.mark.tier(TIERS.get((engine, mix), "soak")))
    for engine in ENGINES
    for mix in MIXES
]


STEPS = 20
SHARES = [(6, 4, 2)] * 6 + [(3, 4, 5)] * 7 + [(1, 9, 2)] * 7
MICROS = [(4, 3, 2)] * 4 + [(2, 3, 1)] * 6 + [(5, 4, 3)] * 10
"""Shares and micro-batches of steps: two rebalances and two resizes on the way."""


def losses(ranks):
    """Return the losses of the steps; all ranks must report the same."""
    curve = []
    for step, (shares, micros) in enumerate(zip(SHARES, MICROS, strict=True), 1):
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
def test_three_ranks_draw_the_curve_of_one(new_ranks, new_rig, curve, engine, mix):
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
        assert worst(drawn, alone[:STEPS]) < tolerance, samples
