"""What ranks resolved: data types, kernels and the compiler's mode, by the run file's names for them, and versions.
Pure."""

from collections.abc import Callable, Sequence

from trainctl.protocol import messages as m
from trainctl.tui.text.styled_line import Line, Piece, clean, flowed, line, width


def settings(compute: m.Compute) -> dict[str, str]:
    """By name; `weights` is the form of the trained ones. What isn't known, or the device doesn't have, is left out."""
    found = {
        "dtype": compute.dtype, "weights": compute.weights, "tf32": _switch(compute.tf32), "compile": compute.compile,
        "attention": compute.attention, "deterministic": _switch(compute.deterministic),
        "cudnn_benchmark": _switch(compute.cudnn_benchmark), "update": compute.update,
    }  # fmt: skip
    return {name: clean(value) for name, value in found.items() if value}


def versions(compute: m.Compute) -> dict[str, str]:
    """Of the libraries that it computes with, by name."""
    return {clean(name): clean(version) for name, version in compute.versions}


def _switch(value: bool | None) -> str:
    return "" if value is None else "on" if value else "off"


def pieces(found: dict[str, str]) -> list[Line]:
    """A group of words for each setting."""
    return [line(Piece(f"{name} ", "label"), value) for name, value in found.items()]


def rows(ranks: Sequence[m.RankView], columns: int, of: Callable[[m.Compute], dict[str, str]] = settings) -> list[Line]:
    """What the ranks resolved, in lines of at most `columns` cells; ranks that differ are named."""
    alike: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for rank in ranks:
        if rank.compute is not None and (found := of(rank.compute)):
            alike.setdefault(tuple(found.items()), []).append(_name(rank, ranks))
    return [
        row for found, names in alike.items() for row in _rows(dict(found), names if len(alike) > 1 else (), columns)
    ]


def _rows(found: dict[str, str], names: Sequence[str], columns: int) -> list[Line]:
    groups = pieces(found)
    if not names:
        return flowed(groups, columns)
    first = line(Piece(f"{', '.join(names)}: "), *groups[0])
    if width(first) <= columns:
        return flowed([first, *groups[1:]], columns)
    ends = [*"," * (len(names) - 1), ":"]
    named = [line(f"{name}{end}") for name, end in zip(names, ends, strict=True)]
    return [*flowed(named, columns, " "), *flowed(groups, columns)]


def _name(rank: m.RankView, ranks: Sequence[m.RankView]) -> str:
    """Its node, with its number if the node has several."""
    alone = sum(one.node == rank.node for one in ranks) == 1
    return clean(rank.node if alone else f"{rank.node}:{rank.rank}")
