"""`python -m trainctl.trainer.profiling.trace_process FOLDER NAME`: makes a trace's file and its table of operators.

FOLDER has `trace.json`, and perhaps a Metal capture. The process writes NAME into it: the trace compressed by gzip, or
with a capture a zip of both. It prints one line of JSON, `Written`. It is a process of its own, so training doesn't
wait for the compression and the table. Writing `trace.json` is the trainer's part: torch holds the interpreter lock
meanwhile, about 0.2 s for 100,000 operators.
"""

import gzip
import hashlib
import shutil
import sys
import zipfile
from pathlib import Path

import msgspec

from trainctl.protocol.messages import PhaseProfile
from trainctl.trainer.common.errors import first_line
from trainctl.trainer.profiling.operator_times import Trace, phase_profiles

TRACE = "trace.json"
GZIP_LEVEL = 5
MOST_TRACE_BYTES = 512 * 1024 * 1024
"""Largest trace that is kept, uncompressed: no viewer opens a larger one."""
MOST_CAPTURE_BYTES = 4 * 1024 * 1024 * 1024
"""Largest Metal capture that is kept."""


class Written(msgspec.Struct, frozen=True):
    """The file, and what it shows."""

    size_bytes: int = 0
    digest: str = ""
    phases: tuple[PhaseProfile, ...] = ()
    lacks: str = ""
    problem: str = ""


def make(folder: Path, name: str) -> Written:
    """Write the file. Raises OSError."""
    raw, size = folder / TRACE, (folder / TRACE).stat().st_size
    if size > MOST_TRACE_BYTES:
        limit = f"at most {MOST_TRACE_BYTES / 1e6:,.0f} MB are kept"
        return Written(problem=f"the trace has {size / 1e6:,.0f} MB, and {limit}: profile fewer steps")
    lacks = ""
    try:
        phases = phase_profiles(msgspec.json.decode(raw.read_bytes(), type=Trace).events)
    except msgspec.MsgspecError as error:
        phases, lacks = (), f"no table of operators: the trace can't be read ({first_line(error)})"
    captures = [path for path in folder.iterdir() if path.suffix == ".gputrace"]
    if captures and _bytes_in(captures[0]) > MOST_CAPTURE_BYTES:
        captures, lacks = [], f"the Metal capture was larger than {MOST_CAPTURE_BYTES / 1e9:,.0f} GB and is removed"
    if name.endswith(".zip"):
        _zip(folder / name, raw, captures)
    else:
        with raw.open("rb") as source, gzip.GzipFile(folder / name, "wb", GZIP_LEVEL, mtime=0) as target:
            shutil.copyfileobj(source, target)
    with (folder / name).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Written((folder / name).stat().st_size, digest, phases, lacks)


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _zip(target: Path, raw: Path, captures: list[Path]) -> None:
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=GZIP_LEVEL) as archive:
        archive.write(raw, raw.name)
        for path in [path for capture in captures for path in sorted(capture.rglob("*"))]:
            archive.write(path, path.relative_to(raw.parent))


def main() -> int:
    """Write what was made as one line on standard output."""
    try:
        written = make(Path(sys.argv[1]), sys.argv[2])
    except (OSError, MemoryError) as error:
        written = Written(problem=first_line(error))
    sys.stdout.write(msgspec.json.encode(written).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
