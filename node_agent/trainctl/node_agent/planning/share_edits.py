"""Edits of shares by rebalance, drain and admit: pure functions to settings and what changed.

Shares of live ranks always sum to G, each at least one; a change names absolute shares by node, so that its `before` is
what undoes its `after`.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import msgspec

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
from trainctl.protocol.config.micro_batches import first_micro, is_auto
from trainctl.protocol.config.run_tables import NodeTable, RunFile
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import Ready, verbs
from trainctl.protocol.messages.events import Change, MicroBatchChanged, NodeStateChanged, SharesChanged

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
    return {rank: _with_share(setting, counts.get(rank, 0)) for rank, setting in settings.ranks.items()}


def _with_share(setting: RankSetting, share: int) -> RankSetting:
    out = "" if share else setting.out or "drained"
    return msgspec.structs.replace(setting, share=share, out=out, last_share=0)


def _set_out(settings: Settings, ranks: Collection[int], out: Literal["drained", "lost", "failed"]) -> Settings:
    changed = {rank: msgspec.structs.replace(settings.ranks[rank], share=0, out=out) for rank in ranks}
    return msgspec.structs.replace(settings, ranks={**settings.ranks, **changed})


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
    nodes = {setting.node for setting in settings.live.values()}
    for node in args.shares:
        if node not in nodes:
            raise InvalidInputError("shares", _why_not(settings, node))
    node_of = {rank: setting.node for rank, setting in settings.live.items()}
    return edit(settings, shares_as_wanted(settings.shares, node_of, args.shares))


def _fastest(settings: Settings, facts: Facts) -> Edit:
    for rank in settings.live:
        if rank not in facts.models:
            raise InvalidInputError("auto", f"{settings.label(rank)} has no measured rate yet: wait for its next step")
    by_rank = costs(settings, facts.models, facts.most_micro)
    counts = split(settings.global_batch, by_rank, "auto")
    free = free_ranks(settings, facts.models, facts.most_micro)
    return _with_micros(edit(settings, counts), settings, {rank: by_rank[rank].micro(counts[rank]) for rank in free})


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
    rated = [
        models[rank].rated(most_micro[rank] if rank in free else setting.micro_batch)
        for rank, setting in settings.live.items()
    ]
    return lower_bound(settings.global_batch, rated)


def _with_micros(edited: Edit, settings: Settings, chosen: Mapping[int, int]) -> Edit:
    """The edit with the micro-batches that were chosen with the shares."""
    if not chosen:
        return edited
    ranks = {
        rank: msgspec.structs.replace(setting, micro_batch=chosen.get(rank, setting.micro_batch))
        for rank, setting in edited.settings.ranks.items()
    }
    before, after = (
        tuple((of[rank].node, of[rank].micro_in_force) for rank in chosen) for of in (settings.ranks, ranks)
    )
    change = msgspec.structs.replace(edited.change, micro_before=before, micro_after=after)
    return Edit(msgspec.structs.replace(edited.settings, ranks=ranks), change)


def _why_not(settings: Settings, node: str) -> str:
    ranks = [rank for rank, setting in settings.ranks.items() if setting.node == node]
    return why_no_share(settings, ranks[0]) if ranks else unknown_node(settings, node)


def why_no_share(settings: Settings, rank: int) -> str:
    """Return why a rank is out, and what would change that."""
    node, out = settings.ranks[rank].node, settings.ranks[rank].out
    if out == "lost":
        return f"{node} is lost and takes no share until it is back"
    return f"{node} is {out} and takes no share; admit {node} first"


def unknown_node(settings: Settings, node: str | None) -> str:
    nodes = ", ".join(dict.fromkeys(setting.node for setting in settings.ranks.values()))
    return f"no node {node!r} in this run; the nodes are {nodes}"


# ---------------------------------------------------------------- drain and admit


def drain(settings: Settings, node: str | None, facts: Facts) -> Edit:
    """Without `node`: its share goes to the others in proportion. Raises InvalidInputError."""
    leaving = _ranks_of(settings, node)
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
    """With `node` again: by its last rate if all have one, else evenly; the others keep their proportions of the rest.
    Raises InvalidInputError."""
    back = [rank for rank in _ranks_of(settings, node) if settings.ranks[rank].out]
    if not back:
        raise InvalidInputError("node", f"{node} is not drained")
    if all(settings.ranks[rank].out == "lost" for rank in back):
        raise InvalidInputError("node", f"{node} is lost; it rejoins automatically when it is back")
    _check_can_join(settings, back, facts, config)
    rates = {
        rank: model.samples_per_second(last_micro_batch(settings.ranks[rank])) for rank, model in facts.models.items()
    }
    return edit(settings, shares_with_back(settings.shares, back, rates), node or "")


def lose(settings: Settings, rank: int) -> Edit:
    """Without a rank that is gone: its samples go to the others in proportion. There must be others.

    What each had before the first loss is kept for their return; a command that deals shares again forgets it.
    """
    is_first = not any(setting.out == "lost" for setting in settings.ranks.values())
    had = {at: setting.share if is_first else setting.last_share for at, setting in settings.ranks.items()}
    edited = edit(settings, shares_without(settings.shares, (rank,)))
    return Edit(_remembering(edited.settings, had, lost=rank), edited.change)


def take_back(settings: Settings, rank: int, facts: Facts, config: RunFile) -> Edit:
    """With a rank again that had been lost. Raises InvalidInputError if it has loaded something else by now."""
    _check_can_join(settings, [rank], facts, config)
    had = {at: setting.last_share for at, setting in settings.ranks.items()}
    present = {at: had[at] for at in (*settings.live, rank)}
    if all(present.values()):
        counts = apportion(settings.global_batch, {at: float(share) for at, share in present.items()})
    else:
        counts = returned_share(settings.shares, rank, had[rank])
    edited = edit(settings, counts)
    return Edit(_remembering(edited.settings, had), edited.change)


def _remembering(settings: Settings, had: Mapping[int, int], lost: int | None = None) -> Settings:
    ranks = {
        rank: msgspec.structs.replace(setting, last_share=had[rank], out="lost" if rank == lost else setting.out)
        for rank, setting in settings.ranks.items()
    }
    return msgspec.structs.replace(settings, ranks=ranks)


def expect(settings: Settings, rank: int) -> Settings:
    """With a rank that had been given up as one that may be back."""
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
    halved = msgspec.structs.replace(setting, micro_batch=after, halved_to=after)
    return Edit(settings.edited(ranks={**settings.ranks, rank: halved}), change)


def as_memory_allows(then: Settings, latest: Settings) -> Settings:
    """Settings of an earlier step with no larger micro-batches than running out of memory has left by now."""
    ranks = {
        rank: msgspec.structs.replace(
            setting,
            micro_batch=min(setting.micro_batch, latest.ranks[rank].halved_to),
            halved_to=latest.ranks[rank].halved_to,
        )
        for rank, setting in then.ranks.items()
        if rank in latest.ranks and latest.ranks[rank].halved_to
    }
    return msgspec.structs.replace(then, ranks={**then.ranks, **ranks})


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


def _ranks_of(settings: Settings, node: str | None) -> list[int]:
    ranks = [rank for rank, setting in settings.ranks.items() if setting.node == node]
    if not ranks:
        raise InvalidInputError("node", unknown_node(settings, node))
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
    after = {rank: msgspec.structs.replace(settings.ranks[rank], micro_batch=micro) for rank in ranks}
    first = min(ranks)
    node, before = settings.ranks[first].node, settings.ranks[first].micro_in_force
    change = MicroBatchChanged(((node, before),), ((node, after[first].micro_in_force),), cause)
    return Edit(settings.edited(ranks={**settings.ranks, **after}), change)
