"""The same client for scripts without an event loop.

with BlockingClient("tcp://127.0.0.1:7474") as client:
    print(client.send("checkpoint", {}).step)
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from trainctl.protocol import messages as m
from trainctl.protocol.client.client import DEFAULT_TIMEOUT_SECONDS, Client, Connection
from trainctl.protocol.security.keyring import Keyring

T = TypeVar("T")


class BlockingClient:
    """`Client` driven by an event loop of its own, which runs only inside the calls. Belongs to one thread."""

    def __init__(
        self, address: str, *, by: str | None = None, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        keys: Keyring | None = None,
    ) -> None:  # fmt: skip
        """As `Client`."""
        self._client = Client(address, by=by, timeout_seconds=timeout_seconds, keys=keys)

    def __enter__(self) -> Self:
        self._runner = asyncio.Runner()
        try:
            self._run(self._client.__aenter__())
        except BaseException:
            self._runner.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run(self._client.__aexit__(kind, error, trace))
        self._runner.close()

    def snapshot(self, columns: int = 120, run: str | None = None) -> m.Snapshot:
        return self._run(self._client.snapshot(columns, run))

    def history(
        self, run: str, metrics: tuple[str, ...], first_step: int = 0, last_step: int | None = None, columns: int = 120
    ) -> m.History:
        return self._run(self._client.history(run, metrics, first_step, last_step, columns))

    def runs(self) -> m.Runs:
        return self._run(self._client.runs())

    def events(self, run: str | None = None, after_id: int = 0, limit: int = 200, newest: bool = False) -> m.Events:
        return self._run(self._client.events(run, after_id, limit, newest))

    def steps(self, run: str | None = None, after_step: int = 0, limit: int = 500) -> m.Steps:
        return self._run(self._client.steps(run, after_step, limit))

    def log(
        self, run: str | None = None, rank: int = 0, offset_bytes: int = -65536, limit_bytes: int = 65536
    ) -> m.LogPart:
        return self._run(self._client.log(run, rank, offset_bytes, limit_bytes))

    def facts(self) -> m.Facts:
        return self._run(self._client.facts())

    def digests(self, what: Literal["model", "data"], path: str) -> m.Digests:
        return self._run(self._client.digests(what, path))

    def audit(self, limit: int = 100) -> m.Audit:
        return self._run(self._client.audit(limit))

    def send(self, verb: str, args: dict[str, Any], **options: Any) -> m.CommandReply:
        """As `Client.send`: the last reply; raises ExpiredError, UnreachableError, RefusedError."""
        return self._run(self._client.send(verb, args, **options))

    def command(self, verb: str, args: dict[str, Any], **options: Any) -> Iterator[m.CommandReply]:
        """As `Client.command`."""
        return self._iterate(self._client.command(verb, args, **options))

    def attach(self, columns: int = 120) -> Iterator[m.Snapshot | m.Live | m.Heartbeat | Connection]:
        """As `Client.attach`."""
        return self._iterate(self._client.attach(columns))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def _iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        try:
            while True:
                try:
                    yield self._run(_next(items))
                except StopAsyncIteration:
                    return
        finally:
            self._run(_close(items))


async def _next(items: AsyncIterator[T]) -> T:
    return await anext(items)


async def _close(items: Any) -> None:
    await items.aclose()
