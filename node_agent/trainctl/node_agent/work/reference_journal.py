"""The journal of a pass over a reference: its units, which slices were dealt, and the values, in a folder of its own.

A slice is journaled before it is sent, and its values are on disk before it counts as answered. A lead that restarts
continues from here.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainctl.node_agent.work.dealer import Slice
from trainctl.node_agent.work.reference_pass import VALUE_BYTES, UnitSizes
from trainctl.protocol.files.durable_files import flush, make_folder
from trainctl.protocol.record.paths import VALUES_NAME
from trainctl.protocol.record.schema import open_for_writing

SLICES_NAME = "slices.db"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS sizes (counts BLOB NOT NULL, tokens BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS slices (
  id INTEGER PRIMARY KEY, first INTEGER NOT NULL, units INTEGER NOT NULL, rank INTEGER NOT NULL, answered INTEGER
);
"""


class ReferenceJournal:
    """Open while its run is led here. Raises OSError and sqlite3.Error where the disk refuses."""

    def __init__(self, folder: Path, sizes: UnitSizes | None = None) -> None:
        """`sizes`: of a new pass; None: the journal has them."""
        make_folder(folder)
        self.folder, self._path = folder, folder / VALUES_NAME
        self._connection = open_for_writing(folder / SLICES_NAME, _SCHEMA)
        try:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError:
            self._connection.close()
            raise
        if sizes is not None:
            self._connection.execute("INSERT INTO sizes VALUES (?, ?)", sizes)
        row = self._connection.execute("SELECT counts, tokens FROM sizes").fetchone()
        self.sizes = UnitSizes(*row) if row is not None else UnitSizes(b"", b"")

    def close(self) -> None:
        self._connection.close()
        os.close(self._file)

    def dealt(self, one: Slice, rank: int) -> None:
        """A slice is about to be sent to a rank, perhaps again."""
        self._connection.execute(
            "INSERT INTO slices (id, first, units, rank) VALUES (?, ?, ?, ?) "
            "ON CONFLICT (id) DO UPDATE SET rank = excluded.rank",
            (*one, rank),
        )

    def answered(self, one: Slice, rank: int, offset: int, values: Sequence[bytes]) -> None:
        """Keep a slice's values, the first of which is value `offset` of all."""
        os.pwrite(self._file, b"".join(values), offset * VALUE_BYTES)
        flush(self._file)
        self._connection.execute("UPDATE slices SET answered = ? WHERE id = ?", (rank, one.id))

    def slices(self) -> Iterator[tuple[Slice, bool]]:
        """Those dealt so far, in order, and whether each was answered."""
        query = "SELECT id, first, units, answered IS NOT NULL FROM slices ORDER BY id"
        for number, first, units, is_answered in self._connection.execute(query).fetchall():
            yield Slice(number, first, units), bool(is_answered)

    def read(self, offset: int, most: int) -> bytes:
        """At most so many values from `offset` on."""
        return os.pread(self._file, most * VALUE_BYTES, offset * VALUE_BYTES)

    def digest(self) -> str:
        """SHA-256 of the values; reads all of them."""
        with self._path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
