"""A step's metrics by name as the record keeps them: which ones there are, and their values, in two blobs.

One row holds all of a rank's, or of the run's: a row for each value would cost three times as much, in bytes and in
time. The first blob has a bit for each id of `metric_names`, the second a double for each bit that is set, in order.
"""

import functools
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

_DOUBLE: Final = struct.Struct("<d").unpack_from


def pack(values: Mapping[int, float]) -> tuple[bytes, bytes]:
    """`values` by the metrics' ids."""
    ids = sorted(values)
    present = sum(1 << number for number in ids)
    return present.to_bytes((present.bit_length() + 7) // 8, "little"), struct.pack(
        f"<{len(ids)}d", *map(values.__getitem__, ids)
    )


def unpack(present: bytes, body: bytes) -> dict[int, float]:
    """Return what was packed, or of a damaged record what can be read of it."""
    count = len(body) // 8
    return dict(zip(_ids(present), struct.unpack(f"<{count}d", body[: 8 * count]), strict=False))


def values_of(number: int, rows: Iterable[tuple[int, bytes, bytes]]) -> Iterator[tuple[int, float]]:
    """Step and value of one metric, of the rows (step, present, body) that have it."""
    offsets: dict[bytes, int | None] = {}
    for step, present, body in rows:
        if present not in offsets:
            ids = _ids(present)
            offsets[present] = 8 * ids.index(number) if number in ids else None
        offset = offsets[present]
        if offset is not None:
            yield step, _DOUBLE(body, offset)[0]


@functools.lru_cache(1024)
def _ids(present: bytes) -> tuple[int, ...]:
    bits = int.from_bytes(present, "little")
    return tuple(number for number in range(bits.bit_length()) if bits >> number & 1)
