"""A run's data for a person to read: statistics, and samples with the tokens that count in the loss."""

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from trainctl.protocol.batch.data_statistics import DataStatistics, ReferenceState, ShownSample, TemplateUse
from trainctl.protocol.errors import InvalidInputError

_SHOWN_TEXT = 120
"""Characters of what a template writes that are shown; tools and system prompts can be long."""
_COUNTED, _CONTEXT, _PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[0m"


def read(file: Path, node: str, samples: int, overrides: Mapping[str, str]) -> DataStatistics:
    """Of the data of a run file as a node has it, with its first `samples`, read by a trainer process. Raises
    InvalidInputError with what that found wrong."""
    module = "trainctl.trainer.data.preview"
    return answer_of(module, file, node, overrides, "--samples", str(samples), answer=DataStatistics)


def statistics_lines(found: DataStatistics) -> list[str]:
    """One fact per line."""
    on = found.packing != "none"
    unit = found.unit
    repeated = f"{found.repeated:,} held-out {unit}" if found.repeated else ""
    whole = ", ".join(f"{'longest' if name == 'p100' else name} {value:,}" for name, value in found.lengths.items())
    return [
        _samples_line(found),
        f"tokens      {found.tokens:,}; {found.counted:,} count in the loss ({found.counted / found.tokens:.1%})",
        f"lengths     {whole} tokens; sequence_length {found.sequence_length:,}",
        f"truncated   {found.truncated:,} {unit} ({found.truncated / found.samples:.1%})",
        f"not used    {found.skipped:,} more {unit}",
        f"duplicates  {found.duplicates:,} {unit}{f'; {repeated} are also used for training' if repeated else ''}",
        f"padding     {found.padding:.1%} of a micro-batch of {found.micro_batch}{' without packing' if on else ''}",
        *_packing_lines(found),
        *(f"left out    {name}: {count:,}" for name, count in found.remarks.items()),
        *_template_lines(found.template),
        *([f"reference   {reference_text(found.reference)}"] if found.reference is not None else ()),
        *([f"warning     {found.warning}"] if found.warning else ()),
    ]


def _samples_line(found: DataStatistics) -> str:
    name = f"{found.unit:<12}"
    if found.held_out_path:
        return f"{name}{found.samples:,}, and {found.held_out:,} held out in {found.held_out_path}"
    if found.growing:
        return f"{name}{found.samples:,} so far; the file still grows"
    return f"{name}{found.samples:,}, of which {found.held_out:,} are held out"


def reference_text(found: ReferenceState) -> str:
    """Whether the reference's log-probabilities are there, and their size."""
    size = f"{found.size_bytes / 1e6:,.1f} MB"
    if found.cached:
        return f"cached in {found.folder} ({size}): no forward pass of it before step 1"
    return f"not cached: computed before step 1 and kept in {found.folder} ({size})"


def _packing_lines(found: DataStatistics) -> list[str]:
    if found.packs is None:
        return []
    made = f"{found.packs:,} packs, {found.pack_efficiency:.1%} full"
    return [f"packing     {made if found.packing == 'best-fit' else f'none; best-fit would make {made}'}"]


def _template_lines(used: TemplateUse | None) -> list[str]:
    if used is None:
        return []
    before, opens, ends = map(_quoted, (used.before, used.opens, used.ends))
    changed = f"{used.changed:,} of {used.conversations:,} conversations that were looked at"
    return [
        f"template    writes {before} before the first conversation, {opens} before an answer, {ends} after it",
        *([f"            writes {used.date} in place of today's date"] if used.date else ()),
        *([f"            leaves out or changes text in {changed}"] if used.changed else ()),
    ]


def _quoted(text: str) -> str:
    """A text in quotes, its middle left out if it is long."""
    if len(text) > _SHOWN_TEXT:
        half = _SHOWN_TEXT // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return json.dumps(text, ensure_ascii=False)


def sample_text(sample: ShownSample, clean: Callable[[str], str], *, color: bool) -> str:
    """The sample's text, each token made `clean`. What counts is green, or without colours between » and «. Of a pair
    the prompt, and each answer."""
    if not sample.rejected:
        return _text(sample.tokens, clean, color=color)
    prompts = [
        tuple(itertools.takewhile(lambda piece: not piece[1], half)) for half in (sample.tokens, sample.rejected)
    ]
    chosen = sample.tokens[len(prompts[0]) :]
    same = prompts[0] == prompts[1]  # else the tokens where prompt and answer meet are others
    rejected = sample.rejected[len(prompts[1]) :] if same else sample.rejected
    parts = {"prompt": prompts[0], "chosen": chosen, "rejected": rejected}
    return "\n".join(f"{name}:\n{_text(tokens, clean, color=color)}" for name, tokens in parts.items())


def _text(tokens: Sequence[tuple[str, bool]], clean: Callable[[str], str], *, color: bool) -> str:
    begin, end = (_COUNTED, _PLAIN + _CONTEXT) if color else ("»", "«")
    text, before = _CONTEXT if color else "", False
    for piece, counted in tokens:
        text += (begin if counted else end) if counted != before else ""
        text += clean(piece)
        before = counted
    return text + (end if before else "") + (_PLAIN if color else "")


T = TypeVar("T")


def answer_of(
    module: str, file: Path, node: str, overrides: Mapping[str, str], *more: str, answer: type[T]
) -> T:  # fmt: skip
    """Return what `python -m MODULE RUN.toml` prints of a run file as a node has it. Raises InvalidInputError with what
    that found wrong."""
    changed = [f"--set={key}={value}" for key, value in overrides.items()]
    words = [sys.executable, "-m", module, str(file), "--node", node, *more, *changed]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        printed, told = process.communicate()
    if process.returncode:
        name, lines = module.rpartition(".")[2], told.strip().splitlines()
        place, _, problem = (lines[-1] if lines else f"{name}: exit status {process.returncode}").partition(": ")
        raise InvalidInputError(place, problem)
    return msgspec.json.decode(printed, type=answer)
