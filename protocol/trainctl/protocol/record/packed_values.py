"""A step's metrics by name as the record keeps them: which ones there are, and their values, in two blobs.

One row holds all of a rank's, or of the run's: a row for each value would cost three times as much, in bytes and in
time. The first blob has a bit for each id of `metric_names`, the second a double for each bit that is set, in order.
"""

import functools
import struct
from collections.abc import Mapping


def pack(values: Mapping[int, float]) -> tuple[bytes, bytes]:
    """`values` by the metrics' ids."""
    ids = sorted(values)
    present = sum(1 << number for number in ids)
    return present.to_bytes((present.bit_length() + 7) // 8, "little"), struct.pack(
        f"<{len(ids)}d", *map(values.__getitem__, ids)
    )


def unpack(present: bytes, body: bytes) -> dict[int, float]:
    """What was packed."""
    return dict(zip(_ids(present), struct.unpack(f"<{len(body) // 8}d", body), strict=True))


def value_of(present: bytes, body: bytes, number: int) -> float | None:
    """The value of one metric, None if it has none here."""
    place = _places(present).get(number)
    return None if place is None else float(struct.unpack_from("<d", body, 8 * place)[0])


@functools.lru_cache(1024)
def _ids(present: bytes) -> tuple[int, ...]:
    bits = int.from_bytes(present, "little")
    return tuple(number for number in range(bits.bit_length()) if bits >> number & 1)


@functools.lru_cache(1024)
def _places(present: bytes) -> dict[int, int]:
    return {number: place for place, number in enumerate(_ids(present))}
