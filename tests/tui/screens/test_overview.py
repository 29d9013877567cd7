"""The Overview's parts as lines: right words at 80 columns, exact sizes at every one, nothing unknown shown as a
number."""

import dataclasses
import itertools
import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tui.support.recorded import (
    CLOCK,
    CONNECTED,
    NOW,
    comings_and_goings,
    committed,
    events,
    host,
    hung,
    live_hosts,
    rank_step,
    run_view,
    shrunk,
    snapshot,
    under_way,
)

from trainctl.protocol import messages as m
from trainctl.protocol.client.client import Connection
from trainctl.protocol.messages.events import AnyEvent, CommandFailed, NoteWritten, Notice, SharesChanged
from trainctl.tui.charts import marks as marks_of
from trainctl.tui.screens import fleet_grouping, fleet_table, header, overview_view, recent_events
from trainctl.tui.state import rank_rows, rank_speed, reducer
from trainctl.tui.state import view_state as md
from trainctl.tui.state.membership_changes import Change
from trainctl.tui.text import styled_line as ln
from trainctl.tui.text.glyphs import ASCII, UNICODE
from trainctl.tui.widgets import inline_bars


def state_of(view: m.RunView | None) -> md.ViewState:
    state = md.ViewState()
    for message in (CONNECTED, snapshot(view), *(live_hosts(view) if view else ())):
        state = reducer.apply(state, message, CLOCK.at_monotonic)
    return state


def texts(made: list[ln.Line]) -> list[str]:
    return [ln.plain(pieces) for pieces in made]


def overview(*given: Any, **options: Any) -> list[ln.Line]:
    return [pieces for part in overview_view.parts(*given, **options) for pieces in part]


FLEET = state_of(run_view(4, step=18_240, steps=60_000))
ALONE = state_of(run_view(1))
MIXED = md.ViewState()
for _message in under_way(hung(run_view(3), 1)):
    MIXED = reducer.apply(MIXED, _message, CLOCK.at_monotonic)
NOTHING = state_of(None)


def test_a_wide_head_has_the_best_and_the_worst_case_beside_the_eta() -> None:
    assert ALONE.last_step is not None
    left = {"time_left_seconds": 3600.0, "time_left_best_seconds": 3300.0, "time_left_worst_seconds": 4500.0}
    last = msgspec.structs.replace(ALONE.last_step.value, values=left)
    state = dataclasses.replace(ALONE, last_step=md.Seen(last, CLOCK.at_monotonic))
    assert "ETA 1h 00m, 15:31 (55m 00s to 1h 15m)" in texts(header.lines(state, CLOCK, 120, UNICODE, rows=2))[0]
    assert "ETA 1h 00m" in (narrow := texts(header.lines(state, CLOCK, 80, UNICODE, rows=2))[0])
    assert " to " not in narrow


def test_the_head_has_the_perplexity_where_it_is_wide_and_the_loss_is_per_token() -> None:
    def learning(columns: int, state: md.ViewState = ALONE) -> str:
        return texts(header.lines(state, CLOCK, columns, UNICODE, rows=2))[1]

    assert "eval 2.301 ppl 9.984 @" in learning(120)
    assert "ppl" not in learning(119)
    assert "ppl" not in learning(120, state_of(run_view(1, loss_unit="nats per pair")))


def test_the_loss_in_the_head_is_the_mean_of_sixteen_steps_unless_the_last_is_no_number() -> None:
    def head(*losses: float) -> str:
        state = ALONE
        assert state.last_step is not None
        for number, loss in enumerate(losses, 119):
            step = msgspec.structs.replace(
                state.last_step.value, step=number, loss=loss, boot=state.boot, seq=state.seq + 1
            )
            state = reducer.apply(state, step, CLOCK.at_monotonic)
        return texts(header.lines(state, CLOCK, 80, UNICODE, rows=2))[1]

    assert "loss 2.500 " in head(*[2.0, 3.0] * 8)
    assert "loss 3.000 " in head(*[9.0] * 4, *[2.0, 4.0] * 8)
    assert "loss nan" in head(*[2.0] * 16, math.nan)


