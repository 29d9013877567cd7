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
from trainctl.trainer.data.batch import Batch, Prompts, Tokens, collate, collate_apart, gathered, packed
from trainctl.trainer.data.permutation import Indices, Packs, best_fit, permute, samples_at
from trainctl.trainer.data.rows import objects_in, row_chunks
from trainctl.trainer.data.token_cache import Report, TokenCache, all_counted, no_report
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
        config: RunFile,
        cache: TokenCache,
        where: str,
        place: Callable[[int], str],
        evaluation: "Dataset | None" = None,
        *,
        may_be_empty: bool = False,
    ) -> None:
        """`place` names a sample of the cache; `evaluation` takes the place of a held-out part. Raises
        InvalidInputError, blaming `where`, for a sample that doesn't fit, and if nothing is left to train on and it may
        not be empty."""
        objective, data = objective_of(config.objective, config.data.kind), config.data
        if cache.offsets is not None and not objective.needs_mask:
            cache = dataclasses.replace(cache, counted=all_counted(cache.tokens), digest=f"{cache.digest} every token")
        self._cache, self._length, self.place, self.evaluation = cache, data.sequence_length, place, evaluation
        self._reference: AlignedValues | None = None
        self.sequences, self.encodes_prompts = objective.sequences, objective.encodes_prompts
        self.has_pairs = objective.has_pairs  # samples are pairs of answers
        self.files = cache.files  # the sources
        self.has_end = cache.has_end  # texts and completions end with a token
        self.remarks = cache.remarks
        self.left_out = 0  # samples without a counted target in the sequence length, or dropped (length, equal answers)
        self.truncated = 0  # samples that lose their end
        self.counted = 0  # targets of usable samples
        usable, weights = self._blocks(where) if cache.offsets is None else self._usable_samples(config, where)
        if not len(usable) and not may_be_empty:
            have = f"{self.left_out} samples"
            raise InvalidInputError(where, f"none of {have} has a token to learn within data.sequence_length")
        held_out, training = _split(len(usable), data.held_out_fraction)
        self._usable, self.training = usable, training
        self._training, self._held_out = usable[training], usable[held_out]
        self.packs: Packs | None = None
        how = [cache.digest, data.sequence_length, data.held_out_fraction]
        if data.packing == "best-fit":
            whole = self._targets_of(self._training)
            self.packs = best_fit(whole, data.sequence_length, config.run.seed)
            self._pack_targets = self.packs.sums(whole)
            how.append(self.packs.digest)
        self.samples, self.held_out = len(self.packs or self._training), len(self._held_out)
        if evaluation is not None:
            how.append(evaluation.digest)
            self.held_out = evaluation.samples
            self.files = listed([*cache.files, *evaluation.held_out_files])
        self.mean_weight = float(weights[training].sum()) / max(1, self.samples)
        self.digest: str = hashlib.sha256(json.dumps(how).encode()).hexdigest()

    @property
    def held_out_files(self) -> tuple[FileDigest, ...]:
        """The sources by their names in data that are evaluated with these."""
        return tuple(FileDigest(f"held-out {file.name}", file.digest) for file in self.files)

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
        """Return training samples as one micro-batch. Raises TrainctlError naming a sample that the token cache
        lacks."""
        members, rows = (indices, None) if self.packs is None else self.packs.members_of(indices)
        chosen = self._training[members]
        try:
            return self._batch(chosen, rows)
        except (IndexError, ValueError) as error:
            raise TrainctlError(  # a file that was cut short lacks the last ones
                f"{self.place(int(chosen.max()))}: its tokens are missing from the token cache ({first_line(error)});"
                " delete the cache to have it made again"
            ) from None

    def targets(self, indices: Indices) -> Indices:
        """Return how many targets each of these training samples has, counted or not."""
        if self.packs is None:
            return self._targets_of(self._training[indices])
        return self._pack_targets[indices]

    def sequence_lengths(self, indices: Indices) -> Indices:
        """Return how many targets each sequence of these training samples has: the rows of their batch."""
        return self._bounds(self._entries(self._training[indices]))[1]

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
        counts. With an encoder, each prompt and completion is cut to 64."""
        longest = _PROBE_SEQUENCE if self.encodes_prompts else PROBE_TOKENS
        prompts: list[Tokens] = []
        samples: list[tuple[Tokens, NDArray[np.bool_]]] = []
        room = PROBE_TOKENS
        for number, entry in enumerate(self._entries(self._training[:PROBE_TOKENS])):
            tokens = self._sample(int(entry))[0]
            if self.encodes_prompts and number % 2 == 0:
                prompts.append(tokens[: longest + 1])
                continue
            tokens = tokens[: min(longest, room) + 1]
            samples.append((tokens, np.ones(len(tokens) - 1, np.bool_)))
            room -= len(tokens) - 1
            if not room:
                break
        return collate_apart(prompts, samples) if prompts else collate(samples)

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
        every, entries = self._cache.lengths_and_counts(self._length)[1], self._entries(self._usable)
        counts = np.zeros(len(every), np.int64)
        counts[entries] = every[entries]
        return counts

    # ------------------------------------------------------------ statistics and single samples

    @property
    def lengths(self) -> Indices:
        """[N, sequences] tokens of each usable sample before it is truncated; `training` numbers those for training. A
        completion is counted without the token that a decoder begins with."""
        each = self._tokens_of(self._entries(self._usable)) - self.encodes_prompts
        return each.reshape(-1, self.sequences)

    @property
    def sequence_targets(self) -> Indices:
        """[N, sequences] targets of each usable sample after it is truncated; of a prompt, what its encoder reads."""
        return self._bounds(self._entries(self._usable))[1].reshape(-1, self.sequences)

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
            tokens = (self._sample(int(entry))[0] for entry in self._entries(np.array([index])))
            yield hashlib.sha256(b"".join(part.tobytes() for part in tokens)).digest()

    def sample(self, number: int) -> list[tuple[Tokens, NDArray[np.bool_]]]:
        """Return the tokens of a usable sample's sequences, and which of their targets count."""
        entries = self._entries(self._usable[number : number + 1])
        parts = [self._sample(int(entry)) for entry in entries]
        if self.encodes_prompts:
            parts[0] = self._prompts(entries[:1]).inputs[0], parts[0][1][:-1]
        return parts

    def index(self, number: int) -> int:
        """Return a usable sample's place in the data."""
        return int(self._usable[number])

    def _entries(self, samples: Indices) -> Indices:
        """Return the places in the token cache of the sequences of samples of the data."""
        if self.sequences == 1:
            return samples
        return (samples[:, None] * self.sequences + np.arange(self.sequences)).ravel()

    def _blocks(self, where: str) -> tuple[Indices, NDArray[np.float64]]:
        count = max(0, len(self._cache.tokens) - 1) // self._length
        if not count:
            have, want = len(self._cache.tokens), self._length + 1
            raise InvalidInputError(
                where, f"the text has {have} tokens; one block needs {want} (data.sequence_length + 1)"
            )
        self.counted = count * self._length
        return np.arange(count, dtype=np.int64), np.full(count, float(self._length))

    def _usable_samples(self, config: RunFile, where: str) -> tuple[Indices, NDArray[np.float64]]:
        """Return the samples that are trained on, and the weight of each, as data.overlong wants it: the others are
        left out or refused, as are pairs whose answers are equal."""
        length, overlong = self._length, config.data.overlong
        each, counts = (values.reshape(-1, self.sequences) for values in self._cache.lengths_and_counts(length))
        longest, first = each.max(axis=1), 0 if self.encodes_prompts else 1  # the first token is no one's target
        learned = np.all(counts[:, 1:] if self.encodes_prompts else counts, axis=1)  # an encoder's prompt needs none
        first_tokens = f"within its first {length + first:,} tokens (data.sequence_length)"

        def check_none(is_wrong: NDArray[np.bool_], problem: Callable[[int], str]) -> None:
            wrong = np.flatnonzero(is_wrong)
            if len(wrong):
                others = f", and {len(wrong) - 1:,} more" if len(wrong) > 1 else ""
                text = f"{self.place(int(wrong[0]))} {problem(int(wrong[0]))}{others}"
                raise InvalidInputError(where, f'{text}; set data.overlong = "drop", or raise data.sequence_length')

        if overlong == "refuse":
            limit = f"data.sequence_length = {length:,} allows {length + first:,}"
            check_none(longest > length, lambda at: f"is {longest[at] + first:,} tokens long; {limit}")
        elif overlong == "truncate" and config.data.kind == "rows":
            check_none(~learned, lambda _: f"has nothing to learn {first_tokens}")
        equal = self._cache.equal_pairs(length) if self.has_pairs else np.zeros(len(learned), np.bool_)
        if overlong == "drop":
            learned &= (longest <= length) & ~equal
        else:
            check_none(equal, lambda _: f"has two equal answers {first_tokens}")
        usable = np.flatnonzero(learned).astype(np.int64)
        self.left_out, self.counted = len(counts) - len(usable), int(counts[usable].sum())
        self.truncated = int(np.count_nonzero(longest[usable] > length))
        return usable, np.ones(len(usable)) if self.has_pairs else counts[usable].sum(axis=1)

    def _batch(self, chosen: Indices, rows: Indices | None = None) -> Batch:
        """Return samples of the data as one micro-batch; `rows`: the row of each, if they are packed."""
        entries = self._entries(chosen)
        if rows is not None:
            return packed(self._cache.tokens, self._cache.counted, *self._bounds(entries), rows)
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
        return gathered(self._cache.tokens, self._cache.counted, *self._bounds(entries))

    def _targets_of(self, chosen: Indices) -> Indices:
        """Return how many targets samples of the data have within the sequence length; of several sequences, padded to
        the longest."""
        each = self._bounds(self._entries(chosen))[1].reshape(-1, self.sequences)
        targets: Indices = each.max(axis=1) * self.sequences
        return targets

    def _tokens_of(self, entries: Indices) -> Indices:
        offsets = self._cache.offsets
        if offsets is None:
            return np.full(len(entries), self._length + 1, np.int64)
        tokens: Indices = offsets[entries + 1] - offsets[entries]
        return tokens

    def _bounds(self, entries: Indices) -> tuple[Indices, Indices]:
        """Return where sequences start in the token cache, and how many targets they have."""
        starts = entries * self._length if self._cache.offsets is None else self._cache.offsets[entries]
        return starts, np.minimum(self._tokens_of(entries) - 1, self._length)

    def _sample(self, entry: int) -> tuple[Tokens, NDArray[np.bool_]]:
        """Return a sequence's tokens and which of its targets count, cut to the sequence length; the first token is no
        one's target."""
        (start,), (targets,) = self._bounds(np.array([entry]))
        stop = start + 1 + targets
        flags = self._cache.counted[start + 1 : stop].astype(np.bool_)
        return self._cache.tokens[start:stop].astype(np.int32), flags


