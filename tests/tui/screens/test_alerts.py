"""Alerts on the screens: counted, shown first, explained, acknowledged, muted, and rung for once."""

from typing import Any

import msgspec
import pytest
from tests.tui.support.alerted import ALERTS, CLOCK_ALERT, DISK_ALERT, LOST_ALERT, SPIKE_ALERT, alerted, alerts
from tests.tui.support.driving import body, running, until
from tests.tui.support.pictures import Pictures, at_columns
from tests.tui.support.recorded import BOOT, CLOCK, NOW, app_of, run_view, snapshot, source_of

from trainctl.protocol import messages as m
from trainctl.protocol.client.client import Connection
from trainctl.protocol.messages import verbs
from trainctl.protocol.messages.events import AlertCleared, AlertRaised
from trainctl.tui.cli import tables
from trainctl.tui.commands import forms
from trainctl.tui.screens import alerts_view, header
from trainctl.tui.state import reducer
from trainctl.tui.state import view_state as md
from trainctl.tui.state.view_state import AlertBell
from trainctl.tui.text.styled_line import plain
from trainctl.tui.widgets.line_view import Lines


def state_of(*found: m.AlertView, **other: Any) -> md.ViewState:
    shot = msgspec.structs.replace(snapshot(run_view(4, step=18_240, steps=60_000)), alerts=alerts(*found, **other))
    return reducer.apply(md.ViewState(), shot, CLOCK.at_monotonic)


def test_what_calls_for_somebody_comes_first_and_errors_first_of_that() -> None:
    loud = msgspec.structs.replace(LOST_ALERT, acknowledged_by=None)
    state = state_of(DISK_ALERT, SPIKE_ALERT, CLOCK_ALERT, loud)
    assert [alert.kind for alert in state.open_alerts] == ["node-lost", "loss-spike", "clock", "disk"]
    assert [alert.kind for alert in state.calling] == ["node-lost", "loss-spike", "clock"]
    assert plain(header.alerts_piece(state)) == "3 ALERTS"
    assert plain(header.alerts_piece(state_of(SPIKE_ALERT))) == "1 ALERT"
    assert header.alerts_piece(state_of(DISK_ALERT)) == ()


def test_the_newest_word_of_each_agent_counts() -> None:
    state = state_of(SPIKE_ALERT)
    state = reducer.apply(state, alerts(CLOCK_ALERT, seq=7), 1.0)
    assert [alert.kind for alert in state.open_alerts] == ["clock"]
    silent = m.AlertView(
        id="lead-silent:mbp", kind="lead-silent", severity="error", text="x", raised_at=NOW, node="mbp"
    )
    theirs = m.Alerts(node="mbp", alerts=(silent,), boot="other", seq=1)
    state = reducer.take(state, "mbp", theirs, 1.0)
    assert [alert.kind for alert in state.open_alerts] == ["lead-silent", "clock"]
    state = reducer.apply(state, alerts(seq=8), 1.0)
    assert [alert.kind for alert in state.open_alerts] == ["lead-silent"]
    assert reducer.apply(state, snapshot(run_view(1, "finished")), 2.0).alerts.keys() == {"mbp"}


def test_what_a_returned_node_repeats_of_the_lead_is_the_lead_s_to_end() -> None:
    """An agent that comes back may tell what it last heard of the lead, after which it never mentions it again."""
    lost = msgspec.structs.replace(LOST_ALERT, acknowledged_by=None)
    state = reducer.take(state_of(lost), "mini", Connection("silent", 1.0, "no message"), 1.0)
    for message in (Connection("connected", 2.0), alerts(lost)):
        state = reducer.take(state, "mini", message, 2.0)
    assert [alert.id for alert in state.open_alerts] == [lost.id]
    state = reducer.take(state, "studio", alerts(seq=9), 3.0)
    assert state.open_alerts == ()
    state = reducer.take(state, "mini", alerts(lost), 4.0)
    assert state.open_alerts == ()


def test_an_event_of_an_alert_shown_above_is_not_shown_twice() -> None:
    state = state_of(CLOCK_ALERT)
    assert state.run is not None
    for number, (ago, id) in enumerate(((900, "clock:mbp:1"), (800, ""), (64, "clock:mbp:1"), (30, "disk:forge")), 20):
        data = AlertRaised(id, "", f"event {number}") if id else AlertCleared("clock:mbp:1", "", "clock")
        severity: m.Severity = "warning" if id else "good"
        event = m.Event(number, NOW - ago, severity, "auto", data=data, run=state.run.run, boot=BOOT, seq=number)
        state = reducer.apply(state, event, 1.0)
    shown = [event.text for event in alerts_view.without_open(state) if event.kind == "alert"]
    assert shown == ["event 20", "clock cleared", "event 23"]
    many = state_of(*(msgspec.structs.replace(SPIKE_ALERT, id=f"x{index}") for index in range(9)))
    lines = [plain(pieces).rstrip() for pieces in alerts_view.overview_lines(many, CLOCK, 80, 3)]
    assert len(lines) == 3 and lines[-1] == "… 7 more alerts: a shows them"