def test_metrics_that_a_person_wants_have_columns_where_there_is_room() -> None:
    state = FLEET
    for rank, seen in FLEET.ranks.items():
        own = msgspec.structs.replace(
            seen.value, values={**seen.value.values, "user:reward": 0.25 + rank, "user:share": 0.5}, step=18_241,
            boot=state.boot, seq=state.seq + 1,
        )  # fmt: skip
        state = reducer.apply(state, own, CLOCK.at_monotonic)
    assert state.own_metrics == ("user:reward", "user:share")

    def table(columns: int, *metrics: str) -> list[str]:
        wanted = fleet_grouping.Arrangement(metrics=metrics)
        rows = texts(fleet_table.lines(state, CLOCK, columns, UNICODE, total=True, wanted=wanted))
        assert {len(row) for row in rows} == {columns}
        return rows

    wide = table(220, "user:reward", "user:share", "busy_seconds", "own_loss", "user:absent")
    assert [word for word in ("reward", "share", "busy seconds", "absent") if word in wide[0]] == [
        "reward", "share", "busy seconds", "absent"
    ]  # fmt: skip
    assert "1.250" in wide[2] and wide[0].count("LOSS") == 1
    end = wide[0].index("share") + len("share")
    assert wide[2][:end].endswith(" 0.500") and not wide[5][end - 7 : end].strip(), "the sum of shares is of samples"
    assert table(149, "user:reward") == table(149)
    many = table(190, *(f"user:metric_{number}" for number in range(40)))[0]
    assert "metric 0" in many and "metric 30" not in many and "STEP" in many
    assert "user:reward" in fleet_table.sortable(state, CLOCK, 220, ("user:reward",))


def test_another_node_s_agent_is_named_when_it_is_not_heard() -> None:
    state = reducer.apply_other(FLEET, "mbp", Connection("connected", CLOCK.at_monotonic), CLOCK.at_monotonic)
    state = reducer.apply_other(state, "mbp", host("mbp"), CLOCK.at_monotonic)
    assert "silent" not in texts(header.lines(state, CLOCK, 80, UNICODE, rows=2))[0]
    later = dataclasses.replace(CLOCK, at_monotonic=CLOCK.at_monotonic + 40)
    lost = reducer.apply_other(
        state, "mbp", Connection("silent", CLOCK.at_monotonic + 4, "no message"), CLOCK.at_monotonic
    )
    beat = m.Heartbeat(node="studio", at=NOW, step_age_seconds=1, loop_lag_seconds=0, boot=FLEET.boot, seq=FLEET.seq)
    lost = reducer.apply(lost, beat, later.at_monotonic)
    for columns in (80, 120):
        assert "mbp silent 40s" in texts(header.lines(lost, later, columns, UNICODE, rows=2))[0]
    row = texts(fleet_table.lines(lost, later, 80, UNICODE, total=False))[2]
    assert row.split()[-2] == "n/a", "a reading that old says nothing, and is no zero"


def test_an_own_rate_is_tokens_over_busy_seconds() -> None:
    step = rank_step(run_view(1), 118, 0)
    busy = step.phases.data + step.phases.forward + step.phases.backward
    assert step.own_tokens_per_second == pytest.approx(step.tokens / busy)
    alone = dataclasses.replace(ALONE, recent={})
    assert rank_rows.own_rate(alone, 0, alone.ranks[0]) == pytest.approx(step.tokens / busy)


@given(st.tuples(*[st.floats(0, 10)] * 6), st.integers(1, 60), st.floats(0.01, 100))
def test_a_phase_bar_is_never_longer_than_its_room(parts: tuple[float, ...], size: int, whole: float) -> None:
    bar = ln.plain(inline_bars.phase_bar(m.Phases(*parts), size, whole))
    assert bar == "n/a" or len(bar) <= size
    if bar != "n/a" and sum(parts) >= whole:
        assert len(bar) == size


