"""One alert in words: its title, what was at hand when it was raised, and what is so now. Pure."""

from trainctl.protocol import messages as m
from trainctl.protocol.config.alert_rules import KINDS
from trainctl.tui.state.view_state import Clock, ViewState
from trainctl.tui.text import formatting as f
from trainctl.tui.text import styled_line as ln
from trainctl.tui.text.styled_line import Line, Piece

WORDS = {"warning": ("ALERT", "warning"), "error": ("ERROR", "bad")}
"""How bad it is, as the screen says it, with its role."""


def title(alert: m.AlertView) -> str:
    """What an alert is about, short: `torch-h lost`, `mbp: clock`, `loss spike`."""
    node, words = ln.clean(alert.node), alert.kind.removeprefix("node-").replace("-", " ")
    between = " " if alert.kind.startswith("node-") else ": "
    return f"{node}{between}{words}" if node else words


def held_words(alert: m.AlertView, *, short: bool = False) -> str:
    """Why it calls nobody, empty if it does."""
    if alert.acknowledged_by is not None:
        return f"{'ack' if short else 'acknowledged by'} {ln.clean(alert.acknowledged_by)}"
    return "muted" if alert.muted else ""


def detail_lines(alert: m.AlertView, state: ViewState, clock: Clock, columns: int) -> list[Line]:
    """All that is known of an alert: what it says, what was at hand when it was raised, and what is so now."""
    _, role = WORDS[alert.severity]
    made = [ln.line(Piece(text, role)) for text in ln.wrap(ln.clean(f"{alert.node} {alert.text}".strip()), columns)]
    made += [ln.line(Piece(text, "label")) for text in ln.wrap(_when(alert, clock), columns)]
    for name, facts, role in (("then", alert.facts, "label"), ("now", facts_now(alert, state), "text")):
        for index, fact in enumerate(facts):
            made += ln.labelled(f"{name if not index else '':<6}", fact, columns, role)
    return made


def _when(alert: m.AlertView, clock: Clock) -> str:
    at = f.clock(alert.raised_at, clock.wall(), clock.zone)
    step = f" after step {alert.step:,}" if alert.step is not None else ""
    age = f.duration(max(clock.wall() - alert.raised_at, 0.0))
    held = held_words(alert)
    return f"raised {at}{step}, {age} ago: {KINDS[alert.kind].summary}{f'; {held}' if held else ''}"


def facts_now(alert: m.AlertView, state: ViewState) -> list[str]:
    """The phases of the rank's last step and the machine's newest reading."""
    made = []
    seen = state.ranks.get(alert.rank) if alert.rank is not None else None
    if seen is not None:
        phases = seen.value.phases
        parts = [f"{name} {f.seconds(getattr(phases, name))}" for name in (*m.BUSY_PHASES, "sync")]
        own = seen.value.own_tokens_per_second
        made.append(f"step {seen.value.step:,}: {', '.join(parts)}" + (f"; own rate {own:,.0f} tok/s" if own else ""))
        if seen.value.peak_or_held_bytes is not None:
            used = f.used_of(seen.value.peak_or_held_bytes, seen.value.memory_cap_bytes)
            made.append(f"memory {used} GB, micro-batch {seen.value.micro_batch} of {seen.value.samples} samples")
    host = state.hosts.get(alert.node)
    return made + (_machine(host.value) if host is not None else [])


def _machine(host: m.HostReading) -> list[str]:
    parts = [f"cpu {host.cpu_percent:.0f} %"] if host.cpu_percent is not None else []
    parts += [f"load {host.load_1min:.1f}"] if host.load_1min is not None else []
    disk = f.used_of(host.disk_free_bytes, host.disk_total_bytes)
    parts += [f"disk free {disk} GB"] if host.disk_free_bytes is not None else []
    made = [", ".join(parts)] if parts else []
    for gpu in host.gpus:
        words = [f"{gpu.utilization_percent:.0f} %"] if gpu.utilization_percent is not None else []
        words += [f"{gpu.clock_mhz / 1000:.2f} GHz"] if gpu.clock_mhz is not None else []
        words += [f"{gpu.power_watts:.0f} W"] if gpu.power_watts is not None else []
        words += [f"{gpu.temperature_celsius:.0f} °C"] if gpu.temperature_celsius is not None else []
        made.append(f"{gpu.name}: {', '.join(words)}")
    return made
