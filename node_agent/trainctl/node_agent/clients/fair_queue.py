"""A fair queue of requests: those in progress and those that wait, for each client and for all; pure."""

from collections import Counter, deque
from typing import Generic, TypeVar

R = TypeVar("R")


class FairQueue(Generic[R]):
    """Lets few of each client's through at a time, that no client's flood piles up in memory or is in others' way."""

    def __init__(self, at_once: int, most_of_one: int, most: int) -> None:
        """`at_once`: of one client under way; `most_of_one` and `most`, of one and of all, count what waits too."""
        self._at_once, self._most_of_one, self._most = at_once, most_of_one, most
        self._waiting: dict[bytes, deque[R]] = {}
        self._begun: Counter[bytes] = Counter()
        self._all = 0

    def enter(self, client: bytes, request: R) -> bool:
        """Whether there is room for it; then it waits for its turn."""
        line = self._waiting.get(client, ())
        if len(line) + self._begun[client] >= self._most_of_one or self._all >= self._most:
            return False
        self._waiting.setdefault(client, deque()).append(request)
        self._all += 1
        return True

    def begin(self, client: bytes) -> R | None:
        """The request of this client's that is to be begun now, the oldest, if any; it must `leave` when it is over."""
        line = self._waiting.get(client)
        if line is None or self._begun[client] >= self._at_once:
            return None
        request = line.popleft()
        if not line:
            del self._waiting[client]
        self._begun[client] += 1
        return request

    def leave(self, client: bytes) -> None:
        self._all -= 1
        self._begun[client] -= 1
        if self._begun[client] <= 0:
            del self._begun[client]
