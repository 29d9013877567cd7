"""Separate work, such as scoring, as pieces of lines: for Runs and `trainctl status`."""

from trainctl.protocol import messages as m
from trainctl.tui.text import formatting as f
from trainctl.tui.text.styled_line import Line, Piece, clean, line

_ROLES = {"starting": "accent", "working": "good", "silent": "warning", "failed": "bad"}


def task(work: m.WorkSummary) -> str:
    """What is done to which file: `score test.jsonl`."""
    kind = "score" if work.view.kind == "log-probabilities" else "answer"
    return f"{kind} {clean(work.file)}".rstrip()


def title(work: m.WorkSummary) -> str:
    """The same, with the checkpoint that is used."""
    return f"{task(work)} with {clean(work.view.run)} step {work.view.checkpoint:,}"


def progress(work: m.WorkSummary) -> list[Line]:
    """The most important first."""
    view = work.view
    rows = f"{view.answered:,}/{view.rows:,}"
    made = [
        line(rows, Piece(" rows", "label"), f" {f.percent(view.answered / view.rows)}"),
        _outlook(work),
        line(f"{f.compact(work.rows_per_second)}", Piece(" rows/s", "label")),
        line(Piece("slices ", "label"), f"{work.slices_answered:,} of {work.slices:,} dealt"),
    ]
    return made if work.is_active else made[:2]


def _outlook(work: m.WorkSummary) -> Line:
    view = work.view
    if view.state == "receiving":
        return line(Piece(f"receiving rows: {view.received_bytes:,} bytes", "accent"))
    if work.is_active:
        return line(Piece("ETA ", "label"), f.duration(work.seconds_left))
    reason = f": {clean(view.reason)}" if view.reason else ""
    return line(Piece(f"{view.state.upper()}{reason}", "bad" if view.state == "failed" else "label"))


def nodes(work: m.WorkSummary) -> list[Line]:
    """Each node, with its speed or the reason why it doesn't work."""
    return [
        line(
            Piece(f"{clean(node.node)} ", "label"),
            f"{f.compact(node.rows_per_second)} rows/s"
            if node.state == "working"
            else Piece(f"{node.state}{f': {clean(node.why)}' if node.why else ''}", _ROLES[node.state]),
        )
        for node in work.view.nodes
    ]
