"""Alerts as lines: one in words, those at the head of the Overview's events, and the panel with what each is about."""

import math

from trainctl.protocol.config.alert_rules import KINDS
from trainctl.protocol.messages import BUSY_PHASES, AlertView, Event, HostReading
from trainctl.protocol.messages.events import AlertRaised
from trainctl.tui.state.view_state import Clock, ViewState
from trainctl.tui.text.formatting import age, duration, seconds, used_of
from trainctl.tui.text.styled_line import (
    Line,
    Piece,
    clean,
    filled,
    fit,
    groups,
    key_words,
    labelled,
    line,
    rule,
    shorten,
    spread,
    width,
    wrap,
)

ALERT_WORDS = {"warning": ("ALERT", "warning"), "error": ("ERROR", "bad")}
"""Words for how bad an alert is, with their role."""


def alert_title(alert: AlertView) -> str:
    """Return what an alert is about, short: `torch-h lost`, `mbp: clock`, `loss spike`."""
    node, words = clean(alert.node), alert.kind.removeprefix("node-").replace("-", " ")
    between = " " if alert.kind.startswith("node-") else ": "
    return f"{node}{between}{words}" if node else words


def held_words(alert: AlertView, *, short: bool = False) -> str:
    """Return why it calls nobody, empty if it does."""
    if alert.acknowledged_by is not None:
        return f"{'ack' if short else 'acknowledged by'} {clean(alert.acknowledged_by)}"
    return "muted" if alert.muted else ""


def detail_lines(alert: AlertView, state: ViewState, clock: Clock, columns: int) -> list[Line]:
    """Return all that is known of an alert: what it says, what was at hand when it was raised, and what is so now."""
    _, role = ALERT_WORDS[alert.severity]
    lines = [line(Piece(text, role)) for text in wrap(clean(f"{alert.node} {alert.text}".strip()), columns)]
    lines += [line(Piece(text, "label")) for text in wrap(_when(alert, clock), columns)]
    for name, facts, role in (("then", alert.facts, "label"), ("now", facts_now(alert, state), "text")):
        for index, fact in enumerate(facts):
            lines += labelled(f"{name if not index else '':<6}", fact, columns, role)
    return lines


def _when(alert: AlertView, clock: Clock) -> str:
    at = clock.time_of(alert.raised_at)
    step = f" after step {alert.step:,}" if alert.step is not None else ""
    ago = duration(max(clock.wall() - alert.raised_at, 0.0))
    held = held_words(alert)
    return f"raised {at}{step}, {ago} ago: {KINDS[alert.kind].summary}{f'; {held}' if held else ''}"


def facts_now(alert: AlertView, state: ViewState) -> list[str]:
    """Return the phases of the rank's last step and the machine's newest reading."""
    words = []
    seen = state.ranks.get(alert.rank) if alert.rank is not None else None
    if seen is not None:
        phases = seen.value.phases
        parts = [f"{name} {seconds(getattr(phases, name))}" for name in (*BUSY_PHASES, "sync")]
        own = seen.value.own_tokens_per_second
        words.append(f"step {seen.value.step:,}: {', '.join(parts)}" + (f"; own rate {own:,.0f} tok/s" if own else ""))
        if seen.value.peak_or_held_bytes is not None:
            used = used_of(seen.value.peak_or_held_bytes, seen.value.memory_cap_bytes)
            words.append(f"memory {used} GB, micro-batch {seen.value.micro_batch} of {seen.value.samples} samples")
    host = state.hosts.get(alert.node)
    return words + (_machine(host.value) if host is not None else [])


def _machine(host: HostReading) -> list[str]:
    parts = [f"cpu {host.cpu_percent:.0f} %"] if host.cpu_percent is not None else []
    parts += [f"load {host.load_1min:.1f}"] if host.load_1min is not None else []
    disk = used_of(host.disk_free_bytes, host.disk_total_bytes)
    parts += [f"disk free {disk} GB"] if host.disk_free_bytes is not None else []
    texts = [", ".join(parts)] if parts else []
    for gpu in host.gpus:
        words = [f"{gpu.utilization_percent:.0f} %"] if gpu.utilization_percent is not None else []
        words += [f"{gpu.clock_mhz / 1000:.2f} GHz"] if gpu.clock_mhz is not None else []
        words += [f"{gpu.power_watts:.0f} W"] if gpu.power_watts is not None else []
        words += [f"{gpu.temperature_celsius:.0f} °C"] if gpu.temperature_celsius is not None else []
        texts.append(f"{gpu.name}: {', '.join(words)}")
    return texts


_LEAST_DETAIL = 9
"""Rows that what is known of the chosen alert gets at least, where there are so many."""


def overview_lines(state: ViewState, clock: Clock, columns: int, rows: int) -> list[Line]:
    """Return at most `rows` lines of alerts that call for somebody; of more than that, the last line counts the
    rest."""
    calling = state.calling
    shown = calling if len(calling) <= rows else calling[: rows - 1]
    lines = [overview_line(alert, clock, columns, key="w " if not index else "") for index, alert in enumerate(shown)]
    if len(shown) < len(calling) and rows:
        text = f"… {len(calling) - len(shown)} more alerts: a shows them"
        lines.append(fit(line(Piece(text, "warning", "app.show('alerts')")), columns))
    return lines


