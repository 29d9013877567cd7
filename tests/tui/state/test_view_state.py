"""The reducer: what a message changes, what it must not, and that nothing grows without end."""

import math

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tui.support.guests import view_of
from tests.tui.support.recorded import (
    BOOT,
    CLOCK,
    CONNECTED,
    NOW,
    committed,
    events,
    host,
    rank_step,
    run_view,
    snapshot,
)
from tests.tui.support.recorded import series as recorded_series

from trainctl.protocol import messages as m
from trainctl.protocol.client.client import Connection
from trainctl.tui.state import reducer
from trainctl.tui.state import view_state as md

VIEW = run_view(1)


def opened(view: m.RunView | None = VIEW) -> md.ViewState:
    state = reducer.apply(md.ViewState(), CONNECTED, 5000.0)
    return reducer.apply(state, snapshot(view), 5000.0)


def test_a_view_is_sent_without_the_curves_that_were_in_the_last_one() -> None:
    first, *others = run_view(3).ranks
    curve, longer = ((1, 0.5), (4, 1.5)), ((1, 0.5), (8, 2.5))
    before = run_view(3, ranks=(msgspec.structs.replace(first, passes=curve), *others))
    now = run_view(3, ranks=(before.ranks[0], msgspec.structs.replace(others[0], passes=longer), *others[1:]))
    sent = now.without_passes_of(before)
    assert [view.passes for view in sent.ranks] == [(), longer, ()]
    assert sent.with_passes_of(before) == now


def test_a_snapshot_opens_everything_with_ages_by_the_agents_clock() -> None:
    state = opened()
    assert state.run.step == 118
    assert math.isclose(state.last_step.age(5000.0), 0.2, abs_tol=1e-3)
    assert math.isclose(state.ranks[0].age(5003.0), 3.2, abs_tol=1e-3)
    assert math.isclose(state.hosts["atlas"].age(5000.0), 0.4, abs_tol=1e-3)
    assert len(state.window("loss")) == 118
    assert state.silent_for(5000.0) is None


def test_steps_move_the_run_and_every_series_on() -> None:
    state = opened()
    state = reducer.apply(state, committed(VIEW, 119, seq=1, loss=9.5), 5000.3)
    state = reducer.apply(state, rank_step(VIEW, 119, 0, seq=2), 5000.3)
    assert (state.run.step, state.run.cursor, state.seq) == (119, 119 * 24, 2)
    assert state.window("loss").last[-1] == 9.5
    assert state.lately("own_tokens_per_second", 0).newest_step == 119
    assert state.ranks[0].age(5001.3) == 1.0


def test_what_is_already_known_changes_nothing() -> None:
    state = reducer.apply(opened(), committed(VIEW, 119, seq=5, loss=9.5), 5000.3)
    for message in (committed(VIEW, 120, seq=5), committed(VIEW, 120, seq=4), host("atlas", 3), events(VIEW)[0]):
        again = reducer.apply(state, message, 5000.3)
        assert again == state
        assert again.windows is state.windows


def test_another_boot_is_not_mixed_in() -> None:
    state = opened()
    stranger = msgspec.structs.replace(committed(VIEW, 119, seq=9), boot="boot-2")
    assert reducer.apply(state, stranger, 5000.0).run == state.run


def test_a_redone_step_keeps_the_retracted_value_in_sight() -> None:
    state = reducer.apply(opened(), committed(VIEW, 119, seq=1, loss=50.0), 5000.0)
    state = reducer.apply(state, committed(VIEW, 119, seq=2, loss=2.1), 5000.0)
    assert state.window("loss").maximum[-1] == 50.0
    assert state.window("loss").last[-1] == 2.1


def test_an_old_generation_does_not_turn_the_run_back() -> None:
    state = opened(msgspec.structs.replace(VIEW, generation=m.Generation(1, 7)))
    late = committed(VIEW, 90, seq=1)
    assert reducer.apply(state, late, 5000.0).run == state.run


def test_a_run_that_starts_takes_the_screen_and_one_that_ended_does_not() -> None:
    state = opened()
    other = run_view(1, run="next-run", step=0, seq=1)
    ended = msgspec.structs.replace(other, state="stopped")
    assert reducer.apply(state, ended, 5000.0).run == state.run
    taken = reducer.apply(state, other, 5000.0)
    assert taken.run == other
    assert not taken.windows
    assert taken.last_step is None


