"""The policies as lines: all in a table, and below it the chosen one with its figures, next command and last ones."""

import math
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from trainctl.protocol.config.policies import POLICIES
from trainctl.protocol.messages import Event, PolicyFigure, PolicyStatus
from trainctl.tui.state import effects, run_events
from trainctl.tui.state.effects import PolicyReport
from trainctl.tui.state.view_state import Clock
from trainctl.tui.text.styled_line import Line, Piece, clean, filled, fit, groups, labelled, line, rule, shorten

_NAME_CELLS, _MODE_CELLS, _LABEL_CELLS = 15, 8, 9
_ROLES = {"on": "good", "advise": "text", "off": "dim"}
POLICY_WORDS: Final[dict[str, str]] = {name: entry.summary for name, entry in POLICIES.items()}
"""Summaries of the policies by name."""
_LEAST_DETAIL = 8
"""Rows that the chosen policy gets at least, where there are so many."""


def title(report: PolicyReport | None) -> str:
    """Return what stands in the rule above the table."""
    step = f" @{report.told.step:,}" if report is not None else ""
    return f"─ policies{step} "


def lines(
    report: PolicyReport, cursor: int, clock: Clock, columns: int, rows: int, keys: Sequence[Line] = ()
) -> list[Line]:
    """Return exactly `rows` lines; `keys`: of the last line."""
    policies = report.told.policies
    room = min(len(policies), max(rows - 3 - _LEAST_DETAIL, 1))
    start = min(max(cursor - room + 1, 0), len(policies) - room)
    drawn = [line(Piece(f"  {'POLICY':<{_NAME_CELLS}}{'MODE':<{_MODE_CELLS}}SEES, OR WOULD DO", "label"))]
    shown = policies[start : start + room]
    drawn += [_row(policy, at, columns, chosen=at == cursor) for at, policy in enumerate(shown, start)]
    chosen = policies[cursor]
    name = f"─ {chosen.name}: {POLICY_WORDS.get(chosen.name, '')} "
    drawn.append(rule(columns, (0, shorten(name, columns - 2), "title")))
    drawn += detail(report, chosen, clock, columns)
    return [*filled(drawn, columns, rows - 1), fit(groups(keys, columns), columns)]


def _row(policy: PolicyStatus, at: int, columns: int, *, chosen: bool) -> Line:
    would = f"{'would send' if policy.mode == 'on' else 'advises'} {policy.command}" if policy.command else ""
    said = (
        would
        or "; ".join(figure_words(figure, policy.mode) for figure in policy.figures[:1])
        or POLICY_WORDS.get(policy.name, "")
    )
    role = "warning" if would else "dim" if policy.mode == "off" else "text"
    room = max(columns - 2 - _NAME_CELLS - _MODE_CELLS, 1)
    cells: Line = (
        Piece("▸" if chosen else " ", "key"),
        Piece(" "),
        Piece(f"{policy.name:<{_NAME_CELLS}}", "strong" if policy.mode != "off" else "dim"),
        Piece(f"{policy.mode:<{_MODE_CELLS}}", _ROLES[policy.mode]),
        Piece(shorten(clean(said), room), role),
    )
    pieces = tuple(piece._replace(action=f"screen.choose_at({at})") for piece in fit(cells, columns))
    return tuple(piece._replace(role="cursor") if chosen and place else piece for place, piece in enumerate(pieces))


def detail(report: PolicyReport, policy: PolicyStatus, clock: Clock, columns: int) -> list[Line]:
    """Return one policy in full: figures against thresholds, the next command and why, the last commands with
    effects."""
    lines = [
        line(Piece(f"  {clean(figure_words(figure, policy.mode))}", "warning" if is_beyond(figure) else "text"))
        for figure in policy.figures
    ]
    for label, words, role in next_words(policy):
        lines += labelled(f"  {label}".ljust(_LABEL_CELLS), words, columns, role)
    for event in reversed(policy.actions):
        at = clock.time_of(event.at)
        text = f"{at} {action_words(report, event)}"
        lines += labelled("  did".ljust(_LABEL_CELLS), text, columns)
    if not policy.actions:
        lines += labelled("  did".ljust(_LABEL_CELLS), "nothing in this run yet", columns, "dim")
    return lines