def overview_line(alert: AlertView, clock: Clock, columns: int, *, key: str = "") -> Line:
    """Return `14:31 ALERT mbp +0.14 s in backward: 84 °C, 1.62→1.38 GHz w why`; a click asks why."""
    word, role = ALERT_WORDS[alert.severity]
    why = f"app.why({alert.id!r})"
    at = clock.time_of(alert.raised_at)
    head = line(Piece(f"{at} ", "dim", why), Piece(f"{word} ", role, why))
    tail = line(Piece(f"  {key}", "key", why), Piece("why", "label", why))
    room = max(columns - width(head) - width(tail) - 1, 1)
    text = clean(f"{alert.node} {alert.text}".strip())
    body = Piece(shorten(text, room), role, why)
    return fit(spread((*head, body), tail, columns), columns)


def without_open(state: ViewState) -> tuple[Event, ...]:
    """Return the run's events, but for those that raised the alerts that are shown above them."""
    above = {alert.id: alert.raised_at - 1.0 for alert in state.calling}

    def is_above(event: Event) -> bool:
        return isinstance(event.data, AlertRaised) and event.at >= above.get(event.data.id, math.inf)

    return tuple(event for event in state.run_events if not is_above(event))


def panel_lines(state: ViewState, cursor: int, clock: Clock, columns: int, rows: int, *, bell: bool) -> list[Line]:
    """Return exactly `rows` lines: the open alerts, and below them what is known of the one at the cursor."""
    alerts = state.open_alerts
    if not alerts:
        lines = _nothing(state)
    else:
        cursor = min(max(cursor, 0), len(alerts) - 1)
        room = min(len(alerts), max(rows - 2 - _LEAST_DETAIL, 1))
        start = min(max(cursor - room + 1, 0), len(alerts) - room)
        head = f"  {'':<6}{'SINCE':<13}{'NODE':<{_node_cells(columns)}}{'KIND':<12}WHAT"
        lines = [line(Piece(head, "label"))]
        for index, alert in enumerate(alerts[start : start + room], start):
            lines.append(_row(alert, index, clock, columns, chosen=index == cursor))
        label = f"─ {alert_title(alerts[cursor])} "
        lines.append(rule(columns, (0, label, "title")))
        lines += [(Piece("  "), *pieces) for pieces in detail_lines(alerts[cursor], state, clock, columns - 2)]
    return [
        *filled(lines, columns, rows - 1),
        fit(_foot(state, clock, bell=bell, any_open=bool(alerts), columns=columns), columns),
    ]


def _node_cells(columns: int) -> int:
    return 9 if columns < 100 else 14


def _row(alert: AlertView, index: int, clock: Clock, columns: int, *, chosen: bool) -> Line:
    word, role = ALERT_WORDS[alert.severity]
    node_cells = _node_cells(columns)
    held = held_words(alert, short=columns < 100)
    quiet = "dim" if held else "text"
    since = clock.time_of(alert.raised_at)
    ago = age(max(clock.wall() - alert.raised_at, 0.0))
    node = shorten(clean(alert.node or "run"), node_cells - 1)
    head = f"{since} {ago}"
    left = (
        Piece("▸" if chosen else " ", "key"),
        Piece(" "),
        Piece(f"{word:<6}", "dim" if held else role),
        Piece(f"{shorten(head, 12):<13}", "label"),
        Piece(f"{node:<{node_cells}}", "dim" if held else "strong"),
        Piece(f"{alert.kind:<12}", quiet),
    )
    right = line(Piece(f"  {held}" if held else "", "dim"))
    room = max(columns - width(left) - width(right) - bool(held), 1)
    body = Piece(shorten(clean(alert.text), room), quiet if held else role)
    pieces = fit(spread((*left, body), right, columns) if held else (*left, body), columns)
    pieces = tuple(piece._replace(action=f"screen.choose_at({index})") for piece in pieces)
    if not chosen:
        return pieces
    # How bad it is keeps its colour; the rest is marked as the chosen line.
    return tuple(piece if place in (0, 2) else piece._replace(role="cursor") for place, piece in enumerate(pieces))


def _nothing(state: ViewState) -> list[Line]:
    head = line(Piece("no open alerts", "good"))
    if state.run is None or not state.active:
        return [head, line(Piece("no active run: only each machine's disk is monitored", "dim"))]
    lines = [head, line(Piece("watched", "label"))]
    lines += [line(Piece(f"  {name:<13}", "text"), Piece(kind.summary, "dim")) for name, kind in KINDS.items()]
    return lines


def _foot(state: ViewState, clock: Clock, *, bell: bool, any_open: bool, columns: int) -> Line:
    keys = (
        [
            ("enter", "why", "screen.why"),
            ("A", "acknowledge", "screen.acknowledge"),
            ("m", "mute an hour", "screen.mute"),
        ]
        if any_open
        else []
    )
    keys.append(("B", f"bell {'on' if bell else 'off'}", "screen.bell"))
    parts = [key_words(*each) for each in keys]
    for mute in (mute for told in state.alerts.values() for mute in told.mutes):
        where = f" on {clean(mute.node)}" if mute.node else ""
        until = clock.time_of(mute.until_at)
        parts.append(line(Piece(f"{mute.kind}{where} muted until {until} by {clean(mute.by)}", "dim")))
    return groups(parts, columns)
