"""Effect of each editing verb on the settings: pure functions to settings and what changed."""

import math
from typing import assert_never

import msgspec

from trainctl.node_agent.planning import share_edits
from trainctl.node_agent.planning.durable import LrRule, Settings
from trainctl.node_agent.planning.plans import rate
from trainctl.node_agent.planning.share_edits import Edit, Facts
from trainctl.protocol.batch.split import apportion
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import verbs
from trainctl.protocol.messages.events import GlobalBatchChanged, LearningRateChanged, MicroBatchChanged

MAX_LEARNING_RATE = 100.0
NO_FACTS = Facts()
MEMBERSHIP = verbs.Drain | verbs.Admit
"""Arguments of verbs that change the live ranks and so need a new generation."""


def apply(
    settings: Settings, args: verbs.AnyArgs, node: str | None, step: int, config: RunFile, facts: Facts = NO_FACTS
) -> Edit:
    """The settings from `step` on; just those there are where nothing changes, so that no plan is new for nothing.
    Raises InvalidInputError naming the argument that can't be had."""
    if not isinstance(args, verbs.EditArgs):
        raise InvalidInputError("verb", f"{type(args).__name__} doesn't edit the settings")
    edit = _edited(settings, args, node, step, config, facts)
    if msgspec.structs.replace(edit.settings, plan_version=settings.plan_version) == settings:
        return Edit(settings, msgspec.structs.replace(edit.change, after=edit.change.before))
    return edit


def _edited(
    settings: Settings, args: verbs.EditArgs, node: str | None, step: int, config: RunFile, facts: Facts
) -> Edit:
    match args:
        case verbs.ResizeBatch():
            return _resize(settings, args, node, facts)
        case verbs.SetGlobalBatch():
            return _global_batch(settings, args, config)
        case verbs.SetLr():
            return _learning_rate(settings, args, step, config)
        case verbs.Rebalance():
            return share_edits.rebalance(settings, args, facts)
        case verbs.Drain():
            return share_edits.drain(settings, node, facts)
        case verbs.Admit():
            return share_edits.admit(settings, node, facts, config)
        case _ as missing:
            assert_never(missing)


def _resize(settings: Settings, args: verbs.ResizeBatch, node: str | None, facts: Facts) -> Edit:
    """A size that a person has chosen stays; a policy's may be chosen again with the share."""
    chosen = [rank for rank, setting in settings.live.items() if node in (None, setting.node)]
    if node is not None and not chosen:
        raise InvalidInputError("node", share_edits.why_no_share(settings, node, "node"))
    ranks = dict(settings.ranks)
    for rank in chosen:
        setting = ranks[rank]
        if args.micro > setting.share:
            raise InvalidInputError("micro", f"{args.micro} is over {setting.node}'s share of {setting.share} samples")
        is_auto = setting.auto_micro and not facts.by_person
        ranks[rank] = msgspec.structs.replace(setting, micro_batch=args.micro, halved_to=0, auto_micro=is_auto)
    change = MicroBatchChanged(share_edits.micros(settings.ranks, chosen), share_edits.micros(ranks, chosen))
    return Edit(settings.edited(ranks=ranks), change)


def _global_batch(settings: Settings, args: verbs.SetGlobalBatch, config: RunFile) -> Edit:
    weights = {rank: float(setting.share) for rank, setting in settings.live.items()}
    ranks = share_edits.with_shares(settings, apportion(args.value, weights))
    lr = settings.lr.scaled(args.value / settings.global_batch) if args.schedule == "scale" else settings.lr
    if args.schedule == "scale":
        _check_rate(lr, "schedule", config)
    change = GlobalBatchChanged(settings.global_batch, args.value, args.schedule)
    return Edit(settings.edited(global_batch=args.value, ranks=ranks, lr=lr), change)


def _learning_rate(settings: Settings, args: verbs.SetLr, step: int, config: RunFile) -> Edit:
    steps = config.run.steps
    before = rate(settings.lr, config.optimizer, steps, step)
    was_constant = settings.lr.kind == "constant"
    change = LearningRateChanged(before, args.value, args.schedule, was_constant)
    if args.schedule == "set":
        lr = msgspec.structs.replace(settings.lr, kind="constant", number=args.value)
        return Edit(settings.edited(lr=lr), change)
    if before == 0:
        raise InvalidInputError("schedule", "the learning rate is 0 here and cannot be scaled; use schedule=set")
    lr = settings.lr.scaled(args.value / before)
    _check_rate(lr, "value", config)
    return Edit(settings.edited(lr=lr), change)


def _check_rate(rule: LrRule, field: str, config: RunFile) -> None:
    """Raise InvalidInputError if the rest of the schedule exceeds the highest learning rate allowed."""
    peak = rule.number * (config.optimizer.learning_rate if rule.kind == "schedule" else 1.0)
    if not math.isfinite(peak) or peak > MAX_LEARNING_RATE:
        problem = f"the schedule's peak would be {peak:.4g}, above the limit of {MAX_LEARNING_RATE:g}"
        raise InvalidInputError(field, f"{problem}; use schedule=set")
