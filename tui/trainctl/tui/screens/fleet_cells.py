"""The cells of the fleet table, each made from one row: what is unknown is n/a, what is old is dimmed."""

from collections.abc import Callable

from trainctl.protocol.messages import GpuReading, HostReading, Metric
from trainctl.tui.charts.metrics import style_of
from trainctl.tui.state.rank_rows import Row
from trainctl.tui.text import formatting
from trainctl.tui.text.formatting import NA, figure, gigabytes, percent, rate, seconds, used_of
from trainctl.tui.text.styled_line import Line, Piece, clean, line, shorten
from trainctl.tui.widgets.inline_bars import phase_bar, share_bar, sparkline
from trainctl.tui.widgets.theme import rank_role

Cell = Callable[[Row, int], Line]
"""Makes a row's cell in so many columns."""
_STATE_ROLES = {"run": "good", "paused": "warning", "drained": "dim"}
_LOUD = {"rejoining": "REJOIN", "late": "LATE", "draining": "DRAIN"}  # as wide as their column


def _na(text: str, role: str = "text") -> Line:
    return line(Piece(text, "dim" if text == NA else role))


def node(row: Row, size: int) -> Line:
    """Return the node's name in the colour of its line in the charts."""
    role = "cursor" if row.selected else "strong" if row.out else rank_role(row.place)
    if row.child:
        return line(Piece(f"  :{row.view.rank}", role))
    mark = ("▾ " if row.open else "▸ ") if row.members else ""
    return line(Piece(mark, "key"), Piece(shorten(clean(row.view.node), size - len(mark)), role))


def state(row: Row, size: int) -> Line:
    """Return the rank's state, in capitals what wants a look: a rank that is gone, on its way there or back, or one
    that the others wait for."""
    if row.view.state in _LOUD:
        return line(Piece(_LOUD[row.view.state], "warning"))
    if row.lost:
        return line(Piece(shorten(row.view.state.upper(), size), "bad"))
    if row.hot and row.view.state == "run":
        return line(Piece("HOT", "warning"))
    if row.slow_phase and row.view.state == "run":
        return line(Piece("SLOW", "warning"))
    return line(Piece(shorten(row.view.state, size), _STATE_ROLES.get(row.view.state, "accent")))


def device(row: Row, size: int) -> Line:
    backend, kind_and_name = row.view.backend or "", clean(row.view.device or "")
    kind, _, name = kind_and_name.partition(" ")
    for maker in ("NVIDIA ", "Apple ", "GeForce "):
        name = name.removeprefix(maker)
    short = name or kind
    if row.members:
        short, backend = f"{len(row.members)}×{short}", backend if size > 12 else ""
    whole = f"{backend} {short}".strip() if size >= len(backend) + len(short) + 1 else short
    return _na(shorten(whole, size) or NA, "label")


def share(row: Row, size: int) -> Line:
    count, whole = row.view.share, row.global_batch
    if count is None:
        return _na(NA)
    if not count or not whole:
        return line(str(count))
    words = f"{count:<2} {percent(count / whole)} ".ljust(7)
    return line(words, share_bar(count / whole, max(size - len(words), 0)))


def micro(row: Row, size: int) -> Line:
    """Return micro-batch and passes: 8x3."""
    passes = row.passes
    if passes is None:
        return line(Piece("-".center(5), "dim"))
    return line(Piece(str(passes[0])), Piece(f"×{passes[1]}", "label"))


def trend(row: Row, size: int) -> Line:
    return line(Piece(sparkline(row.own_rates, size), "bar"))


def bar(row: Row, size: int) -> Line:
    """Return where the step went, or why there is none or none for long."""
    if row.step is None or not row.slowest_seconds or row.says_why:
        why = shorten(clean(row.view.why), size)
        role = "warning" if row.out or row.says_why else "accent"
        return line(Piece(why, role)) if why else line(Piece(NA, "dim"))
    return phase_bar(row.step.phases, size, row.slowest_seconds, waited=row.waited or 0.0, loud=row.slow_phase)


def memory(row: Row, size: int) -> Line:
    """Return the peak of its last step, of what it may hold."""
    step = row.step
    used = step.peak_or_held_bytes if step else None
    if step is None or used is None:
        return _na(NA)
    full = step.memory_cap_bytes is not None and used > 0.92 * step.memory_cap_bytes
    words = used_of(used, step.memory_cap_bytes)
    if len(words) > size:
        words = f"{used / 1e9:.1f}/{gigabytes(step.memory_cap_bytes)}"
    return line(Piece(words, "warning" if full else "text"))


def age(row: Row, size: int) -> Line:
    return _na(formatting.age(row.age), "warning" if row.old or row.lost else "text")


def link(row: Row, size: int) -> Line:
    """Return whether the node's agent is heard, or for how long it hasn't been."""
    if row.link_seconds is not None:
        return line(Piece(f"silent {formatting.age(row.link_seconds)}", "warning"))
    return _na(row.link or NA, "good")


def text(words: Callable[[Row], str], role: str = "text") -> Cell:
    return lambda row, size: _na(words(row), role)


def _reading(
    spec: str,
    of_gpu: Callable[[GpuReading], float | None] | None = None,
    of_host: Callable[[HostReading], float | None] = lambda host: None,
) -> Cell:
    """Return a figure of the row's device where it has one, else of its machine; an old one is dimmed."""

    def cell(row: Row, size: int) -> Line:
        value = of_gpu(row.gpu) if of_gpu and row.gpu else of_host(row.host) if row.host else None
        return _na(figure(value, spec), "old" if row.host_old else "text")

    return cell


def metric(one: Metric) -> Cell:
    """Return a rank's or its machine's metric as the charts write it; an old reading is dimmed."""
    style, of_machine = style_of(one.name), one.scope == "host"

    def cell(row: Row, size: int) -> Line:
        value = row.value_of(one)
        old = of_machine and row.host_old
        return _na(style.words(None if value is None else value * style.factor), "old" if old else "text")

    return cell


def _wait(waited: float | None) -> str:
    """Return a wait in six cells; what is below half a millisecond is 0ms."""
    short = waited is not None and 0 < waited < 0.0005
    return "0ms" if short else seconds(waited).replace(" s", "s").replace(" ms", "ms")


own = text(lambda row: rate(row.own_rate), "strong")
wait = text(lambda row: _wait(row.wait))
held = text(lambda row: gigabytes(row.step.memory_bytes if row.step else None))
gpu_percent = _reading("{:.0f}%", lambda gpu: gpu.utilization_percent)
cpu_percent = _reading("{:.0f}%", of_host=lambda host: host.cpu_percent)
clock_rate = _reading("{:.2f}G", lambda gpu: gpu.clock_mhz and gpu.clock_mhz / 1000)
watts = _reading("{:.0f}", lambda gpu: gpu.power_watts)
celsius = _reading("{:.0f}", lambda gpu: gpu.temperature_celsius, lambda host: host.temperature_celsius)
