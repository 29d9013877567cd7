"""A run's data for a person to read: statistics, and samples with the tokens that count in the loss."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from trainctl.protocol.batch.data_statistics import DataStatistics, ShownSample, TemplateUse
from trainctl.tui.setup.trainer_process import answer_of

_COUNTED, _CONTEXT, _PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[0m"


def read(file: Path, node: str, samples: int, overrides: Mapping[str, str]) -> DataStatistics:
    """Of the data of a run file as a node has it, with its first `samples`, read by a trainer process. Raises
    InvalidInputError with what that found wrong."""
    module = "trainctl.trainer.data.preview"
    return answer_of(module, file, node, overrides, "--samples", str(samples), answer=DataStatistics)


def statistics_lines(found: DataStatistics) -> list[str]:
    """One fact per line."""
    on = found.packing != "none"
    repeated = f"{found.repeated:,} held-out samples" if found.repeated else ""
    whole = ", ".join(f"{'longest' if name == 'p100' else name} {value:,}" for name, value in found.lengths.items())
    return [
        _samples_line(found),
        f"tokens      {found.tokens:,}; {found.counted:,} count in the loss ({found.counted / found.tokens:.1%})",
        f"lengths     {whole} tokens; sequence_length {found.sequence_length:,}",
        f"truncated   {found.truncated:,} samples ({found.truncated / found.samples:.1%})",
        f"not used    {found.skipped:,} more samples",
        f"duplicates  {found.duplicates:,} samples{f'; {repeated} are also used for training' if repeated else ''}",
        f"padding     {found.padding:.1%} of a micro-batch of {found.micro_batch}{' without packing' if on else ''}",
        *_packing_lines(found),
        *_template_lines(found.template),
        *([f"warning     {found.warning}"] if found.warning else ()),
    ]


def _samples_line(found: DataStatistics) -> str:
    if found.held_out_path:
        return f"samples     {found.samples:,}, and {found.held_out:,} held out in {found.held_out_path}"
    if found.growing:
        return f"samples     {found.samples:,} so far; the file still grows"
    return f"samples     {found.samples:,}, of which {found.held_out:,} are held out"


def _packing_lines(found: DataStatistics) -> list[str]:
    if found.packs is None:
        return []
    made = f"{found.packs:,} packs, {found.pack_efficiency:.1%} full"
    return [f"packing     {made if found.packing == 'best-fit' else f'none; best-fit would make {made}'}"]


def _template_lines(used: TemplateUse | None) -> list[str]:
    if used is None:
        return []
    before, opens, ends = (json.dumps(text, ensure_ascii=False) for text in (used.before, used.opens, used.ends))
    return [
        f"template    writes {before} before a conversation, {opens} before an answer, {ends} after it",
        *([f"            writes {used.date} in place of today's date"] if used.date else ()),
        *([f"            leaves out or changes contents of {used.changed:,} of the first {used.conversations:,} "
           "conversations"] if used.changed else ()),
    ]  # fmt: skip


def sample_text(sample: ShownSample, clean: Callable[[str], str], *, color: bool) -> str:
    """The sample's text, each token made `clean`. What counts is green, or without colours between » and «."""
    begin, end = (_COUNTED, _PLAIN + _CONTEXT) if color else ("»", "«")
    text, before = _CONTEXT if color else "", False
    for piece, counted in sample.tokens:
        text += (begin if counted else end) if counted != before else ""
        text += clean(piece)
        before = counted
    return text + (end if before else "") + (_PLAIN if color else "")
