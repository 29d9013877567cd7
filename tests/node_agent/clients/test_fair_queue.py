"""Who may ask how much at a time: limits of each connection, key and all, turns, and nothing left of who is gone."""

from hypothesis import given
from hypothesis import strategies as st

from trainctl.node_agent.clients.router import Asker, FairQueue, Limits

LIMITS = Limits(at_once=4, at_once_of_viewers=2, at_once_of_caller=2, most=40, most_of_caller=8, most_bytes=4000)
ASKERS = tuple(Asker(bytes([number]), "anna" if number < 3 else "bob", number > 3) for number in range(6))


def begun(queue: FairQueue[int], count: int) -> list[int]:
    """The next requests, each over before the next begins."""
    requests = []
    for _ in range(count):
        found = queue.begin(lambda _: True)
        assert found is not None
        asker, request, size = found
        queue.leave(asker, size)
        requests.append(request)
    return requests


def flood(queue: FairQueue[int], key: str, *, is_viewer: bool, size: int = 1) -> int:
    """Enter requests of one key over as many connections as it likes; how many there was room for."""
    many = [queue.enter(Asker(b"%d" % number, key, is_viewer), -1, size) for number in range(100)]
    return sum(many)


def test_one_connection_has_a_limit_and_one_key_half_of_all() -> None:
    queue = FairQueue[int](LIMITS)
    assert [queue.enter(ASKERS[0], number, 1) for number in range(9)] == [True] * 8 + [False]
    assert flood(queue, "anna", is_viewer=False) == 12, "20 in all"
    assert queue.enter(ASKERS[3], 0, 1), "another key has room"


def test_one_key_has_half_of_the_bytes() -> None:
    queue = FairQueue[int](LIMITS)
    assert flood(queue, "anna", is_viewer=False, size=150) == 13
    assert queue.enter(ASKERS[3], 0, 150)


def test_viewers_however_many_leave_room_for_operators_who_come_first() -> None:
    queue = FairQueue[int](LIMITS)
    assert [flood(queue, key, is_viewer=True) for key in ("eve", "mallory", "oscar")] == [20, 10, 0]
    assert [queue.enter(ASKERS[0], number, 1) for number in range(3)] == [True] * 3
    assert begun(queue, 3) == [0, 1, 2]
    first = [queue.begin(lambda _: True) for _ in range(3)]
    assert [found is not None for found in first] == [True, True, False], "viewers have two at a time"
    assert queue.enter(ASKERS[0], 9, 1)
    assert begun(queue, 1) == [9]


def test_keys_take_turns_and_a_key_s_connections_too() -> None:
    queue = FairQueue[int](LIMITS)
    for asker, requests in ((ASKERS[0], (1, 2, 3)), (ASKERS[1], (4,)), (ASKERS[3], (5, 6))):
        for request in requests:
            assert queue.enter(asker, request, 1)
    assert begun(queue, 6) == [1, 5, 4, 6, 2, 3]


def test_who_may_not_begin_is_passed_over() -> None:
    queue = FairQueue[int](LIMITS)
    assert queue.enter(ASKERS[0], 1, 1) and queue.enter(ASKERS[1], 2, 1)
    found = queue.begin(lambda asker: asker != ASKERS[0])
    assert found is not None and found[1] == 2
    assert queue.begin(lambda asker: asker != ASKERS[0]) is None and queue.is_waiting


@given(st.lists(st.tuples(st.sampled_from(ASKERS), st.sampled_from(("enter", "begin", "leave"))), max_size=80))
def test_whatever_order_they_come_in_each_is_begun_once_and_nothing_stays(steps: list[tuple[Asker, str]]) -> None:
    queue, entered, done = FairQueue[int](LIMITS), [], []
    under_way: list[tuple[Asker, int, int]] = []
    for number, (asker, step) in enumerate(steps):
        if step == "enter" and queue.enter(asker, number, 10):
            entered.append(number)
        elif step == "begin" and (found := queue.begin(lambda _: True)) is not None:
            under_way.append(found)
        elif step == "leave" and under_way:
            over = under_way.pop(0)
            queue.leave(over[0], over[2])
            done.append(over[1])
        assert len(under_way) <= 4 and sum(item[0].is_viewer for item in under_way) <= 2
    for over in under_way:
        queue.leave(over[0], over[2])
        done.append(over[1])
    done += begun(queue, len(entered) - len(done))
    assert sorted(done) == entered
    assert not queue.is_waiting and not queue._under_way and not queue._held and not queue._bytes
