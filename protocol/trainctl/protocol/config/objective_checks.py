"""Checks that a run file's objective has the settings, data and adapter that it can work with."""

from trainctl.protocol.config.objectives import ObjectiveTable, caches_reference, objective_of, which_have
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.errors import Collected, InvalidInputError


def check(config: RunFile, where: str) -> None:
    """Raise InvalidInputError naming `where` and the field; with several, all of them."""
    objective, kind = config.objective, config.data.kind
    if kind == "text" and objective_of(objective, kind).needs_mask:
        problem = f'{objective.kind!r} needs data.kind = "rows" or "samples": text has no answers to learn'
        raise InvalidInputError(f"{where}: objective.kind", problem)
    wrong, row = Collected(), objective_of(objective, kind)
    for field in ObjectiveTable.__struct_fields__:
        if field not in ("kind", *row.settings) and getattr(objective, field) != getattr(ObjectiveTable(), field):
            problem = f"is a setting of objective.kind = {which_have(field)}; this run has {objective.kind!r}"
            with wrong.going_on():
                raise InvalidInputError(f"{where}: objective.{field}", problem)
    if row.has_pairs:
        with wrong.going_on():
            _check_preferences(config, where)
    if row.encodes_prompts:
        with wrong.going_on():
            _check_seq2seq(config, where)
    wrong.raise_any()


def _check_seq2seq(config: RunFile, where: str) -> None:
    wrong = Collected()
    for field, is_wrong, problem in (
        ("data.kind", config.data.kind != "rows", 'needs rows with a prompt and a completion: set "rows"'),
        ("data.tokenizer", config.data.tokenizer == "bytes", 'needs the tokenizer of its model: set "model"'),
        ("data.growing", config.data.growing, "needs whole files: set data.growing = false"),
        ("data.packing", config.data.packing != "none", 'does not support packing: set data.packing = "none"'),
        ("adapter.dropout", config.adapter.dropout > 0, "does not support adapter dropout: set adapter.dropout = 0"),
        ("model.base", config.model.base != "stored", 'does not support quantized bases: set model.base = "stored"'),
    ):
        with wrong.going_on():
            if is_wrong:
                raise InvalidInputError(f"{where}: {field}", f'"seq2seq" {problem}')
    wrong.raise_any()


def _check_preferences(config: RunFile, where: str) -> None:
    objective, wrong = config.objective, Collected()
    with wrong.going_on():
        _check_pairs(config, where)
    with wrong.going_on():
        if objective.reference == "adapter-off" and config.adapter.kind == "full":
            problem = '"adapter-off" needs adapters: set adapter.kind = "lora", or "cached" to train all weights'
            raise InvalidInputError(f"{where}: objective.reference", problem)
    with wrong.going_on():
        if caches_reference(objective, has_adapter=config.adapter.kind != "full") and config.model.init == "random":
            problem = '"dpo" needs a trained model as its reference: set "pretrained"'
            raise InvalidInputError(f"{where}: model.init", problem)
    with wrong.going_on():
        if objective.label_smoothing and objective.loss != "robust":
            problem = f'acts only on objective.loss = "robust"; this run has {objective.loss!r}'
            raise InvalidInputError(f"{where}: objective.label_smoothing", problem)
    wrong.raise_any()


def _check_pairs(config: RunFile, where: str) -> None:
    kind = f'"{config.objective.kind}"'
    if config.data.kind != "rows":
        problem = f'{kind} needs rows with a chosen and a rejected answer: set "rows"'
        raise InvalidInputError(f"{where}: data.kind", problem)
    if config.data.growing:
        raise InvalidInputError(f"{where}: data.growing", f"{kind} needs whole files: set data.growing = false")
    if config.data.packing != "none":
        problem = f'{kind} compares the two answers of a pair, which are not packed: set data.packing = "none"'
        raise InvalidInputError(f"{where}: data.packing", problem)
