"""The lead's part in a reference's log-probabilities: ranks that load ask it for units to compute and for all values.

What this node has in its caches from an earlier run is handed on as it is. What it lacks, the ranks compute, or have
themselves from an earlier run. So all ranks end up with the same bits.
"""

import asyncio
import shutil
import sqlite3
import time
from pathlib import Path
from typing import Protocol

from trainctl.node_agent.conductor.events import Computing
from trainctl.node_agent.runs.session import Session
from trainctl.node_agent.work.dealer import Slice
from trainctl.node_agent.work.reference_pass import SLICES_NAME, VALUE_BYTES, ReferenceJournal, ReferencePass, UnitSizes
from trainctl.protocol.config import run_file
from trainctl.protocol.errors import TrainctlError
from trainctl.protocol.messages import ReferenceAsk, ReferenceSlice
from trainctl.protocol.record.paths import VALUES_NAME, stored_digest
from trainctl.protocol.security import received_names

PART_VALUES = 12 * 1024
"""Values in one answer: what is relayed to another node's agent may have 64 KiB."""
SILENT_SECONDS = 8.0
"""Silence of a rank after which its slice is dealt again; it sends a heartbeat every second."""


class _Values(Protocol):
    """Where values come from."""

    def take(self, session: Session, ask: ReferenceAsk) -> ReferenceSlice: ...
    def close(self) -> None: ...


class ReferenceLead:
    """Lead of the reference passes in the run that this agent leads."""

    def __init__(self, node: str) -> None:
        self._node, self._run = node, ""
        self._open: dict[str, _Values] = {}
        self._told: set[int] = set()  # ranks of which the conductor knows that they compute

    async def take(self, session: Session, ask: ReferenceAsk) -> None:
        """Answer a rank."""
        if session.run != self._run:
            self.close()
            self._run = session.run
        if ask.rank not in self._told and not ask.digest:
            self._told.add(ask.rank)
            await session.feed(Computing(ask.rank))
        try:
            found = self._find(session, ask)
            answer = found.take(session, ask) if found is not None else _answer(ask, known=False)
        except (OSError, sqlite3.Error, TrainctlError, ValueError) as error:
            answer = _answer(ask, problem=f"{self._node} can't keep the reference's log-probabilities: {error}"[:500])
        if ask.rank in session.ports:
            await session.ports[ask.rank].tell(answer)

    def ended(self) -> None:
        """The run has ended: its journals are of no more use. One that isn't whole is left for the next run with the
        same reference."""
        for found in self._open.values():
            if isinstance(found, _CollectedValues) and found.is_done:
                shutil.rmtree(found.folder, ignore_errors=True)
        self.close()

    def close(self) -> None:
        """Leave the journals for the next agent of this node."""
        for found in self._open.values():
            found.close()
        self._open.clear()
        self._told.clear()

    def _find(self, session: Session, ask: ReferenceAsk) -> _Values | None:
        """Return what has the values or collects them; None if the units' sizes are needed for that."""
        if ask.reference not in self._open:
            made = self._make(session, ask)
            if made is None:
                return None
            self._open[ask.reference] = made
        return self._open[ask.reference]

    def _make(self, session: Session, ask: ReferenceAsk) -> _Values | None:
        caches = run_file.cache_folder(session.conductor.config, self._node, session.paths.node_data)
        stored = received_names.below(caches, ask.reference)
        folder = received_names.unlinked(caches / f".{ask.reference}.{self._node}")
        if digest := stored_digest(stored):
            shutil.rmtree(folder, ignore_errors=True)  # of an agent that was killed
            return _StoredValues(stored, digest)
        if received_names.unlinked(folder / SLICES_NAME).is_file():
            return _CollectedValues(ReferenceJournal(folder))
        return _CollectedValues(ReferenceJournal(folder, UnitSizes(ask.counts, ask.tokens))) if ask.counts else None


class _StoredValues:
    """Those in this node's caches."""

    def __init__(self, folder: Path, digest: str) -> None:
        self._folder, self._digest = folder, digest

    def take(self, session: Session, ask: ReferenceAsk) -> ReferenceSlice:
        if ask.digest == self._digest:
            return _answer(ask, digest=self._digest)
        with received_names.opened(self._folder, VALUES_NAME) as file:
            file.seek(ask.offset * VALUE_BYTES)
            part = file.read(PART_VALUES * VALUE_BYTES)
        return _answer(ask, offset=ask.offset, values=part, digest=self._digest)

    def close(self) -> None:
        return


class _CollectedValues:
    """Those that ranks compute."""

    def __init__(self, journal: ReferenceJournal) -> None:
        self._journal, self.folder = journal, journal.folder
        self._pass = ReferencePass(*journal.sizes.numbers(), journal.slices())
        self._digest: asyncio.Task[str] | None = None  # once all values are there

    @property
    def is_done(self) -> bool:
        return self._pass.is_done

    def close(self) -> None:
        if self._digest is not None:
            self._digest.cancel()
        self._journal.close()

    def take(self, session: Session, ask: ReferenceAsk) -> ReferenceSlice:
        now, journal, one = time.monotonic(), self._journal, self._pass
        done = Slice(ask.slice, ask.first, ask.units) if ask.slice is not None else None
        if done is not None:
            if one.is_new(done):
                self._keep(done, ask)
            one.answer(ask.rank, done, now)
        _lose_silent(session, one, now)
        dealt = one.deal(ask.rank, now) if ask.wants else None
        if dealt is not None:
            journal.dealt(dealt, ask.rank)
        most = min(PART_VALUES, one.available - ask.offset)
        part = {"offset": ask.offset, "values": journal.read(ask.offset, most)} if most > 0 else {}
        given = {"slice": dealt.id, "first": dealt.first, "units": dealt.rows} if dealt is not None else {}
        return _answer(ask, answered=one.answered, digest=self._digest_of_all(), **part, **given)

    def _keep(self, done: Slice, ask: ReferenceAsk) -> None:
        offset, count = self._pass.span(done)
        size = sum(map(len, ask.values))
        if size != count * VALUE_BYTES:
            raise ValueError(
                f"rank {ask.rank} sent {size:,} bytes for {count:,} values; its trainctl version may differ"
            )
        self._journal.answered(done, ask.rank, offset, ask.values)

    def _digest_of_all(self) -> str:
        if not self._pass.is_done:
            return ""
        if self._digest is None:
            self._digest = asyncio.create_task(asyncio.to_thread(self._journal.digest))
        return self._digest.result() if self._digest.done() else ""


def _lose_silent(session: Session, one: ReferencePass, now: float) -> None:
    for rank, at in session.conductor.ranks.items():
        if at.ended or (at.heard is not None and now - at.heard > SILENT_SECONDS):
            one.lose(rank)


def _answer(ask: ReferenceAsk, **fields: object) -> ReferenceSlice:
    return ReferenceSlice(run=ask.run, ask=ask.ask, reference=ask.reference, **fields)  # type: ignore[arg-type]
