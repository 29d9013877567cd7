"""Who may ask how much at a time: limits of each client and of all, turns, and nothing left of those who are gone."""

from hypothesis import given
from hypothesis import strategies as st

from trainctl.node_agent.clients.fair_queue import FairQueue


def test_one_client_s_requests_are_limited_and_so_are_all() -> None:
    queue = FairQueue[int](1, 2, 3)
    assert [queue.enter(b"a", number) for number in range(3)] == [True, True, False]
    assert [queue.enter(b"b", number) for number in range(2)] == [True, False]
    assert queue.begin(b"a") == 0
    assert not queue.enter(b"a", 3), "what is under way counts as what waits does"
    queue.leave(b"a")
    assert queue.enter(b"b", 1) and not queue.enter(b"c", 0)


@given(st.lists(st.tuples(st.sampled_from(b"abc"), st.sampled_from(("enter", "begin", "leave"))), max_size=60))
def test_whatever_order_they_come_in_each_is_begun_once_and_nothing_stays(steps: list[tuple[int, str]]) -> None:
    queue, entered, begun, under_way = FairQueue[int](2, 4, 7), [], [], dict.fromkeys(b"abc", 0)
    for number, (name, step) in enumerate(steps):
        client = bytes([name])
        if step == "enter" and queue.enter(client, number):
            entered.append(number)
        elif step == "begin" and (request := queue.begin(client)) is not None:
            begun.append(request)
            under_way[name] += 1
        elif step == "leave" and under_way[name]:
            queue.leave(client)
            under_way[name] -= 1
        assert max(under_way.values()) <= 2 and len(entered) - len(begun) + sum(under_way.values()) <= 7
    for name in b"abc":
        while (request := queue.begin(bytes([name]))) is not None or under_way[name]:
            if request is not None:
                begun.append(request)
                under_way[name] += 1
            queue.leave(bytes([name]))
            under_way[name] -= 1
    assert sorted(begun) == entered
    assert not queue._waiting and not queue._begun and queue._all == 0
