"""The combinations of settings that are benched, the run of each, and its figures as a row. Pure."""

import itertools
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from trainctl.protocol import messages
from trainctl.protocol.batch.cost import HOUR_SECONDS
from trainctl.protocol.config import run_file
from trainctl.protocol.config.run_tables import CheckpointTable, EvaluateTable, NodeTable, RunFile, SamplesTable
from trainctl.protocol.errors import InvalidInputError
from trainctl.tui.report.document import ReportSection, ReportTable
from trainctl.tui.text.formatting import NA, duration, gigabytes, loss, money, percent, rate

LEAST_STEPS: Final = 3
MOST_SETTINGS: Final = 64
ORPHAN_SECONDS: Final = 20.0
"""Time after which a trainer ends whose agent was killed together with this program."""
WARMING_PART: Final = 0.2
"""Part of the steps, at the beginning, that doesn't count: caches and clocks are cold."""
_QUIET: Final = ("micro-batch", "replays", "out-of-memory", "spike", "divergence", "plateau", "early-stop")
"""Policies that would change what is measured, or end it."""


class BenchRow(msgspec.Struct, frozen=True, kw_only=True):
    """One setting, measured; None: not known."""

    settings: dict[str, str]
    problem: str = ""  # why it couldn't be measured; empty: it was
    note: str = ""  # what makes its figures differ from those of its settings
    steps: int = 0  # that count
    tokens_per_second: float | None = None
    samples_per_second: float | None = None
    step_seconds: float | None = None
    utilization: float | None = None  # part of the time that the device was busy; of a CPU, of all its cores
    mfu: float | None = None  # part of the datasheet's peak, for NVIDIA devices and bfloat16
    peak_bytes: float | None = None
    steps_of_run: int = 0  # of the run file with these settings; 0: not known
    seconds_to_end: float | None = None  # of all of them
    cost: float | None = None  # of that time
    against_first: float | None = None  # tokens per second relative to the first row's


def grid(words: Sequence[str]) -> list[dict[str, str]]:
    """Return all combinations of the settings in `KEY=VALUE,VALUE` words, the last one's values changing fastest. One
    empty combination without words. Raises InvalidInputError."""
    values: dict[str, list[str]] = {}
    for word in words:
        key, equals, text = word.partition("=")
        chosen = [value.strip() for value in text.split(",")]
        if not key or not equals or not all(chosen):
            raise InvalidInputError("--over", f"{word!r} must be written as KEY=VALUE,VALUE, such as batch.micro=1,2,4")
        if key in values:
            raise InvalidInputError("--over", f"{key} is given twice: name all its values in one --over")
        values[key] = chosen
    rows = [dict(zip(values, row, strict=True)) for row in itertools.product(*values.values())]
    if len(rows) > MOST_SETTINGS:
        raise InvalidInputError("--over", f"{len(rows)} combinations; give at most {MOST_SETTINGS}")
    return rows


def bench_config(
    config: RunFile, node: str, steps: int, compared: Collection[str] = (), caches: str | None = None
) -> RunFile:
    """Return a run file's short run on one node: it trains so many steps and does nothing else. Settings that are
    `compared` win over the node's own ones. `caches`: the folder of token caches where the node sets none. Raises
    InvalidInputError."""
    table = _without_own(config.nodes.get(node, NodeTable()), compared, node)
    table = msgspec.structs.replace(table, share=None, interface="", cache_path=table.cache_path or caches)
    policy = msgspec.to_builtins(config.policy) | {name: {"mode": "off"} for name in _QUIET}
    optimizer = msgspec.structs.replace(config.optimizer, schedule="constant", warmup_steps=0, warmup_ratio=0.0)
    changed = msgspec.structs.replace(
        config,
        optimizer=optimizer,
        nodes={node: table},
        evaluate=EvaluateTable(),
        run=msgspec.structs.replace(config.run, steps=steps, epochs=0.0, orphan_seconds=ORPHAN_SECONDS),
        checkpoint=CheckpointTable(at_end=False),
        samples=SamplesTable(),
    )
    return run_file.parse(run_file.to_dict(changed) | {"policy": policy})


def _without_own(table: NodeTable, compared: Collection[str], node: str) -> NodeTable:
    """Return the node's table without fields that would win over compared settings, such as `micro` over
    `batch.micro`."""
    common = [key for key in compared if not key.startswith("nodes.")]
    names = {name for key in common for name in (key.rpartition(".")[2], key.replace(".", "_"))}
    own = {field.name for field in msgspec.structs.fields(NodeTable) if field.default is None and field.name in names}
    return msgspec.structs.replace(table, **{name: None for name in own if f"nodes.{node}.{name}" not in compared})


