"""Changes of shares by rebalance, drain and admit: pure functions of shares by rank, to apply or preview."""

from collections.abc import Collection, Mapping
from fractions import Fraction

from trainctl.protocol.batch.apportion import apportion
from trainctl.protocol.errors import InvalidInputError

Shares = Mapping[int, int]
"""Samples by live rank; they sum to G."""


def as_wanted(shares: Shares, node_of: Mapping[int, str], wanted: Mapping[str, int | str]) -> dict[int, int]:
    """Shares in which nodes have what is `wanted` of them, all of them known. Samples are given as they are; then
    percentages of G, and what is left in the proportions it had, are dealt by largest remainders. Raises
    InvalidInputError naming `shares`."""
    total = sum(shares.values())
    counts: dict[int, int] = {}
    weights: dict[int, Fraction] = {}
    left = Fraction(total)
    for node, amount in wanted.items():
        mine = {rank: float(share) for rank, share in shares.items() if node_of[rank] == node}
        if isinstance(amount, int):
            counts |= apportion(amount, mine, "shares")
            left -= amount
        else:
            part = _percent(node, amount) * total
            weights |= _divided(part, mine)
            left -= part
    unnamed = {rank: float(share) for rank, share in shares.items() if node_of[rank] not in wanted}
    _check_rest(total, left, [node_of[rank] for rank in unnamed], exact=not weights)
    if unnamed:
        weights |= _divided(left, unnamed)
    rest = total - sum(counts.values())
    return dict(sorted((counts | (apportion(rest, weights, "shares") if weights else {})).items()))


def without(shares: Shares, leaving: Collection[int], field: str = "node") -> dict[int, int]:
    """The samples of ranks that leave to those that stay, in proportion; at least one stays."""
    staying = {rank: float(share) for rank, share in shares.items() if rank not in leaving}
    return apportion(sum(shares.values()), staying, field)


def with_back(shares: Shares, back: Collection[int], rates: Mapping[int, float], field: str = "node") -> dict[int, int]:
    """Shares for ranks that come back too: by their part of all own `rates` (samples per second) if each rank has one,
    else an even one; the others keep their proportions of the rest. Raises InvalidInputError naming `field`."""
    everyone = (*shares, *back)
    known = rates if all(rates.get(rank) for rank in everyone) else dict.fromkeys(everyone, 1.0)
    weights = _divided(Fraction(1), {rank: known[rank] for rank in everyone})
    rest = sum((weights[rank] for rank in shares), Fraction(0))
    weights |= _divided(rest, {rank: float(share) for rank, share in shares.items()})
    return apportion(sum(shares.values()), weights, field)


def returned(shares: Shares, rank: int, last_share: int) -> dict[int, int]:
    """Shares for a rank that was lost and is back: what it had then (0: an even part), or as much of it as leaves the
    others one each; these keep their proportions of the rest."""
    total = sum(shares.values())
    own = max(1, min(last_share or total // (len(shares) + 1), total - len(shares)))
    others = apportion(total - own, {other: float(share) for other, share in shares.items()}, "node")
    return dict(sorted({**others, rank: own}.items()))


def _divided(amount: Fraction, among: Mapping[int, float]) -> dict[int, Fraction]:
    whole = sum(map(Fraction, among.values()))
    return {rank: amount * Fraction(weight) / whole for rank, weight in among.items()}


def _percent(node: str, text: str) -> Fraction:
    part = Fraction(text.removesuffix("%")) / 100
    if not part:
        raise InvalidInputError("shares", f"{node} cannot have {text}; drain {node} to remove it from the group")
    return part


def _check_rest(total: int, left: Fraction, unnamed: Collection[str], *, exact: bool) -> None:
    """With every node named, samples must come to G, and percentages to it within one sample, as people round them."""
    given = f"{float(total - left):g} of {total} samples"
    if unnamed and left <= 0:
        nodes = ", ".join(dict.fromkeys(unnamed))
        raise InvalidInputError("shares", f"shares sum to {given} and leave nothing for {nodes}")
    if not unnamed and (left if exact else abs(left) >= 1):
        raise InvalidInputError("shares", f"shares sum to {given}; the shares of all nodes must sum to {total}")
