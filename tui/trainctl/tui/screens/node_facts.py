"""Facts of one node and its rank, as lines of labelled words: its state, its part, its agent, its machine."""

from collections.abc import Mapping

from trainctl.protocol.client.client import Connection
from trainctl.protocol.messages import CLOCK_LIMITED_BY, Compute, HostReading, NodeView, RankStep
from trainctl.tui.screens import fleet_cells
from trainctl.tui.state.rank_rows import Row
from trainctl.tui.state.step_phases import Compilation
from trainctl.tui.state.view_state import Clock, ViewState
from trainctl.tui.text import run_lines
from trainctl.tui.text.formatting import NA, age, count, duration, figure, gigabytes, percent, rate, seconds
from trainctl.tui.text.run_lines import PROCESS_NAMES
from trainctl.tui.text.styled_line import Line, Piece, clean, fit, flowed, groups, line, plain, shorten
from trainctl.tui.widgets.inline_bars import share_bar

_ROLES = ("trainer", "reducer", "standby", "keeper", "agent", "helper")
"""Roles of processes, those first that matter most."""
MOST_COMPUTE_LINES = 3
"""Lines for what a rank resolved."""
MOST_VERSION_LINES = 2
"""Lines for versions of its libraries."""


def facts(
    row: Row,
    state: ViewState,
    clock: Clock,
    columns: int,
    compiled: Compilation | None = None,
    *,
    with_versions: bool = False,
) -> list[Line]:
    """Return six lines of `columns` cells, or up to eight, and one or two more with versions. `compiled`: the
    compiler's time in the step that it slowed most."""
    agent, compute = _agent(row.view.node, state, clock, columns), row.view.compute
    libraries = run_lines.library_versions(compute) if compute is not None and with_versions else {}
    versions = flowed(run_lines.setting_pieces(libraries), columns)
    lines = [
        _state(row, clock, columns),
        _part(row, columns),
        *_compute(row.view.compute, compiled, row.step, columns),
        *versions[:MOST_VERSION_LINES],
        agent,
        _machine(row, columns),
        _processes(row, columns),
    ]
    return [fit(pieces, columns) for pieces in lines]


def _labelled(label: str, text: str, role: str = "text") -> Line:
    return line(Piece(f"{label} ", "label"), Piece(text, "dim" if text == NA else role))


