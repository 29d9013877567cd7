"""Shares of a global batch: in proportion to weights, as a person sets them, or such that the slowest rank is the least
slow by the ranks' step models; and the cores of a machine among its ranks."""

import heapq
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import msgspec

from trainctl.protocol.batch.pass_curve import ROUNDING
from trainctl.protocol.batch.step_model import StepModel
from trainctl.protocol.config.env_policy import omp_threads
from trainctl.protocol.config.run_tables import NodeTable, RunFile
from trainctl.protocol.errors import InvalidInputError

Weights = Mapping[int, float] | Mapping[int, Fraction]


def spread(total: int, weights: Weights) -> dict[int, int]:
    """`total` samples over ranks in proportion to `weights`, summing exactly; a rank may get none. Largest remainders
    (Hamilton's method) in exact arithmetic, ties to the lower rank: what divides without a rest is dealt just so.
    Raises InvalidInputError if the weights don't allow a proportion."""
    if not weights or not all(0 <= weight < math.inf for weight in weights.values()) or not any(weights.values()):
        raise InvalidInputError("value", "shares need at least one positive weight")
    exact = {rank: Fraction(weights[rank]) for rank in sorted(weights)}
    weight_sum = sum(exact.values())
    quotas = {rank: total * weight / weight_sum for rank, weight in exact.items()}
    counts = {rank: math.floor(quota) for rank, quota in quotas.items()}
    by_remainder = sorted(quotas, key=lambda rank: (counts[rank] - quotas[rank], rank))
    for rank in by_remainder[: total - sum(counts.values())]:
        counts[rank] += 1
    return counts


def apportion(total: int, weights: Weights, field: str = "value") -> dict[int, int]:
    """Return shares as `spread` does, but every rank gets at least one: those whose proportion is less get one, the
    others the rest. Raises InvalidInputError naming `field` if there are more ranks than samples, or the weights don't
    allow a proportion."""
    check_enough(total, len(weights), field)
    counts = spread(total, weights)
    poor = [rank for rank, count in counts.items() if not count]
    if not poor:
        return counts
    rest = {rank: Fraction(weight) for rank, weight in weights.items() if rank not in poor}
    return dict(sorted({**dict.fromkeys(poor, 1), **apportion(total - len(poor), rest, field)}.items()))


def check_enough(total: int, ranks: int, field: str) -> None:
    """Raise InvalidInputError naming `field` if there are more ranks than samples."""
    if total < ranks:
        raise InvalidInputError(field, f"{total} samples are too few for {ranks} ranks; each needs at least one")


MOST_SIZES = 2048
"""Micro-batches of all ranks together up to which all of them are tried: each takes part of a microsecond, often."""
MOST_ROUNDS = 12
"""Levels that are tried before the rest is dealt sample by sample; each halves what is uncertain, or does better."""


