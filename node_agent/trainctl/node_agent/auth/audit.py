"""The audit of refusals at this agent: counted as they happen, written to agent.db at most once a second, bounded."""

import time
from typing import NamedTuple

from trainctl.node_agent.records.agent_db import AgentDb

FLUSH_SECONDS = 1.0
SAME_SECONDS = 60.0
"""Seconds within which refusals of the same thing are one entry with a count."""
MOST_ENTRIES = 256
"""Most different entries within that time, enough for every request and verb of three keys; further ones are counted in
one."""


class Subject(NamedTuple):
    """Who was refused, and what."""

    name: str  # of the key; empty: it has none here
    key: str  # Z85; empty: none was shown
    what: str  # "command pause", "connect"
    why: str
    address: str = ""  # where from, as far as it is known


OTHERS = Subject("", "", "connect", "too many to list one by one")


class _Entry:
    def __init__(self, number: int, now: float) -> None:
        self.number, self.first_at, self.last_at, self.count, self.kept = number, now, now, 0, False


class Audit:
    """Belongs to the agent's loop."""

    def __init__(self, db: AgentDb) -> None:
        self._ledger = db
        self._last_number = db.last_refusal()
        self._entries: dict[Subject, _Entry] = {}
        self._flushed_monotonic = 0.0

    def note(self, subject: Subject) -> None:
        """One refusal, now."""
        now = time.time()
        entry = self._entries.get(subject)
        if entry is None and len(self._entries) >= MOST_ENTRIES:
            subject = OTHERS
            entry = self._entries.get(subject)
        if entry is None:
            self._last_number += 1
            entry = self._entries[subject] = _Entry(self._last_number, now)
        entry.last_at, entry.count, entry.kept = now, entry.count + 1, False

    def flush(self, *, force: bool = False) -> None:
        """Keep what was noted; call it often. What the disk refuses is tried again with the next."""
        new = {subject: entry for subject, entry in self._entries.items() if not entry.kept}
        if not new or (not force and time.monotonic() - self._flushed_monotonic < FLUSH_SECONDS):
            return
        self._flushed_monotonic, now = time.monotonic(), time.time()
        rows = [(one.number, one.first_at, one.last_at, one.count, *subject) for subject, one in new.items()]
        if self._ledger.keep_refusals(rows):
            for entry in new.values():
                entry.kept = True
            recent = {who: entry for who, entry in self._entries.items() if now - entry.first_at < SAME_SECONDS}
            self._entries = recent
