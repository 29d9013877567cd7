"""What the control thread does with orders to fence and form, at the other end of a real socket."""

import os
import time
from pathlib import Path

import pytest
from tests.trainer.support.line import DEADLINE_SECONDS, WHO
from tests.waiting import slowness, until

from trainctl.protocol import messages as m
from trainctl.protocol.machine.file_digests import model_digests
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.status_page import StatusWriter
from trainctl.trainer.collective.group import Solo
from trainctl.trainer.control.inbox import Joined
from trainctl.trainer.runtime import Trainer

FIRST, SECOND, THIRD = (m.Generation(1, n) for n in (1, 2, 3))


def form(generation):
    return m.Form(run="r", generation=generation, engine="none", ranks=(0,))


def fence(generation):
    return m.Fence(run="r", generation=generation)


def test_work_that_shows_nothing_for_long_is_a_sign_of_life_too(line):
    """As loading a large model: while nothing is shown on the status page, processor time counts."""
    begun = line.hear(m.Alive).progress or 0
    worked = time.process_time()
    while time.process_time() < worked + 1.2:
        pass
    until(lambda: (line.hear(m.Alive).progress or 0) > begun)


@pytest.mark.tier("soak")
def test_an_agent_that_comes_back_is_found_in_a_fraction_of_the_time_it_was_away(line):
    """ZeroMQ's pauses would grow to as long as an agent that is back waits before it takes the trainer for hung: away
    for 6.5 s, it would be found after another 4.7 s."""
    away_seconds = 6.5
    line.be_away(away_seconds)
    back_at = time.monotonic()
    line.hear(m.Alive)
    assert time.monotonic() - back_at < away_seconds / 2 * slowness()


def test_a_fence_that_an_update_delays_is_forgotten_when_a_group_is_formed_after_it(line, progress):
    """Answered after the Form, it would leave the generation that the agent counts on."""
    line.tell(form(FIRST))
    line.hear(m.Formed)
    with progress.exclusive(FIRST):
        line.tell(fence(SECOND))
        until(lambda: line.control._pending_fence is not None)
        line.tell(form(SECOND))
        until(lambda: line.control._pending_fence is None)
    assert line.hear(m.Formed).generation == SECOND
    assert progress.formed == SECOND


def test_the_group_that_was_formed_is_the_one_that_plans_reduce_over(new_rig, line, tmp_path):
    line.tell(form(FIRST))
    line.hear(m.Formed)
    joined = line.control.orders.get(timeout=DEADLINE_SECONDS)
    assert joined == Joined(FIRST, joined.group)
    assert type(joined.group) is Solo

    reduced: list[float] = []

    class Counting(Solo):
        def all_reduce(self, backend, tail):
            reduced.append(tail.weight)
            return tail

    rig = new_rig("torch")
    status = StatusWriter(tmp_path / "rank-9.status", os.getpid())
    rig.progress.last_seq = 0
    files = model_digests(Path(rig.config.model.path))
    trainer = Trainer(
        WHO, rig.config, RunPaths(tmp_path), rig.backend, rig.dataset, rig.progress, status, line.control, files
    )  # fmt: skip
    for order in (Joined(FIRST, Counting()), rig.plan(1, 4), m.Leave(run="r", reason="the test is over")):
        line.control.orders.put(order)
    trainer.serve()
    assert reduced == [240.0]
    status.close()