class ShareCost(NamedTuple):
    """The cost of a share on one rank: its step's seconds with the best of the micro-batches that it may run."""

    model: StepModel
    sizes: tuple[int, ...]  # samples of a pass

    @classmethod
    def at(cls, model: StepModel, micro: int) -> "ShareCost":
        """Return the cost with a micro-batch that is set."""
        return cls(model, (max(micro, 1),))

    @classmethod
    def up_to(cls, model: StepModel, most: int, *, tries_all: bool = False) -> "ShareCost":
        """Return the cost with any micro-batch that memory allows. Powers of two and what is midway between them are
        tried, or all: by those a step can be up to 2 % longer than by all."""
        if tries_all:
            return cls(model, tuple(range(1, max(most, 1) + 1)))
        powers = [2**power for power in range(most.bit_length())]
        sizes = {size for power in powers for size in (power, power + power // 2) if size < most} | {max(most, 1)}
        return cls(model, tuple(sorted(sizes)))

    def seconds(self, share: int) -> float:
        """The length of the rank's step; never less with more samples."""
        (curve, floor, slowdown), sizes = self
        best, least = math.inf, curve.least_per_sample(sizes[-1])
        for size, of_pass in curve.passes(sizes):
            passes, rest = divmod(share, size)
            if passes * of_pass + rest * least < best:
                best = min(best, passes * of_pass + curve.seconds(rest))
        return slowdown * best + floor

    def most(self, level: float) -> int:
        """The largest share whose step takes no longer than `level` seconds; 0 if there is none."""
        (curve, floor, slowdown), sizes = self
        budget = (level - floor) / slowdown * (1 + ROUNDING)
        if budget <= 0:
            return 0
        best, least = 0, curve.least_per_sample(sizes[-1])
        for size, of_pass in curve.passes(sizes):
            passes = int(budget / of_pass)
            left = budget - passes * of_pass
            if passes * size + left / least >= best + 1:
                best = max(best, passes * size + min(curve.most(left), size - 1))
                if (best + 1) * least > budget:
                    break
        return best

    def micro(self, share: int) -> int:
        """The micro-batch that runs a share soonest: what is set, or the best that memory allows."""
        return self.sizes[0] if len(self.sizes) == 1 else self.model.best_micro(share, self.sizes[-1])

    @property
    def rated(self) -> tuple[float, float]:
        """Samples per second that no share goes above, and the seconds that none changes."""
        return self.model.rated(self.sizes[-1])


def group_costs(
    total: int, models: Mapping[int, StepModel], micros: Mapping[int, int], most: Mapping[int, int]
) -> dict[int, ShareCost]:
    """Return the cost of shares of a batch of `total` on the ranks of `micros`, of which there must be a model each:
    with any micro-batch up to that in `most`, if it has one and the rank's model knows several, else with that in
    `micros`."""
    free = {rank: min(most[rank], total) for rank in micros if rank in most and not models[rank].is_linear}
    tries_all = sum(free.values()) <= MOST_SIZES
    return {
        rank: ShareCost.up_to(models[rank], free[rank], tries_all=tries_all)
        if rank in free
        else ShareCost.at(models[rank], micro)
        for rank, micro in micros.items()
    }


def split(total: int, costs: Mapping[int, ShareCost], field: str = "value") -> dict[int, int]:
    """The shares, each at least one, whose slowest rank is the least slow.

    A level of seconds is raised until the ranks can almost do the batch within it. What is left goes to the rank
    that is done first with it, ties to the lower rank. Each such step is the best there is, because a rank's seconds
    grow with its share. Raises InvalidInputError naming `field` if there are more ranks than samples.
    """
    check_enough(total, len(costs), field)
    counts = _filled(total, costs)
    left = total - sum(counts.values())
    queue = [(costs[rank].seconds(count + 1), rank) for rank, count in counts.items()]
    heapq.heapify(queue)
    while left:
        seconds, rank = queue[0]
        more = min(max(costs[rank].most(seconds) - counts[rank], 1), left)
        counts[rank] += more
        left -= more
        heapq.heapreplace(queue, (costs[rank].seconds(counts[rank] + 1), rank))
    return counts


def _filled(total: int, costs: Mapping[int, ShareCost]) -> dict[int, int]:
    """Shares that are done by the same time, together at most `total` and nearly so."""
    rated = [cost.rated for cost in costs.values()]
    low, rates = lower_bound(total, rated), sum([rate for rate, _ in rated])
    high, counts = math.inf, _within(low, costs)
    level = low
    for _ in range(MOST_ROUNDS):
        missing = total - sum(counts.values())
        if missing <= len(costs):
            break
        level = min(level + missing / rates, (level + high) / 2)
        tried = _within(level, costs)
        if sum(tried.values()) > total:
            high, level = level, low
        else:
            low, counts = level, tried
    return counts


def _within(level: float, costs: Mapping[int, ShareCost]) -> dict[int, int]:
    return {rank: max(1, cost.most(level)) for rank, cost in sorted(costs.items())}


def slowest(shares: Mapping[int, int], costs: Mapping[int, ShareCost]) -> float:
    """Seconds of a step with these shares: the slowest rank's."""
    return max(costs[rank].seconds(share) for rank, share in shares.items())


def lower_bound(total: int, rated: Sequence[tuple[float, float]]) -> float:
    """Seconds that no split goes below: of samples that can be divided at will, each at its rank's highest rate, those
    ranks aside that would have less than one. `rated`: what `StepModel.rated` says about each rank."""
    rich, left = rated, total
    while True:
        level = (left + sum([rate * floor for rate, floor in rich])) / sum([rate for rate, _ in rich])
        staying = [one for one in rich if one[0] * (level - one[1]) >= 1]
        if not staying or len(staying) == len(rich):
            return level
        left -= len(rich) - len(staying)
        rich = staying


Shares = Mapping[int, int]
"""Samples by live rank; they sum to G."""


def shares_as_wanted(shares: Shares, node_of: Mapping[int, str], wanted: Mapping[str, int | str]) -> dict[int, int]:
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


def shares_without(shares: Shares, leaving: Collection[int], field: str = "node") -> dict[int, int]:
    """The samples of ranks that leave to those that stay, in proportion; at least one stays."""
    staying = {rank: float(share) for rank, share in shares.items() if rank not in leaving}
    return apportion(sum(shares.values()), staying, field)


def shares_with_back(
    shares: Shares, back: Collection[int], rates: Mapping[int, float], field: str = "node"
) -> dict[int, int]:
    """Shares for ranks that come back too: by their part of all own `rates` (samples per second) if each rank has one,
    else an even one; the others keep their proportions of the rest. Raises InvalidInputError naming `field`."""
    everyone = (*shares, *back)
    known = rates if all(rates.get(rank) for rank in everyone) else dict.fromkeys(everyone, 1.0)
    weights = _divided(Fraction(1), {rank: known[rank] for rank in everyone})
    rest = sum((weights[rank] for rank in shares), Fraction(0))
    weights |= _divided(rest, {rank: float(share) for rank, share in shares.items()})
    return apportion(sum(shares.values()), weights, field)


def returned_share(shares: Shares, rank: int, last_share: int) -> dict[int, int]:
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


@dataclass(frozen=True)
class Machine:
    """The cores that a node's ranks run on."""

    pool: str  # equal for nodes whose ranks use the same cores; empty: not known
    cores: float  # that its ranks may use; 0: its agent's version doesn't say, and knows no `shared_threads`
    threads: int = 0  # that its agent's environment sets; 0: any number


def set_threads(table: NodeTable, agent_threads: int = 0) -> int:
    """Return the threads that a node's rank has without a part of shared cores: by its table, or by the OMP_NUM_THREADS
    of the table or of its agent; 0 if none sets them."""
    return table.threads or omp_threads(table.env) or agent_threads


def share_cores(config: RunFile, machines: Mapping[str, Machine]) -> tuple[RunFile, tuple[str, ...]]:
    """Return the run file with `shared_threads` for nodes that share cores and whose threads nothing else sets, and a
    line on each such group of nodes. No part that the run file had before stays."""
    tables, lines = {node: msgspec.structs.replace(table, shared_threads=0) for node, table in config.nodes.items()}, []
    can_read = all(machine.cores for machine in machines.values())
    for pool in dict.fromkeys(machines[node].pool for node in config.nodes if node in machines and can_read):
        nodes = [node for node in config.nodes if node in machines and machines[node].pool == pool]
        threads_set = {node: set_threads(tables[node], machines[node].threads) for node in nodes}
        free = [node for node in nodes if not threads_set[node]]
        if not pool or len(nodes) < 2 or not free:
            continue
        cores = min(machines[node].cores for node in nodes)
        threads = max(1, int(cores - sum(threads_set.values())) // len(free))
        tables |= {node: msgspec.structs.replace(tables[node], shared_threads=threads) for node in free}
        each = "1 thread" if threads == 1 else f"{threads} threads"
        lines.append(f"{', '.join(nodes)} share {cores:g} cores: {each} for {'each' if len(free) > 1 else free[0]}")
    return msgspec.structs.replace(config, nodes=tables), tuple(lines)
