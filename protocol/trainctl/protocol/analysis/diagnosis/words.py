"""Figures of a diagnosis in words."""


def seconds(value: float) -> str:
    """`12 ms`, `0.81 s`, `34 s`."""
    if value < 0.1:
        return f"{1000 * value:.2g} ms"
    return f"{value:.2f} s" if value < 10 else f"{value:,.0f} s"


def percent(part: float) -> str:
    """`12 %` of 0.12; below 1 % with a digit more."""
    return f"{100 * part:.0f} %" if part >= 0.01 or part <= 0 else f"{100 * part:.1g} %"


def megabytes(size: float) -> str:
    """`12 MB` or `1.4 GB`, of 10^6 or 10^9 bytes."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.3g} MB"
