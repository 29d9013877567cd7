"""`trainctl score`: sends the rows of a file to the agent that leads the work, and writes the results in row order."""

import asyncio
import codecs
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Concatenate, ParamSpec

import msgspec

from trainctl.protocol.client.client import Client
from trainctl.protocol.config import validation_errors
from trainctl.protocol.errors import InvalidInputError, RefusedError, TrainctlError, UnreachableError
from trainctl.protocol.messages import (
    AnswerOptions,
    EndWork,
    OpenWork,
    Request,
    WorkResultsRequest,
    WorkRows,
    WorkStatus,
    WorkView,
)
from trainctl.protocol.messages.requests import ROWS_BYTES
from trainctl.protocol.wire.codec import printable

ROW_BYTES = 512 * 1024
"""Largest row, in bytes."""
FILE_CHARACTERS = 200
"""Longest file name that is sent to the agent."""
POLL_SECONDS = 0.3
"""Time between requests for results while there are none."""
PATIENCE_SECONDS = 60.0
"""Time for which an unreachable agent is asked again: its service restarts it."""
CANCEL_SECONDS = 5.0
"""Time that the agent has to confirm a cancellation."""
P = ParamSpec("P")


@dataclass(frozen=True)
class RowFile:
    """A JSONL file whose rows have been checked."""

    path: Path
    rows: int
    size_bytes: int  # of all rows, with a line feed after each
    digest: str

    def lines(self) -> Iterator[bytes]:
        """Yield the rows as they are sent; blank lines and a byte order mark are left out."""
        with self.path.open("rb") as file:
            if file.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:
                file.seek(0)
            yield from (line.strip() + b"\n" for line in file if line.strip())


@dataclass(frozen=True)
class ScoreRequest:
    """The work on each row, and the checkpoint that it is done with."""

    work: str
    run: str
    step: int | None
    best: bool
    nodes: tuple[str, ...]
    options: AnswerOptions | None = None  # for answers; None: log-probabilities


def read_file(path: Path, *, prompts: bool = False) -> RowFile:
    """Check every row; `prompts`: for answers. Raises InvalidInputError naming the file and the first bad line."""
    if path.suffix == ".parquet":
        raise InvalidInputError(str(path), "must be a JSONL file")
    if not path.is_file():
        raise InvalidInputError(str(path), "no such file")
    command = [sys.executable, "-m", "trainctl.trainer.data.rows", str(path)]
    command += ["--prompts"] if prompts else []
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    if checked.returncode:
        said = checked.stderr.strip().splitlines()
        problem = said[-1] if said else f"the check exited with status {checked.returncode}"
        raise InvalidInputError(str(path), problem.removeprefix(f"{path}: "))
    digest, rows, size = hashlib.sha256(), 0, 0
    for line in RowFile(path, 0, 0, "").lines():
        rows += 1
        if len(line) > ROW_BYTES:
            raise InvalidInputError(str(path), f"row {rows:,} has {len(line):,} bytes; at most {ROW_BYTES:,}")
        digest.update(line)
        size += len(line)
    if not rows:
        raise InvalidInputError(str(path), "has no rows")
    return RowFile(path, rows, size, digest.hexdigest())


def answer_options(given: Mapping[str, int | float | None], *, answers: bool) -> AnswerOptions | None:
    """Return the options of answers, None for log-probabilities. Raises InvalidInputError naming an option that is out
    of range, or needs --answers."""
    values = {name: value for name, value in given.items() if value is not None}
    if not answers:
        if values:
            raise InvalidInputError(_option(next(iter(values))), "needs --answers")
        return None
    for name, problem in validation_errors.found(values, AnswerOptions):
        raise InvalidInputError(_option(name), problem)
    return msgspec.convert(values, AnswerOptions)


def lacking(failed: int, rows: int) -> str:
    """Return what to say about rows that have an error in place of a result."""
    has = "has no result; its line has an error" if failed == 1 else "have no result; their lines have an error"
    return f"{failed:,} of {rows:,} rows {has}"


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


