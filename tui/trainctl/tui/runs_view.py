"""The Runs screen as lines: every run the agent knows, newest first, and the machine it knows them from."""

from collections.abc import Sequence

from trainctl.protocol import messages as m
from trainctl.tui import format as f
from trainctl.tui import lines as ln
from trainctl.tui.clock import Clock
from trainctl.tui.glyphs import Glyphs
from trainctl.tui.header import STATE_ROLES
from trainctl.tui.model import ViewState


def lines(
    runs: Sequence[m.RunSummary] | None, cursor: int, problem: str, state: ViewState, clock: Clock, columns: int,
    rows: int,
    glyphs: Glyphs,
) -> list[ln.Line]:  # fmt: skip
    """Exactly `rows` lines; `runs` is None until the agent has answered, `problem` says why it hasn't."""
    made = [_head(columns)]
    if problem:
        made.append(ln.line(ln.Piece(ln.clean(problem), "bad")))
    if runs is None and not problem:
        made.append(ln.line(ln.Piece("asking the agent for its runs", "dim")))
    elif runs is not None and not runs:
        made.append(
            ln.line(ln.Piece("no run yet: `trainctl run RUN.toml` starts one, `trainctl demo` shows one", "dim"))
        )
    detail = _detail(runs[cursor], columns, glyphs) if runs and 0 <= cursor < len(runs) else []
    room = max(rows - len(made) - 2 - len(detail), 1)
    start = min(max(cursor - room + 1, 0), max(len(runs or ()) - room, 0))
    for index, run in enumerate((runs or ())[start : start + room], start):
        made.append(_row(run, index == cursor, clock, columns, glyphs))
    made += [ln.EMPTY] * (rows - len(made) - 1 - len(detail)) + detail
    made.append(_node(state, clock, columns))
    return [ln.fit(pieces, columns) for pieces in made[:rows]]


def _head(columns: int) -> ln.Line:
    return ln.line(ln.Piece(_cells("", "RUN", "STATE", "STEPS", "LOSS", "STARTED", columns), "label"))


def _cells(mark: str, name: str, state: str, steps: str, loss: str, started: str, columns: int) -> str:
    size = max(columns - 2 - 10 - 16 - 8 - 14 - 1, 8)
    return f"{mark:<2}{name:<{size}} {state:<9}{steps:>16}{loss:>8}{started:>14}"


def _row(run: m.RunSummary, chosen: bool, clock: Clock, columns: int, glyphs: Glyphs) -> ln.Line:
    size = max(columns - 51, 8)
    name = ln.shorten(ln.clean(run.name), size, glyphs.ellipsis)
    text = _cells(
        glyphs.cursor if chosen else "", name, run.state.upper() if run.state == "failed" else run.state,
        f"{run.step:,}/{run.steps:,}", f.loss(run.last_loss), f.clock(run.started_at, clock.wall(), clock.zone),
        columns,
    )  # fmt: skip
    if chosen:
        return ln.fit((ln.Piece(text, "cursor"),), columns, "cursor")
    head = 3 + size
    return ln.line(ln.Piece(text[:head]), ln.Piece(text[head : head + 9], STATE_ROLES[run.state]), text[head + 9 :])


def _detail(run: m.RunSummary, columns: int, glyphs: Glyphs) -> list[ln.Line]:
    resumable = run.state not in m.ACTIVE_RUN_STATES
    keys = "enter opens it" + (", s takes it up again" if resumable else "")
    return [
        ln.rule(columns, glyphs.horizontal, (0, f"{glyphs.horizontal} {ln.clean(run.run)} ", "title")),
        ln.line(ln.Piece(ln.shorten(ln.clean(run.directory), columns, glyphs.ellipsis), "dim")),
        ln.line(ln.Piece(keys, "label")),
    ]


def _node(state: ViewState, clock: Clock, columns: int) -> ln.Line:
    node = state.node
    if node is None:
        return ln.EMPTY
    seen = state.hosts.get(node.node)
    host = seen.value if seen else None
    parts = [
        ln.line(ln.Piece("node ", "label"), ln.Piece(ln.clean(node.node), "strong")),
        ln.line(ln.Piece("at ", "label"), ln.clean(node.address)),
        ln.line(
            ln.Piece("cpu ", "label"), f.NA if host is None or host.cpu_percent is None else f"{host.cpu_percent:.0f}%"
        ),
        ln.line(
            ln.Piece("ram ", "label"), f.used_of(host.memory_used_bytes, host.memory_total_bytes) if host else f.NA
        ),
        ln.line(ln.Piece("trainctl ", "label"), ln.clean(node.version)),
        *(_other(name, clock, state) for name in state.agents),
    ]
    return ln.groups(parts, columns)


def _other(name: str, clock: Clock, state: ViewState) -> ln.Line:
    """Another node of the cluster: there, or silent for how long."""
    quiet = state.silent_agents(clock.monotonic()).get(name)
    silent = ln.Piece(f" silent {f.duration(quiet)}", "warning") if quiet is not None else ln.Piece("")
    return ln.line(ln.Piece("+ ", "label"), ln.Piece(ln.clean(name), "strong"), silent)
