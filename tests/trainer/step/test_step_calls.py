"""The number of our functions that a step passes through: a person follows them one by one."""

import sys
from collections import Counter
from pathlib import Path

import trainctl.trainer

MOST_CALLS, MOST_FILES = 330, 25
ROOMS = Path(next(iter(trainctl.trainer.__path__))).parents[2]


def test_a_step_of_two_micro_batches_makes_few_calls(new_rig):
    rig = new_rig("torch")
    for step in (1, 2):  # what is made once is made
        rig.train(step, 6)
    calls: Counter[tuple[str, str]] = Counter()

    def count(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOMS) and ".venv" not in path.parts and "tests" not in path.parts:
            calls[path.name, frame.f_code.co_qualname] += 1

    sys.setprofile(count)
    try:
        rig.train(3, 6)
    finally:
        sys.setprofile(None)
    print(sum(calls.values()), calls.most_common(20))
    assert calls["loop.py", "train"] == 1 and calls["loop.py", "_micro_batch"] == 2
    assert sum(calls.values()) <= MOST_CALLS
    assert len({file for file, _ in calls}) <= MOST_FILES
