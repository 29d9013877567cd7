"""Tests of what the command line prints, from messages alone: lines, tables, JSON, and the place a follower has come
to."""

import json
import random
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from tests.tui.support.recorded import FAILED_SCORING, NOW, SCORING, run_view, shrunk, snapshot
from tests.tui.support.scripted import SNAPSHOT
from tools.protocol_docs import examples

from trainctl.protocol import errors
from trainctl.protocol import messages as m
from trainctl.protocol.errors import InvalidInputError, RefusedError
from trainctl.protocol.messages.events import NoteWritten
from trainctl.protocol.record import log_format
from trainctl.protocol.record.log_format import write
from trainctl.tui.cli import logs, output, tables, watch

SHOWN: Any = examples.EXAMPLES["published by an agent"]
EXAMPLE: Any = examples.EXAMPLES["agent to client"]["snapshot"]
STEP, EVENT, VIEW = SHOWN["step-committed"], SHOWN["event"], SHOWN["run-view"]


def test_what_came_from_elsewhere_cannot_steer_the_terminal() -> None:
    hostile = msgspec.structs.replace(EVENT, data=NoteWritten("\x1b[2J\x07\nall\u202e is well"), by="\x1b]0;x\x07")
    line = tables.event_line(hostile)
    assert line.isprintable()
    assert output.log_text("a\x1b[31mb\r\x00c\td\n", raw=False) == "a[31mb\nc\td\n"
    assert output.log_text("a\x1b[31m\r", raw=True) == "a\x1b[31m\r"


def test_the_status_has_separate_work_while_it_is_in_progress() -> None:
    assert "1,200/5,000 rows 24%  ETA 20s" in tables.status_text(EXAMPLE, works=(SCORING,))
    assert "work " in tables.status_text(msgspec.structs.replace(EXAMPLE, run=None), works=(SCORING,))
    assert tables.status_text(EXAMPLE, works=(FAILED_SCORING,)) == tables.status_text(EXAMPLE)


def test_ranks_that_are_out_have_no_figures_but_since_when_and_why() -> None:
    view = shrunk(run_view(3))
    drained = msgspec.structs.replace(view.ranks[0], state="drained", share=0)
    shown = snapshot(msgspec.structs.replace(view, ranks=(drained, *view.ranks[1:])))
    rows = tables.status_text(shown).splitlines()[-3:]
    assert [row.split()[2:6] for row in rows] == [
        [state, "0", "0%", "n/a"] for state in ("drained", "failed", "rejoining")
    ]
    assert all(row.count("n/a") == 5 for row in rows)
    assert "says: CUDA out of memory" in rows[1]
    assert rows[2].endswith(f"since {tables.time_of_day(NOW - 4)}: has been silent for 5 s")
    assert rows[0].endswith(f"since {tables.time_of_day(drained.since_at)}")


def test_what_is_unknown_is_na_and_never_zero() -> None:
    table = tables.ranks_table(EXAMPLE.run.ranks, (), 24)
    assert table.splitlines()[1].count("n/a") == 4
    assert "n/a tok/s" in tables.step_line(msgspec.structs.replace(STEP, step_seconds=0.0))


def test_json_is_valid_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    output.emit_ok(loss=float("nan"), text="a\nb", step=STEP)
    line = capsys.readouterr().out
    assert line.count("\n") == 1
    assert json.loads(line, parse_constant=pytest.fail)["loss"] == "NaN"


def test_every_error_of_the_tree_has_a_code() -> None:
    kinds = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.TrainctlError)
    ]
    assert {*kinds} - {errors.TrainctlError} == {kind for kind, _ in output.ERROR_CODES}


def step(number: int, n: int = 4) -> m.StepCommitted:
    return msgspec.structs.replace(STEP, step=number, generation=m.Generation(1, n))


def event(number: int, run: str = STEP.run) -> m.Event:
    return msgspec.structs.replace(EVENT, id=number, run=run)


def test_nothing_is_shown_twice_but_what_is_done_again_in_a_later_generation_or_is_the_agent_s_own() -> None:
    place = watch.RunCursor(STEP.run)
    assert [place.passes(step(number)) for number in (1, 2, 2, 1, 3)] == [True, True, False, False, True]
    assert [place.passes(event(number)) for number in (1, 1, 2)] == [True, False, True]
    assert [place.passes(VIEW), place.passes(VIEW)] == [True, False]
    place = watch.RunCursor(STEP.run)
    assert [place.passes(item) for item in (step(5), step(4, 5), step(5, 5), step(5, 4))] == [True, True, True, False]
    assert [place.passes(item) for item in (event(9), event(1, ""), event(1, ""), event(1))] == [*[True] * 3, False]


