"""Which samples of a token cache can be trained on: their lengths, what they teach, and pairs that are equal."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainctl.protocol.config.objectives import objective_of
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.errors import InvalidInputError
from trainctl.trainer.data.permutation import Indices
from trainctl.trainer.data.token_cache import TokenCache

_BLOCK_TOKENS = 1 << 22
"""Tokens whose flags are looked through at once: a cache may be larger than memory."""


def check_lengths(config: RunFile, cache: TokenCache, where: str, place: Callable[[int], str]) -> None:
    """Whether each sample fits, as far as data.overlong wants it; of a row, something to learn has to be left. Raises
    InvalidInputError, blaming `where`, with the `place` of the first that doesn't."""
    if cache.offsets is None or config.data.overlong == "drop":
        return
    length, objective = config.data.sequence_length, objective_of(config.objective, config.data.kind)
    each, counts = (values.reshape(-1, objective.sequences) for values in lengths_and_counts(cache, length))
    targets, first = each.max(axis=1), 0 if objective.encodes_prompts else 1  # the first token is no one's target
    first_tokens = f"within its first {length + first:,} tokens (data.sequence_length)"
    if config.data.overlong == "refuse":
        limit = f"data.sequence_length = {length:,} allows {length + first:,}"
        _check_none(targets > length, lambda at: f"is {targets[at] + first:,} tokens long; {limit}", where, place)
    elif config.data.kind == "rows":
        empty = ~is_learned(counts, encodes_prompts=objective.encodes_prompts)
        _check_none(empty, lambda _: f"has nothing to learn {first_tokens}", where, place)
    if objective.has_pairs:
        _check_none(equal_pairs(cache, length), lambda _: f"has two equal answers {first_tokens}", where, place)


def _check_none(
    is_wrong: NDArray[np.bool_], problem: Callable[[int], str], where: str, place: Callable[[int], str]
) -> None:
    wrong = np.flatnonzero(is_wrong)
    if len(wrong):
        first = int(wrong[0])
        others = f", and {len(wrong) - 1:,} more" if len(wrong) > 1 else ""
        said = f"{place(first)} {problem(first)}{others}"
        raise InvalidInputError(where, f'{said}; set data.overlong = "drop", or raise data.sequence_length')


def lengths_and_counts(cache: TokenCache, length: int) -> tuple[Indices, NDArray[np.float64]]:
    """Of each sample: its targets, and how many of the first `length` count."""
    assert cache.offsets is not None and cache.counted is not None
    counts = np.empty(len(cache.offsets) - 1)
    begin = 0
    while begin < len(counts):
        most = cache.offsets[begin] + _BLOCK_TOKENS
        end = max(begin + 1, int(np.searchsorted(cache.offsets, most, side="right")) - 1)
        places = cache.offsets[begin : end + 1] - cache.offsets[begin]
        flags = cache.counted[cache.offsets[begin] : cache.offsets[end]]
        before = np.concatenate([[0], np.cumsum(flags, dtype=np.int64)])  # counted among the tokens before each
        first = places[:-1] + 1
        counts[begin:end] = before[np.minimum(places[1:], first + length)] - before[first]
        begin = end
    return np.diff(cache.offsets) - 1, counts


def is_learned(counts: NDArray[Any], *, encodes_prompts: bool) -> NDArray[np.bool_]:
    """Whether each sequence of a sample has something to learn, by its counted targets; the prompt of an encoder needs
    none."""
    learned: NDArray[np.bool_] = np.all(counts[:, 1:] if encodes_prompts else counts, axis=1)
    return learned


def equal_pairs(cache: TokenCache, length: int) -> NDArray[np.bool_]:
    """[pairs] Whether both halves of a pair have the same first `length` + 1 tokens, so that its margin is always 0."""
    assert cache.offsets is not None
    begins, widths = cache.offsets[:-1], np.minimum(np.diff(cache.offsets), length + 1)
    last = cache.tokens[begins + widths - 1]
    equal: NDArray[np.bool_] = (widths[0::2] == widths[1::2]) & (last[0::2] == last[1::2])
    for pair in np.flatnonzero(equal):
        one, other = (cache.tokens[begins[half] :][: widths[half]] for half in (2 * pair, 2 * pair + 1))
        equal[pair] = np.array_equal(one, other)
    return equal
