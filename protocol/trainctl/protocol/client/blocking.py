"""The same client for scripts without an event loop.

with BlockingClient() as client:
    print(client.send("checkpoint", {}).step)
"""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from trainctl.protocol.client.client import DEFAULT_TIMEOUT_SECONDS, Client, Connection
from trainctl.protocol.messages import CommandReply, Heartbeat, Live, Snapshot
from trainctl.protocol.security.keyring import Keyring

T = TypeVar("T")
P = ParamSpec("P")


def _blocking(
    ask: Callable[Concatenate[Client, P], Coroutine[Any, Any, T]],
) -> "Callable[Concatenate[BlockingClient, P], T]":
    """A method of `Client` that is waited for."""

    @functools.wraps(ask)
    def wait(self: "BlockingClient", /, *args: P.args, **options: P.kwargs) -> T:
        return self._run(ask(self._client, *args, **options))

    return wait


class BlockingClient:
    """`Client` driven by an event loop of its own, which runs only inside the calls. Belongs to one thread."""

    def __init__(
        self, address: str | None = None, *, by: str | None = None, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        keys: Keyring | None = None,
    ) -> None:  # fmt: skip
        """Take the arguments of `Client`."""
        self._client = Client(address, by=by, timeout_seconds=timeout_seconds, keys=keys)

    def __enter__(self) -> Self:
        self._runner = asyncio.Runner()
        with contextlib.ExitStack() as undo:
            undo.callback(self._runner.close)
            self._run(self._client.__aenter__())
            undo.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._run(self._client.__aexit__(*error))
        self._runner.close()

    snapshot = _blocking(Client.snapshot)
    history = _blocking(Client.history)
    runs = _blocking(Client.runs)
    works = _blocking(Client.works)
    events = _blocking(Client.events)
    steps = _blocking(Client.steps)
    hosts = _blocking(Client.hosts)
    samples = _blocking(Client.samples)
    traces = _blocking(Client.traces)
    trace_part = _blocking(Client.trace_part)
    pairs = _blocking(Client.pairs)
    policies = _blocking(Client.policies)
    diagnosis = _blocking(Client.diagnosis)
    log = _blocking(Client.log)
    facts = _blocking(Client.facts)
    digests = _blocking(Client.digests)
    disk = _blocking(Client.disk)
    audit = _blocking(Client.audit)
    attach_run = _blocking(Client.attach_run)
    run_steps = _blocking(Client.run_steps)
    end_run = _blocking(Client.end_run)

    def send(self, verb: str, args: dict[str, Any], **options: Any) -> CommandReply:
        """Send a command as `Client.send` does and return the last reply. Raises ExpiredError, UnreachableError,
        RefusedError."""
        return self._run(self._client.send(verb, args, **options))

    def command(self, verb: str, args: dict[str, Any], **options: Any) -> Iterator[CommandReply]:
        """Send a command and yield its replies, as `Client.command` does."""
        return self._iterate(self._client.command(verb, args, **options))

    def attach(self, columns: int = 120, run: str | None = None) -> Iterator[Snapshot | Live | Heartbeat | Connection]:
        """Yield a snapshot and the live messages after it, as `Client.attach` does."""
        return self._iterate(self._client.attach(columns, run))

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
