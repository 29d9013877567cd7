"""Warnings before a run: settings that work but are rarely intended, given the model's sizes and the objective."""

from collections.abc import Collection, Iterator

from trainctl.protocol.config import env_policy, families
from trainctl.protocol.config.adapted_layers import adapted_layers
from trainctl.protocol.config.model_facts import ModelFacts
from trainctl.protocol.config.objectives import objective_of
from trainctl.protocol.config.run_tables import OptimizerTable, RunFile


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
