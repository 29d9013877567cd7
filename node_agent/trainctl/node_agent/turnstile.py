"""How many requests are under way, for each client and for all: pure."""

from collections import Counter


class Turnstile:
    """Lets so many in at a time, that no client's flood piles up in memory or takes every place."""

    def __init__(self, most_of_one: int, most: int) -> None:
        self._most_of_one, self._most = most_of_one, most
        self._inside: Counter[bytes] = Counter()

    def enter(self, client: bytes) -> bool:
        """Whether one more of this client's may be begun; who is let in must `leave`."""
        if self._inside[client] >= self._most_of_one or self._inside.total() >= self._most:
            return False
        self._inside[client] += 1
        return True

    def leave(self, client: bytes) -> None:
        self._inside[client] -= 1
        if self._inside[client] <= 0:
            del self._inside[client]