# ---------------------------------------------------------------- words, for the command line too


def figure_words(figure: PolicyFigure, mode: str = "on") -> str:
    """Return `gain of the best split: 3.1 %, acts above 5 %`, or `advises above 5 %` by its policy's mode."""
    value = _in_unit(figure.value, figure.unit) if figure.value is not None else "not known yet"
    does = "advises" if mode == "advise" else "acts"
    acts = f", {does} {figure.acts} {_in_unit(figure.threshold, figure.unit)}" if figure.threshold is not None else ""
    return f"{figure.what}: {value}{acts}"


def _in_unit(value: float, unit: str) -> str:
    if not math.isfinite(value):
        return str(value)
    if unit == "part":
        return f"{100 * value:.3g} %"
    number = f"{value:,.0f}" if float(value).is_integer() else f"{value:.3g}"
    return f"{number} {unit}".rstrip()


def is_beyond(figure: PolicyFigure) -> bool:
    """Return whether the policy acts at the value."""
    if figure.value is None or figure.threshold is None:
        return False
    match figure.acts:
        case "above":
            return figure.value > figure.threshold
        case "below":
            return figure.value < figure.threshold
        case "at":
            return figure.value >= figure.threshold


def next_words(policy: PolicyStatus) -> list[tuple[str, str, str]]:
    """Return what it would do next and why, as label, words and role."""
    if policy.mode == "off":
        return [("next", "nothing: it is off and observes nothing", "dim")]
    if not policy.command:
        return [("next", "nothing now", "text"), ("when", policy.why, "dim")]
    verb = "sends" if policy.mode == "on" else "advises"
    waits = [("waits", f"for {policy.waits}", "dim")] if policy.waits else []
    return [("next", f"{verb} {policy.command}", "warning"), *waits, ("why", policy.why, "dim")]


def action_words(report: PolicyReport, event: Event) -> str:
    """Return a command of a policy: what it changed, how it ended, and the measured effect."""
    ended = f" ({event.outcome})" if event.outcome not in (None, "applied") else ""
    effect = effects.figures(report.measured.get(event.id), event)
    return f"{run_events.event_words(event, '→')}{ended}; effect: {effect}"


# ---------------------------------------------------------------- the command line


def text(report: PolicyReport) -> str:
    """Return all policies: a paragraph for each."""
    head = f"run {report.told.run}, step {report.told.step:,}"
    return "\n\n".join([head, *("\n".join(_paragraph(report, policy)) for policy in report.told.policies)])


def _paragraph(report: PolicyReport, policy: PolicyStatus) -> list[str]:
    head = f"{policy.name:<{_NAME_CELLS}}{policy.mode:<{_MODE_CELLS}}{POLICY_WORDS.get(policy.name, '')}"
    said = [("sees", figure_words(figure, policy.mode)) for figure in policy.figures]
    said += [(label, words) for label, words, _ in next_words(policy)]
    said += [("did", action_words(report, event)) for event in reversed(policy.actions)]
    return [head.rstrip(), *(f"  {label:<6}{clean(words)}" for label, words in said)]


def objects(report: PolicyReport) -> list[dict[str, Any]]:
    """Return the policies for a script; an action also has its text, and as `effect` the tokens per second around
    it."""
    return [
        msgspec.to_builtins(policy) | {"actions": [_action(report, event) for event in policy.actions]}
        for policy in report.told.policies
    ]


def _action(report: PolicyReport, event: Event) -> dict[str, Any]:
    effect = report.measured.get(event.id)
    rates = {"rate_before": effect.before, "rate_after": effect.after} if effect is not None else None
    return run_events.event_fields(event) | {"effect": rates}
