"""The fleet table: a row a rank with its own speed, where its step went, its memory and its device.

A rank's own rate is tokens / (data + forward + backward), for in a synchronous run its part of the fleet's rate is only
its share. Unknown is n/a; what is old is dimmed and its age says how old; a lost rank stays.
"""

from collections.abc import Callable
from dataclasses import dataclass

from trainctl.protocol import messages as m
from trainctl.tui import format as f
from trainctl.tui import series as s
from trainctl.tui.clock import Clock
from trainctl.tui.glyphs import Glyphs
from trainctl.tui.lines import Line, Piece, clean, fit, line, pad_left, shorten
from trainctl.tui.model import Seen, ViewState

PHASES = (("data", "d"), ("forward", "f"), ("backward", "b"), ("wait", "."), ("sync", "s"), ("optimizer", "o"))
"""Phases in the order of the bar, with their letters. The wait for the plan is `.`."""
_BAD_STATES = ("away", "lost", "failed")
_OLD_SECONDS = 5.0
_OWN_RATE_STEPS = 8


@dataclass(frozen=True)
class Row:
    """One rank with all that is known of it; `age` in seconds, of its last report, or of its loss."""

    view: m.RankView
    step: m.RankStep | None
    age: float | None
    old: bool
    host: m.HostReading | None
    own_rate: float | None
    own_rates: s.Window
    wait: float | None  # for slower ranks (the all-reduce included) and for the plan
    global_batch: int
    slowest_seconds: float | None
    selected: bool = False

    @property
    def lost(self) -> bool:
        return self.view.state in _BAD_STATES

    @property
    def gpu(self) -> m.GpuReading | None:
        """The rank's device where the host reads it: by the index in `cuda:1`, else the only one."""
        gpus = self.host.gpus if self.host else ()
        device = self.view.device or ""
        if not gpus or device.startswith("cpu"):
            return None
        digits = device.partition("cuda:")[2][:1]
        index = int(digits) if digits.isdigit() else 0
        return gpus[index] if index < len(gpus) else None


@dataclass(frozen=True)
class Column:
    """`least` is the screen width from which it is shown; `right` aligns to the right."""

    title: str
    size: int
    cell: Callable[[Row, Glyphs, int], Line]
    right: bool = False
    least: int = 60
    gap: int = 1


def rows(state: ViewState, clock: Clock, selected: int | None = None) -> list[Row]:
    """One for each rank, in the order of their numbers."""
    run = state.run
    if run is None:
        return []
    now = clock.monotonic()
    silent = state.silent_for(now) is not None
    times = [seen.value.step_seconds for seen in state.ranks.values()]
    slowest = max(times, default=None)
    made = []
    for view in sorted(run.ranks, key=lambda item: item.rank):
        seen = state.ranks.get(view.rank)
        age = seen.age(now) if seen else None
        old = silent or (run.state == "running" and age is not None and age > max(_OLD_SECONDS, 3 * (slowest or 0.0)))
        host = _fresh_host(state, view.node, now)
        lost = view.state in _BAD_STATES
        made.append(
            Row(
                view=view, step=None if lost or seen is None else seen.value,
                age=max(clock.wall() - view.since_at, 0.0) if lost else age, old=old, host=host,
                own_rate=None if lost else own_rate(state, view.rank, seen),
                own_rates=state.lately("own_tokens_per_second", view.rank),
                wait=None if lost or seen is None else seen.value.phases.sync + seen.value.phases.wait,
                global_batch=run.global_batch, slowest_seconds=slowest, selected=view.rank == selected,
            )
        )  # fmt: skip
    return made


def _fresh_host(state: ViewState, node: str, now: float) -> m.HostReading | None:
    seen = state.hosts.get(node)
    return seen.value if seen and (seen.age(now) <= 30 or state.silent_for(now) is not None) else None


