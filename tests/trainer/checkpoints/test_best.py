"""The best checkpoint by held-out loss, and that it is kept beside the newest ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.trainer.support.trained_run import TrainedRun

from trainctl.protocol.record.checkpoints import best_checkpoint, best_step, listed
from trainctl.protocol.record.rollups import Evaluation
from trainctl.trainer.checkpoints.files import spare

NAN = float("nan")


def evaluated(**losses):
    return [Evaluation(int(step[1:]), 0.0, loss, 1.0, 1.0) for step, loss in losses.items()]


@pytest.mark.parametrize(("losses", "best"), [
    ({}, None), ({"s5": 1.0}, None), ({"s2": NAN}, None), ({"s1": 2.0, "s2": 1.0, "s5": 0.5}, 2),
    ({"s1": 1.0, "s2": 1.0, "s4": NAN}, 2), ({"s2": 1.0, "s3": 0.5}, 4), ({"s2": 1.0, "s3": 0.5, "s4": 2.0}, 2),
    ({"s1": 1.0, "s3": 0.5, "s4": NAN}, 1),
])  # fmt: skip
def test_the_best_is_the_kept_step_with_the_lowest_finite_loss(losses, best):
    assert best_step([1, 2, 4], evaluated(**losses)) == best


@given(
    steps=st.sets(st.integers(1, 40), min_size=1), keep_last=st.integers(1, 3),
    losses=st.dictionaries(st.integers(1, 40), st.sampled_from([1.0, 2.0, 3.0, NAN])),
)  # fmt: skip
def test_removing_others_makes_none_the_best(steps, keep_last, losses):
    written, there = list[int](), list[int]()
    for step in sorted(steps):
        best = best_step(there, evaluated(**{f"s{at}": loss for at, loss in losses.items() if at < step}))
        gone = spare([*there, step], keep_last, 0, [best] if best is not None else [])
        written, there = [*written, step], [one for one in [*there, step] if one not in gone]
        known = evaluated(**{f"s{at}": loss for at, loss in losses.items() if at <= step})
        assert best_step(there, known) == best_step(written, known)


@pytest.fixture
def trained(tmp_path, chat_model):
    lora = {"kind": "lora", "rank": 2}
    return lambda **changes: TrainedRun(tmp_path / "runs" / "run-1", chat_model, "torch", lora, **changes)


def test_the_best_is_kept_though_each_checkpoint_is_later_than_its_evaluation(trained):
    run = trained(steps=6, saved=(2, 4, 6), held_out={1: 1.0, 3: 2.0, 5: 3.0}, checkpoint={"keep_last": 1})
    assert [folder.name for folder in listed(run.paths.checkpoints)] == ["step-6", "step-2"]


@pytest.mark.parametrize(("keep_best", "steps"), [(True, [6, 5, 2]), (False, [6, 5])])
def test_the_best_is_kept_beside_the_last(trained, keep_best, steps):
    """Step 2 is best until the end; step 1 was until step 2, and step 4's lower loss has no checkpoint.
    Step 5 has a loss of its own, which comes after it."""
    losses, table = {1: 3.0, 2: 1.0, 3: 2.0, 4: 0.5, 5: 2.5}, {"keep_last": 2, "keep_best": keep_best}
    run = trained(steps=6, saved=(1, 2, 3, 5, 6), held_out=losses, checkpoint=table)
    assert [int(folder.name.removeprefix("step-")) for folder in listed(run.paths.checkpoints)] == steps
    best = best_checkpoint(run.paths)
    assert best is not None and best.name == ("step-2" if keep_best else "step-5")
    run.paths.record.unlink()
    assert best_checkpoint(run.paths) is None