def test_a_run_that_goes_back_loses_the_points_of_undone_evaluations() -> None:
    state = opened()
    found = {"eval_loss": 2.0, "eval_step": 118, "eval_values": (("eval/kl", 0.25),)}
    state = reducer.apply(state, msgspec.structs.replace(VIEW, seq=1, **found), 5000.0)
    assert (state.window("eval_loss").first[-1], state.window("eval/kl").first[-1]) == (118, 118)
    steps = len(state.window("loss"))
    state = reducer.apply(state, msgspec.structs.replace(VIEW, seq=2, step=100, eval_loss=None, eval_step=None), 5001.0)
    assert not len(state.window("eval/kl")) and all(state.window("eval_loss").first <= 100)
    assert len(state.window("loss")) == steps


def test_an_evaluation_in_the_run_view_becomes_a_point_once() -> None:
    state = opened()
    before = len(state.window("eval_loss"))
    found = {"eval_loss": 2.0, "eval_step": 118, "eval_values": (("eval/kl", 0.25),)}
    for seq in (1, 2):
        state = reducer.apply(state, msgspec.structs.replace(VIEW, seq=seq, **found), 5000.0)
    assert len(state.window("eval_loss")) == before + 1
    assert len(state.window("eval/kl")) == 1


def test_silence_is_noticed_with_and_without_the_clients_word() -> None:
    state = opened()
    assert state.silent_for(5004.0) is None
    assert state.silent_for(5012.0) == 12.0
    silent = reducer.apply(state, Connection("silent", 5003.5, "no message"), 5003.5)
    assert silent.silent_for(5004.0) == 4.0
    beat = m.Heartbeat(node="atlas", at=NOW, step_age_seconds=0.1, loop_lag_seconds=0.0, boot=BOOT, seq=0)
    assert reducer.apply(state, beat, 5011.0).silent_for(5012.0) is None


def test_a_finer_history_replaces_coarse_recent_steps_and_keeps_newer_ones() -> None:
    view = run_view(4, step=18_240, steps=60_000)
    state = reducer.apply(reducer.apply(md.ViewState(), CONNECTED, 0.0), snapshot(view), 0.0)
    assert state.lately("busy_seconds", 0).bucket_steps > 1
    fine = m.History(rid="r", series=recorded_series(view, 18_240 - 255))
    refined = reducer.apply_history(state, view.run, fine)
    assert refined.lately("busy_seconds", 0).bucket_steps == 1
    assert refined.windows is state.windows
    assert reducer.apply_history(state, "another", fine) is state


def test_messages_of_other_nodes_agents_change_their_lines_and_machines_only() -> None:
    state = opened()
    connecting = Connection("connecting", 5000.0)
    state = reducer.take(state, "mbp", connecting, 5000.0)
    state = reducer.take(state, "mbp", Connection("connected", 5000.5), 5000.5)
    state = reducer.take(state, "mbp", host("mbp"), 5001.0)
    other_boot = m.Heartbeat(node="mbp", at=NOW, step_age_seconds=None, loop_lag_seconds=0.5, boot="boot-7", seq=99)
    state = reducer.take(state, "mbp", other_boot, 5003.0)
    assert state.run == VIEW
    assert state.heartbeat is None, "the loop lag shown is the lead's"
    assert state.hosts["mbp"].age(5003.0) == 2.0
    assert state.silent_agents(5004.0) == {}
    assert state.silent_agents(5020.0) == {"mbp": 17.0}, "a line that claims to be good but says nothing isn't"
    state = reducer.take(state, "mbp", Connection("silent", 5004.0, "no message"), 5004.0)
    assert state.silent_agents(5005.0) == {"mbp": 2.0}
    state = reducer.take(state, "atlas", Connection("silent", 5004.0, "gone"), 5004.0)
    assert state.connection.state == "silent", "atlas is the one that conducts"


def test_an_agent_never_reached_is_silent_since_it_is_tried_and_has_no_reading() -> None:
    state = reducer.take(opened(), "mini", Connection("silent", 5001.0, "no agent"), 5001.0)
    assert state.silent_agents(5013.0) == {"mini": 12.0}
    assert "mini" not in state.hosts


def test_another_node_that_begins_to_conduct_takes_the_screen_with_its_own_line() -> None:
    state = reducer.take(opened(), "studio", Connection("connected", 5001.0), 5001.0)
    state = reducer.take(state, "studio", host("studio"), 5001.0)
    state = reducer.take(state, "studio", snapshot(run_view(4, step=18_240, steps=60_000)), 5002.0)
    assert state.run.lead == "studio"
    assert "studio" not in state.agents
    assert state.connection.since_monotonic == 5001.0
    state = reducer.take(state, "atlas", Connection("connected", 5003.0), 5003.0)
    assert set(state.agents) == {"atlas"}


