"""A blocking client for scripts without an event loop of their own, and for notebooks, which have one.

with BlockingClient() as client:
    print(client.send("checkpoint", {}).step)
"""

import asyncio
import contextlib
import functools
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from trainctl.protocol.client.client import DEFAULT_TIMEOUT_SECONDS, Attached, Client
from trainctl.protocol.errors import ClosedError
from trainctl.protocol.messages import CommandReply, Reply, Request
from trainctl.protocol.security.keyring import Keyring

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R", bound=Reply)


def _blocking(
    method: Callable[Concatenate[Client, P], Coroutine[Any, Any, T]],
) -> "Callable[Concatenate[BlockingClient, P], T]":
    @functools.wraps(method)
    def wait(self: "BlockingClient", /, *args: P.args, **options: P.kwargs) -> T:
        return self._run(method(self._client, *args, **options))

    return wait


class BlockingClient:
    """`Client` driven by an event loop in a thread of its own. Its calls wait; one thread at a time may make them."""

    def __init__(
        self,
        address: str | None = None,
        *,
        by: str | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        keys: Keyring | None = None,
    ) -> None:
        """Take the arguments of `Client`."""
        self._client = Client(address, by=by, timeout_seconds=timeout_seconds, keys=keys)
        self._loop: asyncio.AbstractEventLoop | None = None

    def connect(self) -> Self:
        """Open the connection, as `with` does, unless it is open. Raises what `Client.connect` raises."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="trainctl-client", daemon=True)
            self._thread.start()
            with contextlib.ExitStack() as undo:
                undo.callback(self.close)
                self._run(self._client.connect())
                undo.pop_all()
        return self

    def close(self) -> None:
        """Close the connection, if it is open, and end the thread. Requests without a reply stay without one."""
        if self._loop is None:
            return
        try:
            self._run(self._client.close())
            self._run(self._loop.shutdown_asyncgens())
        finally:
            loop, self._loop = self._loop, None
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join()
            loop.close()

    def __enter__(self) -> Self:
        return self.connect()

    def __exit__(self, *error: object) -> None:
        self.close()

    attach_run = _blocking(Client.attach_run)
    run_steps = _blocking(Client.run_steps)
    end_run = _blocking(Client.end_run)

    def ask(self, request: Callable[Concatenate[str, P], Request[R]], /, *args: P.args, **fields: P.kwargs) -> R:
        """Return the reply to a request, as `Client.ask` does: `ask(EventsRequest, run, newest=True)`."""
        return self._run(self._client.ask(request, *args, **fields))

    def send(self, verb: str, args: dict[str, Any], **options: Any) -> CommandReply:
        """Send a command as `Client.send` does and return the last reply. Raises ExpiredError, UnreachableError,
        RefusedError."""
        return self._run(self._client.send(verb, args, **options))

    def command(self, verb: str, args: dict[str, Any], **options: Any) -> Iterator[CommandReply]:
        """Send a command and yield its replies, as `Client.command` does."""
        return self._iterate(self._client.command(verb, args, **options))

    def attach(self, columns: int = 120, run: str | None = None) -> Iterator[Attached]:
        """Yield a snapshot and the live messages after it, as `Client.attach` does."""
        return self._iterate(self._client.attach(columns, run))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop is None:
            work.close()
            raise ClosedError(self._client.address)
        running = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return running.result()
        finally:
            running.cancel()  # where the wait was interrupted

    def _iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        async def next_item() -> T:
            return await anext(items)

        async def close() -> None:
            if isinstance(items, AsyncGenerator):
                await items.aclose()

        try:
            with contextlib.suppress(StopAsyncIteration):
                while True:
                    yield self._run(next_item())
        finally:
            with contextlib.suppress(ClosedError):  # closing the client has ended them
                self._run(close())
