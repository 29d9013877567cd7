"""Stages of calibrations that run at the same time: what a process may begin, and who hears of it."""

import io
import threading

from trainctl.trainer.calibration.stages import PASSES, QUIET, REST, StageRelay, Stages


def test_a_stage_begins_once_it_is_reached():
    stages = Stages()
    assert not stages.has(PASSES)
    waiting = threading.Thread(target=lambda: stages.has(QUIET, 60.0))
    waiting.start()
    stages.raise_to(QUIET)
    waiting.join(30)
    assert not waiting.is_alive()
    stages.raise_to(PASSES)
    assert stages.has(QUIET), "a stage isn't taken back"
    assert not stages.has(REST)


def test_each_process_is_told_what_may_begin():
    heard, first, second = [], io.StringIO(), io.StringIO()
    relay = StageRelay(0, heard.append)
    relay.raise_to(PASSES)
    relay.begin(first)
    relay.raise_to(QUIET)
    first.close()  # it has ended
    relay.raise_to(PASSES)
    relay.begin(second)
    assert second.getvalue() == "2\n"
    alone = io.StringIO()
    StageRelay.alone().begin(alone)
    assert alone.getvalue() == f"{REST}\n"
