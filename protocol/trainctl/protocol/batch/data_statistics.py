"""Statistics of training data: lengths, counted tokens, padding, packing, and how fast it is read. Pure."""

from typing import TYPE_CHECKING, Final, Literal

import msgspec

from trainctl.protocol.batch.settings_rules import DataSize
from trainctl.protocol.config.objectives import SAMPLES
from trainctl.protocol.config.run_tables import DataKind

if TYPE_CHECKING:  # clients read these statistics without NumPy
    import numpy as np
    from numpy.typing import NDArray

PERCENTILES: Final = (50, 90, 95, 99, 100)


class ShownSample(msgspec.Struct, frozen=True):
    """One sample as a person reads it."""

    place: str  # FILE: line N
    tokens: tuple[tuple[str, bool], ...]  # text of each token, and whether it counts in the loss
    rejected: tuple[tuple[str, bool], ...] = ()  # of a pair: the same for the rejected answer; `tokens`: the chosen one


class TemplateUse(msgspec.Struct, frozen=True):
    """The chat template's use, by the first conversation."""

    conversations: int  # that were looked at
    before: str  # what it writes before the first message
    opens: str  # what it writes where the assistant's answer begins
    ends: str  # what it writes after the answer
    changed: int  # conversations with a content that it leaves out or writes otherwise
    date: str = ""  # that it writes in place of today's


class ReferenceState(msgspec.Struct, frozen=True):
    """The reference's log-probabilities of the data, on one node."""

    folder: str  # of the node's caches
    size_bytes: int  # of the values, in the folder or once they are there
    cached: bool  # whether they are there


class DataStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The report of `trainctl data preview`."""

    samples: int  # in data.path
    held_out: int  # of them, or in held_out_path
    tokens: int  # within the sequence length
    counted: int  # tokens that count in the loss
    lengths: dict[str, int]  # percentiles of the samples' lengths in tokens, before they are truncated
    sequence_length: int
    truncated: int  # samples that lose their end
    skipped: int  # samples that are not used
    duplicates: int  # samples equal to an earlier one
    padding: float  # fraction of a micro-batch's positions that are padding, without packing
    micro_batch: int
    packing: Literal["none", "best-fit"] = "none"  # as the run file asks for
    packs: int | None = None  # that best-fit makes of the samples for training, asked for or not; None: of text
    pack_efficiency: float | None = None  # tokens of all packs / (packs x sequence_length)
    shown: tuple[ShownSample, ...] = ()
    held_out_path: str = ""
    repeated: int = 0  # held-out samples equal to one for training
    growing: bool = False  # more may be written to the file: these are the samples that it has now
    unit: str = SAMPLES  # what samples are called
    reference: ReferenceState | None = None  # None: they are not computed before the first step
    warning: str = ""  # what is missing at the end of texts and completions
    remarks: dict[str, int] = {}  # what was left out of files and rows, and how often
    template: TemplateUse | None = None  # None: no conversations among the first rows


def epoch_samples(data: DataStatistics) -> int:
    """Return the samples of an epoch, as training counts them: packs are samples, held-out ones aren't."""
    if data.packing != "none" and data.packs is not None:
        return data.packs
    return data.samples if data.held_out_path else data.samples - data.held_out


def data_size(data: DataStatistics) -> DataSize:
    """Return how much data a run has, as far as that is fixed."""
    return DataSize(epoch_samples(data), data.held_out)


def without_end(kind: DataKind) -> str:
    """Return a warning if texts and completions get no end token: the model doesn't learn where they end."""
    if kind == "text":
        return "no end token follows the texts: the model's config.json has no eos_token_id"
    return "no end token follows texts and completions: the tokenizer has no eos_token"


def percentiles(lengths: "NDArray[np.int64]") -> dict[str, int]:
    """Return each of PERCENTILES, rounded up to a length that occurs."""
    import numpy as np  # only where lengths are measured; a client reads the result

    values = np.percentile(lengths, PERCENTILES, method="higher")
    return {f"p{percent}": int(value) for percent, value in zip(PERCENTILES, values, strict=True)}


def padding(
    lengths: "NDArray[np.int64]",
    micro_batch: int,
    micro_tokens: int = 0,
    used: "NDArray[np.int64] | None" = None,
    *,
    are_apart: bool = False,
) -> float:
    """The fraction of positions that are padding if samples of these lengths, in this order, are processed
    `micro_batch` at a time, each padded to the longest beside it. With `micro_tokens`, the first of a micro-batch,
    which is its longest, says how many fit into it. `used`: [N, sequences] positions of each sample's sequences that
    are no padding even alone; None: all of its length. If they `are_apart`, each sequence is only padded to the longest
    of its place, as prompts for an encoder and completions for a decoder are."""
    positions = done = 0
    whole = lengths[:, None] if used is None else used
    while done < len(lengths):
        fit = max(1, micro_tokens // int(lengths[done])) if micro_tokens else micro_batch
        group = lengths[done : done + min(micro_batch, fit)]
        width = int(whole[done : done + len(group)].max(axis=0).sum() if are_apart else group.max())
        positions += width * len(group)
        done += len(group)
    return 1 - int(whole.sum()) / positions


class Assembling(msgspec.Struct, frozen=True):
    """Micro-batches that were assembled from the token cache, one after another."""

    micro_batches: int
    tokens: int  # without padding
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


class StepNeed(msgspec.Struct, frozen=True):
    """Tokens per second that training takes on a node."""

    tokens_per_second: float
    source: Literal["given", "run", "model"]  # by the user, from a recorded run, or timed on this machine
    detail: str = ""  # the run's id; or what was timed


class DataRates(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements of `trainctl data bench`."""

    source_bytes: int  # of the files that were tokenized
    tokens: int  # that they came to
    tokenizing_seconds: float
    micro_batch: int  # samples at most
    prefetch: int  # micro-batches assembled ahead
    workers: int  # threads that assemble them
    cold: Assembling | None  # from the disk; None: the system keeps the files in memory
    warm: Assembling  # from memory
    need: StepNeed | None = None

    def share_of_step(self, assembling: Assembling) -> float | None:
        """Seconds of assembling for each second of training; None without a need."""
        return None if self.need is None else self.need.tokens_per_second / assembling.tokens_per_second