def test_the_bell_rings_once_for_each_alert_that_is_new() -> None:
    bell = AlertBell()
    again = state_of(msgspec.structs.replace(SPIKE_ALERT, raised_at=NOW))
    both = state_of(CLOCK_ALERT, SPIKE_ALERT)
    states = [md.ViewState(), state_of(CLOCK_ALERT), both, both, state_of(DISK_ALERT), again]
    assert [bell.rings(state) for state in states] == [False, False, True, False, False, True]
    bell.on = False
    assert not bell.rings(both)
    bell.on = True
    assert not bell.rings(both)


def test_the_dialogs_and_the_command_line_begin_with_what_calls() -> None:
    form = forms.form("acknowledge", state_of(*ALERTS))
    assert forms.order_of(form, {"id": form.fields[0].value}).args == {"id": "loss-spike"}
    form = forms.form("mute", state_of(CLOCK_ALERT))
    order = forms.order_of(form, {item.name: item.value for item in form.fields})
    assert (order.args, order.node) == ({"kind": "clock", "minutes": 60.0}, "mbp")
    verbs.check(order.verb, dict(order.args), order.node)
    table = tables.alerts_table(ALERTS).splitlines()
    assert [row.split()[0] for row in table] == ["ID", "loss-spike", "clock:mbp:1", "disk:forge", "node-lost:mini:3"]
    status = tables.status_text(msgspec.structs.replace(snapshot(run_view(4, step=18_240)), alerts=alerts(*ALERTS)))
    assert sum(line.startswith("alert ") for line in status.splitlines()) == 2, "those that call"


async def test_the_panel_by_key_and_mouse() -> None:
    source = alerted()

    async with running(source) as (pilot, app):
        rung: list[int] = []
        app.bell = lambda: rung.append(1)  # type: ignore[method-assign]
        await until(pilot, lambda: len(app.live.open_alerts) == 4)
        app.paint()
        assert "2 ALERTS" in body(app)
        assert "HOT" in body(app)
        await pilot.press("a")
        assert app.screen.name == "alerts"
        assert body(app).splitlines()[3].startswith("▸ ALERT 14:30 12s    run      loss-spike")
        await pilot.click(app.screen.query_one("#body"), offset=(20, 4))
        await pilot.pause()
        assert body(app).splitlines()[7].startswith("─ mbp: clock ─")
        await pilot.press("k")
        await pilot.pause()
        assert body(app).splitlines()[7].startswith("─ loss spike ─"), "k is up, here as everywhere"
        await pilot.press("j", "A", "m", "B")
        assert not app.alert_bell.on
        assert "B bell off" in body(app)
        await until(pilot, lambda: len(source.commands) == 2)
        assert [(verb, args, options["node"]) for verb, args, options in source.commands] == [
            ("acknowledge", {"id": "clock:mbp:1"}, None),
            ("mute", {"kind": "clock", "minutes": 60.0}, "mbp"),
        ]
        await pilot.press("down", "down", "down", "down", "m")
        await until(pilot, lambda: len(source.commands) == 3)
        assert source.commands[-1][1:][0] == {"kind": "disk", "minutes": 0.0}
        await pilot.press("enter")
        why = app.screen.query_one("#dialog-text", Lines)
        assert "4.2 GB left" in why.shown[1]
        source.more.put_nowait(alerts(seq=901))
        await until(pilot, lambda: "this alert has cleared" in "\n".join(why.shown))
        await pilot.press("escape")
        app.paint()
        assert "no open alerts" in body(app)
        app.alert_bell.on = True
        source.more.put_nowait(alerts(CLOCK_ALERT, seq=902))
        await until(pilot, lambda: rung == [1])
        await pilot.press("1", "w")
        await pilot.pause()
        assert app.screen.query_one("#dialog").border_title == "why: mbp: clock"
        assert "+0.14 s" in app.screen.query_one("#dialog-text", Lines).shown[1]


async def test_nothing_is_sent_by_a_screen_that_only_reads() -> None:
    source = alerted()

    async with running(source, read_only=True, bell=False) as (pilot, app):
        await until(pilot, lambda: bool(app.live.open_alerts))
        await pilot.press("a", "A", "m")
        await pilot.pause()
    assert source.commands == []


@at_columns(80, 120)
async def test_picture_of_the_panel(pictures: Pictures, columns: int) -> None:
    await pictures.compare(app_of(alerted()), columns, "a", "down")


@pytest.mark.parametrize("key", ["1", "w"], ids=["overview", "why"])
async def test_picture_of_alerts_on_the_overview(pictures: Pictures, key: str) -> None:
    await pictures.compare(app_of(alerted(CLOCK_ALERT, LOST_ALERT)), 80, key)


async def test_picture_without_alerts(pictures: Pictures) -> None:
    await pictures.compare(app_of(source_of(4)), 80, "a")