def test_what_a_snapshot_holds_counts_as_shown() -> None:
    place = watch.RunCursor(STEP.run)
    place.skip_to(EXAMPLE)
    assert not place.passes(STEP)
    assert not place.passes(EVENT)
    assert place.passes(step(122))
    assert place.passes(event(18))


@pytest.mark.parametrize(
    ("offset", "asked", "size", "end"),
    [(0, 0, 10, 10), (0, 0, 0, 0), (0, 0, 2**20, logs.LOG_CHUNK_BYTES), (100, 100, 100, 100)],
)
def test_where_a_part_of_a_log_ends(offset: int, asked: int, size: int, end: int) -> None:
    part = m.LogPart(rid="", run=None, rank=0, offset_bytes=offset, size_bytes=size, text="\ufffd" * 4)
    assert logs.end_of(part, asked) == end


def test_a_status_names_the_straggler_and_tells_of_waits_only_where_all_have_reported_one_step() -> None:
    shown = snapshot(run_view(3))
    assert tables.status_text(shown).splitlines()[-1] == (
        "straggler  mlx-c: the others wait 92 ms for it in each step; +60 ms in backward"
    )
    ahead = (msgspec.structs.replace(shown.rank_steps[0], step=119), *shown.rank_steps[1:])
    run = msgspec.structs.replace(shown.run, straggler=None)
    text = tables.status_text(msgspec.structs.replace(shown, run=run, rank_steps=ahead))
    assert "straggler" not in text
    header, *rows = text.splitlines()[-4:]
    at = header.index("WAIT") + len("WAIT")
    assert [row[:at].split()[-1] for row in rows] == ["n/a"] * 3


class EmptyLog:
    """An agent whose third rank has written nothing."""

    async def ask(self, request: Any, *args: Any) -> m.Reply:
        return snapshot(run_view(3)) if request is m.SnapshotRequest else await self.read(*args[:3])

    async def read(self, run: str | None, rank: int, offset: int) -> m.LogPart:
        return m.LogPart(rid="r", run="demo", rank=rank, offset_bytes=0, size_bytes=0, text="")


@pytest.mark.parametrize("last", [None, 5])
async def test_an_empty_log_is_said_to_be_empty(capsys: pytest.CaptureFixture[str], last: int | None) -> None:
    client: Any = EmptyLog()
    assert await logs.show_logs(client, None, 2, last, follow=False, json=False) == 0
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "rank 2 on mlx-c has written nothing\n")


class ClusterLogs(EmptyLog):
    """An agent of the group of three, whose last rank's log can't be read."""

    texts: ClassVar[dict[int, str]] = {
        0: write(NOW - 9, "INFO", "ready") + "\n" + write(NOW - 2, "ERROR", "no space") + "\nOSError: 28\n",
        1: write(NOW - 5, "WARNING", "late") + "\n",
    }

    async def read(self, run: str | None, rank: int, offset: int) -> m.LogPart:
        if rank not in self.texts:
            raise RefusedError(f"rank: {rank} is on mlx-c: no answer")
        text = self.texts[rank]
        return m.LogPart(rid="r", run=run, rank=rank, offset_bytes=offset, size_bytes=len(text), text=text[offset:])


async def test_logs_of_all_nodes_are_merged_and_what_cannot_be_read_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    client: Any = ClusterLogs()
    assert await logs.show_merged(client, None, None, None, logs.query_of(None), follow=False, json=False) == 0
    said = capsys.readouterr()
    assert [line[20:] for line in said.out.splitlines()] == [
        "torch-a INFO    ready", "torch-b WARNING late", "torch-a ERROR   no space", "torch-a         OSError: 28",
    ]  # fmt: skip
    assert said.err == "mlx-c: rank: 2 is on mlx-c: no answer\n"
    wanted = logs.query_of("~l.te|space")
    assert await logs.show_merged(client, None, None, 1, wanted, follow=False, json=True) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [(line["node"], line["rank"], line["level"], line["text"]) for line in shown["lines"]] == [
        ("torch-a", 0, "ERROR", "no space")
    ]
    with pytest.raises(InvalidInputError, match="--grep: column 1"):
        logs.query_of("/l.te/")


