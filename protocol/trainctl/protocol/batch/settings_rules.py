"""The rules of a run's settings: one table, which `check` reads for a run file, `advise` also for its nodes, and a
diagnosis for its ranks; and warnings by the sizes of a run's model. Pure.

A setting outside its usual range may be meant, so none of this refuses a run.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from trainctl.protocol.config import env_policy, families
from trainctl.protocol.config.adapted_layers import adapted_layers
from trainctl.protocol.config.data_files import named_splits
from trainctl.protocol.config.model_facts import ModelFacts
from trainctl.protocol.config.objectives import OBJECTIVES, UsualRange, objective_name, objective_of
from trainctl.protocol.config.run_tables import OptimizerTable, RunFile

MIN_BATCHES: Final = 8
"""Steps of an epoch below which a batch is large for its data."""
HELD_OUT_PART: Final = 0.1
"""Part of the samples that is held out on advice."""
MIN_HELD_OUT: Final = 8
"""Held-out samples below which their mean loss is mostly chance."""


@dataclass(frozen=True)
class DataSize:
    """The amount of data that a run has."""

    epoch: int  # samples of an epoch, without the held-out ones
    held_out: int | None = None  # samples that are evaluated; None: not known


class Unusual(msgspec.Struct, frozen=True):
    """A setting that is probably a mistake."""

    setting: str  # as in --set
    text: str  # the value, the usual range and its source
    change: str  # KEY=VALUE that brings it into the range


LEARNING_RATES: Final = {
    (name, has_adapter): row.rates[has_adapter] for name, row in OBJECTIVES.items() for has_adapter in (False, True)
}
"""Usual peak rates of AdamW by objective, and by whether adapters are trained. The ranges are wider than what their
sources used."""
_EPOCHS: Final = {
    True: UsualRange(0, 16, "epochs of text", "Muennighoff et al. 2023: up to 4 as good as new text"),
    False: UsualRange(0, 20, "epochs of answers", "Ouyang et al. 2022: 16"),
}
"""Usual epochs by whether every token of a text is learnt."""


def _learning_rate(config: RunFile, data: DataSize | None) -> Iterator[Unusual]:
    objective = objective_name(config.objective, config.data.kind)
    usual = LEARNING_RATES[objective, config.adapter.kind != "full"]
    rate = config.optimizer.learning_rate
    if not usual.low <= rate <= usual.high:
        yield _outside("optimizer.learning_rate", f"{rate:g}", usual, usual.low if rate < usual.low else usual.high)


def _batch(config: RunFile, data: DataSize | None) -> Iterator[Unusual]:
    batch = config.batch.global_
    if data is None or not data.epoch or batch * MIN_BATCHES <= max(data.epoch, MIN_BATCHES):
        return
    text = (
        f"batch.global {batch:,} is large for {data.epoch:,} samples: an epoch has {data.epoch / batch:.2g} steps; "
        f"usual are batches of 2 to 32, and more only with much data (Masters and Luschi 2018)"
    )
    yield Unusual("batch.global", text, f"batch.global={max(1, data.epoch // MIN_BATCHES)}")


def _epochs(config: RunFile, data: DataSize | None) -> Iterator[Unusual]:
    if data is None or not data.epoch:
        return
    epochs = config.run.epochs or config.run.steps * config.batch.global_ / data.epoch
    usual = _EPOCHS[objective_name(config.objective, config.data.kind) == "pretrain"]
    if epochs > usual.high:
        found = _outside("run.steps", f"{config.run.steps:,} makes {epochs:,.3g} epochs, which", usual, usual.high)
        yield msgspec.structs.replace(found, change=f"run.epochs={usual.high:g}")


def _held_out(config: RunFile, data: DataSize | None) -> Iterator[Unusual]:
    if data is None or data.held_out is None or not config.evaluate.every_steps or data.held_out >= MIN_HELD_OUT:
        return
    if config.data.held_out_path or config.data.held_out_fraction >= HELD_OUT_PART:
        return  # of so little data, more would be missed in training
    whole = data.epoch + data.held_out
    text = (
        f"data.held_out keeps {data.held_out} of {whole:,} samples for evaluation: its loss is mostly chance; usual is "
        f"up to a quarter of little data (Hastie, Tibshirani and Friedman 2009, section 7.2)"
    )
    yield Unusual("data.held_out", text, f"data.held_out={HELD_OUT_PART}")


def _splits(config: RunFile, data: DataSize | None) -> Iterator[Unusual]:
    splits = named_splits(Path(config.data.path), config.data.kind)
    if splits:
        others = " and ".join(path.name for split, path in splits.items() if split != "train")
        text = (
            f"data.path is a folder with {splits['train'].name} beside {others}: all of it is trained on; usual is to "
            "train on the first alone, and to name held-out data as data.held_out_path"
        )
        yield Unusual("data.path", text, f"data.path={splits['train']}")


def _outside(setting: str, value: str, usual: UsualRange, nearest: float) -> Unusual:
    side = "below" if nearest == usual.low else "above"
    within = f"at most {usual.high:g}" if not usual.low else f"{usual.low:g} to {usual.high:g}"
    text = f"{setting} {value} is {side} the usual {within} of {usual.where} ({usual.source})"
    return Unusual(setting, text, f"{setting}={nearest:g}")


FASTER_PRODUCTS: Final = 1.3
"""Ratio of matrix products from which a narrower data type is worth it."""
FREE_PART: Final = 0.6
"""Part of a rank's memory below which activations needn't be computed twice."""
MUCH_PADDING: Final = 0.1
"""Part of a micro-batch's positions that are padding from which packing is advised."""
SHORT: Final = 0.5
"""Part of the sequence length below which the mean sample of a run is short."""


