"""What a report says of memory, by the metrics' names."""

from trainctl.protocol import messages as m


def memory(held: float | None = None, peak: float | None = None, cap: float | None = None) -> dict[str, float]:
    """In bytes; what is None isn't known."""
    found = zip(m.RANK_COLUMNS, (held, peak, cap), strict=True)
    return {name: float(value) for name, value in found if value is not None}