def measured_row(
    settings: Mapping[str, str],
    steps: Sequence[messages.StepCommitted],
    parts: Iterable[messages.RankStep],
    readings: Iterable[messages.HostReading],
    device: str | None,
) -> BenchRow:
    """Return the figures of a run's committed steps, without the first ones and those that compiled. `device`: of its
    rank, as it says it."""
    parts = [*parts]
    compiled = {part.step for part in parts if part.values.get("compile_seconds")}
    first = steps[0].step + max(1, round(WARMING_PART * len(steps))) if steps else 0
    steady = [step for step in steps if step.step >= first and step.step not in compiled and step.step_seconds > 0]
    seconds = sum(step.step_seconds for step in steady)
    if not steady:
        return BenchRow(settings=dict(settings), problem="no step without compiling: give more --steps")
    numbers = {step.step for step in steady}
    counted = [part for part in parts if part.step in numbers]
    peaks = [peak for part in parts if (peak := messages.peak_bytes(part.values)) is not None]
    mfus = [part.values["mfu"] for part in counted if "mfu" in part.values]
    return BenchRow(
        settings=dict(settings),
        steps=len(steady),
        note=_note(parts),
        tokens_per_second=sum(step.tokens or 0 for step in steady) / seconds,
        samples_per_second=sum(step.samples or 0 for step in steady) / seconds,
        step_seconds=seconds / len(steady),
        utilization=_utilization(readings, device),
        mfu=statistics.fmean(mfus) if mfus else None,
        peak_bytes=max(peaks, default=None),
    )


def _note(parts: Sequence[messages.RankStep]) -> str:
    halved = min((part.micro_batch or 0 for part in parts if part.replays), default=0)
    return f"ran out of memory: passes of {halved}" if halved else ""


def _utilization(readings: Iterable[messages.HostReading], device: str | None) -> float | None:
    """Return the mean use of the rank's device, by the machine's readings while it trained."""
    percents = []
    for reading in readings:
        gpu = reading.gpu_of(device)
        used = reading.cpu_percent if (device or "").startswith("cpu") else gpu.utilization_percent if gpu else None
        percents += [used] if used is not None else []
    return statistics.fmean(percents) / 100 if percents else None


def compared(rows: Sequence[BenchRow], steps: Sequence[int], price_per_hour: float | None) -> list[BenchRow]:
    """Return the rows with the time and cost of their whole runs, of so many steps each, and each beside the first
    that was measured."""
    first = next((row.tokens_per_second for row in rows if row.tokens_per_second), None)
    complete = []
    for row, whole in zip(rows, steps, strict=True):
        seconds = row.step_seconds * whole if row.step_seconds is not None and whole else None
        cost = seconds * price_per_hour / HOUR_SECONDS if seconds is not None and price_per_hour is not None else None
        ratio = row.tokens_per_second / first if row.tokens_per_second and first else None
        complete.append(
            msgspec.structs.replace(row, steps_of_run=whole, seconds_to_end=seconds, cost=cost, against_first=ratio)
        )
    return complete


def header(rows: Sequence[BenchRow], unit: str) -> tuple[str, ...]:
    """Return the headings: one for each setting, then the figures'."""
    return (*rows[0].settings, "TOKENS/S", f"{unit.upper()}/S", "USED", "PEAK GB", "TO THE END", "COST", "X", "")


def cells(row: BenchRow, currency: str) -> tuple[str, ...]:
    """Return a row of the table; one that failed says why in its last cell."""
    ratio = NA if row.against_first is None else f"{row.against_first:.2f}"
    return (
        *row.settings.values(),
        rate(row.tokens_per_second),
        loss(row.samples_per_second),
        percent(row.utilization),
        gigabytes(row.peak_bytes),
        duration(row.seconds_to_end),
        money(row.cost, currency),
        ratio,
        row.problem or row.note,
    )


class SavedBench(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a table printed by `--json` that a report takes."""

    node: str
    currency: str
    unit: str
    rows: tuple[BenchRow, ...]


def read_saved(file: Path) -> SavedBench:
    """Read a table that `trainctl bench --json` printed into a file. Raises InvalidInputError."""
    try:
        saved = msgspec.json.decode(file.read_bytes(), type=SavedBench)
    except OSError as error:
        raise InvalidInputError("--bench", f"{file}: {error.strerror or error}") from None
    except msgspec.MsgspecError as error:
        problem = f"{file} isn't what trainctl bench --json prints: {error}; run it again and keep its output"
        raise InvalidInputError("--bench", problem) from None
    if not saved.rows:
        raise InvalidInputError("--bench", f"{file} has no rows: run trainctl bench --json again")
    return saved


def section(saved: SavedBench) -> ReportSection:
    """Return the table as a section of a report."""
    head = header(saved.rows, saved.unit)
    rows = tuple(cells(row, saved.currency) for row in saved.rows)
    right = tuple(numeric(head, len(saved.rows[0].settings)))
    return ReportSection("Settings compared", (ReportTable(head, rows, f"Short real runs on {saved.node}", right),))


def numeric(head: Sequence[str], settings: int) -> list[int]:
    """Return the columns of figures, which are right-aligned, after so many of settings."""
    return [column for column, name in enumerate(head) if column >= settings and name and " " not in name]


def fields(rows: Sequence[BenchRow], node: str, currency: str, unit: str) -> dict[str, Any]:
    """Return what `--json` prints."""
    return {
        "node": node,
        "currency": currency,
        "unit": unit,
        "rows": [{**msgspec.to_builtins(row), "ok": not row.problem} for row in rows],
    }
