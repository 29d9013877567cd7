"""Which connection each identity speaks over, so that an answer goes to the one that asked or to nobody: pure.

A client may claim any identity as it connects, be it one that another had before. So nobody is answered by identity
alone, but as a caller: an identity and the number of the connection over which it spoke.
"""

import dataclasses

IDENTITY_BYTES = 5
"""Of an identity that the socket gave a connection: a zero and a number, which grows."""
NUMBER_BYTES = 8
_NOBODY = bytes(NUMBER_BYTES)


@dataclasses.dataclass
class _Connection:
    number: int  # from 1, never used again
    identity: bytes = b""  # empty: it hasn't spoken yet
    public: str = ""


class Callers:
    """Belongs to one socket. Connections are told apart by their descriptors, which the system uses again."""

    def __init__(self) -> None:
        self._open: dict[int, _Connection] = {}  # by descriptor
        self._speakers: dict[bytes, _Connection] = {}  # by identity
        self._last_number = 0

    def opened(self, descriptor: int) -> None:
        self.closed(descriptor)
        self._last_number += 1
        self._open[descriptor] = _Connection(self._last_number)

    def closed(self, descriptor: int) -> None:
        connection = self._open.pop(descriptor, None)
        if connection is not None:
            self._speakers.pop(connection.identity, None)

    def speak(self, identity: bytes, descriptor: int, public: str) -> bytes | None:
        """The caller that a message is of, None for one that chose its identity. What still comes from a connection
        that has ended is of a caller that isn't answered."""
        if len(identity) != IDENTITY_BYTES or identity[:1] != b"\0":
            return None
        connection = self._open.get(descriptor)
        if connection is None or _is_older(identity, connection.identity):
            return identity + _NOBODY
        if self._speakers.get(identity, connection) is not connection:
            return None
        self._speakers.pop(connection.identity, None)
        connection.identity, connection.public = identity, public
        self._speakers[identity] = connection
        return identity + connection.number.to_bytes(NUMBER_BYTES)

    def find(self, caller: bytes) -> tuple[bytes, str] | None:
        """Identity and key of a caller whose connection is open still."""
        identity, number = caller[:-NUMBER_BYTES], int.from_bytes(caller[-NUMBER_BYTES:])
        connection = self._speakers.get(identity)
        return (identity, connection.public) if connection is not None and connection.number == number else None


def _is_older(identity: bytes, than: bytes) -> bool:
    """Of the one that had a descriptor before: the numbers of identities grow, and go round."""
    if not than:
        return False
    ahead = (int.from_bytes(than[1:]) - int.from_bytes(identity[1:])) % 2**32
    return 0 < ahead < 2**31