def test_a_rank_that_says_nothing_is_dimmed_with_its_age() -> None:
    late = dataclasses.replace(CLOCK, at_monotonic=CLOCK.at_monotonic + 20)
    beat = m.Heartbeat(
        node="studio", at=NOW + 20, step_age_seconds=20, loop_lag_seconds=0, boot=FLEET.boot, seq=FLEET.seq
    )
    state = reducer.apply(FLEET, beat, late.at_monotonic)
    row = fleet_table.lines(state, late, 80, UNICODE, total=False)[1]
    assert ln.plain(row).split()[-1] == "20s"
    assert {piece.role for piece in row if piece.text.strip()} <= {"old", "warning"}


@pytest.mark.parametrize(
    ("state", "reason", "words"),
    [("finished", "", "FINISHED"), ("failed", "out of memory", "out of memory"), ("stopped", "by anna", "by anna"),
     ("paused", "", "PAUSED")],
)  # fmt: skip
def test_how_a_run_ended_is_said(state: m.RunState, reason: str, words: str) -> None:
    made = texts(header.lines(state_of(run_view(1, state, reason=reason)), CLOCK, 80, UNICODE, rows=2))[0]
    assert words in made
    assert "ETA 1" not in made


def test_a_mark_keeps_its_number_when_more_commands_come() -> None:
    """A question for what one did gets the same answer before and after the next."""
    first = next(event for event in ALONE.run_events if event.verb == "resize-batch")
    more = [msgspec.structs.replace(first, id=100 + index, step=100 + index) for index in range(8)]
    before = marks_of.numbered(ALONE)
    after = marks_of.numbered(dataclasses.replace(ALONE, events=(*ALONE.run_events, *more)))
    assert len(after) == marks_of.MAX_MARKS
    assert len(set(after.values())) == len(after)
    kept = before.keys() & after.keys()
    assert kept and all(after[event] == before[event] for event in kept)


@pytest.mark.parametrize(
    ("severity", "data", "outcome", "label"),
    [
        ("warning", Notice("x", "alert"), None, "ALERT "),
        ("warning", Notice("x", "rank"), None, "WARN "),
        ("error", Notice("x", "rank"), None, "ERROR "),
        ("warning", CommandFailed("x"), "rejected", ""),
        ("info", Notice("x", "agent"), None, ""),
        ("good", Notice("x", "alert"), None, ""),
    ],
)
def test_only_an_alert_is_called_one(
    severity: m.Severity, data: AnyEvent, outcome: m.CommandState | None, label: str
) -> None:
    event = m.Event(id=1, at=NOW, severity=severity, by="auto", data=data, outcome=outcome)
    assert recent_events.label(event)[0] == label


def test_before_anything_answers_no_run_is_not_said_to_be_missing() -> None:
    waiting = texts(overview(md.ViewState(), CLOCK, 80, 24, UNICODE))
    assert any("connecting" in row for row in waiting)
    assert not any("no run yet" in row for row in waiting)
    assert any("no run yet" in row for row in texts(overview(NOTHING, CLOCK, 80, 24, UNICODE)))


def test_an_events_text_cannot_drive_the_terminal() -> None:
    bad = msgspec.structs.replace(events(run_view(1))[0], data=NoteWritten("\x1b[2Jgone\x07"), by="\x1b]0;x")
    assert "\x1b" not in ln.plain(recent_events.event_line(bad, ALONE, CLOCK, 80, UNICODE))


def test_an_effect_needs_steps_on_both_sides() -> None:
    resized = events(run_view(1))[2]
    near = msgspec.structs.replace(resized, step=117)
    assert recent_events.effect(ALONE, near) is None
    change = recent_events.effect(ALONE, resized)
    assert change is not None
    assert abs(change) < 0.1


