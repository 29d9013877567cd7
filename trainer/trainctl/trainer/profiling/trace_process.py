"""`python -m trainctl.trainer.profiling.trace_process FOLDER NAME`: makes a trace's file and its table of operators.

FOLDER has `trace.json`, and perhaps a Metal capture. The process writes NAME into it: the trace compressed by gzip, or
with a capture a zip of both. It prints one line of JSON, `Written`. It is a process of its own, so training doesn't
wait for the compression and the table. Writing `trace.json` is the trainer's part: torch holds the interpreter lock
meanwhile, about 0.2 s for 100,000 operators. (Its own table, `profile.events()`, would hold it for 4 s.)

The trace is in the Trace Event Format (complete events, ph "X", times in microseconds) with the categories and
arguments that torch's profiler writes: an operator is `cpu_op`, our phases are `user_annotation`, and a kernel names
the operator that launched it by `External id` and the call that launched it by `correlation`.
"""

import gzip
import shutil
import sys
import zipfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from trainctl.protocol.messages import OPERATORS_KEPT, PHASES, OperatorTime, PhaseProfile
from trainctl.protocol.record.checkpoints import digest_of
from trainctl.trainer.common.errors import first_line

TRACE = "trace.json"
GZIP_LEVEL = 5
MAX_TRACE_BYTES = 512 * 1024 * 1024
"""Largest trace that is kept, uncompressed: no viewer opens a larger one."""
MAX_CAPTURE_BYTES = 4 * 1024 * 1024 * 1024
"""Largest Metal capture that is kept."""
_NAME_CHARACTERS = 80


class TraceArgs(msgspec.Struct, frozen=True, gc=False, rename={"external_id": "External id"}):
    """The arguments that link events."""

    external_id: Any = None
    correlation: Any = None


class TraceEvent(msgspec.Struct, frozen=True):
    """One event of a trace, as far as it is needed here."""

    ph: str = ""
    cat: str | None = None
    name: str = ""
    ts: float = 0.0  # begin, in microseconds
    dur: float = 0.0  # duration, in microseconds
    pid: Any = None
    tid: Any = None
    args: TraceArgs = TraceArgs()


class Trace(msgspec.Struct, frozen=True):
    """A trace's file."""

    events: list[TraceEvent] = msgspec.field(name="traceEvents", default_factory=list)


class Written(msgspec.Struct, frozen=True):
    """The file, and what it shows."""

    size_bytes: int = 0
    digest: str = ""
    phases: tuple[PhaseProfile, ...] = ()
    lacks: str = ""
    problem: str = ""


def main() -> int:
    """Write what was made as one line on standard output."""
    try:
        written = make(Path(sys.argv[1]), sys.argv[2])
    except (OSError, MemoryError) as error:
        written = Written(problem=first_line(error))
    sys.stdout.write(msgspec.json.encode(written).decode() + "\n")
    return 0


def make(folder: Path, name: str) -> Written:
    """Write the file. Raises OSError."""
    raw, size = folder / TRACE, (folder / TRACE).stat().st_size
    if size > MAX_TRACE_BYTES:
        limit = f"at most {MAX_TRACE_BYTES / 1e6:,.0f} MB are kept"
        return Written(problem=f"the trace has {size / 1e6:,.0f} MB, and {limit}: profile fewer steps")
    lacks = ""
    try:
        phases = phase_profiles(msgspec.json.decode(raw.read_bytes(), type=Trace).events)
    except msgspec.MsgspecError as error:
        phases, lacks = (), f"no table of operators: the trace can't be read ({first_line(error)})"
    captured = [path for capture in folder.glob("*.gputrace") for path in sorted(capture.rglob("*"))]
    if sum(path.stat().st_size for path in captured if path.is_file()) > MAX_CAPTURE_BYTES:
        captured, lacks = [], f"the Metal capture was larger than {MAX_CAPTURE_BYTES / 1e9:,.0f} GB and is removed"
    if name.endswith(".zip"):
        with zipfile.ZipFile(folder / name, "w", zipfile.ZIP_DEFLATED, compresslevel=GZIP_LEVEL) as archive:
            for path in (raw, *captured):
                archive.write(path, path.relative_to(folder))
    else:
        with raw.open("rb") as source, gzip.GzipFile(folder / name, "wb", GZIP_LEVEL, mtime=0) as target:
            shutil.copyfileobj(source, target)
    return Written((folder / name).stat().st_size, digest_of(folder / name), phases, lacks)


def phase_profiles(events: Sequence[TraceEvent]) -> tuple[PhaseProfile, ...]:
    """Return the phases of a trace in the order of a step, each with its OPERATORS_KEPT longest operators."""
    complete = [event for event in events if event.ph == "X"]
    ranges = [event for event in complete if event.cat == "user_annotation" and event.name in PHASES]
    ranges.sort(key=lambda event: event.ts)  # they follow each other on one thread
    begins = [event.ts for event in ranges]

    def phase_at(time: float) -> str | None:
        before = bisect_right(begins, time)
        event = ranges[before - 1] if before else None
        return event.name if event is not None and time < event.ts + event.dur else None

    # By phase and operator: calls, and the microseconds of the host and of the device.
    phases: dict[str, dict[str, list[float]]] = {event.name: defaultdict(lambda: [0, 0.0, 0.0]) for event in ranges}
    operators = [event for event in complete if event.cat == "cpu_op"]
    for event, own in self_times(operators):
        if phase := phase_at(event.ts):
            times = phases[phase][event.name]
            times[0] += 1
            times[1] += own
    # A kernel belongs to the phase in which it was launched: the device runs it later.
    launched = {event.args.correlation: event.ts for event in complete if event.cat in ("cuda_runtime", "cuda_driver")}
    names = {event.args.external_id: event.name for event in operators}
    for event in complete:
        is_on_device = event.cat in ("kernel", "gpu_memcpy", "gpu_memset")
        if is_on_device and (phase := phase_at(launched.get(event.args.correlation, event.ts))):
            phases[phase][names.get(event.args.external_id, event.name)][2] += event.dur
    walls = {name: sum(event.dur for event in ranges if event.name == name) for name in phases}
    return tuple(_profile(name, walls[name], phases[name]) for name in PHASES if name in phases)


def self_times(operators: Iterable[TraceEvent]) -> list[tuple[TraceEvent, float]]:
    """Return each operator with its time less that of the operators that it called directly, in microseconds."""
    timed, open_by_thread = list[list[Any]](), defaultdict[tuple[Any, Any], list[list[Any]]](list)
    for event in sorted(operators, key=lambda event: (event.ts, -event.dur)):
        stack = open_by_thread[event.pid, event.tid]
        while stack and event.ts >= stack[-1][0].ts + stack[-1][0].dur:
            stack.pop()
        if stack:
            stack[-1][1] -= event.dur
        stack.append([event, event.dur])
        timed.append(stack[-1])
    return [(event, max(0.0, own)) for event, own in timed]


def _profile(name: str, wall: float, operators: dict[str, list[float]]) -> PhaseProfile:
    times = [
        OperatorTime(operator[:_NAME_CHARACTERS], int(calls), own / 1e6, device / 1e6)
        for operator, (calls, own, device) in sorted(operators.items())
    ]
    times.sort(key=lambda time: (-time.device_seconds, -time.seconds))
    device = sum(device for _, _, device in operators.values())
    return PhaseProfile(name, wall / 1e6, device / 1e6, tuple(times[:OPERATORS_KEPT]))


if __name__ == "__main__":
    sys.exit(main())
