"""Frames that are nearly of this protocol, made from a seed out of its examples: flipped, cut, spliced, swollen.

The same seed makes the same frames, so that one that does harm is found again by its number.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import msgspec
from tools.protocol_docs import examples

from trainctl.protocol.wire import codec

HUGE_HEADERS = (b"\xdb", b"\xdd", b"\xdf", b"\xc6", b"\xc9")
"""Headers of a string, an array, a map, bytes and an extension, each followed by four bytes of its length."""
STRANGE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 7, 255, 2**31, 2**53 + 1, 2**63 - 1, 2**64 - 1, -(2**63), 0.0, -0.0, 1e308, 5e-324,
    float("nan"), float("inf"), float("-inf"), "", "x", "x" * 64, "x" * 5000, "\x00", "\x1b[2J", "é" * 40, "../../etc",
    "1e9", b"", b"\xff" * 9, b"\x00" * 70_000, [], [[]], [None] * 300, {}, {"type": "command"}, {"v": 1},
    msgpack.ExtType(5, b"x"), msgpack.Timestamp(1, 2), {str(key): 0 for key in range(300)},
)  # fmt: skip


class Mutator:
    """Endless frames like those of one conversation (a key of `examples.EXAMPLES`)."""

    def __init__(self, conversation: str, seed: int) -> None:
        self._chance = random.Random(f"{conversation} {seed}")
        messages = list(examples.EXAMPLES[conversation].values())
        self._frames = [codec.encode(message) for message in messages]
        self._plain = [msgspec.to_builtins(message) for message in messages]
        self._kinds: tuple[Callable[[], bytes], ...] = (
            self._flipped, self._flipped, self._cut, self._spliced, self._edited, self._retyped, self._retyped,
            self._swollen, self._nested, self._doubled, self._of_another_version, self._short_of_a_field, self._noise,
        )  # fmt: skip

    def frames(self, count: int) -> Iterator[bytes]:
        for _ in range(count):
            yield self.frame()

    def frame(self) -> bytes:
        return self._chance.choice(self._kinds)()

    def _flipped(self) -> bytes:
        frame = bytearray(self._chance.choice(self._frames))
        for _ in range(self._chance.choice((1, 1, 2, 8))):
            frame[self._chance.randrange(len(frame))] ^= 1 << self._chance.randrange(8)
        return bytes(frame)

    def _cut(self) -> bytes:
        frame = self._chance.choice(self._frames)
        return frame[: self._chance.randrange(len(frame))]

    def _spliced(self) -> bytes:
        one, other = self._chance.choice(self._frames), self._chance.choice(self._frames)
        return one[: self._chance.randrange(len(one))] + other[self._chance.randrange(len(other)) :]

    def _edited(self) -> bytes:
        """Some bytes are taken out, or others put in."""
        frame = self._chance.choice(self._frames)
        start, length = self._chance.randrange(len(frame)), self._chance.randrange(1, 9)
        if self._chance.random() < 0.5:
            return frame[:start] + frame[start + length :]
        return frame[:start] + self._chance.randbytes(length) + frame[start:]

    def _retyped(self) -> bytes:
        """One value, however deep, is another one."""
        return _packed(self._changed(self._chance.choice(self._plain)))

    def _changed(self, value: Any) -> Any:
        if isinstance(value, dict) and value and self._chance.random() < 0.9:
            key = self._chance.choice(list(value))
            return {**value, key: self._changed(value[key])}
        if isinstance(value, list | tuple) and value and self._chance.random() < 0.9:
            place = self._chance.randrange(len(value))
            return [*value[:place], self._changed(value[place]), *value[place + 1 :]]
        return self._chance.choice(STRANGE)

    def _swollen(self) -> bytes:
        """A length that is claimed and not there."""
        frame = self._chance.choice(self._frames)
        place = self._chance.randrange(len(frame))
        size = self._chance.choice((2**32 - 1, 2**31, 2**24, 70_000, 4097, 257)).to_bytes(4, "big")
        return frame[:place] + self._chance.choice(HUGE_HEADERS) + size + frame[place:]

    def _nested(self) -> bytes:
        levels = self._chance.choice((9, 100, 1100, 60_000))
        if self._chance.random() < 0.5:
            return self._chance.choice((b"\x91", b"\x81\xa1a")) * levels + b"\x90"
        value: Any = []
        for _ in range(min(levels, 100)):
            value = [value] if self._chance.random() < 0.5 else {"a": value}
        plain = self._chance.choice(self._plain)
        return _packed({**plain, self._chance.choice(list(plain)): value})

    def _doubled(self) -> bytes:
        """A key that comes twice, with another value."""
        plain = self._chance.choice(self._plain)
        key = self._chance.choice(list(plain))
        header = msgpack.Packer().pack_map_header(len(plain) + 1)
        pairs = b"".join(_packed(name) + _packed(value) for name, value in plain.items())
        frame: bytes = header + pairs + _packed(key) + _packed(self._chance.choice(STRANGE))
        return frame

    def _of_another_version(self) -> bytes:
        return _packed({**self._chance.choice(self._plain), "v": self._chance.choice((*STRANGE, 1))})

    def _short_of_a_field(self) -> bytes:
        plain = dict(self._chance.choice(self._plain))
        del plain[self._chance.choice(list(plain))]
        if self._chance.random() < 0.5:
            plain[self._chance.choice(("added", "id", "rid", "run", "seq"))] = self._chance.choice(STRANGE)
        return _packed(plain)

    def _noise(self) -> bytes:
        return self._chance.randbytes(self._chance.choice((0, 1, 2, 16, 300)))


def _packed(value: Any) -> bytes:
    frame: bytes = msgpack.packb(value)
    return frame
