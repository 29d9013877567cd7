"""How often, and how soon, a run whose ranks were all lost is taken up again."""

from trainctl.node_agent.runs.way_back import WayBack


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def waited(way: WayBack, clock: Clock) -> float:
    """Until the run is due."""
    begun = clock.now
    while way.due() is None:
        clock.now += 0.5
    return clock.now - begun


def test_the_wait_doubles_until_it_is_given_up():
    way = WayBack(clock := Clock())
    waits = []
    while way.take("run-1", 40, "killed"):
        waits.append(waited(way, clock))
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert way.run is None


def test_a_run_that_got_further_begins_to_count_anew():
    way = WayBack(clock := Clock())
    for step in (40, 40, 40, 41):
        assert way.take("run-1", step, "killed")
        last = waited(way, clock)
    assert last == 1.0


def test_one_that_cannot_be_taken_up_is_tried_again():
    way = WayBack(clock := Clock())
    assert way.take("run-1", 40, "killed")
    tries = 0
    while way.run is not None:
        waited(way, clock)
        tries += 1
        way.again()
    assert tries == 5
    assert way.run is None


def test_it_is_handed_out_once_and_forgotten_for_another_run():
    way = WayBack(clock := Clock())
    way.take("run-1", 40, "killed")
    assert way.due() is None
    clock.now = 1.0
    assert (way.due(), way.due()) == ("run-1", None)
    way.take("run-1", 40, "killed")
    assert way.forget() == "run-1"
    assert (way.forget(), way.run) == (None, None)


def test_waiting_for_nodes_is_no_try():
    way = WayBack(clock := Clock())
    assert way.take("run-1", 40, "killed")
    waited(way, clock)
    assert way.held_seconds == 0.0
    for _ in range(30):
        way.hold("run-1")
        assert waited(way, clock) == 1.0
    assert way.held_seconds == 30.0
    assert way.again()
    assert (waited(way, clock), way.held_seconds) == (2.0, 0.0)
