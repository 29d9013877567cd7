"""A sum that fails leaves every rank as it was: the same batch is finished by the next group, with the same loss."""

import functools
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from tests.trainer.support.curves import worst
from tests.trainer.support.ranks import DEADLINE_SECONDS, Rank, Ranks
from tests.waiting import slowness

from trainctl.protocol import messages as m
from trainctl.trainer.backends.base import Backend
from trainctl.trainer.collective.group import ReducerGroup, Tail
from trainctl.trainer.common.errors import AbandonedError, GroupError

NewRanks = Callable[..., Ranks]
SHARES, MICROS = (6, 4, 2), (4, 3, 2)
FENCED_WITHIN_SECONDS = 5.0


class Watched(ReducerGroup):
    """Keeps what the accumulators held when they were to be summed."""

    held: dict[str, Any] | None = None

    def all_reduce(self, backend: Backend, tail: Tail) -> Tail:
        self.held = backend.copy_of("accumulators")
        return super().all_reduce(backend, tail)


def soon(rank: Rank, plan: m.StepPlan) -> bool:
    return any(isinstance(said, m.Soon) and said.seq == plan.seq for said in rank.rig.sent)


def begin(ranks: list[Rank], plan: m.StepPlan) -> "list[Future[m.Report]]":
    """Have them run the plan, and see them all at the sum."""
    futures = [rank.submit(functools.partial(rank.rig.executor.train, plan, time.perf_counter())) for rank in ranks]
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not all(soon(rank, plan) for rank in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return futures


@pytest.mark.parametrize("engine", ["gloo", "ring"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_reducer_that_dies_or_hangs_costs_nothing(
    new_ranks: NewRanks,
    curve: Callable[..., list[float]],
    same_bits: Callable[..., bool],
    engine: m.Engine,
    number: signal.Signals,
) -> None:
    ranks = new_ranks(engine, ("torch", "torch", "torch"))
    assert ranks.form() == []
    for rank in ranks.ranks:
        assert rank.group is not None
        rank.group.__class__ = Watched
    losses = [ranks.train(ranks.plan(1, SHARES, MICROS))[0]]
    plan = ranks.plan(2, SHARES, MICROS)
    futures = begin(ranks.ranks[:2], plan)
    ranks.ranks[0].reducer().send_signal(number)
    futures += begin(ranks.ranks[2:], plan)
    if number == signal.SIGKILL:
        with pytest.raises(GroupError, match="the reducer ended by SIGKILL"):
            futures[0].result(DEADLINE_SECONDS)
    asked = time.monotonic()
    answers = ranks.fence()
    errors = [future.exception(DEADLINE_SECONDS) for future in futures]
    assert time.monotonic() - asked < FENCED_WITHIN_SECONDS * slowness()
    assert all(isinstance(error, AbandonedError | GroupError) for error in errors), errors
    for rank in ranks.ranks:
        now = rank.call(lambda own=rank.rig.backend: own.copy_of("accumulators"))
        assert same_bits(rank.group.held, now), "what the sum left"
    assert [(answer.last_step, answer.held_from) for answer in answers] == [(1, plan.generation)] * 3
    assert [answer.held for answer in answers] == [work.ranges for work in plan.work]

    assert ranks.form() == []
    rest = tuple(m.RankWork(rank, (), 1) for rank in range(3))
    losses.append(ranks.train(ranks.plan(2, SHARES, MICROS, work=rest, finishes=plan.generation))[0])
    losses.append(ranks.train(ranks.plan(3, SHARES, MICROS))[0])
    drawn = [report.loss_sum / report.weight for report in losses]
    assert worst(drawn, curve("torch", samples=False, resized=False)[:3]) < 1e-5


@pytest.mark.parametrize(
    ("engine", "said"),
    [("gloo", "connection to c was (reset|closed)"), ("ring", "connection to a peer was lost")],
)
def test_who_loses_a_peer_says_so_in_plain_words_and_the_log_has_the_engines(
    new_ranks: NewRanks, caplog: pytest.LogCaptureFixture, engine: m.Engine, said: str
) -> None:
    ranks = new_ranks(engine, ("torch", "torch", "torch"))
    assert ranks.form() == []
    plan = ranks.plan(1, SHARES, MICROS)
    futures = begin(ranks.ranks[:2], plan)
    ranks.ranks[2].reducer().kill()
    errors = [str(future.exception(DEADLINE_SECONDS)) for future in futures]
    assert any(re.fullmatch(said, error) for error in errors), errors
    assert not any("[" in error for error in errors), errors
    assert any(f"{engine}: RuntimeError: [" in record.getMessage() for record in caplog.records)
