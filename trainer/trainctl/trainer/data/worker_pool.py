"""Chunks tokenized by several processes at once, their results in the chunks' order.

A worker ends when its pipe closes, so none outlives this process.
"""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from trainctl.protocol.errors import InvalidInputError, TrainctlError
from trainctl.trainer.common.errors import first_line
from trainctl.trainer.data.chunk_tokens import Recipe, SampleTokens
from trainctl.trainer.data.chunks import Chunk, TextTokens
from trainctl.trainer.data.row_tokens import import_tokenizers

Result = tuple[TextTokens | SampleTokens, int]
"""What a chunk tokenizes to, and the bytes of its source."""
_AHEAD = 4
"""Chunks a worker may be ahead of the slowest one."""


class _Refusal(NamedTuple):
    """An InvalidInputError on its way from a worker."""

    where: str
    problem: str


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def tokenized(recipe: Recipe, chunks: Iterable[Chunk], workers: int) -> Iterator[Result]:
    """By so many processes; 0: by this one. Raises InvalidInputError for the first chunk that can't be tokenized."""
    if workers:
        yield from _by_workers(recipe, chunks, workers)
        return
    encode = recipe.encoder()
    for chunk in chunks:
        yield encode(chunk), chunk.size


def _by_workers(recipe: Recipe, chunks: Iterable[Chunk], count: int) -> Iterator[Result]:
    with contextlib.ExitStack() as workers:
        idle = [workers.enter_context(_worker(recipe)) for _ in range(count)]
        remaining = enumerate(chunks)
        busy: dict[Any, tuple[int, int]] = {}  # by pipe: the chunk's number and size
        done: dict[int, Any] = {}
        following = 0
        while True:
            while idle and len(done) < _AHEAD * count and (item := next(remaining, None)) is not None:
                pipe = idle.pop()
                _ask(pipe, item[1])
                busy[pipe] = item[0], item[1].size
            if not busy:
                return
            for pipe in wait([*busy]):
                number, size = busy.pop(pipe)
                done[number] = _answer(pipe), size
                idle.append(pipe)
            while following in done:
                result, size = done.pop(following)
                if isinstance(result, _Refusal):
                    raise InvalidInputError(result.where, result.problem)
                yield result, size
                following += 1


@contextlib.contextmanager
def _worker(recipe: Recipe) -> Iterator[Any]:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(theirs, recipe), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.terminate()
        process.join()


def _ask(pipe: Any, chunk: Chunk) -> None:
    try:
        pipe.send(chunk)
    except OSError:
        raise _ended() from None


def _answer(pipe: Any) -> Any:
    try:
        return pipe.recv()
    except (EOFError, OSError):
        raise _ended() from None


def _ended() -> TrainctlError:
    return TrainctlError("a tokenizing process ended unexpectedly; look in the kernel log for an out-of-memory kill")


def _serve(pipe: "Connection[Any, Chunk]", recipe: Recipe) -> None:
    """A worker's life: one answer for each chunk."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each core has a process already
    if recipe.kind != "samples":
        import_tokenizers(recipe.tokenizer)
    with contextlib.suppress(EOFError, OSError):
        encode = None
        while True:
            chunk = pipe.recv()
            try:
                encode = encode or recipe.encoder()
                answer: Any = encode(chunk)
            except InvalidInputError as error:
                answer = _Refusal(error.where, error.problem)
            except OSError as error:
                answer = _Refusal(str(error.filename or chunk.source), first_line(error))
            pipe.send(answer)
