"""How fast a run's data are read, beside what training takes."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from trainctl.protocol.batch.data_statistics import Assembling, DataRates, StepNeed
from trainctl.protocol.config.run_tables import RunFile
from trainctl.tui.setup import recorded_runs
from trainctl.tui.setup.data_preview import answer_of
from trainctl.tui.text.formatting import NA, compact, count


def known_need(config: RunFile, node: str, given: float | None) -> StepNeed | None:
    """What training takes, as the user gives it or this machine's newest run of the same settings measured it."""
    if given is not None:
        return StepNeed(given, "given")
    found = recorded_runs.newest_like(config, node)
    return None if found is None else StepNeed(found.tokens_per_second, "run", found.run)


def measure(
    file: Path, node: str, overrides: Mapping[str, str], need: StepNeed | None, *, may_load: bool
) -> DataRates:  # fmt: skip
    """Of the data of a run file as a node has it. Without a `need`, the model is timed, if it may be loaded. Raises
    InvalidInputError with what is wrong."""
    more = ["--model"] if need is None and may_load else []
    found = answer_of("trainctl.trainer.step.data_bench", file, node, overrides, *more, answer=DataRates)
    return found if need is None else msgspec.structs.replace(found, need=need)


def lines(found: DataRates) -> list[str]:
    """A table, and what follows from it."""
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
    """Where the figure is from."""
    return {
        "given": "as given by --need", "run": f"measured in {need.detail}",
        "model": f"forward and backward of {need.detail}",
    }[need.source]  # fmt: skip


def conclusion(found: DataRates) -> str:
    """One line: the rates side by side, and what to do if the data are slower."""
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
