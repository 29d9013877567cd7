"""What a policy remembers: the newest values of each observation, apart from what is kept."""

from trainctl.node_agent.autopilot.policy import Memory


def test_an_observation_has_its_newest_values_and_can_be_forgotten() -> None:
    memory = Memory()
    assert [list(memory.observe("use", value, 2)) for value in (1.0, 2.0, 3.0)] == [[1.0], [1.0, 2.0], [2.0, 3.0]]
    assert (memory.last("use"), memory.last("other", 7.0)) == (3.0, 7.0)
    memory.forget("use", "other")
    assert list(memory.observe("use", 4.0, 2)) == [4.0]


def test_a_window_that_gets_another_size_has_the_newest_of_its_values() -> None:
    memory = Memory()
    for value in (1.0, 2.0, 3.0):
        memory.observe("use", value, 3)
    assert list(memory.observe("use", 4.0, 2)) == [3.0, 4.0]