async def test_logs_that_are_too_long_are_said_to_be_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    client: Any = ClusterLogs()
    monkeypatch.setattr(logs, "MOST_LINES", 3)
    assert await logs.show_merged(client, None, None, None, logs.query_of(None), follow=False, json=False) == 0
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == 3
    assert "only the newest 3 lines are kept" in said.err


class FileLog(EmptyLog):
    """An agent's answers about a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    async def ask(self, request: Any, run: str | None, rank: int, offset: int, limit: int) -> m.LogPart:
        with self.file.open("rb") as stream:
            start, end, size, text = log_format.read_part(stream, offset, limit)
        return m.LogPart(rid="r", run=run, rank=rank, offset_bytes=start, size_bytes=size, text=text, end_bytes=end)


async def test_a_log_of_long_characters_is_the_file_byte_by_byte(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    picked = random.Random(7)
    body = "".join(picked.choices("aé東🙂\n", k=400_000)).encode()[:1_000_000]
    body = body.decode("utf-8", "ignore").encode() + b"\xe6\x9d"  # a writer may stop within a character
    (tmp_path / "log").write_bytes(body)
    client: Any = FileLog(tmp_path / "log")
    whole = body[:-2]  # the rest of the last character is still to come
    await logs.show_logs(client, None, 0, None, follow=False, json=False)
    assert capfdbinary.readouterr().out == whole
    tail = await logs.log_tail(client, None, 0, 50_000)
    assert tail.text.encode() == b"".join(whole.splitlines(keepends=True)[-50_000:])
    assert (tail.offset_bytes, tail.end_bytes) == (len(whole) - len(tail.text.encode()), len(whole))
    for _ in range(200):
        offset, limit = picked.randrange(len(body)), picked.randrange(1, 20)
        part = await client.ask(m.LogRequest, None, 0, offset, limit)
        assert 0 <= part.offset_bytes - offset <= 3
        assert part.end_bytes > part.offset_bytes or part.end_bytes >= len(whole)
        assert "\ufffd" not in part.text or limit < 7 or part.end_bytes == len(body)


H200 = m.GpuReading("NVIDIA H200")
MIXED = "bfloat16, weights float32"
TORCH = m.Compute("bfloat16", attention="flash", weights="float32", versions=(("torch", "2.11.0"),))
MLX = m.Compute("float32", attention="mx.fast", weights="float32", versions=(("mlx", "0.30"),))


def host(node: str, *gpus: m.GpuReading) -> m.HostReading:
    return m.HostReading(
        node=node, read_at=0.0, cpu_percent=None, memory_used_bytes=None, memory_total_bytes=None, disk_free_bytes=None,
        gpus=gpus,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("device", "backend", "compute", "gpus", "cells"),
    [
        ("cuda:0", "torch", TORCH, (H200,), ["yes (CUDA)", "cuda:0", "torch 2.11.0", "flash", MIXED]),
        ("cpu", "torch", MLX, (H200,), ["no: NVIDIA H200 is idle", "cpu", "torch", "mx.fast", "float32"]),
        ("cpu", "torch", MLX, (), ["no: none here", "cpu", "torch", "mx.fast", "float32"]),
        ("gpu", "mlx", MLX, (), ["yes (Metal)", "gpu", "mlx 0.30", "mx.fast", "float32"]),
        ("mps", "torch", TORCH, (), ["yes (Metal)", "mps", "torch 2.11.0", "flash", MIXED]),
        (None, "torch", None, (), ["n/a", "n/a", "torch", "n/a", "n/a"]),
    ],
)  # fmt: skip
def test_each_rank_s_device_library_attention_and_precision_are_in_one_table(
    device: str | None, backend: str, compute: m.Compute | None, gpus: tuple[m.GpuReading, ...], cells: list[str]
) -> None:
    view = run_view()
    rank = msgspec.structs.replace(view.ranks[0], node="a", device=device, backend=backend, compute=compute)
    snapshot = msgspec.structs.replace(SNAPSHOT, run=msgspec.structs.replace(view, ranks=(rank,)))
    _, row = tables.devices_table(snapshot, {"a": host("a", *gpus)}).splitlines()
    assert [cell.strip() for cell in row.split("  ") if cell.strip()][1:6] == cells