def test_the_last_parts_of_each_rank_are_kept_until_its_micro_batch_changes() -> None:
    state = opened()
    for seq, step in enumerate(range(119, 150), 1):
        state = reducer.apply(state, rank_step(VIEW, step, 0, seq=seq), 5000.3)
    assert [part.step for part in state.parts[0]] == list(range(134, 150))
    resized = msgspec.structs.replace(rank_step(VIEW, 150, 0, seq=90), micro_batch=4)
    assert len(reducer.apply(state, resized, 5000.3).parts[0]) == 1


messages = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 4000), st.sampled_from(["step", "rank", "event", "host"])), max_size=60
)


def made(seq: int, step: int, kind: str) -> m.Live:
    match kind:
        case "step":
            return committed(VIEW, step, seq=seq)
        case "rank":
            return rank_step(VIEW, step, 0, seq=seq)
        case "event":
            return msgspec.structs.replace(events(VIEW)[0], id=seq, seq=seq)
    return host("atlas", seq)


@given(messages)
@settings(max_examples=40, deadline=None)
def test_doubles_and_stragglers_make_no_difference(drawn: list[tuple[int, int, str]]) -> None:
    once = sorted({seq: (seq, step, kind) for seq, step, kind in drawn}.values())
    plain = twice = opened()
    for item in once:
        plain = reducer.apply(plain, made(*item), CLOCK.at_monotonic)
    for index, item in enumerate(once):
        twice = reducer.apply(twice, made(*item), CLOCK.at_monotonic)
        twice = reducer.apply(twice, made(*once[index // 2]), CLOCK.at_monotonic)
    assert twice.seq == plain.seq
    assert twice.run == plain.run
    assert twice.events == plain.events
    assert dict(twice.ranks) == dict(plain.ranks)
    for key, window in plain.windows.items():
        assert np.array_equal(window.maximum, twice.windows[key].maximum, equal_nan=True)


def test_memory_is_bounded_over_a_long_run() -> None:
    state = opened(run_view(1, step=0))
    seq = 0
    for step in range(1, 2500):
        for kind in ("step", "rank", "event"):
            seq += 1
            state = reducer.apply(state, made(seq, step, kind), 5000.0 + step)
    assert len(state.events) <= reducer.MAX_EVENTS
    assert all(len(window) <= 2 * reducer.RECENT_STEPS for window in state.recent.values())
    assert all(len(window) <= 512 for window in state.windows.values())
    assert state.lately("loss").bucket_steps == 1
    assert len(state.windows) < 20


def test_a_guest_takes_the_screen_only_from_a_run_that_has_ended() -> None:
    shown = run_view(1)
    state = reducer.apply(md.ViewState(), snapshot(shown), CLOCK.at_monotonic)
    beside = msgspec.structs.replace(view_of(run_view(3)), run="notebook-1", seq=1)
    state = reducer.apply(state, beside, CLOCK.at_monotonic)
    assert state.run == shown
    over = msgspec.structs.replace(shown, state="finished", seq=2)
    state = reducer.apply(reducer.apply(state, over, CLOCK.at_monotonic), msgspec.structs.replace(beside, seq=3), 0.0)
    assert state.run is not None and state.run.run == "notebook-1"
    hosted = msgspec.structs.replace(shown, run="demo-2", seq=4)
    assert reducer.apply(state, hosted, CLOCK.at_monotonic).run == hosted


def test_a_run_that_starts_shows_no_answers_of_the_run_before_it() -> None:
    asked = {"prompt": "Why?", "max_tokens": 8, "temperature": 0.0, "top_p": 1.0, "seed": 0, "by": "auto"}
    answered = {"answer": "Because.", "tokens": 2, "ended": True, "seconds": 0.2, "loss": 2.0, "eval_loss": None}
    where = {"run": VIEW.run, "step": 118, "at": NOW, "number": 0, "node": "atlas", "boot": BOOT, "seq": 1}
    answer = msgspec.convert({**asked, **answered, **where, "type": "sample"}, m.Sample)
    state = reducer.apply(opened(), answer, 5000.0)
    assert state.samples == (answer,)
    assert reducer.apply(state, run_view(1, run="next-run", step=0, seq=2), 5000.0).samples == ()
