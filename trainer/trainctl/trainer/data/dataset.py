"""Samples by index: blocks of text, or samples of their own length with a mask, and a held-out part of either.

A block of `sequence_length` = T has T + 1 tokens and so T targets; its last token is the next block's first, so
every token of the text but the first is a target exactly once (a rest shorter than a block is left out). A sample's
weight is its number of counted targets. Held out are the samples that the permutation keyed by (`HELD_OUT_KEY`, 0)
puts first, so they are spread over the whole text and the same for every seed; or all samples of files of their own.

A pair of answers is one sample of two sequences, which stand one after the other in the token cache. So do a prompt
and its completion for an encoder-decoder model. The prompt then has one token more than its encoder is given.

With packing, the samples left for training are put together to packs, once for all epochs, and a pack is the sample
everywhere else. Held-out samples are never packed.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainctl.protocol.config.data_files import data_files
from trainctl.protocol.config.objectives import objective_of
from trainctl.protocol.config.run_file import held_out_data
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.errors import InvalidInputError, TrainctlError
from trainctl.protocol.machine.file_digests import listed
from trainctl.protocol.messages import FileDigest
from trainctl.trainer.common.errors import first_line
from trainctl.trainer.common.reference_cache import AlignedValues, ReferenceKey, Values
from trainctl.trainer.data.batch import Batch, Prompts, Tokens, collate, collate_apart, from_blocks, gathered, packed
from trainctl.trainer.data.permutation import Indices, Packs, best_fit, permute, samples_at
from trainctl.trainer.data.rows import objects_in, row_chunks
from trainctl.trainer.data.token_cache import Report, TokenCache, check_lengths, is_learned, no_report
from trainctl.trainer.data.tokenizing import open_cache

Look = Callable[[], None]
"""Called at least twice a second by what waits; whatever it raises ends the wait."""
HELD_OUT_KEY = 0x68656C64  # "held"
PROBE_TOKENS = 256
_PROBE_SEQUENCE = 64


@dataclasses.dataclass(frozen=True)
class Seen:
    """The data that a run has trained on, for its checkpoints."""

    samples: int  # N; of a growing file those of `chunks`
    digest: str
    chunks: tuple[str, ...] = ()  # of a growing file: each chunk's digest, shortened


class Dataset:
    """`samples` are for training, numbered from 0; `held_out` are for evaluation, numbered from 0 on their own."""

    def __init__(
        self,
        cache: TokenCache,
        sequence_length: int,
        held_out: float,
        where: str = "data",
        *,
        drop_overlong: bool = False,
        packing_seed: int | None = None,
        evaluation: "Dataset | None" = None,
        may_be_empty: bool = False,
        sequences: int = 1,
        encodes_prompts: bool = False,
    ) -> None:
        """Without a `packing_seed`, samples are not packed. `evaluation` takes the place of a held-out part. A sample
        has so many `sequences`; `encodes_prompts`: they are its prompt, for an encoder, and its completion. Raises
        InvalidInputError, blaming `where`, if nothing is left to train on and it may not be empty."""
        self._cache, self._length, self.evaluation = cache, sequence_length, evaluation
        self._reference: AlignedValues | None = None
        self.sequences, self.encodes_prompts = sequences, encodes_prompts
        self.files = cache.files  # the sources
        self.has_end = cache.has_end  # texts and completions end with a token
        self.remarks = cache.remarks
        self.place: Callable[[int], str] = lambda index: f"sample {index + 1}"  # where a sample of the data is
        self.left_out = 0  # samples without a counted target in the sequence length, or dropped (length, equal answers)
        self.truncated = 0  # samples that lose their end
        self.counted = 0  # targets of usable samples
        usable, weights = self._blocks(where) if cache.offsets is None else self._usable_samples(cache, drop_overlong)
        if not len(usable) and not may_be_empty:
            have = f"{self.left_out} samples"
            raise InvalidInputError(where, f"none of {have} has a token to learn within data.sequence_length")
        kept_for_evaluation = _held_out_count(len(usable), held_out)
        order = permute(np.arange(len(usable), dtype=np.int64), len(usable), HELD_OUT_KEY, 0)
        self._held_out = usable[np.sort(order[:kept_for_evaluation])]
        training = np.sort(order[kept_for_evaluation:])
        self._usable, self.training = usable, training
        self._training = usable[training]
        self.packs: Packs | None = None
        how = [cache.digest, sequence_length, held_out]
        if packing_seed is not None:
            whole = self._targets_of(self._training)
            self.packs = best_fit(whole, sequence_length, packing_seed)
            self._pack_targets = self.packs.sums(whole)
            how.append(self.packs.digest)
        self.samples, self.held_out = len(self.packs or self._training), len(self._held_out)
        if evaluation is not None:
            how.append(evaluation.digest)
            self.held_out = evaluation.samples
            self.files = listed(
                [*cache.files, *(FileDigest(f"held-out {file.name}", file.digest) for file in evaluation.files)]
            )
        self.mean_weight = float(weights[training].sum()) / max(1, self.samples)
        self.digest: str = hashlib.sha256(json.dumps(how).encode()).hexdigest()

    def samples_at(self, positions: Indices, seed: int) -> Indices:
        """Return the training sample at each position of the endless sequence."""
        return samples_at(positions, self.samples, seed)

    def at_hand(self, positions: Indices) -> Indices:
        """Return as many positions whose samples are there from the beginning."""
        return positions

    def covers(self, stop: int) -> bool:
        """Return whether the samples of all positions below `stop` are there."""
        return True

    def wait_for(self, stop: int, look: Look) -> float:
        """Wait until it `covers` them. Return since when it does, by time.perf_counter."""
        return 0.0

    def seen(self, cursor: int) -> Seen:
        """Return the data that the samples of the positions below `cursor` are from."""
        return Seen(self.samples, self.digest)

    def check_seen(self, seen: Seen, cursor: int, look: Look) -> None:
        """Check that the data still begin with those that a run at `cursor` has seen; `seen` differs otherwise."""

    def close(self) -> None:
        """End all that it has started."""

    def batch(self, indices: Indices) -> Batch:
        """Return training samples as one micro-batch. Raises TrainctlError naming the sample that the token cache
        lacks."""
        try:
            return self._assembled(indices)
        except (IndexError, ValueError) as error:
            wrong = next((index for index in indices if not self._is_whole(index)), indices[0])
            number = self._training[self.packs.members[self.packs.offsets[wrong]] if self.packs else wrong]
            raise TrainctlError(
                f"{self.place(int(number))}: its tokens are missing from the token cache ({first_line(error)});"
                " delete the cache to have it made again"
            ) from None

    def _assembled(self, indices: Indices) -> Batch:
        return self._batch(self._training[indices]) if self.packs is None else self._packed(self.packs, indices)

    def _is_whole(self, index: np.int64) -> bool:
        try:
            self._assembled(np.array([index]))
        except (IndexError, ValueError):
            return False
        return True

    def targets(self, indices: Indices) -> Indices:
        """Return how many targets each of these training samples has, counted or not."""
        if self.packs is None:
            return self._targets_of(self._training[indices])
        return self._pack_targets[indices]

    def held_out_targets(self, indices: Indices) -> Indices:
        """Return how many targets each of these held-out samples has."""
        if self.evaluation is not None:
            return self.evaluation.targets(indices)
        return self._targets_of(self._held_out[indices])

    def held_out_batch(self, indices: Indices) -> Batch:
        """Return held-out samples as one micro-batch."""
        if self.evaluation is not None:
            return self.evaluation.batch(indices)
        return self._batch(self._held_out[indices])

    def probe_batch(self) -> Batch:
        """Return the first training samples, by which ranks are compared, cut to 256 targets in all; every target
        counts."""
        if self.encodes_prompts:
            return self._probe_of_prompts()
        samples: list[tuple[Tokens, NDArray[np.bool_]]] = []
        targets = 0
        for index in self._entries(self._training):
            if targets == PROBE_TOKENS:
                break
            tokens = self._tokens(int(index))[: PROBE_TOKENS - targets + 1]
            samples.append((tokens, np.ones(len(tokens) - 1, np.bool_)))
            targets += len(tokens) - 1
        return collate(samples)

    def _probe_of_prompts(self) -> Batch:
        """Return the `probe_batch` of completions; each prompt and completion is cut to 64."""
        prompts: list[Tokens] = []
        completions: list[tuple[Tokens, NDArray[np.bool_]]] = []
        for sample in self._training[:PROBE_TOKENS]:
            room = PROBE_TOKENS - sum(len(flags) for _, flags in completions)
            if not room:
                break
            prompt, completion = (self._tokens(int(entry)) for entry in self._entries(np.array([sample])))
            prompts.append(prompt[: _PROBE_SEQUENCE + 1])
            completion = completion[: min(_PROBE_SEQUENCE, room) + 1]
            completions.append((completion, np.ones(len(completion) - 1, np.bool_)))
        return collate_apart(prompts, completions)

    # ------------------------------------------------------------ the reference's log-probabilities

    @property
    def usable(self) -> int:
        """Samples for training and evaluation together, numbered from 0 on their own."""
        return len(self._usable)

    def reference_key(self, model: str, compute: str) -> ReferenceKey:
        """Return the key of their reference log-probabilities; `model` is the digest of the base model's files,
        `compute` as `compute_of` says."""
        how = [self._cache.digest, self._length, hashlib.sha256(self._usable.tobytes()).hexdigest()]
        return ReferenceKey(hashlib.sha256(json.dumps(how).encode()).hexdigest(), model, compute, self.counted)

    def usable_batch(self, numbers: Indices) -> Batch:
        """Return usable samples as one micro-batch."""
        return self._batch(self._usable[numbers])

    def usable_targets(self) -> tuple[Indices, Indices]:
        """Return the targets of a micro-batch of each usable sample alone, with padding, and how many of them count."""
        counts = self._sequence_counts[self._entries(self._usable)].reshape(-1, self.sequences).sum(axis=1)
        return self._targets_of(self._usable), counts

    def attach_reference(self, values: Values) -> None:
        """Have each micro-batch carry its part of [counted] log-probabilities, those of all usable samples."""
        self._reference = AlignedValues(values, self._sequence_counts)

    @functools.cached_property
    def _sequence_counts(self) -> Indices:
        """The counted targets of each sequence in the token cache, 0 where its sample isn't used."""
        counts = np.zeros(len(self._cache.offsets) - 1 if self._cache.offsets is not None else 0, np.int64)
        entries = self._entries(self._usable)
        counts[entries] = self._cache.lengths_and_counts(self._length)[1][entries].astype(np.int64)
        return counts

    # ------------------------------------------------------------ statistics and single samples

    @property
    def has_pairs(self) -> bool:
        """Whether samples are pairs of answers."""
        return self.sequences > 1 and not self.encodes_prompts

    @property
    def lengths(self) -> Indices:
        """[N, sequences] tokens of each usable sample before it is truncated; `training` numbers those for training. A
        completion is counted without the token that a decoder begins with."""
        if self._cache.offsets is None:
            return np.full((len(self._usable), 1), self._length + 1, np.int64)
        each: Indices = np.diff(self._cache.offsets)[self._entries(self._usable)] - self.encodes_prompts
        return each.reshape(-1, self.sequences)

    @property
    def sequence_targets(self) -> Indices:
        """[N, sequences] targets of each usable sample after it is truncated; of a prompt, what its encoder reads."""
        return self._targets_of_entries(self._entries(self._usable)).reshape(-1, self.sequences)

    @property
    def duplicates(self) -> int:
        """Usable samples with the tokens of an earlier one."""
        return len(self._usable) - len(set(self._hashes(self._usable)))

    @property
    def repeated(self) -> int:
        """Held-out samples with the tokens of one for training."""
        apart = self.evaluation
        held_out = self._hashes(self._held_out) if apart is None else apart._hashes(apart._usable)
        trained = set(self._hashes(self._training))
        return sum(sample in trained for sample in held_out)

    def _hashes(self, chosen: Indices) -> Iterator[bytes]:
        for index in chosen:
            tokens = [self._tokens(int(entry)) for entry in self._entries(np.array([index]))]
            yield hashlib.sha256(b"".join(part.tobytes() for part in tokens)).digest()

    def sample(self, number: int) -> list[tuple[Tokens, NDArray[np.bool_]]]:
        """Return the tokens of a usable sample's sequences, and which of their targets count."""
        index = self.index(number)
        if self._cache.offsets is not None:
            parts = [self._sample(int(entry)) for entry in self._entries(np.array([index]))]
            if self.encodes_prompts:
                parts[0] = self._prompts(np.array([2 * index])).inputs[0], parts[0][1][:-1]
            return parts
        tokens = self._tokens(index)
        return [(tokens, np.ones(len(tokens) - 1, np.bool_))]

    def index(self, number: int) -> int:
        """Return a usable sample's place in the data."""
        return int(self._usable[number])

    def _entries(self, samples: Indices) -> Indices:
        """Return the places in the token cache of the sequences of samples of the data."""
        if self.sequences == 1:
            return samples
        return (samples[:, None] * self.sequences + np.arange(self.sequences)).ravel()

    def _tokens(self, index: int) -> Tokens:
        if self._cache.offsets is not None:
            return self._sample(index)[0]
        tokens: Tokens = self._cache.tokens[index * self._length :][: self._length + 1].astype(np.int32)
        return tokens

    def _blocks(self, where: str) -> tuple[Indices, NDArray[np.float64]]:
        count = max(0, len(self._cache.tokens) - 1) // self._length
        if not count:
            have, want = len(self._cache.tokens), self._length + 1
            raise InvalidInputError(
                where, f"the text has {have} tokens; one block needs {want} (data.sequence_length + 1)"
            )
        self.counted = count * self._length
        return np.arange(count, dtype=np.int64), np.full(count, float(self._length))

    def _usable_samples(self, cache: TokenCache, drop_overlong: bool) -> tuple[Indices, NDArray[np.float64]]:
        targets, counts = (values.reshape(-1, self.sequences) for values in cache.lengths_and_counts(self._length))
        learned = is_learned(counts, encodes_prompts=self.encodes_prompts)
        chosen = learned & (targets <= self._length).all(axis=1) if drop_overlong else learned
        if drop_overlong and self.has_pairs:
            chosen &= ~cache.equal_pairs(self._length)
        usable = np.flatnonzero(chosen).astype(np.int64)
        self.left_out, self.counted = len(counts) - len(usable), int(counts[usable].sum())
        self.truncated = int(np.count_nonzero((targets[usable] > self._length).any(axis=1)))
        return usable, np.ones(len(usable)) if self.has_pairs else counts[usable].sum(axis=1)

    def _batch(self, chosen: Indices) -> Batch:
        if self._cache.offsets is None:
            places = chosen[:, None] * self._length + np.arange(self._length + 1)
            return from_blocks(self._cache.tokens[places].astype(np.int32))
        assert self._cache.counted is not None
        entries = self._entries(chosen)
        if self.encodes_prompts:
            return dataclasses.replace(self._gathered(entries[1::2]), prompts=self._prompts(entries[0::2]))
        batch = self._gathered(entries)
        reference = self._reference.of(entries, batch.counted) if self._reference is not None else None
        return dataclasses.replace(batch, sequences=self.sequences, reference=reference)

    def _prompts(self, entries: Indices) -> Prompts:
        """Return prompts for the encoder. One that is cut keeps the special tokens at its end, as transformers'
        tokenizers truncate."""
        assert self._cache.offsets is not None
        batch, ends = self._gathered(entries), self._cache.offsets[entries + 1] - 1  # the last token is never read
        is_cut = ends - self._cache.offsets[entries] > self._length
        columns = np.arange(-min(self._cache.prompt_end, self._length), 0)
        batch.inputs[np.ix_(is_cut, columns)] = self._cache.tokens[ends[is_cut][:, None] + columns]
        return Prompts(batch.inputs, batch.lengths)

    def _gathered(self, entries: Indices) -> Batch:
        assert self._cache.offsets is not None and self._cache.counted is not None
        lengths = self._targets_of_entries(entries)
        return gathered(self._cache.tokens, self._cache.counted, self._cache.offsets[entries], lengths)

    def _packed(self, packs: Packs, indices: Indices) -> Batch:
        assert self._cache.offsets is not None and self._cache.counted is not None
        documents = [self._training[packs.members[slice(*packs.offsets[index : index + 2])]] for index in indices]
        chosen = np.concatenate(documents)
        rows = np.repeat(np.arange(len(documents)), [len(part) for part in documents])
        return packed(
            self._cache.tokens, self._cache.counted, self._cache.offsets[chosen], self._targets_of(chosen), rows
        )

    def _targets_of(self, chosen: Indices) -> Indices:
        """Return how many targets samples of the data have within the sequence length; of several sequences, padded to
        the longest."""
        entries = self._targets_of_entries(self._entries(chosen)).reshape(-1, self.sequences)
        targets: Indices = entries.max(axis=1) * self.sequences
        return targets

    def _targets_of_entries(self, entries: Indices) -> Indices:
        if self._cache.offsets is None:
            return np.full(len(entries), self._length, np.int64)
        targets: Indices = np.minimum(self._cache.offsets[entries + 1] - self._cache.offsets[entries] - 1, self._length)
        return targets

    def _sample(self, entry: int) -> tuple[Tokens, NDArray[np.bool_]]:
        """Return a sequence's tokens and which of its targets count, cut to the sequence length; the first token is no
        one's target."""
        assert self._cache.offsets is not None and self._cache.counted is not None
        start, stop = (int(offset) for offset in self._cache.offsets[entry : entry + 2])
        stop = min(stop, start + 1 + self._length)
        return self._cache.tokens[start:stop].astype(np.int32), self._cache.counted[start + 1 : stop].astype(np.bool_)