def own_rate(state: ViewState, rank: int, seen: Seen[m.RankStep] | None) -> float | None:
    """Tokens per second the rank would reach alone: the median of its last steps with the present micro-batch."""
    if seen is None:
        return None
    return s.typical(state.lately("own_tokens_per_second", rank), _OWN_RATE_STEPS) or seen.value.own_tokens_per_second


def live_rates(state: ViewState) -> list[float | None]:
    """Own rates of the ranks that take part."""
    ranks = state.run.ranks if state.run else ()
    return [own_rate(state, view.rank, state.ranks.get(view.rank)) for view in ranks if view.state not in _BAD_STATES]


def sum_of_own_rates(state: ViewState) -> float | None:
    """What the live ranks would do together if none waited for another; None unless all are known."""
    rates = live_rates(state)
    return sum(rate for rate in rates if rate is not None) if rates and None not in rates else None


def fleet_rate(state: ViewState) -> float | None:
    """Tokens per second of the run lately."""
    return s.typical(state.lately("tokens_per_second"), _OWN_RATE_STEPS)


def lines(
    state: ViewState, clock: Clock, columns: int, glyphs: Glyphs, *, total: bool, selected: int | None = None
) -> list[Line]:
    """The table: head, a line a rank, and with `total` a FLEET line; each `columns` wide."""
    table = rows(state, clock, selected)
    shown = layout(columns, any(row.gpu for row in table), _seconds_title(state))
    made = [_head(shown, columns)]
    made += [_body(row, shown, columns, glyphs) for row in table]
    if total and table:
        made.append(fit(_total(state, shown, glyphs), columns))
    return made


