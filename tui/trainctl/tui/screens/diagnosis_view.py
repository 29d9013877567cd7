"""A diagnosis as lines: the verdict, the findings in a list, and one in full with its evidence, cost and remedies."""

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from trainctl.protocol.messages import CheckedCause, Diagnosis, DiagnosisReply, Finding, Remedy
from trainctl.tui.commands.verbs import DESCRIPTIONS
from trainctl.tui.text.formatting import percent
from trainctl.tui.text.styled_line import (
    Line,
    Piece,
    clean,
    filled,
    fit,
    groups,
    labelled,
    line,
    plain,
    rule,
    shorten,
    wrap,
)

TEXT_COLUMNS: Final = 80
"""Columns of the command line's text."""
_LABEL_CELLS = 12
_SEVERITY_CELLS = 9
_LEAST_DETAIL = 12
"""Rows that the chosen finding gets at least, where there are so many."""
_ROLES = {"error": "error", "warning": "warning", "info": "text"}


def title(reply: DiagnosisReply | None) -> str:
    """Return what stands in the rule above the list."""
    if reply is None:
        return "─ diagnosis "
    found = reply.diagnosis
    return f"─ diagnosis of steps {found.first_step:,} to {found.step:,} "


def verdict(found: Diagnosis) -> str:
    """Return the result in a sentence."""
    if not found.step:
        return "no step has been committed yet" if not found.findings else found.findings[0].title
    if found.findings:
        more = len(found.findings) - 1
        return found.findings[0].title + (f"; {more} more finding{'s' if more > 1 else ''}" if more else "")
    unknown = len(_unknown(found))
    looked = len({cause.cause for cause in found.checked}) - unknown
    missing = f"; too little is known about {unknown}" if unknown else ""
    return f"nothing found: {looked} causes were checked{missing}"


def _unknown(found: Diagnosis) -> list[str]:
    judged = {one.cause for one in found.checked if one.result != "unknown"}
    return [cause for cause in dict.fromkeys(one.cause for one in found.checked) if cause not in judged]


def lines(reply: DiagnosisReply, cursor: int, columns: int, rows: int, keys: Sequence[Line] = ()) -> list[Line]:
    """Return exactly `rows` lines; `keys`: of the last line."""
    found = reply.diagnosis
    role = _ROLES[found.findings[0].severity] if found.findings else "good"
    drawn = [line(Piece(text, role)) for text in wrap(clean(verdict(found)), columns)]
    if found.findings:
        room = max(rows - len(drawn) - 2 - _LEAST_DETAIL, 1)
        start = min(max(cursor - room + 1, 0), max(len(found.findings) - room, 0))
        shown = enumerate(found.findings[start : start + room], start)
        drawn += [(), *(_row(finding, at, columns, chosen=at == cursor) for at, finding in shown)]
        chosen = found.findings[cursor]
        name = shorten(f"─ {clean(chosen.title)} ", columns - 2)
        drawn.append(rule(columns, (0, name, "title")))
        drawn += detail(chosen, columns)
    else:
        drawn += [(), *_checked(found, columns)]
    return [*filled(drawn, columns, rows - 1), fit(groups(keys, columns), columns)]


def _row(finding: Finding, at: int, columns: int, *, chosen: bool) -> Line:
    saved = finding.what_if
    cost = f"{percent(saved.part)} of a step" if saved is not None and saved.saved > 0 else ""
    room = max(columns - 3 - _SEVERITY_CELLS - len(cost), 10)
    text = shorten(clean(finding.title), room - 1)
    cells: Line = (
        Piece("▸" if chosen else " ", "key"),
        Piece(" "),
        Piece(f"{finding.severity:<{_SEVERITY_CELLS}}", _ROLES[finding.severity]),
        Piece(text.ljust(room), "strong"),
        Piece(cost, "label"),
    )
    pieces = tuple(piece._replace(action=f"screen.choose_at({at})") for piece in fit(cells, columns))
    return tuple(piece._replace(role="cursor") if chosen and place else piece for place, piece in enumerate(pieces))


