"""Predictions: every verb says what it would change, by what was measured, and what isn't known is said to be so."""

import msgspec
import pytest
from tests.memory_values import memory
from tests.tui.support.recorded import CLOCK, CONNECTED, rank_step, run_view, snapshot

from trainctl.protocol import messages as m
from trainctl.protocol.batch.step_model import StepModel
from trainctl.protocol.messages import verbs
from trainctl.tui.commands import arguments, shares
from trainctl.tui.commands.forms import preview
from trainctl.tui.commands.shares import Seat, seats_of
from trainctl.tui.state import reducer
from trainctl.tui.state import view_state as md

GB = 10**9
VIEW = run_view(4, step=18_240, steps=60_000)
FLEET = reducer.apply(reducer.apply(md.ViewState(), CONNECTED, 0.0), snapshot(VIEW), CLOCK.at_monotonic)
EXAMPLES = {
    "start-run": "start-run resume=sft-1b-20261119-110000", "resize-batch": "resize-batch micro=4 --node forge",
    "rebalance": "rebalance studio=17 mbp=8 forge=39", "set-global-batch": "set-global-batch value=128",
    "set-lr": "set-lr value=1e-4", "checkpoint": "checkpoint", "evaluate": "evaluate",
    "sample": "sample prompt=x", "defragment": "defragment --node mbp",
    "profile": "profile steps=2 nodes=mbp,forge", "drain": "drain --node mbp",
    "admit": "admit --node mini", "promote": "promote --node forge", "pause": "pause", "resume": "resume",
    "rollback": "rollback steps=100 skip_batches=200",
    "stop": "stop", "note": "note text=x", "acknowledge": "acknowledge id=memory:forge",
    "mute": "mute kind=memory minutes=30", "autopilot": "autopilot name=first-shares mode=off",
}  # fmt: skip


def seat(peak: float | None, held: float | None, cap: float | None = 24 * GB, micro: int = 8) -> Seat:
    sizes = [None if size is None else int(size) for size in (held, cap, peak)]
    return Seat(
        "forge", 16, micro, StepModel.linear(10.0, 0.1), *sizes, peaks={} if peak is None else {micro: int(peak)}
    )


def step_at(micro: int, busy_seconds: float, step: int) -> m.RankStep:
    """A step of forge, with 39 samples in passes of `micro`."""
    phases = m.Phases(data=0.0, forward=busy_seconds / 3, backward=busy_seconds * 2 / 3, sync=0.05)
    return msgspec.structs.replace(rank_step(VIEW, step, 2, seq=step), phases=phases, micro_batch=micro, samples=39)


