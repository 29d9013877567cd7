"""What the screens need of a client, so that a recorded one can stand in for the network."""

from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Protocol, Self

from trainctl.protocol import messages as m
from trainctl.protocol.client import Connection


class Source(Protocol):
    """The part of `trainctl.protocol.client.Client` that the full-screen program uses; errors are that class's."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def attach(self, columns: int = 120) -> AsyncIterator[m.Snapshot | m.Live | m.Heartbeat | Connection]: ...

    def command(self, verb: str, args: dict[str, Any], **options: Any) -> AsyncIterator[m.CommandReply]: ...

    async def snapshot(self, columns: int = 120, run: str | None = None) -> m.Snapshot: ...

    async def history(
        self, run: str, metrics: tuple[str, ...], first_step: int = 0, last_step: int | None = None, columns: int = 120
    ) -> m.History: ...

    async def runs(self) -> m.Runs: ...

    async def events(
        self, run: str | None = None, after_id: int = 0, limit: int = 200, newest: bool = False
    ) -> m.Events: ...


Connect = Callable[[], Source]
