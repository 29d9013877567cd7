"""The Overview's head: which run, how far, how well, how fast. One line a subject; wider screens add, never
reshuffle."""

import math
from collections.abc import Mapping

from trainctl.protocol.batch.cost import CostFigures, run_rates
from trainctl.protocol.messages import ACTIVE_RUN_STATES, HostReading, RunRates, RunView
from trainctl.tui.state import series
from trainctl.tui.state.rank_rows import efficiency, fleet_rate
from trainctl.tui.state.view_state import Clock, ViewState
from trainctl.tui.text.formatting import (
    NA,
    compact,
    count,
    duration,
    eta,
    figure,
    gigabytes,
    learning_rate,
    loss,
    percent,
    seconds,
    short_unit,
    span,
    used_of,
)
from trainctl.tui.text.run_lines import (
    AVERAGE_LOSS,
    EFFICIENCY,
    LOSS_STEPS,
    RECENT_RATE,
    cost_figures,
    cost_pieces,
    cost_spent,
    energy_text,
    rate_pieces,
    run_energy,
)
from trainctl.tui.text.styled_line import Line, Piece, clean, fit, groups, line, shorten, spread, width

SPAN_COLUMNS = 120
"""Columns from which the best and the worst case stand beside the ETA."""
STATE_ROLES = {
    "running": "good",
    "finished": "good",
    "starting": "accent",
    "pausing": "warning",
    "paused": "warning",
    "stopping": "warning",
    "stopped": "warning",
    "failed": "bad",
}


def lines(state: ViewState, clock: Clock, columns: int, *, rows: int, badge: str = "", address: str = "") -> list[Line]:
    """Return the head as `rows` (2 to 4) lines of `columns` cells; `badge` is a word about the screen itself
    ("READ-ONLY"), `address` the agent's, for wide screens."""
    run = state.run
    if run is None:
        return [fit(_without_run(state, clock, columns, badge), columns)] + [fit((), columns)] * (rows - 1)
    drawn = [_identity(state, run, clock, columns, badge), _learning(state, clock, columns, rows)]
    if rows >= 4:
        drawn.append(groups(rate_pieces(_rates(state, run), RECENT_RATE), columns))
    if rows >= 3:
        at = line(Piece("at ", "label"), clean(address)) if address and columns >= 120 else ()
        drawn.append(spread(_resources(state, run, clock, columns - width(at) - 1), at, columns))
    return [fit(pieces, columns) for pieces in drawn]


def connection_piece(state: ViewState, clock: Clock) -> Line:
    """Return `agent silent 12s` while the line is not good, `mbp silent 12s` while another node's isn't, else
    nothing."""
    now = clock.monotonic()
    quiet = state.silent_for(now)
    if quiet is not None:
        return line(Piece(f"agent silent {duration(quiet)}", "bad"))
    if state.heard_at is not None:
        return _others_piece(state.silent_agents(now))
    since = max(now - state.connection.since_monotonic, 0.0)
    words = "no agent yet" if state.connection.state == "silent" else "connecting"
    return line(Piece(f"{words} {duration(since)}", "warning"))


def _others_piece(silent: Mapping[str, float]) -> Line:
    if not silent:
        return ()
    who = clean(next(iter(silent))) if len(silent) == 1 else f"{len(silent)} agents"
    return line(Piece(f"{who} silent {duration(max(silent.values()))}", "warning"))