def layout(columns: int, has_gpu: bool, bar_title: str) -> list[Column]:
    """The columns that fit, the step bar stretched over what is left."""
    device = Column("GPU", 4, _gpu_percent, True, 76) if has_gpu else Column("CPU", 4, _cpu_percent, True, 76)
    chosen = [
        Column("NODE", 7, _node, gap=0),
        Column("STATE", 6, _state),
        Column("DEVICE", 8, _device, least=116),
        Column("SHARE", 10, _share),
        Column("MICRO", 6, _micro),
        Column("OWN T/S", 7, _own, True),
        Column("TREND", 8, _sparkline, least=112, gap=2),
        Column(bar_title, 0, _bar, gap=2),
        Column("WAIT", 6, _wait, True, 100),
        Column("MEM GB", 7, _memory, True, 70, gap=2),
        Column("PEAK", 5, _peak, True, 132),
        device,
        Column("CLK", 5, _clock, True, 118 if has_gpu else 10_000),
        Column("W", 4, _watts, True, 118 if has_gpu else 10_000),
        Column("°C", 4, _celsius, True, 104),
        Column("AGE", 3, _age, True, gap=2),
    ]
    chosen = [column for column in chosen if columns >= column.least]
    used = sum(column.size + column.gap for column in chosen)
    # Past 60 cells a longer bar says no more: the space goes to names and devices.
    bar = max(min(columns - used, 60), 8)
    spare = max(columns - used - bar, 0)
    grow = {"NODE": min(spare // 2, 12), "DEVICE": min(spare - spare // 2, 24)}
    return [
        Column(c.title, bar if c.size == 0 else c.size + grow.get(c.title, 0), c.cell, c.right, c.least, c.gap)
        for c in chosen
    ]


def _seconds_title(state: ViewState) -> str:
    last = state.last_step
    return f"STEP {f.seconds(last.value.step_seconds)}" if last else "STEP"


def _head(shown: list[Column], columns: int) -> Line:
    parts = []
    for column in shown:
        text = column.title.rjust(column.size) if column.right else column.title.ljust(column.size)
        parts.append(" " * column.gap + text[: column.size])
    return fit((Piece("".join(parts), "label"),), columns)


def _body(row: Row, shown: list[Column], columns: int, glyphs: Glyphs) -> Line:
    parts: list[Piece] = []
    for column in shown:
        cell = column.cell(row, glyphs, column.size)
        cell = pad_left(cell, column.size) if column.right else fit(cell, column.size)
        parts += [Piece(" " * column.gap), *cell]
    made = fit([piece for piece in parts if piece.text], columns)
    if row.old or row.lost:
        keep = ("bad", "warning", "cursor")
        return tuple(piece if piece.role in keep else piece._replace(role="old") for piece in made)
    return made


def _na(text: str, role: str = "text") -> Line:
    return line(Piece(text, "dim" if text == f.NA else role))


def _node(row: Row, glyphs: Glyphs, size: int) -> Line:
    return line(Piece(shorten(clean(row.view.node), size, glyphs.ellipsis), "cursor" if row.selected else "strong"))


def _state(row: Row, glyphs: Glyphs, size: int) -> Line:
    if row.lost:
        return line(Piece(row.view.state.upper(), "bad"))
    role = {"run": "good", "paused": "warning"}.get(row.view.state, "accent")
    return line(Piece(shorten(row.view.state, size, glyphs.ellipsis), role))


def _device(row: Row, glyphs: Glyphs, size: int) -> Line:
    backend, device = row.view.backend or "", clean(row.view.device or "")
    kind, _, name = device.partition(" ")
    for maker in ("NVIDIA ", "Apple ", "GeForce "):
        name = name.removeprefix(maker)
    short = name or kind
    whole = f"{backend} {short}".strip() if size >= len(backend) + len(short) + 1 else short
    return _na(shorten(whole, size, glyphs.ellipsis) or f.NA, "label")


def _share(row: Row, glyphs: Glyphs, size: int) -> Line:
    share, whole = row.view.share, row.global_batch
    if not share or not whole:
        return line(str(share))
    part = share / whole
    text = f"{share:<2} {f.percent(part)} ".ljust(7)
    cells = max(size - len(text), 0)
    blocks = max(round(part * cells), 1 if cells else 0)
    return line(text, Piece(glyphs.block * blocks, "bar"))


def _micro(row: Row, glyphs: Glyphs, size: int) -> Line:
    micro, share = row.view.micro_batch, row.view.share
    if not micro or not share or row.lost:
        return line(Piece("-".center(5), "dim"))
    micro = min(micro, share)
    return line(Piece(str(micro)), Piece(f"{glyphs.times}{-(-share // micro)}", "label"))


def _own(row: Row, glyphs: Glyphs, size: int) -> Line:
    return _na(f.rate(row.own_rate), "strong")


def _sparkline(row: Row, glyphs: Glyphs, size: int) -> Line:
    return line(Piece(sparkline(row.own_rates, size, glyphs), "bar"))


def sparkline(window: s.Window, size: int, glyphs: Glyphs) -> str:
    """The last steps' values, each cell the mean of its part; the middle is their middle, and a tenth more or less
    shows."""
    values = [value for value in window.last[-8 * size :].tolist() if value == value]
    if len(values) < 2:
        return ""
    parts = min(size, len(values))
    means = [
        sum(values[a:b]) / (b - a)
        for a, b in ((i * len(values) // parts, (i + 1) * len(values) // parts) for i in range(parts))
    ]
    low, high = min(means), max(means)
    span = max(high - low, 0.2 * abs(high)) or 1.0
    top = len(glyphs.sparks) - 1
    return "".join(glyphs.sparks[round(top * (0.5 + (mean - (low + high) / 2) / span))] for mean in means)


def _bar(row: Row, glyphs: Glyphs, size: int) -> Line:
    if row.step is None or not row.slowest_seconds:
        return line(Piece(f.NA, "dim"))
    return phase_bar(row.step.phases, size, row.slowest_seconds)


def phase_bar(phases: m.Phases, size: int, whole_seconds: float) -> Line:
    """Letters in proportion to the seconds of each phase; `whole_seconds` fills `size` cells (largest remainders)."""
    seconds = [max(getattr(phases, name), 0.0) for name, _ in PHASES]
    total = sum(seconds)
    if total <= 0 or whole_seconds <= 0:
        return line(Piece(f.NA, "dim"))
    cells = min(round(size * total / max(whole_seconds, total)), size)
    exact = [cells * part / total for part in seconds]
    counts = [int(part) for part in exact]
    by_rest = sorted(range(len(exact)), key=lambda index: counts[index] - exact[index])
    for index in by_rest[: cells - sum(counts)]:
        counts[index] += 1
    return line(
        *(
            Piece(letter * many, "phase_wait" if letter == "." else f"phase_{letter}")
            for (_, letter), many in zip(PHASES, counts, strict=True)
        )
    )


def _wait(row: Row, glyphs: Glyphs, size: int) -> Line:
    return _na(f.NA if row.wait is None else f.seconds(row.wait).replace(" s", "s").replace(" ms", "ms"))


def _memory(row: Row, glyphs: Glyphs, size: int) -> Line:
    step = row.step
    if step is None or step.memory_bytes is None:
        return _na(f.NA)
    full = step.memory_cap_bytes is not None and step.memory_bytes > 0.92 * step.memory_cap_bytes
    return line(Piece(f.used_of(step.memory_bytes, step.memory_cap_bytes), "warning" if full else "text"))


def _peak(row: Row, glyphs: Glyphs, size: int) -> Line:
    return _na(f.gigabytes(row.step.memory_peak_bytes if row.step else None))


def _gpu_percent(row: Row, glyphs: Glyphs, size: int) -> Line:
    value = row.gpu.utilization_percent if row.gpu else None
    return _na(f.NA if value is None else f"{value:.0f}%")


def _cpu_percent(row: Row, glyphs: Glyphs, size: int) -> Line:
    value = row.host.cpu_percent if row.host else None
    return _na(f.NA if value is None else f"{value:.0f}%")


def _clock(row: Row, glyphs: Glyphs, size: int) -> Line:
    value = row.gpu.clock_mhz if row.gpu else None
    return _na(f.NA if value is None else f"{value / 1000:.2f}G")


def _watts(row: Row, glyphs: Glyphs, size: int) -> Line:
    value = row.gpu.power_watts if row.gpu else None
    return _na(f.NA if value is None else f"{value:.0f}")


def _celsius(row: Row, glyphs: Glyphs, size: int) -> Line:
    value = row.gpu.temperature_celsius if row.gpu else row.host.temperature_celsius if row.host else None
    return _na(f.NA if value is None else f"{value:.0f}")


def _age(row: Row, glyphs: Glyphs, size: int) -> Line:
    return _na(f.age(row.age), "warning" if row.old or row.lost else "text")


def _total(state: ViewState, shown: list[Column], glyphs: Glyphs) -> Line:
    """Sums over the ranks that are known: shares, own rates, memory in use."""
    assert state.run is not None
    ranks = state.run.ranks
    live = sum(1 for view in ranks if view.state not in _BAD_STATES)
    memory = [seen.value.memory_bytes for seen in state.ranks.values()]
    known = [size for size in memory if size is not None]
    texts = {
        "NODE": "FLEET", "STATE": f"{live}/{len(ranks)}", "SHARE": str(sum(view.share for view in ranks)),
        "OWN T/S": f.rate(sum_of_own_rates(state)),
        "MEM GB": f.gigabytes(sum(known)) if known and len(known) == len(memory) else f.NA,
    }  # fmt: skip
    rate = fleet_rate(state)
    parts = []
    for column in shown:
        text = texts.get(column.title, "")
        if column.title.startswith("STEP"):
            text = f"{f.compact(rate)} together"
        text = text.rjust(column.size) if column.right else text.ljust(column.size)
        parts.append(" " * column.gap + text[: column.size])
    return line(Piece("".join(parts), "label"))
