"""Edits of shares by rebalance, drain and admit: pure functions to settings and what changed.

Shares of live ranks always sum to G, each at least one; a change names absolute shares by node, so that its `before` is
what undoes its `after`.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

from msgspec.structs import replace

from trainctl.node_agent.planning import compatibility
from trainctl.node_agent.planning.durable import RankSetting, Settings
from trainctl.protocol.batch.split import (
    ShareCost,
    apportion,
    group_costs,
    lower_bound,
    returned_share,
    shares_as_wanted,
    shares_with_back,
    shares_without,
    split,
)
from trainctl.protocol.batch.step_model import StepModel
from trainctl.protocol.calibration.peak import fastest_within_cap
from trainctl.protocol.config.run_tables import NodeTable, RunFile, first_micro, is_auto
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import Ready, verbs
from trainctl.protocol.messages.events import Change, MicroBatchChanged, NodeStateChanged, Pairs, SharesChanged

AWAY_SECONDS = 5.0
"""Seconds of silence after which a trainer counts as hung; it reports every second, also while it computes."""


@dataclasses.dataclass(frozen=True)
class Edit:
    settings: Settings
    change: Change


@dataclasses.dataclass(frozen=True)
class Facts:
    """Facts about the ranks that an edit may need beside their settings."""

    models: Mapping[int, StepModel] = dataclasses.field(default_factory=dict)  # of those that have been measured
    standing: Collection[int] = ()  # ranks of the newest generation: their state is that of the last step
    ready: Mapping[int, Ready] = dataclasses.field(default_factory=dict)  # what those that have loaded, and live, said
    silent_seconds: Mapping[int, float] = dataclasses.field(default_factory=dict)  # since anything was heard from them
    most_micro: Mapping[int, int] = dataclasses.field(default_factory=dict)  # samples of a pass at most, where known
    by_person: bool = True  # whether a person sent the command, and no policy


def with_shares(settings: Settings, counts: Mapping[int, int]) -> dict[int, RankSetting]:
    """All ranks with new shares, out and without one if `counts` has none for them."""
    ranks = {}
    for rank, setting in settings.ranks.items():
        share = counts.get(rank, 0)
        ranks[rank] = replace(setting, share=share, out="" if share else setting.out or "drained", last_share=0)
    return ranks


def _set_out(settings: Settings, ranks: Collection[int], out: Literal["drained", "lost", "failed"]) -> Settings:
    changed = {rank: replace(settings.ranks[rank], share=0, out=out) for rank in ranks}
    return replace(settings, ranks={**settings.ranks, **changed})


def edit(settings: Settings, counts: Mapping[int, int], node: str = "") -> Edit:
    """The settings with these shares of live ranks; all others are out. `node`: the one drained or admitted."""
    ranks = with_shares(settings, counts)
    shown = [rank for rank, setting in settings.ranks.items() if not (setting.out and ranks[rank].out)]
    change = SharesChanged(_by_node(settings.ranks, shown), _by_node(ranks, shown), node=node)
    return Edit(settings.edited(ranks=ranks), change)


def _by_node(ranks: Mapping[int, RankSetting], shown: Collection[int]) -> dict[str, int]:
    """Samples by node, in the order of ranks."""
    by_node: dict[str, int] = {}
    for rank in sorted(shown):
        by_node[ranks[rank].node] = by_node.get(ranks[rank].node, 0) + ranks[rank].share
    return by_node


# ---------------------------------------------------------------- rebalance


def rebalance(settings: Settings, args: verbs.Rebalance, facts: Facts) -> Edit:
    """Shares as wanted, or those of the shortest step by the ranks' own models. Raises InvalidInputError naming the
    argument."""
    if args.auto:
        return _fastest(settings, facts)
    node_of = {rank: setting.node for rank, setting in settings.live.items()}
    for node in args.shares:
        if node not in node_of.values():
            raise InvalidInputError("shares", why_no_share(settings, node, "shares"))
    return edit(settings, shares_as_wanted(settings.shares, node_of, args.shares))


def _fastest(settings: Settings, facts: Facts) -> Edit:
    for rank in settings.live:
        if rank not in facts.models:
            raise InvalidInputError("auto", f"{settings.label(rank)} has no measured rate yet: wait for its next step")
    by_rank = costs(settings, facts.models, facts.most_micro)
    counts = split(settings.global_batch, by_rank, "auto")
    edited = edit(settings, counts)
    free = free_ranks(settings, facts.models, facts.most_micro)
    if not free:
        return edited
    before, ranks = settings.ranks, dict(edited.settings.ranks)
    for rank in free:
        ranks[rank] = replace(ranks[rank], micro_batch=by_rank[rank].micro(counts[rank]))
    change = replace(edited.change, micro_before=micros(before, free), micro_after=micros(ranks, free))
    return Edit(replace(edited.settings, ranks=ranks), change)


def micros(ranks: Mapping[int, RankSetting], chosen: Iterable[int]) -> Pairs:
    """Return the micro-batches in force of some ranks, by node."""
    return tuple((ranks[rank].node, ranks[rank].micro_in_force) for rank in chosen)


def free_ranks(settings: Settings, models: Mapping[int, StepModel], most_micro: Mapping[int, int]) -> list[int]:
    """Live ranks whose micro-batch is chosen with the share: as the run file asks, where the curve is known."""
    auto = [rank for rank, setting in settings.live.items() if setting.auto_micro and rank in most_micro]
    return [rank for rank in auto if not models[rank].is_linear]


def costs(settings: Settings, models: Mapping[int, StepModel], most_micro: Mapping[int, int]) -> dict[int, ShareCost]:
    """Return what shares cost the live ranks, each of which must have a model: with the micro-batches that are set, or
    with any up to `most_micro` where that is chosen with the share."""
    micros = {rank: setting.micro_batch for rank, setting in settings.live.items()}
    most = {rank: size for rank, size in most_micro.items() if settings.ranks[rank].auto_micro}
    return group_costs(settings.global_batch, models, micros, most)


def least_seconds(settings: Settings, models: Mapping[int, StepModel], most_micro: Mapping[int, int]) -> float:
    """Return what no step goes below, whatever the shares; it is found in a fraction of the time that a split takes."""
    free = {*free_ranks(settings, models, most_micro)} if most_micro else set()
    micros = {rank: most_micro[rank] if rank in free else at.micro_batch for rank, at in settings.live.items()}
    return lower_bound(settings.global_batch, [models[rank].rated(micro) for rank, micro in micros.items()])


def why_no_share(settings: Settings, node: str, field: str) -> str:
    """Return why a node is out, and what would change that. Raises InvalidInputError for a node of another run."""
    out = settings.ranks[ranks_of(settings, node, field)[0]].out
    if out == "lost":
        return f"{node} is lost and takes no share until it is back"
    return f"{node} is {out} and takes no share; admit {node} first"


# ---------------------------------------------------------------- drain and admit


def drain(settings: Settings, node: str | None, facts: Facts) -> Edit:
    """Take a node out: its share goes to the others in proportion. Raises InvalidInputError."""
    leaving = ranks_of(settings, node)
    if all(settings.ranks[rank].out == "drained" for rank in leaving):
        raise InvalidInputError("node", f"{node} is already drained")
    if all(settings.ranks[rank].out for rank in leaving):
        after = _set_out(settings, leaving, "drained").edited()
        return Edit(after, NodeStateChanged(node or "", settings.ranks[leaving[0]].out, "drained"))
    staying = settings.live.keys() - leaving
    if not staying:
        raise InvalidInputError("node", f"{node} is the last live node; use stop to end the run")
    if facts.standing and not staying & set(facts.standing):
        raise InvalidInputError("node", f"only {node} has the state of the last step; try again after the next step")
    return edit(settings, shares_without(settings.shares, leaving), node or "")


def admit(settings: Settings, node: str | None, facts: Facts, config: RunFile) -> Edit:
    """Take a node in again: by its last rate if all have one, else evenly. The others keep their proportions of the
    rest. Raises InvalidInputError."""
    back = [rank for rank in ranks_of(settings, node) if settings.ranks[rank].out]
    if not back:
        raise InvalidInputError("node", f"{node} is not drained")
    if all(settings.ranks[rank].out == "lost" for rank in back):
        raise InvalidInputError("node", f"{node} is lost; it rejoins automatically when it is back")
    _check_can_join(settings, back, facts, config)
    last = {rank: last_micro_batch(setting) for rank, setting in settings.ranks.items()}
    rates = {rank: model.samples_per_second(last[rank]) for rank, model in facts.models.items()}
    return edit(settings, shares_with_back(settings.shares, back, rates), node or "")


def lose(settings: Settings, rank: int) -> Edit:
    """Take out a rank that is gone: its samples go to the others in proportion. There must be others.

    What each had before the first loss is kept for their return; a command that deals shares again forgets it.
    """
    is_first = not any(setting.out == "lost" for setting in settings.ranks.values())
    had = {at: setting.share if is_first else setting.last_share for at, setting in settings.ranks.items()}
    return _remembering(edit(settings, shares_without(settings.shares, (rank,))), had, lost=rank)


def take_back(settings: Settings, rank: int, facts: Facts, config: RunFile) -> Edit:
    """Take in a rank again that had been lost. Raises InvalidInputError if it has loaded something else by now."""
    _check_can_join(settings, [rank], facts, config)
    had = {at: setting.last_share for at, setting in settings.ranks.items()}
    present = {at: had[at] for at in (*settings.live, rank)}
    if all(present.values()):
        counts = apportion(settings.global_batch, {at: float(share) for at, share in present.items()})
    else:
        counts = returned_share(settings.shares, rank, had[rank])
    return _remembering(edit(settings, counts), had)


def _remembering(edited: Edit, had: Mapping[int, int], lost: int | None = None) -> Edit:
    ranks = {}
    for rank, setting in edited.settings.ranks.items():
        ranks[rank] = replace(setting, last_share=had[rank], out="lost" if rank == lost else setting.out)
    return Edit(replace(edited.settings, ranks=ranks), edited.change)


def expect(settings: Settings, rank: int) -> Settings:
    """Count a rank that had been given up as one that may be back."""
    return _set_out(settings, (rank,), "lost").edited()


def give_up(settings: Settings, rank: int) -> Settings:
    """A lost rank that is not started any more, until it is admitted."""
    return _set_out(settings, (rank,), "failed").edited()


def last_micro_batch(setting: RankSetting) -> int:
    """Samples per forward/backward of a rank that may be out: by the share that it has, or last had."""
    return min(setting.micro_batch, setting.share or setting.last_share or setting.micro_batch)


def halve(settings: Settings, rank: int) -> Edit:
    """Half the micro-batch, at least 1, for a rank that ran out of memory; the same settings if it was 1."""
    setting = settings.ranks[rank]
    before = last_micro_batch(setting)
    after = max(1, before // 2)
    change = MicroBatchChanged(((setting.node, before),), ((setting.node, after),))
    if after == before:
        return Edit(settings, change)
    halved = replace(setting, micro_batch=after, halved_to=after)
    return Edit(settings.edited(ranks={**settings.ranks, rank: halved}), change)


def as_memory_allows(then: Settings, latest: Settings) -> Settings:
    """Settings of an earlier step with no larger micro-batches than running out of memory has left by now."""
    ranks = dict(then.ranks)
    for rank, setting in then.ranks.items():
        halved_to = latest.ranks[rank].halved_to if rank in latest.ranks else 0
        if halved_to:
            ranks[rank] = replace(setting, micro_batch=min(setting.micro_batch, halved_to), halved_to=halved_to)
    return replace(then, ranks=ranks)


def _check_can_join(settings: Settings, back: Collection[int], facts: Facts, config: RunFile) -> None:
    for rank in back:
        if rank not in facts.ready:
            raise InvalidInputError("node", f"{settings.label(rank)}'s trainer is not ready to join")
        if (silent_seconds := facts.silent_seconds.get(rank, 0.0)) > AWAY_SECONDS:
            problem = f"{settings.label(rank)}'s trainer has been silent for {silent_seconds:.0f} s"
            raise InvalidInputError("node", problem)
    joined = [rank for rank in (*settings.live, *back) if rank in facts.ready]
    ready = {settings.label(rank): facts.ready[rank] for rank in joined}
    difference = compatibility.disagreement(ready)
    if difference is not None:
        raise InvalidInputError("node", difference)
    try:
        compatibility.choose(config.group, ready)
    except InvalidInputError as error:
        raise InvalidInputError("node", str(error)) from None


def ranks_of(settings: Settings, node: str | None, field: str = "node") -> list[int]:
    """Return the ranks of a node. Raises InvalidInputError if the run has no such node."""
    ranks = [rank for rank, setting in settings.ranks.items() if setting.node == node]
    if not ranks:
        nodes = ", ".join(dict.fromkeys(setting.node for setting in settings.ranks.values()))
        raise InvalidInputError(field, f"no node {node!r} in this run; the nodes are {nodes}")
    return ranks


def fastest_micro(settings: Settings, config: RunFile, ready: Ready) -> Edit | None:
    """The micro-batch of a rank's profile, for its first step; None if the run file, a person or a lack of memory has
    decided, or nothing changes. A smaller share limits it, as any micro-batch."""
    setting = settings.ranks.get(ready.rank)
    if setting is None or ready.profile is None:
        return None
    table = config.nodes.get(setting.node, NodeTable())
    if not is_auto(config, table) or setting.halved_to or setting.micro_batch != first_micro(config, table):
        return None
    chosen = fastest_within_cap(ready.profile.passes, config.batch.global_, ready.memory_cap_bytes)
    if chosen.micro == setting.micro_batch:
        return None
    cause = f'micro = "auto": {chosen.rate:.4g} samples/s by {setting.node}\'s calibration'
    return resized(settings, [ready.rank], chosen.micro, cause)


def resized(settings: Settings, ranks: Sequence[int], micro: int, cause: str = "") -> Edit:
    """Return another micro-batch for the ranks of a node, which the run file leaves to be chosen."""
    after = {**settings.ranks, **{rank: replace(settings.ranks[rank], micro_batch=micro) for rank in ranks}}
    change = MicroBatchChanged(micros(settings.ranks, [min(ranks)]), micros(after, [min(ranks)]), cause)
    return Edit(settings.edited(ranks=after), change)