@dataclass(frozen=True)
class RankSettings:
    """The settings by which a rank works, as it is planned or as it runs. None or empty: not known."""

    has_narrower: bool | None = None  # its device computes in a narrower type
    products: float | None = None  # times as many matrix products per second in the narrower type
    attention: str = ""  # the kernel
    checkpointing: str = ""
    memory_part: float | None = None  # of its cap that it needs
    padding: float | None = None  # part of a micro-batch
    sample: float | None = None  # mean tokens of a sample, as a part of the sequence length


def _is_wide(rank: RankSettings) -> bool | None:
    return rank.products >= FASTER_PRODUCTS if rank.products is not None else rank.has_narrower


def _is_eager(rank: RankSettings) -> bool | None:
    return rank.attention == "eager" if rank.attention else None


def _recomputes(rank: RankSettings) -> bool | None:
    if rank.checkpointing == "none":
        return False
    return rank.memory_part < FREE_PART if rank.memory_part is not None else None


def _lacks_memory(rank: RankSettings) -> bool | None:
    if rank.checkpointing == "all":
        return False
    return rank.memory_part > 1 if rank.memory_part is not None else None


def _is_padded(rank: RankSettings) -> bool | None:
    if rank.padding is not None:
        return rank.padding >= MUCH_PADDING
    return rank.sample < SHORT if rank.sample is not None else None


@dataclass(frozen=True)
class SettingsRule:
    """One setting that is often left slow or wrong."""

    change: str  # KEY=VALUE of --set, or the KEY alone if the value depends on the file
    title: str
    by_file: Callable[[RunFile, DataSize | None], Iterator[Unusual]] | None = None
    by_rank: Callable[[RankSettings], bool | None] = lambda _: None  # whether the change pays; None: not known
    sign: str = ""  # what shows it in a run, for docs
    remedy: str = ""


PRECISION: Final = SettingsRule(
    "model.dtype=auto",
    "float32 where bfloat16 is faster",
    by_rank=_is_wide,
    sign="by calibrated matrix products, or by the device's name",
    remedy="compute in the best type that all devices have; sums and weights stay float32",
)
ATTENTION: Final = SettingsRule(
    "model.attention", "Attention is not fused", by_rank=_is_eager, sign="the kernel that a rank reports"
)
RECOMPUTED: Final = SettingsRule(
    "model.gradient_checkpointing=none",
    "Activations are computed twice while memory is free",
    by_rank=_recomputes,
    sign="gradient checkpointing, and a peak below 60 % of the cap",
    remedy="keep the activations",
)
LACKS_MEMORY: Final = SettingsRule(
    "model.gradient_checkpointing=all", "Memory is too small for the activations", by_rank=_lacks_memory
)
PACKING: Final = SettingsRule(
    "data.packing=best-fit",
    "Short samples are not packed",
    by_rank=_is_padded,
    sign="a mean sample below half of the sequence length",
    remedy="put several samples into one sequence",
)
RULES: Final = (
    PRECISION,
    ATTENTION,
    RECOMPUTED,
    LACKS_MEMORY,
    PACKING,
    SettingsRule("optimizer.learning_rate", "The learning rate is unusual", _learning_rate),
    SettingsRule("batch.global", "The batch is large for its data", _batch),
    SettingsRule("run.epochs", "The data are repeated often", _epochs),
    SettingsRule("data.held_out", "Few samples are held out", _held_out),
    SettingsRule("data.path", "Held-out data are trained on", _splits),
)
"""All rules, in the order in which they are said."""


def unusual_settings(config: RunFile, data: DataSize | None = None) -> tuple[Unusual, ...]:
    """Return what is probably a mistake in a run file. `data`: None if they weren't counted."""
    return tuple(found for rule in RULES if rule.by_file is not None for found in rule.by_file(config, data))


