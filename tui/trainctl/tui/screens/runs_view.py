"""The Runs screen as lines: every run that the cluster knows, the chosen one's place and keys, and the nodes with what
they are doing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from trainctl.protocol.batch import cost
from trainctl.protocol.messages import ACTIVE_RUN_STATES, PolicyView, RunSummary, WorkSummary
from trainctl.tui.screens.header import STATE_ROLES
from trainctl.tui.state.table_fields import SortOrder, column_title
from trainctl.tui.state.table_schemas import RunRow
from trainctl.tui.state.view_state import Clock, ViewState
from trainctl.tui.text import run_lines
from trainctl.tui.text.formatting import NA, count, duration, figure, gigabytes, loss, used_of
from trainctl.tui.text.run_lines import (
    LAST_LOSS,
    cost_amount,
    cost_pieces,
    missing_prices,
    rate_pieces,
    samples_of,
    time_left,
    work_nodes,
    work_progress,
    work_task,
    work_title,
)
from trainctl.tui.text.styled_line import Line, Piece, clean, fit, groups, key_words, line, rule, shorten, spread, width

SORTED_BY = ("name", "state", "kind", "step", "loss", "age", "duration", "lead")
_LEAST_NAME = 12


@dataclass(frozen=True)
class RunsColumn:
    """`field` is what it is sorted by; it is shown from `least` columns on."""

    field: str
    title: str
    size: int
    right: bool = False
    least: int = 60


_LOSS = LAST_LOSS.label.upper()
_COLUMNS = (
    RunsColumn("name", "RUN", 0),
    RunsColumn("state", "STATE", 9),
    RunsColumn("kind", "KIND", 6, least=90),
    RunsColumn("step", "STEPS", 16, True),
    RunsColumn("loss", _LOSS, 9, True),
    RunsColumn("age", "STARTED", 14, True),
    RunsColumn("duration", "LASTED", 10, True, 76),
    RunsColumn("lead", "  LEAD", 11, least=100),
    RunsColumn("", "  NODES", 30, least=120),
)
_COST = RunsColumn("", "COST", 12, True, 100)
_PRICED_COLUMNS = (
    *_COLUMNS[:-2],
    _COST,
    RunsColumn("lead", "  LEAD", 11, least=120),
    RunsColumn("", "  NODES", 30, least=140),
)
"""Columns where a run has a cost, which then stands before the nodes."""


def row_of(run: RunSummary, clock: Clock) -> RunRow:
    """Return a run with its ages; a run that has ended lasted until its last step."""
    now = clock.wall()
    end = now if run.state in ACTIVE_RUN_STATES else run.last_step_at
    lasted = max(end - run.started_at, 0.0) if end is not None else None
    return RunRow(run, max(now - run.started_at, 0.0), lasted)


def as_tree(rows: Sequence[RunRow]) -> list[RunRow]:
    """Return each branch below the run that it branched off, where that is among the rows. A tree stands where the
    first of its runs would."""
    known = {row.run.run: row for row in rows}
    below: dict[str, list[RunRow]] = {}
    for row in rows:
        if (parent := _parent(row)) in known:
            below.setdefault(parent, []).append(row)
    made: dict[str, RunRow] = {}
    for row in rows:
        root, seen = row, {row.run.run}
        while (parent := _parent(root)) in known and parent not in seen:
            root = known[parent]
            seen.add(parent)
        _grow(root, 0, below, made)
    return list(made.values())


def _grow(row: RunRow, depth: int, below: Mapping[str, Sequence[RunRow]], made: dict[str, RunRow]) -> None:
    if row.run.run not in made:
        made[row.run.run] = replace(row, depth=depth)
        for branch in below.get(row.run.run, ()):
            _grow(branch, depth + 1, below, made)


def _parent(row: RunRow) -> str:
    return row.run.branch.run if row.run.branch is not None else ""


def columns_of(columns: int, *, priced: bool = False) -> list[tuple[RunsColumn, int]]:
    """Return the columns that fit, with their sizes: names get what is left, up to what a name may need."""
    shown = [column for column in (_PRICED_COLUMNS if priced else _COLUMNS) if columns >= column.least]
    left = columns - 3 - sum(column.size + 1 for column in shown)
    name = max(min(left, 48), _LEAST_NAME)
    return [(column, column.size or name) for column in shown]


def head(columns: int, order: SortOrder, *, priced: bool = False) -> Line:
    """Return the titles, to be clicked; the one that the table is sorted by carries an arrow."""
    pieces = [Piece("   ")]
    for column, size in columns_of(columns, priced=priced):
        title = column_title(column.field, column.title, size, order, right=column.right)
        pieces += [title, Piece(" ")]
    return fit(pieces, columns)


def row(item: RunRow, chosen: bool, marked: bool, clock: Clock, columns: int, *, priced: bool = False) -> Line:
    """Return one run; `marked` for a comparison; `priced`: whether any run has a cost."""
    run = item.run
    texts = {
        "RUN": f"{'  ' * (item.depth - 1)}└ " * bool(item.depth) + clean(run.name),
        "STATE": _state(run),
        "KIND": run.kind,
        "STEPS": f"{run.step:,}/{count(run.steps)}",
        _LOSS: loss(run.last_loss),
        "STARTED": clock.time_of(run.started_at),
        "LASTED": duration(item.duration_seconds),
        "  LEAD": f"  {clean(run.lead) or NA}",
        "  NODES": "  " + (" ".join(map(clean, run.nodes)) or NA),
        "COST": _spent(run, clock),
    }
    mark = f"{'▸' if chosen else ' '}{'*' if marked else ' '} "
    pieces = [Piece(mark, "mark")]
    for column, size in columns_of(columns, priced=priced):
        text = shorten(texts[column.title], size)
        role = STATE_ROLES[run.state] if column.title == "STATE" else "dim" if NA in text else "text"
        pieces += [Piece(text.rjust(size) if column.right else text.ljust(size), role), Piece(" ")]
    return tuple(piece._replace(role="cursor") for piece in fit(pieces, columns)) if chosen else fit(pieces, columns)


def _state(run: RunSummary) -> str:
    """Return the state, in capitals where it must not be overlooked. The colour says how a simulated run ended."""
    if run.simulated:
        return "SIMULATED"
    return (run.state.upper() if run.state == "failed" else run.state) + ("?" if run.stale else "")


def _spent(run: RunSummary, clock: Clock) -> str:
    if run.cost is None:
        return NA
    found = cost.figures(run.cost, clock.wall(), None, None)
    return cost_amount(found, found.spent)


def costs(run: RunSummary, state: ViewState, clock: Clock, columns: int) -> list[Line]:
    """Return what the chosen run costs; with the energy if it is the live one. No line without a price, a second one on
    a narrow screen for the nodes that have none."""
    if run.cost is None:
        return []
    live = state.run if state.run is not None and state.run.run == run.run else None
    words = (
        run_lines.run_energy([item.value for item in state.hosts.values()], live, run.cursor)
        if live is not None
        else ""
    )
    left = run.rates.seconds_left if run.rates is not None else None
    trained = live.trained(run.cursor) if live is not None else run.cursor  # what an ended run skipped isn't known here
    found = cost.figures(run.cost, clock.wall(), left, trained)
    samples = samples_of(run.rates.unit if run.rates is not None else "")
    active = run.state in ACTIVE_RUN_STATES
    costs = cost_pieces(found, samples, active=active, energy=words)
    own_line = missing_prices(found) if columns < 100 else []
    rest = [pieces for pieces in costs if pieces not in own_line]
    return [fit(groups(pieces, columns), columns) for pieces in (rest, own_line) if pieces]


def detail(
    run: RunSummary,
    marked: int,
    columns: int,
    policies: Sequence[PolicyView] = (),
    costs: Sequence[Line] = (),
) -> list[Line]:
    """Return the chosen run's id and directory, its time left, on a wide screen how fast it is, `costs`, its policies
    if they are known, and what can be done with it; `marked` counts it with those marked."""
    again = run.state not in ACTIVE_RUN_STATES
    keys = [
        ("enter", "opens it", "open"),
        *([("s", "resumes it", "resume_run")] if again else []),
        ("space", "marks it", "mark"),
    ]
    if marked > 1:
        keys.append(("c", f"compares {marked} runs", "compare"))
    elif run.branch is not None:
        keys.append(("c", "compares it with its parent", "compare"))
    keys += [("N", "starts a run", "start"), ("B", "branches off it", "branch")]
    hints = [key_words(key, words, f"screen.{action}") for key, words, action in keys]
    name = f"─ {clean(run.run)} "
    return [
        rule(columns, (0, name, "title")),
        _place(run, columns),
        *_lineage(run, columns),
        *_rates(run, columns),
        *costs,
        *_policies(policies, columns),
        fit(groups(hints, columns), columns),
    ]


def _place(run: RunSummary, columns: int) -> Line:
    left = time_left(run.rates) if run.rates is not None and columns < 100 else ()
    room = columns - width(left) - 1 if left else columns
    directory = line(Piece(shorten(clean(run.directory), room), "dim"))
    return spread(directory, left, columns)


def _lineage(run: RunSummary, columns: int) -> list[Line]:
    if run.branch is None:
        return []
    words = f"branched off {clean(run.branch.run)} at step {run.branch.step:,}"
    return [line(Piece(shorten(words, columns), "text"))]


def _rates(run: RunSummary, columns: int) -> list[Line]:
    if run.rates is None or columns < 100:
        return []
    times = [time_left(run.rates), *rate_pieces(run.rates)]
    return [fit(groups([pieces for pieces in times if pieces], columns), columns)]


def _policies(policies: Sequence[PolicyView], columns: int) -> list[Line]:
    roles = {"on": "good", "advise": "warning", "off": "dim"}
    each = [line(Piece(f"{clean(view.name)} ", "label"), Piece(view.mode, roles[view.mode])) for view in policies]
    return [fit(groups([line(Piece("policies", "strong")), *each], columns), columns)] if each else []


def work(works: Sequence[WorkSummary], columns: int) -> list[Line]:
    """Return separate work: how far it is, and its nodes; of work that failed why."""
    lines = []
    for one in works:
        title = shorten(work_title(one), columns - 4)
        lines.append(rule(columns, (0, f"─ {title} ", "title")))
        lines.append(fit(groups(work_progress(one), columns), columns))
        if one.is_active:
            lines.append(fit(groups(work_nodes(one), columns), columns))
    return lines


def nodes(state: ViewState, works: Sequence[WorkSummary], clock: Clock, columns: int, room: int) -> list[Line]:
    """Return the cluster's nodes, idle ones first, in at most `room` lines with their rule; those that don't fit are
    counted."""
    names = [*([state.node.node] if state.node else []), *state.agents]
    run, busy = state.run, {}
    if run is not None and state.active:
        busy = {view.node: f"{'leads' if run.lead == view.node else 'in'} {clean(run.name)}" for view in run.ranks}
    busy |= {node.node: work_task(work) for work in works if work.is_active for node in work.view.nodes}
    names.sort(key=lambda name: name in busy)
    if room < 2 or not names:
        return []
    idle = sum(1 for name in names if name not in busy)
    title = f"─ nodes: {idle} idle of {len(names)} "
    lines = [rule(columns, (0, title, "title"))]
    fits = len(names) if len(names) < room else room - 2
    lines += [_node(name, busy.get(name, ""), state, clock, columns) for name in names[:fits]]
    if fits < len(names):
        lines.append(fit((Piece(f"… {len(names) - fits} more", "dim"),), columns))
    return lines


def _node(name: str, task: str, state: ViewState, clock: Clock, columns: int) -> Line:
    own = state.node if state.node is not None and state.node.node == name else None
    quiet = state.silent_for(clock.monotonic()) if own else state.agents[name].silent_for(clock.monotonic())
    seen = state.hosts.get(name)
    host = seen.value if seen is not None and quiet is None else None
    doing = (
        (f"silent {duration(quiet)}", "warning") if quiet is not None else (task, "text") if task else ("idle", "good")
    )
    gpus = host.gpus if host else ()
    parts = [
        fit((Piece(shorten(clean(name), 14), "strong"),), 14),
        fit((Piece(shorten(doing[0], 20), doing[1]),), 20),
        _figure("cpu", figure(host.cpu_percent if host else None, "{:.0f}%"), 4),
        _figure("ram", used_of(host.memory_used_bytes, host.memory_total_bytes) if host else NA, 7, " GB"),
        _figure("disk free", gigabytes(host.disk_free_bytes) if host else NA, 4, " GB"),
        line(Piece(f"{len(gpus)}×{clean(gpus[0].name)}" if gpus else "", "label")),
        line(Piece(f"{clean(own.address)}  trainctl {clean(own.version)}" if own else "", "dim")),
    ]
    return fit(groups(parts, columns), columns)


def _figure(name: str, value: str, size: int, unit: str = "") -> Line:
    known = value != NA
    text = f"{value}{unit if known else ''}".ljust(size + len(unit))
    return line(Piece(f"{name} ", "label"), Piece(text, "text" if known else "dim"))


def nothing(runs: Sequence[RunSummary] | None, hidden: int, problem: str) -> Line:
    """Return what stands in the place of rows."""
    if problem:
        return line(Piece(clean(problem), "bad"))
    if runs is None:
        return line(Piece("loading runs from the agent", "dim"))
    words = (
        "the filter hides all runs; esc clears it"
        if hidden
        else ("no run yet: N or `trainctl run RUN.toml` starts one, `trainctl demo` trains one")
    )
    return line(Piece(words, "dim"))