def _without_run(state: ViewState, clock: Clock, columns: int, badge: str) -> Line:
    left = [line(Piece(clean(state.node.node) if state.node else "trainctl", "strong"))]
    left += [line(Piece("no run", "warning"))] if state.node else []
    right = groups([connection_piece(state, clock), line(Piece(badge, "warning"))], columns // 2)
    return spread(groups(left, columns - width(right) - 1), right, columns)


def _identity(state: ViewState, run: RunView, clock: Clock, columns: int, badge: str) -> Line:
    right = _corner(state, run, clock, columns, badge)
    room = columns - width(right) - 1
    left = _progress(state, run, clock, columns, brief=False)
    others = _attached(state, columns)
    if others and width(groups(left[:5], columns)) + width(others) + 2 <= room:
        right = (*others, Piece("  "), *right)
        room = columns - width(right) - 1
    if width(groups(left[:5], columns)) > room:
        left = _progress(state, run, clock, columns, brief=True)
    return spread(groups(left, room), right, columns)


def _attached(state: ViewState, columns: int) -> Line:
    """Return `3 attached: anna, cron and you` while somebody else is, the names where there is room."""
    if not state.viewers:
        return ()
    names = list(dict.fromkeys(clean(viewer.by) or "?" for viewer in state.viewers))
    who = shorten(f": {', '.join(names)} and you", columns // 4) if columns >= 100 else ""
    return line(Piece(f"{len(state.viewers) + 1} attached{who}", "accent"))


def _progress(state: ViewState, run: RunView, clock: Clock, columns: int, *, brief: bool) -> list[Line]:
    """Return what stands at the left of the first line, the most important first; `brief` leaves the clock time out."""
    done = run.step / run.steps if run.steps else None
    lines = [
        line(Piece(shorten(clean(run.name), max(columns // 4, 12)), "strong")),
        line(_state(state, run, clock)),
        line(Piece(f"{run.step:,}/{count(run.steps)}", "strong")),
        line(Piece(percent(done), "text")),
        _outlook(state, run, clock, columns, brief=brief),
    ]
    if columns >= 100:
        epoch = f"{run.cursor / run.samples:.2f}" if run.samples and run.cursor is not None else NA
        lines.append(line(Piece("epoch ", "label"), epoch))
        lines += [line(Piece("plan ", "label"), f"v{run.plan_version}")] if run.kind == "hosted" else []
    if columns >= 150:
        lines.append(line(Piece("run ", "label"), Piece(clean(run.run), "dim")))
    return lines


def _state(state: ViewState, run: RunView, clock: Clock) -> Piece:
    """Return the run's state, or that its ranks wait for the lead's agent: without plans they make no step."""
    silent = _lead_silent(state, run, clock)
    if silent is None:
        return Piece(run.state.upper(), STATE_ROLES.get(run.state, "text"))
    quiet = f"{silent:.0f} s" if silent < 60 else duration(silent)
    return Piece(f"WAITING FOR {clean(run.lead)}'s AGENT {quiet}", "warning")


def _lead_silent(state: ViewState, run: RunView, clock: Clock) -> float | None:
    """Return seconds since the agent whose plans the ranks wait for was heard; None while it is, and for a guest's
    loop, which waits for none."""
    leads = state.node is not None and state.node.node == run.lead
    return state.silent_for(clock.monotonic()) if state.active and leads and run.kind == "hosted" else None


def _corner(state: ViewState, run: RunView, clock: Clock, columns: int, badge: str) -> Line:
    silent = connection_piece(state, clock) if _lead_silent(state, run, clock) is None else ()
    alone = silent and (columns < 100 or state.silent_for(clock.monotonic()) is not None)
    place = () if alone else _place(run, columns)
    return groups([silent, alerts_piece(state), place, line(Piece(badge, "warning"))], columns // 2)


def alerts_piece(state: ViewState) -> Line:
    """Return `2 ALERTS`, of those that call for somebody; a click shows them."""
    calling = state.calling
    if not calling:
        return ()
    role = "bad" if any(alert.severity == "error" for alert in calling) else "warning"
    return line(Piece(f"{len(calling)} ALERT{'S' if len(calling) > 1 else ''}", role, "app.show('alerts')"))


def _place(run: RunView, columns: int) -> Line:
    """Return who leads, by which engine, whether of unlike backends, in which generation; of a guest, that it is
    one."""
    engine = run.kind if run.kind != "hosted" else f"{run.engine} mixed" if run.mixed else run.engine
    words = [clean(run.lead), engine, str(run.generation)]
    if engine == "none" and columns < 100:
        words.remove("none")
    dot = " · " if columns >= 100 else "·"
    return line(Piece(dot.join(words), "label"))


def _outlook(state: ViewState, run: RunView, clock: Clock, columns: int, *, brief: bool) -> Line:
    if run.state == "running" and run.reason:
        return line(Piece(clean(run.reason), "warning"))
    if run.state in ("starting", "running"):
        rates = _rates(state, run)
        if brief:
            return line(Piece("ETA ", "label"), duration(rates.seconds_left))
        reach = span(rates.seconds_left_best, rates.seconds_left_worst) if columns >= SPAN_COLUMNS else ""
        text = eta(rates.seconds_left, clock.wall(), clock.zone)
        return line(Piece("ETA ", "label"), text, Piece(f" ({reach})" if reach else "", "dim"))
    if run.state in ACTIVE_RUN_STATES:
        return line(Piece("ETA ", "label"), Piece(NA, "dim"))
    reason = f": {clean(run.reason)}" if run.reason else ""
    return line(Piece(f"{_ended(state, clock)}{reason}", "bad" if run.state == "failed" else "label"))


def _ended(state: ViewState, clock: Clock) -> str:
    """Return when the run ended, by its event; where none is known, when it last committed a step."""
    last = state.last_step.value.committed_at if state.last_step else 0.0
    at = next((event.at for event in reversed(state.run_events) if event.kind == "run"), None)
    if at is not None and at >= last:
        return f"ended {clock.time_of(at)}"
    return f"last step {clock.time_of(last)}" if last else "ended"


def _rates(state: ViewState, run: RunView) -> RunRates:
    lately = series.typical(state.lately("step_seconds"), 32)
    return run_rates(run, state.last_step.value if state.last_step else None, lately)


def _cost(state: ViewState, run: RunView, clock: Clock) -> CostFigures | None:
    last = state.last_step.value if state.last_step else None
    return cost_figures(run, last, clock.wall(), _rates(state, run).seconds_left) if run.cost else None


def _learning(state: ViewState, clock: Clock, columns: int, rows: int) -> Line:
    run, last = state.run, state.last_step
    assert run is not None
    step = last.value if last else None
    evaluated = f" @{run.eval_step:,}" if columns >= 100 and run.eval_step is not None else ""
    is_shown = columns >= 120 and run.perplexity is not None
    perplexity = line(Piece(" ppl ", "label"), loss(run.perplexity)) if is_shown else ()
    gradient = line(Piece("|g| ", "label"), _norm(step.grad_norm if step else None))
    spent = _cost(state, run, clock) if rows < 3 else None  # a head of more lines has one for it
    unit, recent = clean(short_unit(run.rate_unit)), Piece(f"{RECENT_RATE.label} " * (columns >= 100), "label")
    parts = [
        line(Piece(f"{AVERAGE_LOSS.label} ", "label"), Piece(loss(_loss(state)), "strong"), _trend(state)),
        line(Piece("eval ", "label"), loss(run.eval_loss), *perplexity, Piece(evaluated, "dim")),
        line(Piece("lr ", "label"), learning_rate(run.learning_rate)),
        gradient if spent is None else cost_spent(spent),
        line(recent, Piece(compact(fleet_rate(state)), "strong"), Piece(f" {unit}", "label")),
        line(Piece(f"{EFFICIENCY.label} ", "label"), percent(efficiency(state))),
    ]
    if step is not None and step.skipped:
        parts.insert(1, line(Piece(f"SKIPPED {step.skipped}", "bad")))
    if columns >= 100:
        tokens = compact(step.tokens_total or None if step else None)
        parts += [line(Piece("G ", "label"), count(run.global_batch)), line(Piece("tokens ", "label"), tokens)]
    return groups(parts, columns)


def _loss(state: ViewState) -> float | None:
    """Return the average loss, which wanders less than one step's; a last loss that is no number as it is."""
    if state.last_step is None:
        return None
    last = state.last_step.value.loss
    mean = series.recent_mean(state.lately("loss"), LOSS_STEPS) if last is None or math.isfinite(last) else None
    return last if mean is None else mean


def _norm(value: float | None) -> str:
    return NA if value is None else f"{value:.2f}" if abs(value) < 100 else compact(value)


def _trend(state: ViewState) -> Piece:
    """Return change of the loss over the last thousand steps, or hundred while there aren't a thousand; nothing before
    that."""
    for steps, name in ((1000, "1k"), (100, "100")):
        window = state.window("loss") if steps > 512 else state.lately("loss")
        change = series.trend(window, steps)
        if change is not None:
            sign = "↑" if change > 0.0005 else "↓" if change < -0.0005 else "→"
            return Piece(f" {sign}{abs(100 * change):.1f}%/{name}", "good" if change < 0 else "warning")
    return Piece("")


def _resources(state: ViewState, run: RunView, clock: Clock, columns: int) -> Line:
    seen = state.hosts.get(run.lead) or next(iter(state.hosts.values()), None)
    host, now = seen.value if seen else None, clock.wall()
    lag = seconds(state.heartbeat.value.loop_lag_seconds if state.heartbeat else None)
    cpu = f"{clean(run.lead)} cpu " if len(run.ranks) > 1 else "cpu "
    free = f"{gigabytes(host.disk_free_bytes)} GB" if host and host.disk_free_bytes is not None else NA
    taking_part = {view.node for view in run.ranks}
    readings = [item.value for node, item in state.hosts.items() if node in taking_part]
    ended, spent = run.state not in ACTIVE_RUN_STATES, _cost(state, run, clock)
    used = line(Piece("energy ", "label"), energy_text(readings))
    parts = [
        line(Piece("started ", "label"), clock.time_of(run.started_at)),
        line(Piece("" if ended else "up ", "label"), "" if ended else duration(now - run.started_at)),
        line(Piece(f"{run.sample_unit} ", "label"), count(run.samples)),
        line(Piece(cpu, "label"), figure(host.cpu_percent if host else None, "{:.0f}%")),
        line(Piece("load ", "label"), figure(host.load_1min if host else None, "{:.1f}")),
        line(Piece("ram ", "label"), _ram(host)),
        line(Piece("disk free ", "label"), free),
        _power(state),
        used if spent is None else (),
        line(Piece("loop lag ", "label"), lag),
    ]
    if spent is not None:
        done = state.last_step.value.cursor if state.last_step else run.cursor
        words = run_energy(readings, run, done)
        parts = [*cost_pieces(spent, run.sample_unit, active=not ended, energy=words), *parts]
    if columns >= 150:
        parts.append(line(Piece(shorten(clean(run.directory), columns // 3), "dim")))
    return groups(parts, columns)


def _power(state: ViewState) -> Line:
    read = [gpu for item in state.hosts.values() for gpu in item.value.gpus if gpu.power_watts is not None]
    total = f"{sum(gpu.power_watts or 0.0 for gpu in read):.0f} W" if read else NA
    return line(Piece("power ", "label"), total)


def _ram(host: HostReading | None) -> str:
    if host is None or host.memory_used_bytes is None:
        return NA
    return f"{used_of(host.memory_used_bytes, host.memory_total_bytes)} GB"