def fit_warnings(config: RunFile, facts: ModelFacts, where: str, devices: Collection[str] = ()) -> tuple[str, ...]:
    """One line each. `devices`: of the ranks, as far as they are known. Raises InvalidInputError for adapters of layers
    that the model doesn't have."""
    found = (
        families.untested(facts.family),
        _length(config, facts),
        _rank(config, facts, where),
        _mixture(config, facts, where),
        _divergence(config),
        *_variables(config),
        *_without_effect(config, devices),
    )
    return tuple(line for line in found if line)


def _length(config: RunFile, facts: ModelFacts) -> str:
    length = config.data.sequence_length
    if facts.positions is None or length <= facts.positions:
        return ""
    return (
        f"data.sequence_length {length:,} is above the {facts.positions:,} positions that the model has: it was not "
        f"trained on positions after that; lower data.sequence_length"
    )


def _rank(config: RunFile, facts: ModelFacts, where: str) -> str:
    """A matrix of n by m has no higher rank than the smaller of both; adapters of that rank save nothing."""
    if config.adapter.kind == "full":
        return ""
    shapes = adapted_layers(config.adapter, facts.shapes, where).shapes
    layer, smallest = min(((name, min(shape)) for name, shape in shapes.items()), key=lambda pair: pair[1])
    if config.adapter.rank < smallest:
        return ""
    what = f"the smaller dimension of {layer.rpartition('.')[2]}, {smallest}"
    return f"adapter.rank {config.adapter.rank} is not below {what}: lower adapter.rank"


def _mixture(config: RunFile, facts: ModelFacts, where: str) -> str:
    """Say which parts of a mixture of experts are trained, and that nothing balances its router."""
    if config.adapter.kind == "full":
        weight = f"router_aux_loss_coef {facts.router_loss:g} of config.json"
        unused = "without output_router_logits, as in transformers"
        return f"{weight} has no effect {unused}: the loss is that of the tokens alone" if facts.router_loss else ""
    adapted = adapted_layers(config.adapter, facts.shapes, where)
    if not adapted.left_out:
        return ""
    trained = ", ".join(sorted({layer.rpartition(".")[2] for layer in adapted.shapes}))
    return (
        f"the {' and '.join(adapted.left_out)} aren't trained, because adapters can't be attached to them; "
        f'{trained} are ({len(adapted.shapes):,} layers). adapter.kind = "full" trains all weights'
    )


def _divergence(config: RunFile) -> str:
    """Only adapters can be turned off for the logits of the model as it was."""
    measured = {metric.name for metric in objective_of(config.objective, config.data.kind).held_out}
    if config.adapter.kind != "full" or "kl" not in measured:
        return ""
    return (
        "evaluations of a dpo run that trains all weights don't measure eval/kl, so the alert kl can't open: follow "
        "eval/logratio, or train an adapter"
    )


def _without_effect(config: RunFile, devices: Collection[str]) -> Iterator[str]:
    """Name settings that are made and change nothing beside the others."""
    on_cpu = bool(devices) and all(device == "cpu" for device in devices)
    falls_to = OptimizerTable(learning_rate=1.0).final_fraction
    for setting, is_set, is_idle, why in (
        (
            "group.links_per_peer",
            config.group.links_per_peer > 1,
            config.group.engine == "gloo",
            'only the engine "ring" has several links',
        ),
        (
            "data.workers",
            config.data.workers > 1,
            config.data.prefetch == 0,
            "with data.prefetch = 0 no thread assembles micro-batches ahead",
        ),
        ("model.tf32", config.model.tf32, on_cpu, "TF32 is for GPUs"),
        (
            "optimizer.final_fraction",
            config.optimizer.final_fraction != falls_to,
            config.optimizer.schedule == "constant",
            "a constant rate doesn't fall",
        ),
        ("samples.every_steps", config.samples.every_steps > 0, not config.samples.prompts, "there are no prompts"),
        (
            "nodes.NAME.shared_threads",
            any(table.shared_threads for table in config.nodes.values()),
            True,
            "the lead of each new run sets it; set threads",
        ),
        (
            "checkpoint.keep_every",
            config.checkpoint.keep_every > 0,
            not config.checkpoint.every_steps,
            "checkpoint.every_steps is 0",
        ),
    ):
        if is_set and is_idle:
            yield f"{setting} has no effect: {why}"


def _variables(config: RunFile) -> Iterator[str]:
    for node, table in config.nodes.items():
        for name in sorted({*table.env} - env_policy.ALLOWED):
            yield f"nodes.{node}.env.{name}: {node} refuses the run unless its owner allows this variable there"
