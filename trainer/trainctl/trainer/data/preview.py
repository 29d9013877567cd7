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
    ReferenceState,
    ShownSample,
    TemplateUse,
    padding,
    percentiles,
    without_end,
)
from trainctl.protocol.config import names, run_file, run_tables
from trainctl.protocol.config.data_files import data_files
from trainctl.protocol.config.names import node_directory
from trainctl.protocol.config.objectives import caches_reference, objective_of
from trainctl.protocol.config.run_tables import NodeTable, micro_of
from trainctl.protocol.errors import TrainctlError
from trainctl.protocol.machine.file_digests import model_digests
from trainctl.trainer.common.errors import first_line
from trainctl.trainer.common.reference_cache import compute_of, read_values
from trainctl.trainer.data.chat_template import TEMPLATE_DATE, template_use
from trainctl.trainer.data.dataset import Dataset, open_dataset, place_of
from trainctl.trainer.data.permutation import Indices, best_fit, samples_at
from trainctl.trainer.data.row_tokens import RowTokenizer, import_tokenizers, row_tokenizer
from trainctl.trainer.data.rows import Conversation, row_chunks, rows_in

_TEMPLATE_ROWS = 200
"""Rows that are looked at for what the chat template does. More take longer: each is rendered once more."""


def preview(
    config: run_tables.RunFile, shown: int, where: str, caches: Path | None = None, kept: Path | None = None
) -> DataStatistics:
    """Return statistics of a run file's data and its first `shown` samples. Caches are made in `caches`; `kept` is the
    folder of the node's caches. Raises InvalidInputError as `open_dataset`."""
    with tempfile.TemporaryDirectory(prefix="trainctl-preview-", dir=caches) as folder:
        dataset = open_dataset(config, Path(folder), where)
        whole, targets, batch = dataset.lengths, dataset.sequence_targets, config.batch
        micro = micro_of(config, NodeTable())
        training = targets[dataset.training]
        used = training[samples_at(np.arange(len(training)), len(training), config.run.seed)]
        widths = used.max(axis=1) * dataset.sequences
        starts = range(0, len(widths), batch.global_)  # a rank processes the longest of each global batch first
        order = np.concatenate([at + np.argsort(-widths[at : at + batch.global_], kind="stable") for at in starts])
        tokenizer = row_tokenizer(Path(config.model.path), config.data.tokenizer, where) if shown else None
        return DataStatistics(
            samples=len(whole),
            held_out=dataset.held_out,
            tokens=int(targets.sum()),
            counted=dataset.counted,
            lengths=percentiles(whole.max(axis=1)),
            sequence_length=config.data.sequence_length,
            truncated=dataset.truncated,
            skipped=dataset.left_out,
            duplicates=dataset.duplicates,
            micro_batch=micro,
            held_out_path=config.data.held_out_path,
            repeated=dataset.repeated,
            unit=objective_of(config.objective, config.data.kind).sample_unit,
            growing=run_file.grows(config),
            remarks=dict(dataset.remarks),
            warning="" if dataset.has_end else without_end(config.data.kind),
            padding=padding(widths[order], micro, batch.micro_tokens, used[order], are_apart=dataset.encodes_prompts),
            packing=config.data.packing,
            **_packing(config, training),
            template=_template(config, where, pairs=dataset.has_pairs),
            reference=_reference(config, dataset, kept),
            shown=tuple(_shown(config, dataset, tokenizer, number) for number in range(min(shown, len(whole)))),
        )


def _packing(config: run_tables.RunFile, targets: Indices) -> dict[str, Any]:
    """Return how best-fit packs samples of so many `targets`, [N, sequences]; nothing of text and pairs."""
    if config.data.kind == "text" or targets.shape[1] > 1:
        return {}
    length = config.data.sequence_length
    packs = len(best_fit(targets[:, 0], length, config.run.seed))
    return {"packs": packs, "pack_efficiency": int(targets.sum()) / (packs * length)}


def _template(config: run_tables.RunFile, where: str, *, pairs: bool) -> TemplateUse | None:
    """Look at the conversations among the first rows."""
    if config.data.kind != "rows":
        return None
    grows, sources = run_file.grows(config), data_files(Path(config.data.path), "rows")
    chunks = (chunk for source in sources for chunk in row_chunks(source, grows=grows))
    first = islice((row for chunk in chunks for row in rows_in(chunk, are_pairs=pairs)), _TEMPLATE_ROWS)
    talks = [row for row in first if isinstance(row, Conversation)]
    if not talks:
        return None
    tokenizer = row_tokenizer(Path(config.model.path), config.data.tokenizer, where)
    date = f"{TEMPLATE_DATE:%Y-%m-%d}" if tokenizer.writes_date(talks[0]) else ""
    return template_use([(row.messages, tokenizer.render(row)) for row in talks], date)


def _reference(config: run_tables.RunFile, dataset: Dataset, caches: Path | None) -> ReferenceState | None:
    """Read the model's files only if there are values that may be theirs."""
    if caches is None or not caches_reference(config.objective, has_adapter=config.adapter.kind != "full"):
        return None
    parts = (dataset, *([dataset.evaluation] if dataset.evaluation is not None else []))
    may_be_there = caches.is_dir() and any(caches.glob("reference-*"))
    model = model_digests(Path(config.model.path)).whole if may_be_there else ""
    keys = [part.reference_key(model, compute_of(config.model)) for part in parts]
    cached = may_be_there and all((caches / key.name).is_dir() for key in keys)
    for key in keys if cached else ():
        read_values(caches / key.name, key)
    return ReferenceState(str(caches), sum(key.size_bytes for key in keys), cached)


def _shown(config: run_tables.RunFile, dataset: Dataset, tokenizer: RowTokenizer | None, number: int) -> ShownSample:
    assert tokenizer is not None
    pieces = [
        tuple(tokenizer.pieces(tokens.tolist(), [False, *counted.tolist()]))  # the first token is no one's target
        for tokens, counted in dataset.sample(number)
    ]
    if dataset.encodes_prompts:
        prompt, completion = pieces
        pieces = [(*prompt, ("\n", False), *completion)]
    return ShownSample(place_of(config, dataset.index(number)), *pieces)


def main() -> int:
    """Print one JSON line. Return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m trainctl.trainer.data.preview", description="A run's data.")
    parser.add_argument("run_file", type=Path)
    parser.add_argument("--node", default="")
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    arguments: Any = parser.parse_args()
    try:
        overrides = dict(pair.split("=", 1) for pair in arguments.set)
        config = run_file.on_this_machine(run_file.read(arguments.run_file, overrides), arguments.node)
        run_file.check_paths(config, str(arguments.run_file), arguments.node)
        caches = run_file.cache_folder(config, arguments.node, Path(tempfile.gettempdir()))
        where = str(arguments.run_file)
        if arguments.samples or config.data.kind != "samples":
            import_tokenizers(config.data.tokenizer)
        kept = run_file.cache_folder(
            config, arguments.node, node_directory(arguments.node or names.node_name()) / "data"
        )
        statistics = preview(config, arguments.samples, where, caches if caches.is_dir() else caches.parent, kept)
    except (TrainctlError, OSError) as error:
        print(first_line(error), file=sys.stderr)
        return 2
    print(msgspec.json.encode(statistics).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
