"""Tests of what the control thread does with orders to fence and form, at the other end of a real socket."""

import time
from pathlib import Path

from tests.trainer.support.line import DEADLINE_SECONDS
from tests.waiting import until

from trainctl.protocol import messages as m
from trainctl.protocol.machine.file_digests import model_digests
from trainctl.protocol.record.paths import RunPaths
from trainctl.trainer.collective.group import Solo
from trainctl.trainer.control.orders import Joined
from trainctl.trainer.loading import progress_bar
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
    rig.progress.last_seq = 0
    files = model_digests(Path(rig.config.model.path))
    trainer = Trainer(rig.rank, rig.config, RunPaths(tmp_path), line.control, files)
    for order in (Joined(FIRST, Counting()), rig.plan(1, 4), m.Leave(run="r", reason="the test is over")):
        line.control.orders.put(order)
    trainer.serve()
    assert reduced == [240.0]


def test_progress_is_a_bar_with_the_time_that_is_left_by_what_this_process_did():
    assert progress_bar(0, 100, 0, 0.0) == "[--------------------] 0%"
    assert progress_bar(75, 100, 50, 10.0) == "[###############-----] 75%, 10 s left"
    assert progress_bar(10, 1000, 0, 60.0).endswith("1%, 99 min left")
    assert progress_bar(0, 0, 0, 1.0).startswith("[-")