def test_speeds_at_micro_batches_that_were_left_are_kept_with_the_run() -> None:
    state = FLEET
    for step in range(18_241, 18_245):
        state = reducer.apply(state, step_at(13, 2.6, step), CLOCK.at_monotonic)
    for step in range(18_245, 18_249):
        state = reducer.apply(state, step_at(6, 3.9, step), CLOCK.at_monotonic)
    assert state.tried[2, 13].rate == pytest.approx(15.0)
    ranks = [msgspec.structs.replace(view, micro_batch=6) if view.rank == 2 else view for view in VIEW.ranks]
    state = reducer.apply(state, msgspec.structs.replace(VIEW, ranks=tuple(ranks), seq=20_000), CLOCK.at_monotonic)
    forge = next(seat for seat in seats_of(state) if seat.node == "forge")
    assert str(shares.memory_at(forge, 39, 13)) == "20 of 24 GB"
    smaller = msgspec.structs.replace(step_at(6, 3.9, 18_249), values=memory(GB, GB * 3 // 2, 24 * GB))
    state = reducer.apply(state, msgspec.structs.replace(smaller, seq=20_002), CLOCK.at_monotonic)
    forge = next(seat for seat in seats_of(state) if seat.node == "forge")
    assert str(shares.memory_at(forge, 39, 13)) == "20 of 24 GB", "a peak that falls is not another process"
    ranks = [msgspec.structs.replace(view, pid=77) if view.rank == 2 else view for view in ranks]
    replaced = msgspec.structs.replace(VIEW, ranks=tuple(ranks), seq=20_003)
    assert not reducer.apply(state, replaced, CLOCK.at_monotonic).tried
    other = reducer.apply(state, run_view(1, run="another", seq=20_004), CLOCK.at_monotonic)
    assert not other.tried


def test_a_curve_predicts_micro_batches_that_were_never_in_use() -> None:
    """A pass of forge costs 30 ms a sample, and 100 ms whatever its size; its steps are as its curve says."""
    curve = tuple((micro, 0.1 + 0.03 * micro) for micro in (1, 4, 16))
    ranks = [msgspec.structs.replace(view, passes=curve) if view.rank == 2 else view for view in VIEW.ranks]
    known = msgspec.structs.replace(VIEW, ranks=tuple(ranks))
    state = reducer.apply(reducer.apply(md.ViewState(), CONNECTED, 0.0), snapshot(known), CLOCK.at_monotonic)
    for step in range(18_241, 18_249):
        state = reducer.apply(state, step_at(13, 3 * (0.1 + 0.03 * 13), step), CLOCK.at_monotonic)
    later = msgspec.structs.replace(VIEW, state="paused", seq=20_000)
    state = reducer.apply(state, later, CLOCK.at_monotonic)
    assert [view.passes for view in state.run.ranks if view.rank == 2] == [curve], "a live view leaves it out"
    seat = next(seat for seat in seats_of(state) if seat.node == "forge")
    assert seat.model is not None and not seat.model.is_linear
    floor = seat.model.floor_seconds
    assert seat.seconds(20) == pytest.approx(0.49 + 0.31 + floor)


def test_memory_grows_by_the_samples_of_a_pass_and_is_bounded_where_that_is_not_known() -> None:
    known = shares.memory_at(seat(20 * GB, 12 * GB), 16, 16)
    assert (str(known), known.over) == ("28 of 24 GB", True)
    assert str(shares.memory_at(seat(20 * GB, 12 * GB), 16, 4)) == "at most 20 of 24 GB"
    assert str(shares.memory_at(seat(20 * GB, 12 * GB), 16, 8)) == "20 of 24 GB"
    assert str(shares.memory_at(seat(6 * GB, 6 * GB), 16, 16)) == "at most 12 of 24 GB"
    assert str(shares.memory_at(seat(6 * GB, 6 * GB, None), 16, 16)) == "at most 12 GB"
    assert shares.memory_at(seat(None, None), 16, 16) is None
    assert shares.memory_at(seat(20 * GB, 12 * GB), 4, 8) == shares.Memory(20 * GB, 24 * GB, at_most=True)


@pytest.mark.parametrize(
    ("verb", "says"),
    [
        ("start-run", "sft-1b is running; only one run at a time"),
        ("checkpoint", "writes step 18,240 or the next one; the last one: 300.0 MB, loop paused 14 ms"),
        ("profile", "records the next 2 steps on mbp, forge after one that warms up; these steps are slower; "
         "curve unchanged"),
        ("drain", verbs.VERBS["drain"].summary),
        ("pause", "pauses after step 18,241, within about 3.06 s; curve unchanged"),
        ("rollback", "goes back from step 18,240 to the newest checkpoint up to step 18,140; "
         "doesn't train on the samples of the 200 global batches after it: changes the curve"),
        ("stop", "ends after step 18,241, within about 3.06 s, with a checkpoint first"),
    ],
)  # fmt: skip
def test_verbs_say_what_they_would_change(verb: str, says: str) -> None:
    assert says in preview(arguments.parse(EXAMPLES[verb]), FLEET).text


def test_without_a_run_each_is_refused_but_its_start() -> None:
    assert set(EXAMPLES) == set(verbs.VERBS)
    nothing = md.ViewState()
    ended = reducer.apply(nothing, snapshot(run_view(1, "stopped")), CLOCK.at_monotonic)
    for verb, text in EXAMPLES.items():
        order = arguments.parse(text)
        roles = (preview(order, nothing).role, preview(order, ended).role)
        always = ("start-run", "acknowledge", "mute")  # the last two are the agent's own
        assert roles == ("strong" if verb in always else "bad", "strong" if verb in (*always, "note") else "bad")
