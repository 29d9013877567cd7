"""A fair queue of requests: limits for each connection, each key and all, and turns between them; pure."""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

R = TypeVar("R")


class Asker(NamedTuple):
    """Who sent a request."""

    caller: bytes  # its connection, by which it is answered
    key: str = ""  # empty: the agent uses no keys, and every connection is its user's
    is_viewer: bool = False
    descriptor: int = -1  # of the connection; -1: not known


class Limits(NamedTuple):
    """Limits on the requests under way at a time, and on how much is held with those that wait.

    One key may have half of what all may hold, and all viewers together three quarters, so that neither leaves an
    operator without room.
    """

    at_once: int
    at_once_of_viewers: int
    at_once_of_caller: int
    most: int
    most_of_caller: int
    most_bytes: int


class FairQueue(Generic[R]):
    """Operators' requests come before viewers'; among them keys take turns, and among a key's its connections."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._waiting: dict[bool, dict[str, dict[bytes, deque[tuple[Asker, R, int]]]]] = {False: {}, True: {}}
        self._under_way: Counter[Any] = Counter()
        self._held: Counter[Any] = Counter()
        self._bytes: Counter[Any] = Counter()

    def enter(self, asker: Asker, request: R, size: int) -> bool:
        """Take a request of so many bytes, to wait for its turn; return False if there is no room."""
        limits, shares = self._limits, {"all": 1.0, "viewers": 0.75, asker.key: 0.5}
        if self._held[asker.caller] >= limits.most_of_caller:
            return False
        for holder in _holders(asker):
            share = shares.get(holder, 1.0)
            if self._held[holder] >= share * limits.most or self._bytes[holder] + size > share * limits.most_bytes:
                return False
        self._count(asker, 1, size)
        lines = self._waiting[asker.is_viewer].setdefault(asker.key, {})
        lines.setdefault(asker.caller, deque()).append((asker, request, size))
        return True

    @property
    def is_waiting(self) -> bool:
        """Return whether any request waits for its turn."""
        return any(self._waiting.values())

    def begin(self, may: Callable[[Asker], bool]) -> tuple[Asker, R, int] | None:
        """The next request and its size, if one may begin now, of an asker that `may`; it must `leave` when it is
        over."""
        limits, at_once = self._limits, self._under_way
        if at_once["all"] >= limits.at_once:
            return None
        for is_viewer, keys in self._waiting.items():
            if is_viewer and at_once["viewers"] >= limits.at_once_of_viewers:
                break
            for key, lines in keys.items():
                for caller, line in lines.items():
                    if at_once[caller] < limits.at_once_of_caller and may(line[0][0]):
                        return self._take(keys, key, caller, line)
        return None

    def _take(
        self, keys: dict[str, dict[bytes, Any]], key: str, caller: bytes, line: deque[tuple[Asker, R, int]]
    ) -> tuple[Asker, R, int]:
        """Its key and its connection go to the end of their rows."""
        taken = line.popleft()
        lines = keys.pop(key)
        del lines[caller]
        if line:
            lines[caller] = line
        if lines:
            keys[key] = lines
        for holder in _holders(taken[0]):
            self._under_way[holder] += 1
        return taken

    def leave(self, asker: Asker, size: int) -> None:
        """A request that was begun is over."""
        for holder in _holders(asker):
            self._under_way[holder] -= 1
        self._count(asker, -1, -size)
        for counts in (self._under_way, self._held, self._bytes):
            for holder in _holders(asker):
                if not counts[holder]:
                    del counts[holder]

    def _count(self, asker: Asker, requests: int, size: int) -> None:
        for holder in _holders(asker):
            self._held[holder] += requests
            self._bytes[holder] += size


def _holders(asker: Asker) -> Iterator[Any]:
    """Whose share a request is of. A key is 40 characters, or empty; a caller is bytes."""
    yield from ("all", asker.key, asker.caller)
    if asker.is_viewer:
        yield "viewers"