class Scoring:
    """One call of `trainctl score`."""

    def __init__(
        self, client: Client, file: RowFile, wanted: ScoreRequest, stream: IO[bytes], show: Callable[[WorkView], None]
    ) -> None:
        """`show` is given the state of the work whenever it was asked for."""
        self._client, self._file, self._wanted, self._stream, self._show = client, file, wanted, stream, show

    async def run(self) -> int:
        """Score all rows; gives how many have an error in place of a result. Raises TrainctlError. When it is
        interrupted, the work is cancelled on all nodes."""
        try:
            await self._send(await self._open())
            failed = await self._write_results()
        except UnreachableError as error:
            raise UnreachableError(f"{error}; {self._how_to_resume()}") from None
        except asyncio.CancelledError:
            with contextlib.suppress(TrainctlError, TimeoutError):
                async with asyncio.timeout(CANCEL_SECONDS):
                    await self._end()
            raise
        with contextlib.suppress(TrainctlError):  # the agent removes it later
            await self._end()
        return failed

    async def _open(self) -> WorkView:
        wanted, file = self._wanted, self._file
        status = await self._ask(
            OpenWork,
            work=wanted.work,
            kind="answers" if wanted.options else "log-probabilities",
            run=wanted.run,
            rows=file.rows,
            size_bytes=file.size_bytes,
            digest=file.digest,
            step=wanted.step,
            best=wanted.best,
            nodes=wanted.nodes,
            options=wanted.options or AnswerOptions(),
            file=file.path.name.encode("utf-8", "replace").decode()[:FILE_CHARACTERS],
        )
        return status.view

    async def _send(self, view: WorkView) -> None:
        """The rows, from the first byte that the agent lacks."""
        self._show(view)
        offset, lack, part = 0, view.received_bytes, b""
        for line in self._file.lines():
            part += line
            while len(part) > ROWS_BYTES:
                offset, part = await self._send_part(offset, part[:ROWS_BYTES], lack), part[ROWS_BYTES:]
        await self._send_part(offset, part, lack)

    async def _send_part(self, offset: int, part: bytes, lack: int) -> int:
        start = max(offset, lack)
        if data := part[start - offset :]:
            await self._ask(WorkRows, work=self._wanted.work, offset_bytes=start, data=data)
        return offset + len(part)

    async def _write_results(self) -> int:
        lines, written, failed = enumerate(self._file.lines(), 1), 0, 0
        while written < self._file.rows:
            status = await self._ask(WorkResultsRequest, work=self._wanted.work, after_row=written)
            for result in status.results:
                number, line = next(lines)
                made = _merged(number, line, json.loads(result))
                failed += "error" in made
                text = printable(json.dumps(made, ensure_ascii=False))
                self._stream.write(text.encode("utf-8", "replace") + b"\n")
            written += len(status.results)
            self._show(status.view)
            if not status.results:
                if status.view.state in ("failed", "cancelled"):
                    raise RefusedError(f"scoring {status.view.state}: {status.view.reason or 'by another client'}")
                self._stream.flush()
                await asyncio.sleep(POLL_SECONDS)
        self._stream.flush()
        return failed

    async def _end(self) -> None:
        await self._client.ask(EndWork, self._wanted.work)

    async def _ask(
        self, request: Callable[Concatenate[str, P], Request[WorkStatus]], /, *args: P.args, **fields: P.kwargs
    ) -> WorkStatus:
        """Return the reply. An agent that restarts is asked again for a while."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                return await self._client.ask(request, *args, **fields)
            except UnreachableError:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(POLL_SECONDS)

    def _how_to_resume(self) -> str:
        return f"to continue, repeat the command with --resume {self._wanted.work}"


def _merged(number: int, line: bytes, result: dict[str, Any]) -> dict[str, Any]:
    """Return a line of the output: the row's number, its own ID if it has one, and the result."""
    own = json.loads(line).get("id")
    return {"row": number, **({"id": own} if own is not None else {}), **result}


def new_id() -> str:
    """Return an ID for new work."""
    return os.urandom(6).hex()


def progress_line(view: WorkView) -> str:
    """Rows done of all, and each node's speed."""
    if view.state == "receiving":
        return f"sending rows: {view.received_bytes:,} bytes"
    nodes = [
        f"{node.node} {node.rows_per_second:,.1f} rows/s"
        if node.state == "working" and node.rows_per_second is not None
        else f"{node.node} {node.state}"
        for node in view.nodes
    ]
    return f"{view.answered:,} of {view.rows:,} rows ({view.answered / view.rows:.0%}): {', '.join(nodes)}"
