"""`python -m trainctl.trainer.data.preview RUN.toml`: statistics of a run's data and its first samples, as JSON.

Everything is read and tokenized as the run would, in a temporary folder beside the node's token caches if it has a
`cache_path`.
"""

import argparse
import sys
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from trainctl.protocol.batch.data_statistics import (
    DataStatistics,
    ShownSample,
    TemplateUse,
    padding,
    percentiles,
    without_end,
)
from trainctl.protocol.config import run_file, run_tables
from trainctl.protocol.errors import TrainctlError
from trainctl.trainer.common.errors import first_line
from trainctl.trainer.data.best_fit import best_fit
from trainctl.trainer.data.chat_dates import TEMPLATE_DATE
from trainctl.trainer.data.chat_spans import template_use
from trainctl.trainer.data.chunks import row_chunks
from trainctl.trainer.data.dataset import Dataset, open_dataset, place_of
from trainctl.trainer.data.pairs import halves_in
from trainctl.trainer.data.permutation import Indices, samples_at
from trainctl.trainer.data.row_tokens import RowTokenizer, row_tokenizer
from trainctl.trainer.data.rows import Conversation, rows_in

_TEMPLATE_ROWS = 200
"""Rows that are looked at for what the chat template does. More take longer: each is rendered once more."""


def preview(config: run_tables.RunFile, shown: int, where: str, caches: Path | None = None) -> DataStatistics:
    """Of the data of a run file, with the first `shown` samples. Raises InvalidInputError as `open_dataset`."""
    with tempfile.TemporaryDirectory(prefix="trainctl-preview-", dir=caches) as folder:
        dataset = open_dataset(config, Path(folder), where)
        whole = dataset.lengths
        used = np.minimum(whole, config.data.sequence_length + 1) - 1  # targets
        training, batch = used[dataset.training], config.batch
        order = samples_at(np.arange(len(training)), len(training), config.run.seed)
        tokenizer = row_tokenizer(Path(config.model.path), config.data.tokenizer, where) if shown else None
        return DataStatistics(
            samples=len(whole), held_out=dataset.held_out, tokens=int(used.sum()), counted=dataset.counted,
            lengths=percentiles(whole), sequence_length=config.data.sequence_length, truncated=dataset.truncated,
            skipped=dataset.left_out, duplicates=dataset.duplicates, micro_batch=batch.micro,
            held_out_path=config.data.held_out_path, repeated=dataset.repeated,
            growing=run_file.grows(config), warning="" if dataset.has_end else without_end(config.data.kind),
            padding=padding(_by_length(training[order], batch.global_), batch.micro, batch.micro_tokens),
            packing=config.data.packing, **(_packing(config, training) if dataset.sequences == 1 else {}),
            template=_template(config, where, pairs=dataset.has_pairs),
            shown=tuple(_shown(config, dataset, tokenizer, number) for number in range(min(shown, len(whole)))),
        )  # fmt: skip


def _packing(config: run_tables.RunFile, targets: Indices) -> dict[str, Any]:
    """What best-fit makes of samples with so many `targets`; nothing of text."""
    if config.data.kind == "text":
        return {}
    length = config.data.sequence_length
    packs = len(best_fit(targets, length, config.run.seed))
    return {"packs": packs, "pack_efficiency": int(targets.sum()) / (packs * length)}


def _template(config: run_tables.RunFile, where: str, *, pairs: bool) -> TemplateUse | None:
    """By the conversations among the first rows."""
    if config.data.kind != "rows":
        return None
    grows, read = run_file.grows(config), halves_in if pairs else rows_in
    chunks = (
        chunk
        for source in run_file.data_files(Path(config.data.path), "rows")
        for chunk in row_chunks(source, grows=grows)
    )
    first = islice((row for chunk in chunks for row in read(chunk)), _TEMPLATE_ROWS)
    talks = [row for row in first if isinstance(row, Conversation)]
    if not talks:
        return None
    tokenizer = row_tokenizer(Path(config.model.path), config.data.tokenizer, where)
    date = f"{TEMPLATE_DATE:%Y-%m-%d}" if tokenizer.writes_date(talks[0]) else ""
    return template_use([(row.messages, tokenizer.render(row)) for row in talks], date)


def _by_length(lengths: Indices, global_batch: int) -> Indices:
    """As one rank processes them: the longest of each global batch first."""
    batches = np.split(lengths, range(global_batch, len(lengths), global_batch))
    return np.concatenate([-np.sort(-batch) for batch in batches])


def _shown(config: run_tables.RunFile, dataset: Dataset, tokenizer: RowTokenizer | None, number: int) -> ShownSample:
    assert tokenizer is not None
    pieces: list[tuple[str, bool]] = []
    for tokens, counted in dataset.sample(number):
        flags = [False, *counted.tolist()]  # the first token is no one's target
        pieces += [("\n", False)] * bool(pieces) + [*tokenizer.pieces(tokens.tolist(), flags)]
    return ShownSample(place_of(config, dataset.index(number)), tuple(pieces))


def main() -> int:
    """Print one JSON line; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m trainctl.trainer.data.preview", description="A run's data.")
    parser.add_argument("run_file", type=Path)
    parser.add_argument("--node", default="")
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    given: Any = parser.parse_args()
    try:
        overrides = dict(pair.split("=", 1) for pair in given.set)
        config = run_file.on_this_machine(run_file.read(given.run_file, overrides), given.node)
        run_file.check_paths(config, str(given.run_file), given.node)
        caches = run_file.cache_folder(config, given.node, Path(tempfile.gettempdir()))
        found = preview(config, given.samples, str(given.run_file), caches if caches.is_dir() else caches.parent)
    except (TrainctlError, OSError) as error:
        print(first_line(error), file=sys.stderr)
        return 2
    print(msgspec.json.encode(found).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
