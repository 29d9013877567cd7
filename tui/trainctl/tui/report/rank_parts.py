"""Ranks as people name them, and their parts of a step of a plan version."""

from collections import Counter
from collections.abc import Iterable
from typing import Protocol, TypeVar

from trainctl.protocol import messages as m
from trainctl.protocol.record.whole_run import PlanSpan, WholeRunReader


class _Ranked(Protocol):
    @property
    def rank(self) -> int: ...


T = TypeVar("T", bound=_Ranked)


def named(ranks: Iterable[tuple[str, T]]) -> dict[str, T]:
    """By name, of pairs (node, rank): the node, or node:rank where the node has several."""
    pairs = list(ranks)
    counts = Counter(node for node, _ in pairs)
    return {node if counts[node] == 1 else f"{node}:{one.rank}": one for node, one in pairs}


def parts_of(reader: WholeRunReader, span: PlanSpan) -> dict[str, m.RankStep]:
    """The parts, by name, of one step of a plan version: of its second step, unless that finished a batch for a lost
    rank, whose samples are then missing."""
    found: tuple[m.RankStep, ...] = ()
    for step in dict.fromkeys((min(span.first + 1, span.last), span.last, span.first)):
        found = reader.rank_steps(step)
        committed, _ = reader.steps(step - 1, 1)
        if not any(part.replays for part in found) and _is_whole(found, committed[0]):
            break
    return named([(part.node, part) for part in found])


def _is_whole(parts: Iterable[m.RankStep], step: m.StepCommitted) -> bool:
    return step.global_batch is None or sum(part.samples for part in parts) == step.global_batch