@given(
    st.integers(overview_view.LEAST_COLUMNS, 220), st.integers(overview_view.LEAST_ROWS, 70),
    st.sampled_from([FLEET, MIXED, ALONE, NOTHING, md.ViewState()]), st.sampled_from([UNICODE, ASCII]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_every_size_is_filled_exactly(columns: int, rows: int, state: md.ViewState, glyphs: object) -> None:
    assert isinstance(glyphs, type(UNICODE))
    made = overview(state, CLOCK, columns, rows, glyphs, selected=2)
    assert len(made) == rows
    assert {ln.width(pieces) for pieces in made} == {columns}


def test_sixteen_ranks_fit_with_the_chosen_one_in_sight() -> None:
    view = run_view(4, step=18_240, steps=60_000)
    ranks = tuple(msgspec.structs.replace(view.ranks[0], rank=rank, node=f"node{rank}") for rank in range(16))
    state = dataclasses.replace(FLEET, run=msgspec.structs.replace(view, ranks=ranks))
    made = "\n".join(texts(overview(state, CLOCK, 80, 24, UNICODE, selected=15)))
    assert "node15" in made
    assert "more ranks" in made


# ---------------------------------------------------------------- what other ranks and other commands leave alone


def of_messages(messages: list[object], state: md.ViewState | None = None) -> md.ViewState:
    state = state or md.ViewState()
    for message in messages:
        state = reducer.apply(state, message, CLOCK.at_monotonic)  # type: ignore[arg-type]
    return state


def test_a_wait_is_unknown_while_reports_are_still_to_come() -> None:
    state = of_messages(under_way(run_view(3)))
    ahead = msgspec.structs.replace(state.ranks[0].value, step=119, seq=state.seq + 1)
    waits = [row.wait for row in rank_rows.rows(reducer.apply(state, ahead, CLOCK.at_monotonic), CLOCK)]
    assert waits == [row.wait for row in rank_rows.rows(state, CLOCK)]
    assert None not in waits
    alone = dataclasses.replace(state, parts={**state.parts, 0: (ahead,)}, ranks={**state.ranks, 0: md.Seen(ahead, 0)})
    assert [row.wait for row in rank_rows.rows(alone, CLOCK)] == [None] * 3


def drained(view: m.RunView, rank: int) -> m.RunView:
    """A rank is out, and the first one has its samples."""
    ranks = [msgspec.structs.replace(item, state="drained", share=0) if item.rank == rank else item
             for item in view.ranks]  # fmt: skip
    ranks[0] = msgspec.structs.replace(ranks[0], share=ranks[0].share + view.ranks[rank].share)
    return msgspec.structs.replace(view, ranks=tuple(ranks))


def test_a_drained_rank_is_out_of_the_scale_and_of_the_sums() -> None:
    state = of_messages(under_way(run_view(3)))
    old = msgspec.structs.replace(state.ranks[2].value, step_seconds=9.0, seq=state.seq + 1, step=119)
    state = of_messages([old, msgspec.structs.replace(drained(run_view(3), 2), seq=state.seq + 2)], state)
    assert [row.slowest_seconds for row in rank_rows.rows(state, CLOCK)] == [0.4] * 3
    made = texts(fleet_table.lines(state, CLOCK, 120, UNICODE, total=True))
    assert "drained" in made[3]
    assert " 0.81" in made[4], "0.41 and 0.40 GB"


SHRUNK = of_messages([*under_way(shrunk(run_view(3))), *comings_and_goings(run_view(3), seq=100)])


@pytest.mark.parametrize("columns", [60, 80, 100, 120, 160, 200])
@pytest.mark.parametrize("why", ["", "was ended by signal 9", "says: " + "no memory " * 30])
def test_a_long_why_takes_the_room_of_what_is_unknown_and_no_more(columns: int, why: str) -> None:
    assert SHRUNK.run is not None
    ranks = tuple(msgspec.structs.replace(view, why=why) for view in SHRUNK.run.ranks)
    state = dataclasses.replace(SHRUNK, run=msgspec.structs.replace(SHRUNK.run, ranks=ranks))
    made = fleet_table.lines(state, CLOCK, columns, UNICODE, total=True)
    assert {ln.width(row) for row in made} == {columns}
    assert ln.plain(made[3]).rstrip().endswith(" 4s")
    assert columns < 80 or why[:21] in ln.plain(made[2])


def test_ranks_that_are_out_have_no_part_in_the_sums() -> None:
    assert [view.node for view in rank_speed.live_ranks(SHRUNK.run)] == ["torch-a"]
    assert rank_speed.reporting(SHRUNK.run) == [0]
    assert rank_rows.sum_of_own_rates(SHRUNK) == pytest.approx(5200, rel=0.02)
    assert [row.step is None for row in rank_rows.rows(SHRUNK, CLOCK)] == [False, True, True]


def test_a_loss_and_a_return_are_told_as_they_are() -> None:
    rows = texts(recent_events.lines(SHRUNK, CLOCK, 120, 9, UNICODE))
    assert any("ERROR mlx-c is lost: was ended by signal 9; torch-a 12→13" in row for row in rows)
    assert any(" mlx-c rejoins: torch-a 13→12" in row for row in rows)
    assert not any("rebalance mlx-c" in row or "admit mlx-c" in row for row in rows)
    marks = [mark for mark in marks_of.of_run(SHRUNK) if isinstance(mark, Change)]
    assert marks == [Change(70, "g1.3"), Change(78, "g1.4"), Change(116, "g1.5")]


def test_efficiency_is_of_the_present_plan_alone() -> None:
    state = of_messages(under_way(run_view(3)))
    assert rank_rows.efficiency(state) == pytest.approx(3048 / 0.4 / (5200 + 4900 + 690), rel=0.02)
    view = msgspec.structs.replace(drained(run_view(3), 2), seq=state.seq + 1, plan_version=5)
    state = reducer.apply(state, view, CLOCK.at_monotonic)
    for number in range(119, 125):
        done = msgspec.structs.replace(committed(view, number, seconds=0.32), plan_version=5, seq=state.seq + 1)
        state = reducer.apply(state, done, CLOCK.at_monotonic)
        for rank in (0, 1):
            part = msgspec.structs.replace(rank_step(run_view(3), number, rank), seq=state.seq + 1)
            state = reducer.apply(state, part, CLOCK.at_monotonic)
        known = rank_rows.efficiency(state)
        assert known is None if number < 122 else known == pytest.approx(3048 / 0.32 / (5200 + 4900), rel=0.02)


def test_efficiency_is_unknown_where_not_every_rank_of_the_plan_is() -> None:
    """To a node that doesn't conduct: its own rank is all that it has."""
    view = run_view(3)
    assert rank_rows.efficiency(of_messages(under_way(view))) is not None
    alone = msgspec.structs.replace(view, ranks=view.ranks[:1])
    state = of_messages(under_way(view))
    assert rank_rows.efficiency(dataclasses.replace(state, run=alone)) is None


def test_a_neighbour_s_effect_is_not_credited_and_no_change_has_none() -> None:
    state = of_messages(under_way(run_view(3)))
    window = state.lately("tokens_per_second")
    rates = dataclasses.replace(window, last=np.where(window.first < 100, 100.0, 200.0))
    state = dataclasses.replace(state, recent={**state.recent, ("tokens_per_second", None): rates})

    def rebalance(number: int, step: int, before: int = 1, after: int = 2) -> m.Event:
        return m.Event(
            id=number, at=NOW, severity="info", by="anna", data=SharesChanged({"a": before}, {"a": after}), step=step,
            run=run_view(3).run, verb="rebalance", outcome="applied",
        )  # fmt: skip

    first, second = rebalance(21, 92), rebalance(22, 100)
    both = dataclasses.replace(state, events=(first, second))
    assert recent_events.effect(both, second) == pytest.approx(1.0)
    assert recent_events.effect(both, first) == pytest.approx(0.0)
    assert recent_events.effect(dataclasses.replace(both, events=(first, rebalance(23, 96), second)), first) is None
    same = rebalance(24, 100, 2, 2)
    assert recent_events.effect(both, same) is None
    assert marks_of.numbered(dataclasses.replace(both, events=(first, same))) == {21: "21"}


def test_the_chart_by_node_tells_equal_steps_apart_by_what_each_rank_is_busy() -> None:
    panel = overview_view.busy_panel(of_messages(under_way(run_view(3))))
    assert [track.label for track in panel.traces] == ["step", "torch-a", "torch-b", "mlx-c"]
    assert [round(float(track.window.last[-1]), 2) for track in panel.traces] == [0.4, 0.29, 0.26, 0.37]
    assert [track.label for track in overview_view.busy_panel(ALONE).traces] == ["atlas"]


@pytest.mark.parametrize("steps", [150, 2000, 60_000])
def test_the_charts_have_one_range_that_is_more_than_half_filled(steps: int) -> None:
    for step in [*range(2, 300), *range(300, steps, 97), steps]:
        if step <= steps:
            state = dataclasses.replace(MIXED, run=run_view(3, step=step, steps=steps))
            panels = [overview_view.loss_panel(state), overview_view.busy_panel(state), overview_view.rate_panel(state)]
            ((first, last),) = {(panel.first, panel.last) for panel in panels}
            assert first == 1
            assert step > last / 2, (step, last)


@pytest.mark.parametrize("step", [8, 30, 130, 700])
def test_no_chart_is_drawn_in_less_than_half_of_its_width(step: int) -> None:
    begun, seq = [snapshot(run_view(3, step=0, steps=2000))], itertools.count(1)
    for past in range(1, step + 1):
        view = run_view(3, step=past, steps=2000)
        begun += [committed(view, past, next(seq)), *(rank_step(view, past, rank, next(seq)) for rank in range(3))]
    state = of_messages(begun)
    left, right = zip(
        *(_halves(row) for row in texts(overview_view.chart_lines(state, 80, 9, UNICODE))[1:-1]), strict=True
    )
    for rows in (left, right):
        drawn = {at for row in rows for at, char in enumerate(row) if "\u2800" < char <= "\u28ff"}
        assert max(drawn) - min(drawn) + 1 >= len(rows[0]) / 2, "\n".join(rows)


def _halves(row: str) -> tuple[str, str]:
    left, _, right = row.partition(UNICODE.vertical)
    return left, right


def test_of_many_ranks_the_chart_has_their_span_the_selected_one_and_the_straggler() -> None:
    state = of_messages(under_way(run_view(3)))
    assert state.run is not None
    slow = rank_speed.Straggler(rank=2, node="mlx-c", phase="backward", excess_seconds=0.1, waited_seconds=0.1)
    many = tuple(msgspec.structs.replace(state.run.ranks[0], rank=rank, node=f"node-{rank}") for rank in range(8))
    wide = dataclasses.replace(state, run=msgspec.structs.replace(state.run, ranks=many), slow=slow)
    panel = overview_view.busy_panel(wide, selected=1)
    assert [track.label for track in panel.traces] == ["step", "mean", "node-1", "node-2"]
    span = panel.traces[1]
    assert span.band and (round(float(span.window.minimum[-1]), 2), round(float(span.window.maximum[-1]), 2)) == (
        0.26,
        0.37,
    )
    assert [track.label for track in overview_view.rate_panel(dataclasses.replace(wide, slow=None)).traces] == ["mean"]


@pytest.mark.parametrize("size", [(20, 5), (12, 40), (200, 3)])
def test_what_is_too_small_says_first_what_it_needs(size: tuple[int, int]) -> None:
    said = overview_view.too_small(*size)
    assert said is not None
    assert said[: size[0]].startswith("needs 60x15")