def open_dataset(config: RunFile, folder: Path, where: str, report: Report = no_report) -> Dataset:
    """Return the data of `config`, tokenized into a cache under `folder`. Raises InvalidInputError naming the file,
    line or field at fault."""
    held_out = held_out_data(config)
    evaluation = _open(held_out, folder, where, "data.held_out_path", report) if held_out is not None else None
    return _open(config, folder, where, "data.path", report, evaluation)


def _open(
    config: RunFile, folder: Path, where: str, field: str, report: Report, evaluation: Dataset | None = None
) -> Dataset:
    cache = open_cache(config, folder, where, report)
    return dataset_of(config, cache, f"{where}: {field}", functools.partial(place_of, config), evaluation)


def dataset_of(
    config: RunFile,
    cache: TokenCache,
    where: str,
    place: Callable[[int], str],
    evaluation: Dataset | None = None,
    *,
    may_be_empty: bool = False,
) -> Dataset:
    """Return the data set that a run file makes of a token cache; `place` names a sample of it. Raises
    InvalidInputError, blaming `where`, for a sample that doesn't fit."""
    objective = objective_of(config.objective, config.data.kind)
    if cache.offsets is not None and not objective.needs_mask:
        every = np.broadcast_to(np.uint8(1), cache.tokens.shape)
        cache = dataclasses.replace(cache, counted=every, digest=f"{cache.digest} every token")
    check_lengths(config, cache, where, place)
    dataset = Dataset(
        cache,
        config.data.sequence_length,
        config.data.held_out_fraction,
        where,
        drop_overlong=config.data.overlong == "drop",
        packing_seed=config.run.seed if config.data.packing == "best-fit" else None,
        evaluation=evaluation,
        sequences=objective.sequences,
        encodes_prompts=objective.encodes_prompts,
        may_be_empty=may_be_empty,
    )
    dataset.place = place
    return dataset


def place_of(config: RunFile, index: int) -> str:
    """Return where a sample is in its file."""
    if config.data.kind != "rows":
        return f"sample {index + 1}"
    chunks = (chunk for source in data_files(Path(config.data.path), "rows") for chunk in row_chunks(source))
    return next(islice((place for chunk in chunks for place, _ in objects_in(chunk)), index, None))


def _held_out_count(samples: int, fraction: float) -> int:
    """Return at least one if any is wanted and two are there; never all."""
    if fraction <= 0 or samples < 2:
        return 0
    return min(samples - 1, max(1, int(samples * fraction)))
