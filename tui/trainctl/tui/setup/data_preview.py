"""A run's data for a person to read: statistics, samples with the tokens that count in the loss, and reading speed."""

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from trainctl.protocol.batch.data_statistics import (
    Assembling,
    DataRates,
    DataStatistics,
    ReferenceState,
    ShownSample,
    StepNeed,
    TemplateUse,
)
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.errors import InvalidInputError
from trainctl.tui.setup import memory_report
from trainctl.tui.text.formatting import NA, compact, count

_SHOWN_TEXT = 120
"""Characters of what a template writes that are shown; tools and system prompts can be long."""
_COUNTED, _CONTEXT, _PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[0m"


def read(file: Path, node: str, samples: int, overrides: Mapping[str, str]) -> DataStatistics:
    """Return statistics of a run's data as a node has it, with its first `samples`, read by a trainer process. Raises
    InvalidInputError with what that found wrong."""
    module = "trainctl.trainer.data.preview"
    return answer_of(module, file, node, overrides, "--samples", str(samples), answer=DataStatistics)


def statistics_lines(found: DataStatistics) -> list[str]:
    """Return one fact per line."""
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
    """Return whether the reference's log-probabilities are there, and their size."""
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
    """Return a text in quotes, its middle left out if it is long."""
    if len(text) > _SHOWN_TEXT:
        half = _SHOWN_TEXT // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return json.dumps(text, ensure_ascii=False)


def sample_text(sample: ShownSample, clean: Callable[[str], str], *, color: bool) -> str:
    """Return the sample's text, each token made `clean`. What counts is green, or without colours between » and «. Of a
    pair the prompt, and each answer."""
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


def answer_of(module: str, file: Path, node: str, overrides: Mapping[str, str], *more: str, answer: type[T]) -> T:
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


def known_need(config: RunFile, node: str, given: float | None) -> StepNeed | None:
    """Return what training takes, as the user gives it or this machine's newest run of the same settings measured
    it."""
    if given is not None:
        return StepNeed(given, "given")
    found = memory_report.newest_like(config, node)
    return None if found is None else StepNeed(found.tokens_per_second, "run", found.run)


def measure_speed(
    file: Path, node: str, overrides: Mapping[str, str], need: StepNeed | None, *, may_load: bool
) -> DataRates:
    """Return how fast a run's data are read as a node has it. Without a `need`, the model is timed, if it may be
    loaded. Raises InvalidInputError with what is wrong."""
    more = ["--model"] if need is None and may_load else []
    found = answer_of("trainctl.trainer.step.data_bench", file, node, overrides, *more, answer=DataRates)
    return found if need is None else msgspec.structs.replace(found, need=need)


def speed_lines(found: DataRates) -> list[str]:
    """Return a table, and what follows from it."""
    rate = found.tokens / found.tokenizing_seconds
    size, speed = found.source_bytes / 1e6, found.source_bytes / 1e6 / found.tokenizing_seconds
    cold = (
        "the page cache can't be emptied here" if found.cold is None else _micro_batches(found, found.cold, "the disk")
    )
    return [
        f"{'':<12}{'tokens/s':>9}",
        _row("tokenizing", rate, f"{size:.3g} MB in {found.tokenizing_seconds:.3g} s ({speed:.3g} MB/s)"),
        _row("cold cache", None if found.cold is None else found.cold.tokens_per_second, cold),
        _row("warm cache", found.warm.tokens_per_second, _micro_batches(found, found.warm, "memory")),
        *([] if found.need is None else [_row("training", found.need.tokens_per_second, _source(found.need))]),
        conclusion(found),
    ]


def _row(name: str, rate: float | None, detail: str) -> str:
    return f"{name:<12}{NA if rate is None else compact(rate):>9}  {detail}"


def _micro_batches(found: DataRates, part: Assembling, place: str) -> str:
    threads = "1 thread" if found.workers == 1 else f"{found.workers} threads"
    ahead = f"{threads}, {found.prefetch} ahead" if found.prefetch else "none ahead"
    return f"{count(part.micro_batches)} micro-batches of up to {found.micro_batch} from {place} ({ahead})"


def _source(need: StepNeed) -> str:
    """Return where the figure is from."""
    return {
        "given": "as given by --need",
        "run": f"measured in {need.detail}",
        "model": f"forward and backward of {need.detail}",
    }[need.source]


def conclusion(found: DataRates) -> str:
    """Return one line: the rates side by side, and what to do if the data are slower."""
    cold = "cold n/a" if found.cold is None else f"{compact(found.cold.tokens_per_second)} cold"
    rates = f"data: {compact(found.warm.tokens_per_second)} tokens/s warm, {cold}"
    share = found.share_of_step(found.warm)
    if found.need is None or share is None:
        return rates
    needed = f"{rates}; a step needs {compact(found.need.tokens_per_second)} tokens/s: data takes {_percent(share)}"
    slow = found.share_of_step(found.cold or found.warm)
    if share > 1:
        return f"{needed} of a step: training waits for it; raise data.workers, or lower batch.micro_tokens"
    if slow is not None and slow > 1:
        return f"{needed} of a step, but {_percent(slow)} cold: keep the token cache on a faster disk (cache_path)"
    return f"{needed} of a step"


def _percent(part: float) -> str:
    """Two significant digits: 0.012 %, 1.4 %, 120 %."""
    return f"{float(f'{100 * part:.2g}'):g} %"
