"""The dealer gives each row to exactly one result, whatever workers do and in whatever order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainctl.node_agent.work.dealer import FIRST_ROWS, MOST_DEALS, SLICE_BYTES, Dealer, Slice

WORKERS = ("a", "b", "c")
MOST_ROWS = 50
Step = tuple[str, str, float]  # worker, what happens, seconds since the step before


def steps() -> st.SearchStrategy[list[Step]]:
    happening = st.sampled_from(("ask", "answer", "answer again", "die", "restart the lead"))
    return st.lists(st.tuples(st.sampled_from(WORKERS), happening, st.floats(0, 30)), max_size=60)


@given(sizes=st.lists(st.integers(1, 2000), min_size=1, max_size=200), steps=steps())
def test_each_row_once(sizes: list[int], steps: list[Step]) -> None:
    dealer, now = Dealer(sizes, MOST_ROWS), 0.0
    held: dict[str, Slice] = {}  # what each worker has in hand, also if the dealer has given it up
    late: list[tuple[str, Slice]] = []
    journal: dict[int, tuple[Slice, bool]] = {}
    counted = [0] * len(sizes)

    def answer(worker: str, one: Slice) -> None:
        if dealer.answer(worker, one.id, now) is None:
            return
        journal[one.id] = (one, True)
        for row in range(one.first, one.first + one.rows):
            counted[row] += 1

    def ask(worker: str) -> None:
        if (one := dealer.deal(worker, now)) is not None:
            held[worker] = one
            journal.setdefault(one.id, (one, False))

    for worker, what, seconds in steps:
        now += seconds
        if what == "ask":
            ask(worker)
        elif what == "answer" and worker in held:
            late.append((worker, held[worker]))
            answer(worker, held.pop(worker))
        elif what == "answer again" and late:
            answer(*late[0])
        elif what == "die":
            dealer.lose(worker)
        elif what == "restart the lead":
            dealer = Dealer(sizes, MOST_ROWS, [journal[number] for number in sorted(journal)])
    while not dealer.is_done:
        now += 0.5
        ask("a")
        if "a" in held:
            answer("a", held.pop("a"))
        else:  # the others have the rest
            dealer.lose("b")
            dealer.lose("c")
    assert counted == [1] * len(sizes)
    assert dealer.answered_rows == len(sizes)


def simulate(speeds: dict[str, float], rows: int) -> float:
    """Seconds until workers of these speeds, in rows per second, have done all rows of one size."""
    dealer, free, finished = Dealer([100] * rows, MOST_ROWS * 10), dict.fromkeys(speeds, 0.0), 0.0
    while not dealer.is_done:
        worker = min(free, key=lambda one: free[one])
        now = free[worker]
        if (one := dealer.deal(worker, now)) is None:
            free[worker] = float("inf")
            continue
        free[worker] = now + one.rows / speeds[worker]
        finished = max(finished, free[worker])
        dealer.answer(worker, one.id, free[worker])
    return finished


@pytest.mark.parametrize("speeds", [{"a": 100.0, "b": 50.0, "c": 20.0}, {"a": 3000.0, "b": 10.0}])
def test_unequal_workers_finish_together(speeds: dict[str, float]) -> None:
    rows = 20_000
    seconds = simulate(speeds, rows)
    assert rows / sum(speeds.values()) / seconds > 0.98


def test_the_first_slice_is_small_and_a_lost_reply_is_repeated() -> None:
    dealer = Dealer([10] * 1000, MOST_ROWS)
    first = dealer.deal("a", 0.0)
    assert first == Slice(0, 0, FIRST_ROWS)
    assert dealer.deal("a", 0.1) == first
    dealer.answer("a", 0, 0.2)
    second = dealer.deal("a", 0.2)
    assert second is not None and (second.first, second.rows) == (FIRST_ROWS, 40)  # 2 s at 20 rows/s
    assert dealer.speed("a") == pytest.approx(FIRST_ROWS / 0.2)


def test_a_slice_that_ends_every_worker_is_named() -> None:
    dealer = Dealer([10] * 4, MOST_ROWS)
    for _ in range(MOST_DEALS):
        assert dealer.repeatedly_lost() is None
        one = dealer.deal("a", 0.0)
        dealer.lose("a")
    assert dealer.repeatedly_lost() == one


def test_answers_are_dealt_by_number_of_rows_within_the_limit_of_bytes() -> None:
    dealer = Dealer([10, SLICE_BYTES, 10, 10, 10, *[10] * 20], 6, alike=True)
    assert dealer.deal("a", 0.0) == Slice(0, 0, 1)  # a row may take long
    dealer.answer("a", 0, 1.0)
    assert dealer.deal("a", 1.0) == Slice(1, 1, 1)  # 2 s would be two rows
    dealer.answer("a", 1, 2.0)
    assert dealer.deal("a", 2.0) == Slice(2, 2, 2)
    assert dealer.deal("b", 2.0) == Slice(3, 4, 1)
    dealer.answer("b", 3, 2.01)
    assert dealer.deal("b", 2.01) == Slice(4, 5, 6)
