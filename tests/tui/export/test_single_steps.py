"""Each step of an agent's history is asked for once, in a bucket of its own, however far apart their numbers are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainctl.protocol import messages as m
from trainctl.protocol.record.downsampling import choose
from trainctl.tui.export.mirror.run_source import questions, values

NAMES = tuple(f"user:{number}" for number in range(40))


@given(
    st.integers(1, 10**6), st.lists(st.sampled_from([1, 2, 9, 10, 37, 2_048, 10**9]), max_size=120),
    st.integers(1, 8), st.sampled_from([0, 5, 30]), st.integers(0, 10**7),
)  # fmt: skip
def test_every_step_has_a_bucket_of_its_own(
    first: int, gaps: list[int], ranks: int, raw_most: int, values_from: int
) -> None:
    steps = [first]
    for gap in gaps:
        steps.append(steps[-1] + gap)
    seen: dict[str, list[int]] = {name: [] for name in NAMES}
    told = list(questions(NAMES, steps, ranks, values_from))
    for question in told:
        names, asked = question.names, question.steps
        assert len(names) <= 16 and len(asked) * len(names) * (ranks + 1) <= 20_000
        columns = min(asked[-1] - asked[0] + 1, 2_000)
        if raw_most or asked[-1] - asked[0] >= 2_000:
            size = choose(asked[0], asked[-1], columns, raw_most=raw_most).bucket_steps
            assert len({step // size for step in asked}) == len(asked)
        for name in names:
            seen[name] += asked
    assert all(found == steps for found in seen.values())
    assert [question.columns for question in told] == [
        min(question.steps[-1] - question.steps[0] + 1, 2_000) for question in told
    ]


@pytest.mark.parametrize("apart", [1, 2_048, 10**12])
def test_a_page_of_steps_evenly_apart_is_one_request(apart: int) -> None:
    assert len(list(questions(NAMES[:16], range(apart, 501 * apart, apart), 1))) == 1


def test_what_is_no_longer_kept_singly_is_left_out() -> None:
    own = m.Series("user:0", None, 10, (20, 30), *((1.0, 2.0),) * 4)
    rank = m.Series("step_seconds", 1, 10, (20, 30), *((3.0, 4.0),) * 4)
    history = m.History(rid="r", series=(own, rank), values_from=30)
    assert list(values(history, (25, 31))) == [
        (31, None, "user:0", 2.0), (25, 1, "step_seconds", 3.0), (31, 1, "step_seconds", 4.0),
    ]  # fmt: skip
