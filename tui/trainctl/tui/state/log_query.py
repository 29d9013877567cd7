"""What is looked for in logs: text, a pattern, and whose."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from trainctl.tui.state.merged_log import LogEntry


@dataclass(frozen=True)
class Query:
    """What is looked for: text in any case, or /a regular expression/; `node:NAME` keeps the logs of that node."""

    text: str = ""
    nodes: tuple[str, ...] = ()
    pattern: re.Pattern[str] | None = None
    problem: str = ""


def parse(text: str) -> Query:
    """What was typed as a query; a regular expression that is none is named, and finds nothing."""
    words = text.split(" ")
    nodes = tuple(word[5:] for word in words if word.startswith("node:") and len(word) > 5)
    wanted = " ".join(word for word in words if not word.startswith("node:") or len(word) == 5).strip()
    if not wanted:
        return Query(text, nodes)
    is_pattern = len(wanted) > 2 and wanted.startswith("/") and wanted.endswith("/")
    try:
        return Query(text, nodes, re.compile(wanted[1:-1] if is_pattern else re.escape(wanted), re.IGNORECASE))
    except re.error as error:
        return Query(text, nodes, re.compile(r"(?!)"), f"{wanted}: {error}")


def kept(entries: Sequence[LogEntry], query: Query, *, only: bool) -> Sequence[LogEntry]:
    """The lines that are shown: of the nodes asked for, and with `only` those with a match."""
    if not query.nodes and (query.pattern is None or not only):
        return entries
    pattern = query.pattern if only else None
    return [
        entry
        for entry in entries
        if (not query.nodes or any(entry.node.startswith(node) for node in query.nodes))
        and (pattern is None or pattern.search(entry.text))
    ]


def count_found(entries: Sequence[LogEntry], query: Query) -> int:
    """How many lines have a match."""
    return sum(1 for entry in entries if query.pattern.search(entry.text)) if query.pattern is not None else 0