def _state(row: Row, clock: Clock, columns: int) -> Line:
    view = row.view
    since = clock.time_of(view.since_at) if view.since_at > 0 else NA
    why = shorten(clean(view.why), columns // 2)
    reported = NA if row.age is None else f"{age(row.age)} ago"
    slow = f"the others wait for its {row.slow_phase}" if row.slow_phase and view.state == "run" else ""
    pieces = [
        line(*fleet_cells.state(row, 9), Piece(" since ", "label"), since),
        line(Piece(why or slow, "warning")),
        _labelled("rank", str(view.rank)),
        _labelled("on", clean(f"{view.backend or ''} {view.device or ''}".strip()) or NA),
        _labelled("pid", figure(view.pid, "{}")),
        () if row.out else _labelled("reported", reported, "warning" if row.old else "text"),
    ]
    return groups(pieces, columns)


def _part(row: Row, columns: int) -> Line:
    view, step = row.view, row.step
    whole = row.global_batch
    part = view.share / whole if whole and view.share is not None else None
    share = line(
        Piece("share ", "label"),
        Piece(figure(view.share, "{}"), "strong"),
        f" of {figure(whole, '{}')} ",
        f"{percent(part)} " if part is not None else "",
        share_bar(part or 0.0, 12),
    )
    micro = fleet_cells.micro(row, 6)
    pieces = [
        share,
        line(Piece("micro ", "label"), Piece(plain(micro).strip())),
        _labelled("own", f"{rate(row.own_rate)} tok/s" if row.own_rate else NA, "strong"),
        _labelled("wait", NA if row.wait is None else seconds(row.wait)),
        _labelled("last step", NA if step is None else f"{step.step:,}"),
        _labelled("tokens", NA if step is None or not step.tokens else count(step.tokens)),
        _labelled("replays", NA if step is None else str(step.replays)),
    ]
    return groups(pieces, columns)


def _compute(compute: Compute | None, compiled: Compilation | None, step: RankStep | None, columns: int) -> list[Line]:
    """Return the precision, the kernels that it computes with, the compiler's time, and how much it computes: at most
    three lines."""
    if compute is None:
        return [_labelled("dtype", NA)]
    flops = _flops(step.values if step is not None else {})
    took = _labelled("compiled", compiled.text) if compiled is not None else ()
    settings = run_lines.setting_pieces(run_lines.compute_settings(compute))
    return flowed([*settings, took, flops], columns)[:MOST_COMPUTE_LINES]


def _flops(values: Mapping[str, float]) -> Line:
    """Return `6.2 TFLOP/s, 48% of its matmul peak, MFU 41%`; nothing where the model's sizes aren't known. Without a
    calibration of its data type, its peak isn't known."""
    if (tflops := values.get("tflops")) is None:
        return ()
    use, mfu = values.get("matmul_use"), values.get("mfu")
    part = f"{percent(use)} of its matmul peak" if use is not None else "peak unknown: trainctl calibrate"
    stated = f", MFU {percent(mfu)}" if mfu is not None else ""
    return line(Piece(f"{tflops:.3g} TFLOP/s", "strong"), f", {part}{stated}")


def _agent(node: str, state: ViewState, clock: Clock, columns: int) -> Line:
    now = clock.monotonic()
    view, quiet, connection, lag = _line_to(node, state, now)
    peer = next((item for item in state.peers if item.node == node), None)
    address = view.address if view else peer.address if peer else None
    reading = state.hosts.get(node)
    boot = view.boot if view else reading.value.boot if reading else ""
    why = clean(connection.why) if connection and quiet is not None else ""
    leads = state.run is not None and state.run.lead == node
    pieces = [
        line(Piece("agent ", "label"), connection_word(connection, quiet, now)),
        line(Piece(shorten(why, columns // 2), "warning")),
        line(Piece("leads" if leads else "", "accent")),
        _labelled("at", clean(address) if address else NA),
        _labelled("lag", seconds(lag)),
        _labelled("version", clean(view.version) if view else NA),
        _labelled("boot", clean(boot)[:8] or NA),
    ]
    return groups(pieces, columns)


def _line_to(
    node: str, state: ViewState, now: float
) -> tuple[NodeView | None, float | None, Connection | None, float | None]:
    """Return a node's own view, seconds of its agent's silence (None: the line is good), the line to it, and its
    lag."""
    if state.node is not None and state.node.node == node:
        lag = state.heartbeat.value.loop_lag_seconds if state.heartbeat else None
        return state.node, state.silent_for(now), state.connection, lag
    found = state.agents.get(node)
    if found is None:
        return None, None, None, None
    return found.node, found.silent_for(now), found.connection, found.lag_seconds


def connection_word(connection: Connection | None, quiet: float | None, now: float) -> Piece:
    """Return how the line to an agent is, in a word or three."""
    if connection is None:
        return Piece(NA, "dim")
    if quiet is None:
        return Piece("connected", "good")
    if connection.state == "connecting":
        return Piece(f"connecting {duration(now - connection.since_monotonic)}", "warning")
    return Piece(f"silent {duration(quiet)}", "bad")


def _machine(row: Row, columns: int) -> Line:
    host, gpu = row.host, row.gpu
    role = "old" if row.host_old else "text"

    def of(label: str, text: str) -> Line:
        return _labelled(label, text, role)

    celsius = (gpu.temperature_celsius if gpu else None) or (host.temperature_celsius if host else None)
    pieces = [
        of("cpu", figure(host.cpu_percent if host else None, "{:.0f}%")),
        of("load", figure(host.load_1min if host else None, "{:.1f}")),
    ]
    if gpu is not None:
        limits = " and ".join(CLOCK_LIMITED_BY[limit] for limit in gpu.clock_limits)
        pieces += [
            of("gpu", figure(gpu.utilization_percent, "{:.0f}%")),
            of("clock", figure(gpu.clock_mhz and gpu.clock_mhz / 1000, "{:.2f} GHz")),
            line(Piece(f"limited by {limits}" if limits else "", "warning")),
            of("power", figure(gpu.power_watts, "{:.0f} W")),
            of("energy", run_lines.energy_text([host] if host else [])),
        ]
    pieces += [of("temperature", figure(celsius, "{:.0f} °C")), of("disk free", _disk_free(host))]
    return groups(pieces, columns)


def _disk_free(host: HostReading | None) -> str:
    if host is None or host.disk_free_bytes is None:
        return NA
    of = f" of {_size(host.disk_total_bytes)}" if host.disk_total_bytes else ""
    return f"{_size(host.disk_free_bytes)}{of}"


def _processes(row: Row, columns: int) -> Line:
    found = row.host.processes if row.host else ()
    mine = sorted(
        (item for item in found if item.rank in (None, row.view.rank)),
        key=lambda item: _ROLES.index(item.role) if item.role in _ROLES else len(_ROLES),
    )
    if not mine:
        return _labelled("processes", NA)
    role = "old" if row.host_old else "text"
    parts = []
    for item in mine:
        figures = f"{item.pid} {figure(item.cpu_percent, '{:.0f}%')} {_size(item.memory_bytes)}"
        parts.append(line(Piece(f"{clean(PROCESS_NAMES.get(item.role, item.role))} ", "label"), Piece(figures, role)))
    return groups(parts, columns)


def _size(value: float | None) -> str:
    if value is None:
        return NA
    return f"{value / 1e6:.0f} MB" if value < 0.995e9 else f"{gigabytes(value)} GB"