def open_dataset(config: RunFile, folder: Path, where: str, report: Report = no_report) -> Dataset:
    """Return the data of `config`, tokenized into a cache under `folder`. Raises InvalidInputError naming the file,
    line or field at fault."""

    def opened(part: RunFile, field: str, evaluation: Dataset | None = None) -> Dataset:
        cache, place = open_cache(part, folder, where, report), functools.partial(place_of, part)
        return Dataset(part, cache, f"{where}: data.{field}", place, evaluation)

    held_out = held_out_data(config)
    return opened(config, "path", opened(held_out, "held_out_path") if held_out is not None else None)


def _split(samples: int, fraction: float) -> tuple[Indices, Indices]:
    """Return the samples that are held out, and the others: at least one if any is wanted and two are there, never
    all."""
    count = min(samples - 1, max(1, int(samples * fraction))) if fraction > 0 and samples > 1 else 0
    order = permute(np.arange(samples, dtype=np.int64), samples, HELD_OUT_KEY, 0)
    return np.sort(order[:count]), np.sort(order[count:])


def place_of(config: RunFile, index: int) -> str:
    """Return where a sample is in its file."""
    if config.data.kind != "rows":
        return f"sample {index + 1}"
    chunks = (chunk for source in data_files(Path(config.data.path), "rows") for chunk in row_chunks(source))
    return next(islice((place for chunk in chunks for place, _ in objects_in(chunk)), index, None))
