"""A sum that fails leaves every rank as it was: the same batch is finished by the next group, with the same loss."""

import functools
import re
import signal
import time
from typing import Any

import msgspec
import pytest
from tests.trainer.support.curves import worst
from tests.trainer.support.ranks import DEADLINE_SECONDS
from tests.waiting import until

from trainctl.protocol import messages as m
from trainctl.trainer.collective.group import ReducerGroup
from trainctl.trainer.common.errors import AbandonedError, GroupError
from trainctl.trainer.loop import train

SHARES, MICROS = (6, 4, 2), (4, 3, 2)


class Watched(ReducerGroup):
    """Keeps what the accumulators held when they were to be summed."""

    held: dict[str, Any] | None = None

    def all_reduce(self, backend, tail):
        self.held = backend.copy_out("accumulators")
        return super().all_reduce(backend, tail)


def begin(ranks, plan):
    """Have them run the plan, and see them all at the sum."""
    futures = [rank.submit(functools.partial(train, rank.rig.rank, plan, time.perf_counter())) for rank in ranks]
    soon = m.Soon(run="r", rank=0, generation=plan.generation, seq=plan.seq)
    for rank in ranks:
        until(lambda rank=rank: msgspec.structs.replace(soon, rank=rank.number) in rank.rig.sent)
    return futures


@pytest.mark.parametrize(
    ("engine", "number"),
    [
        ("gloo", signal.SIGKILL),
        ("ring", signal.SIGSTOP),
        pytest.param("gloo", signal.SIGSTOP, marks=pytest.mark.tier("all")),
        pytest.param("ring", signal.SIGKILL, marks=pytest.mark.tier("all")),
    ],
)
def test_a_reducer_that_dies_or_hangs_costs_nothing(new_ranks, curve, same_bits, engine, number):
    ranks = new_ranks(engine, ("mlx", "mlx", "mlx"))
    assert ranks.form() == []
    for rank in ranks.ranks:
        rank.group.__class__ = Watched
    losses = [ranks.train(ranks.plan(1, SHARES, MICROS))[0]]
    plan = ranks.plan(2, SHARES, MICROS)
    futures = begin(ranks.ranks[:2], plan)
    ranks.ranks[0].reducer().send_signal(number)
    futures += begin(ranks.ranks[2:], plan)
    if number == signal.SIGKILL:
        with pytest.raises(GroupError, match="the reducer ended by SIGKILL"):
            futures[0].result(DEADLINE_SECONDS)
    answers = ranks.fence()
    errors = [future.exception(DEADLINE_SECONDS) for future in futures]
    assert all(isinstance(error, AbandonedError | GroupError) for error in errors), errors
    for rank in ranks.ranks:
        now = rank.call(lambda own=rank.rig.backend: own.copy_out("accumulators"))
        assert same_bits(rank.group.held, now), "what the sum left"
    assert [(answer.last_step, answer.held_from) for answer in answers] == [(1, plan.generation)] * 3
    assert [answer.held for answer in answers] == [work.ranges for work in plan.work]

    assert ranks.form() == []
    rest = tuple(m.RankWork(rank, (), 1) for rank in range(3))
    losses.append(ranks.train(ranks.plan(2, SHARES, MICROS, work=rest, finishes=plan.generation))[0])
    losses.append(ranks.train(ranks.plan(3, SHARES, MICROS))[0])
    drawn = [report.loss_sum / report.weight for report in losses]
    assert worst(drawn, curve("mlx", samples=False, resized=False)[:3]) < 1e-5


@pytest.mark.parametrize(
    ("engine", "said"),
    [("gloo", "connection to c was (reset|closed)"), ("ring", "connection to a peer was lost")],
)
def test_who_loses_a_peer_says_so_in_plain_words_and_the_log_has_the_engines(new_ranks, caplog, engine, said):
    ranks = new_ranks(engine, ("mlx", "mlx", "mlx"))
    assert ranks.form() == []
    plan = ranks.plan(1, SHARES, MICROS)
    futures = begin(ranks.ranks[:2], plan)
    ranks.ranks[2].reducer().kill()
    errors = [str(future.exception(DEADLINE_SECONDS)) for future in futures]
    assert any(re.fullmatch(said, error) for error in errors), errors
    assert not any("[" in error for error in errors), errors
    assert any(f"{engine}: RuntimeError: [" in record.getMessage() for record in caplog.records)
