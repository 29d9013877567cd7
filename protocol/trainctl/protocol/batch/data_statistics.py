"""Statistics of training data: lengths, counted tokens, padding, packing. Pure."""

from typing import Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from trainctl.protocol.config.run_tables import DataKind

PERCENTILES: Final = (50, 90, 95, 99, 100)


class ShownSample(msgspec.Struct, frozen=True):
    """One sample as a person reads it."""

    place: str  # FILE: line N
    tokens: tuple[tuple[str, bool], ...]  # text of each token, and whether it counts in the loss


class TemplateUse(msgspec.Struct, frozen=True):
    """What the chat template makes of conversations, by the first of them."""

    conversations: int  # that were looked at
    before: str  # what it writes before the first message
    opens: str  # what it writes where the assistant's answer begins
    ends: str  # what it writes after the answer
    changed: int  # conversations with a content that it leaves out or writes otherwise
    date: str = ""  # that it writes in place of today's


class DataStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What `trainctl data preview` reports."""

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
    warning: str = ""  # what is missing at the end of texts and completions
    template: TemplateUse | None = None  # None: no conversations among the first rows


def without_end(kind: DataKind) -> str:
    """What to warn of if texts and completions get no end token: the model doesn't learn where they end."""
    if kind == "text":
        return "no end token follows the texts: the model's config.json has no eos_token_id"
    return "no end token follows texts and completions: the tokenizer has no eos_token"


def percentiles(lengths: NDArray[np.int64]) -> dict[str, int]:
    """Each of PERCENTILES, rounded up to a length that occurs."""
    values = np.percentile(lengths, PERCENTILES, method="higher")
    return {f"p{percent}": int(value) for percent, value in zip(PERCENTILES, values, strict=True)}


def padding(lengths: NDArray[np.int64], micro_batch: int, micro_tokens: int = 0) -> float:
    """The fraction of positions that are padding if samples of these lengths, in this order, are processed
    `micro_batch` at a time, each padded to the longest beside it. With `micro_tokens`, the first of a micro-batch,
    which is its longest, says how many fit into it."""
    positions = done = 0
    while done < len(lengths):
        fit = max(1, micro_tokens // int(lengths[done])) if micro_tokens else micro_batch
        group = lengths[done : done + min(micro_batch, fit)]
        positions += int(group.max()) * len(group)
        done += len(group)
    return 1 - int(lengths.sum()) / positions
