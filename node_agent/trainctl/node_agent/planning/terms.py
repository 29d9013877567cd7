"""Terms of leadership: which node may claim which term."""

from collections.abc import Collection


def next_term(above: int, node: str, others: Collection[str]) -> int:
    """The lowest term above one that is `node`'s to claim. Each node of the cluster has every n-th one for itself, as
    with the ballots of Paxos (Lamport, The Part-Time Parliament, 1998): no two can lead in one term, not even where
    they were parted and an operator's word stood for a majority, if all have the same cluster file."""
    names = sorted({node, *others})
    return above + 1 + (names.index(node) - above - 1) % len(names)
