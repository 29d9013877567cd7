"""A signal ends a rank that trains alone, at any moment: at most the step in flight is lost, and the rest stands to the
bit."""

import random
import signal
import time
from pathlib import Path

import pytest
from tests.tiers import scale
from tests.trainer.support.process_agent import G, settings
from tests.waiting import HANG_SECONDS

from trainctl.protocol import messages as m
from trainctl.protocol.record import checkpoints
from trainctl.trainer.__main__ import GRACE_SECONDS
from trainctl.trainer.checkpoints import files

TERMS = scale("terminations")
MOST_STEPS = 5
"""Steps of a life before the one that the signal meets."""


class Lives:
    """One rank's lives, each of which begins with what the one before has left."""

    def __init__(self, agent):
        self.agent, self._chance = agent, random.Random(25)
        self.losses: dict[int, float] = {}
        self.saved = 0
        self.waits: list[float] = []
        """Seconds from each signal to the end of the process."""

    def live(self, number):
        agent, generation = self.agent, m.Generation(1, number)
        process = agent.start(*(["--resume-from", str(self.folder)] if self.saved else []))
        assert agent.hear(m.Ready).last_step == self.saved
        agent.form(generation)
        first, count = self.saved + 1, self._chance.randint(1, MOST_STEPS)
        begun = time.monotonic()
        for step in range(first, first + count):
            self._keep(agent.step(step - first + 1, step, generation))
        step_seconds = (time.monotonic() - begun) / count
        agent.plan(count + 1, first + count, generation)
        time.sleep(self._chance.uniform(0, 1.2 * step_seconds))
        begun = time.monotonic()
        process.send_signal(signal.SIGTERM)
        said = agent.hear(m.Checkpointed, lambda one: one.seq is None)
        _, errors = process.communicate(timeout=HANG_SECONDS)
        self.waits.append(time.monotonic() - begun)
        assert process.returncode == 128 + signal.SIGTERM, errors
        assert said.checkpoint is not None, said.problem
        assert said.step in (first + count - 1, first + count), "the step in flight, or the one before"
        self.saved = checkpoints.verify(Path(said.checkpoint.path)).step
        assert self.saved == said.step

    @property
    def folder(self):
        return self.agent.paths.checkpoint(self.saved)

    def _keep(self, report):
        assert self.losses.setdefault(report.step, report.loss_sum) == report.loss_sum, "made again to another loss"


@pytest.fixture
def lives(agent, tmp_path, run_file):
    here = settings(tmp_path)["nodes"]["here"]
    run_file(run__orphan_seconds=1.0, nodes__here=here | {"backend": "mlx"})
    return Lives(agent)


def in_one_pass(cursor, samples):
    """What makes a plan's step one micro-batch of so many samples."""
    return {"cursor": cursor, "global_batch": samples, "work": (m.RankWork(0, (m.Range(cursor, samples),), samples),)}


@pytest.mark.tier("all")
def test_a_long_micro_batch_is_finished_before_the_checkpoint(lives):
    agent, generation = lives.agent, m.Generation(1, 1)
    process = agent.start()
    agent.hear(m.Ready)
    agent.form(generation)
    agent.step(1, 1, generation)
    seconds = agent.step(2, 2, generation, **in_one_pass(G, 40 * G)).step_seconds
    agent.plan(3, 3, generation, **in_one_pass(41 * G, int(1.6 * 40 * G * GRACE_SECONDS / seconds)))
    agent.hear(m.Alive, lambda alive: alive.phase in ("forward", "backward"))
    process.send_signal(signal.SIGTERM)
    assert agent.hear(m.Checkpointed, lambda one: one.seq is None).step == 2
    _, errors = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 128 + signal.SIGTERM, errors


@pytest.mark.timeout(600 + 60 * TERMS)
def test_a_term_signal_to_a_rank_that_trains_alone_costs_at_most_the_step_in_flight(lives, new_rig, same_bits):
    for number in range(1, TERMS + 1):
        lives.live(number)
    print(f"\n{TERMS} signals, {lives.saved} steps; seconds to the end: {', '.join(f'{s:.1f}' for s in lives.waits)}")
    rig, state = new_rig("mlx"), files.read(lives.folder).state
    straight = {step: rig.train(step, 5, learning_rate=1e-3).loss_sum for step in range(1, lives.saved + 1)}
    assert lives.losses.items() <= straight.items()
    assert same_bits(rig.backend.copy_out("weights"), state.weights)
