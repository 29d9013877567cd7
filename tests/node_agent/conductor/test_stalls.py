"""What counts as a standstill, and from when on it is a hang."""

import msgspec
from tests.node_agent.support.simulated_ranks import RUN, SimRank, SimWorld
from tests.node_agent.support.simulation import config, durable

from trainctl.node_agent.conductor.deadlines import FIRST_TIMES, LONGEST_TIMES, StallDetector
from trainctl.node_agent.conductor.state import ConductorState, Progress
from trainctl.protocol import messages as m

LEAST, LOAD = 100.0, 600.0


def alive(progress: int | None, phase: str = "forward", step: int = 5) -> m.Alive:
    return m.Alive(run="r", rank=0, generation=None, step=step, phase=phase, progress=progress)


class Stalls(StallDetector):
    """One of a run whose rank 0 has loaded a model."""

    def __init__(self, hung_seconds: float = LEAST, parameters: int = 1000) -> None:
        tables = {"run": {"name": RUN, "steps": 10, "load_seconds": LOAD}, "group": {"hung_seconds": hung_seconds}}
        self.state = ConductorState(RUN, config(10, 12, **tables), durable(("a", "b"), 12), Progress())
        self.state.ranks[0].ready = msgspec.structs.replace(SimRank(0, SimWorld(0)).ready(), parameters=parameters)
        super().__init__(self.state)

    def beat(self, message: m.Alive, at: float) -> None:
        self.state.now = at
        self.heard(message)


def heard(made: Stalls, times: list[float], progress: int | None = 7, phase: str = "forward") -> Stalls:
    for at in times:
        made.beat(alive(progress, phase), at)
    return made


def test_it_grows_with_each_heartbeat_that_brings_nothing_new():
    made = heard(Stalls(), [10.0, 11.0, 12.0, 13.5])
    assert (made.seconds(0), made.is_at_work(0)) == (3.5, True)
    made.beat(alive(8), 14.0)
    assert made.seconds(0) == 0.0


def test_time_in_which_nothing_was_heard_is_nobodys_standstill():
    """Neither that of a machine that slept, nor that of an agent that was stopped and then reads all at once."""
    slept = heard(Stalls(), [10.0, 11.0, 3000.0])
    assert slept.seconds(0) <= 4.0
    stopped = heard(Stalls(), [10.0, *[3000.0] * 50])
    assert stopped.seconds(0) <= 3.0


def test_of_a_heartbeat_without_the_number_nothing_is_known():
    made = heard(Stalls(), [float(second) for second in range(500)], progress=None)
    assert (made.seconds(0), made.is_at_work(0)) == (0.0, False)


def test_the_first_of_its_kind_may_take_longer_and_again_after_another_start():
    made = Stalls()
    assert made.limit_seconds(0, "train", 0.1) == FIRST_TIMES * LEAST
    made.done(0, "train")
    assert made.limit_seconds(0, "train", 0.1) == LEAST
    assert made.limit_seconds(0, "evaluate", 0.1) == FIRST_TIMES * LEAST
    assert made.limit_seconds(1, "train", 0.1) == FIRST_TIMES * LEAST
    made.forget(0)
    assert made.limit_seconds(0, "train", 0.1) == FIRST_TIMES * LEAST


def test_what_was_measured_raises_the_limit():
    made = Stalls()
    made.done(0, "train")
    made.done(0, "checkpoint")
    assert made.limit_seconds(0, "train", 60.0) == LONGEST_TIMES * 60.0
    large = Stalls(parameters=1_000_000_000)
    assert large.limit_seconds(0, "checkpoint", 0.1) >= 3600.0
    heard(made, [float(second) for second in range(51)])  # 50 s in one phase, and then it got on
    made.beat(alive(8), 51.0)
    assert made.limit_seconds(0, "train", 0.1) == LONGEST_TIMES * 50.0


def test_a_wait_for_others_is_no_measure():
    made = Stalls()
    made.done(0, "train")
    heard(made, [float(second) for second in range(500)], phase="idle")
    made.beat(alive(8), 500.0)
    assert made.limit_seconds(0, "train", 0.1) == LEAST


def test_a_large_model_may_load_for_long():
    assert Stalls(1.0).load_limit_seconds() == LOAD
    assert Stalls(parameters=1_000_000_000).load_limit_seconds() >= 1000.0