def detail(finding: Finding, columns: int) -> list[Line]:
    """Return one finding in full: what shows it, what a step would take without it, what it is not, and what to do."""
    said: list[tuple[str, str, str]] = [("evidence", text, "text") for text in finding.evidence]
    if finding.what_if is not None and finding.what_if.saying:
        said.append(("what if", finding.what_if.saying, "strong"))
    for number, remedy in enumerate(finding.remedies, 1):
        said.append((f"remedy {number}", remedy.text, "good" if number == 1 else "text"))
        said += [("", remedy_command(remedy), "key")] if remedy.command else []
    said += [("ruled out", text, "dim") for text in finding.ruled_out]
    return [
        row
        for name, text, role in _once(said)
        for row in labelled(f"  {name}".ljust(_LABEL_CELLS), text, columns, role)
    ]


def _once(said: Sequence[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """Return the lines with each label at its first one only."""
    names = ["", *(name for name, _, _ in said)]
    known = zip(names, said, strict=False)
    return [(name if name != before else "", text, role) for before, (name, text, role) in known]


def remedy_command(remedy: Remedy) -> str:
    """Return a remedy's command, with the key that opens its dialog in the full screen."""
    key = DESCRIPTIONS[remedy.verb].key if remedy.verb else None
    return f"{remedy.command} (key {key.key})" if key is not None else remedy.command


def _checked(found: Diagnosis, columns: int) -> list[Line]:
    """Return what was looked for, of a run without findings: what isn't known last, and what is the same on all nodes
    once."""
    said = dict.fromkeys((one.result == "unknown", one.cause, _result(one)) for one in found.checked)
    return [
        row
        for is_unknown, cause, text in sorted(said, key=lambda one: one[0])
        for row in labelled(f"  {cause}".ljust(2 * _LABEL_CELLS), text, columns, "dim" if is_unknown else "text")
    ]


def _result(one: CheckedCause) -> str:
    return f"not known: {one.text}" if one.result == "unknown" else one.text


# ---------------------------------------------------------------- the command line


def text(reply: DiagnosisReply) -> str:
    """Return the verdict, then each finding, at most 80 columns wide."""
    found = _with_run_named(reply)
    made = wrap(f"{reply.run}, step {found.step:,}: {verdict(found)}", TEXT_COLUMNS)
    for number, finding in enumerate(found.findings, 1):
        made += ["", *wrap(f"{number}. {finding.severity}: {clean(finding.title)}", TEXT_COLUMNS)]
        made += [plain(row).rstrip() for row in detail(finding, TEXT_COLUMNS)]
    unknown = ", ".join(_unknown(found))
    if unknown:
        rows = labelled("not known: ", f"{unknown} (readings, steps or calibrations are missing)", TEXT_COLUMNS)
        made += ["", *(plain(row).rstrip() for row in rows)]
    return "\n".join(made)


def objects(reply: DiagnosisReply) -> dict[str, Any]:
    """Return the run, the verdict and the diagnosis for a script."""
    fields = msgspec.to_builtins(_with_run_named(reply))
    return {"run": reply.run, "live": reply.live, "verdict": verdict(reply.diagnosis), **fields}


def _with_run_named(reply: DiagnosisReply) -> Diagnosis:
    """Return the diagnosis with the run in its commands: a shell may have other runs that they could mean."""

    def named(remedy: Remedy) -> Remedy:
        is_sent = remedy.command.startswith("trainctl send ")
        return replace(remedy, command=f"{remedy.command} --run {reply.run}") if is_sent else remedy

    findings = reply.diagnosis.findings
    return replace(
        reply.diagnosis, findings=tuple(replace(one, remedies=tuple(map(named, one.remedies))) for one in findings)
    )
