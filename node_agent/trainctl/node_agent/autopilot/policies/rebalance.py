"""Moves samples to the ranks that are fast, before step 1 and later; the loss doesn't change.

The split is the one of `rebalance auto=true`. What it gained is measured; after a split that disappoints comes the one
before, or a better one, and twice as long a wait.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from trainctl.node_agent.autopilot.policy import (
    Assessment,
    Measured,
    Memory,
    Policy,
    Proposal,
    RunFacts,
    Stepped,
    assess,
    barred_size,
    percent,
)
from trainctl.node_agent.planning import share_edits
from trainctl.node_agent.planning.durable import Settings
from trainctl.node_agent.planning.rank_models import NEWEST
from trainctl.protocol.batch.split import apportion, slowest, split
from trainctl.protocol.batch.step_model import StepModel
from trainctl.protocol.messages import PolicyFigure, verbs

LEAST_STEPS = 3
"""Steps with the present split that are measured before anything is concluded."""
KEPT_PROMISE = 0.5
"""Part of the predicted gain below which a split disappoints."""
MOST_CORRECTIONS = 1
"""Splits that may follow one in its quiet steps, for a large gain: ranks that compute at other times than before may
have other speeds, as those that share a machine."""
SAME = 0.02
"""Relative change of the step's seconds, or of their lower bound, within which a search would find what it found."""
SHARE = "share "
"""Prefix of the names under which the shares before the last command are kept, by rank."""


@dataclass(frozen=True)
class _Gain:
    seconds: float  # the slowest rank's, as it is
    best: float  # the slowest rank's, with the best split

    @property
    def part(self) -> float:
        return self.seconds / self.best - 1


@dataclass
class _Seen:
    version: int
    gains: deque[float]  # of the best split, in whole windows of steps
    steps: int = 0
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=NEWEST))  # of the newest steps
    usual_seconds: float = math.inf  # their median, at the end of the last window
    settled: tuple[float, float] = (0.0, 0.0)  # a step's seconds, and its bound, when a search found too little

    @classmethod
    def of(cls, facts: RunFacts, memory: Memory) -> "_Seen":
        """Return the observations so far; none from before the current plan version."""
        version, seen = facts.durable.settings.plan_version, memory.evidence.get("seen")
        if seen is None or seen.version != version:
            gains = deque[float](maxlen=facts.config.policy.rebalance.windows)
            seen = memory.evidence["seen"] = cls(version, gains)
        made: _Seen = seen
        return made

    def is_due(self, seconds: float, at_once: float) -> bool:
        """Count one more step, and return whether to look at the ranks' speeds: in the first window of a split at each
        step, then once in a window, or if the last steps all took longer by what is acted on at once."""
        self.steps += 1
        self.seconds.append(seconds)
        is_window = self.steps % NEWEST == 0
        if is_window:
            self.usual_seconds = statistics.median(self.seconds)
        if self.steps <= NEWEST or is_window:
            return self.steps >= LEAST_STEPS
        limit = (1 + at_once) * self.usual_seconds
        return seconds > limit and min([*self.seconds][-LEAST_STEPS:]) > limit

    def is_settled(self, seconds: float, bound: float) -> bool:
        """Return whether the last search that found too little had these seconds of a step and this lower bound."""
        known = zip(self.settled, (seconds, bound), strict=True)
        return all(math.isclose(then, now, rel_tol=SAME) for then, now in known)


class Rebalance(Policy):
    """A small gain must show in several windows of steps, a large one in as many steps as make it sure."""

    name = "rebalance"

    def propose(self, facts: RunFacts, memory: Memory) -> Proposal | None:
        settings, stepped = facts.durable.settings, facts.occasion
        if not isinstance(stepped, Stepped):
            return None
        _go_back(facts, memory)
        if len(settings.live) < 2:
            return None
        seen = _Seen.of(facts, memory)
        if not seen.is_due(stepped.report.step_seconds, facts.config.policy.rebalance.at_once):
            return None
        steps, is_quiet = seen.steps, facts.step < memory.kept.get("quiet until", 0.0)
        if is_quiet and not _may_correct(settings, memory):
            return None
        if not stepped.models.keys() >= settings.live.keys():
            return None
        gain = _gain(facts, memory, stepped)
        if is_quiet and not _is_large(facts, gain, steps):
            return None
        if "promised" in memory.kept and (undone := _judged(facts, memory, stepped)) is not None:
            return undone
        if is_quiet:
            wanted: Proposal | None = _proposed(
                facts, memory, gain, steps, int(memory.kept.get("corrections", 0.0)) + 1
            )
        else:
            if steps % NEWEST == 0:
                seen.gains.append(gain.part)
            wanted = _wanted(facts, memory, gain, steps)
        if wanted is not None:
            memory.kept = {name: value for name, value in memory.kept.items() if not name.startswith(SHARE)}
        return wanted

    def sees(self, facts: RunFacts, memory: Memory) -> Assessment:
        table, live = facts.config.policy.rebalance, facts.durable.settings.live
        stepped, seen = facts.occasion, _Seen.of(facts, memory)
        is_known = isinstance(stepped, Stepped) and len(live) > 1 and live.keys() <= stepped.models.keys()
        gain = _gain(facts, memory, stepped) if isinstance(stepped, Stepped) and is_known else None
        best = _best(facts, stepped) if isinstance(stepped, Stepped) and is_known else None
        quiet = memory.kept.get("quiet until", 0.0) - facts.step
        above = next((number for number, part in enumerate(reversed(seen.gains)) if part < table.gain), len(seen.gains))
        figures = [
            PolicyFigure("gain of the best split", best.part if best else None, table.gain, "part"),
            PolicyFigure("windows in a row that showed it", above, table.windows, acts="at"),
            PolicyFigure("steps until the next split may come", max(quiet, 0.0)),
        ]
        is_due = gain is not None and seen.steps >= LEAST_STEPS and quiet <= 0
        wanted = _wanted(facts, memory, gain, seen.steps) if gain is not None and is_due else None
        otherwise = f"moves samples if steps get {percent(table.gain)} faster in {table.windows} windows of {NEWEST}"
        return assess(figures, wanted, f"{otherwise} steps, or {percent(table.at_once)} at once")


def _best(facts: RunFacts, stepped: Stepped) -> _Gain:
    settings = facts.durable.settings
    costs = share_edits.costs(settings, stepped.models, stepped.most_micro)
    return _Gain(_slowest(settings, stepped.models), slowest(split(settings.global_batch, costs), costs))


def _go_back(facts: RunFacts, memory: Memory) -> None:
    """In a run that has gone back behind the last command there is none to judge, and no longer quiet than a whole
    one."""
    kept, until = memory.kept, memory.kept.get("quiet until")
    if until is None:
        return
    quiet = kept.get("quiet", float(facts.config.policy.rebalance.quiet_steps))
    if facts.step + quiet < until:
        left = {name: value for name, value in kept.items() if name != "promised"}
        memory.kept = left | {"quiet until": facts.step + quiet}


def _slowest(settings: Settings, models: Mapping[int, StepModel]) -> float:
    return max([models[rank].seconds(of.share, of.micro_batch) for rank, of in settings.live.items()])


def _is_large(facts: RunFacts, gain: _Gain, steps: int) -> bool:
    """The middle of a few steps scatters more than that of a window."""
    return gain.part >= facts.config.policy.rebalance.at_once * math.sqrt(NEWEST / min(steps, NEWEST))


def _may_correct(settings: Settings, memory: Memory) -> bool:
    """Return whether a split may follow the last one in its quiet steps: not before that one has taken effect."""
    is_in_effect = memory.kept.get("version") != settings.plan_version
    return is_in_effect and memory.kept.get("corrections", 0.0) < MOST_CORRECTIONS


def _wanted(facts: RunFacts, memory: Memory, gain: _Gain, steps: int) -> Proposal | None:
    """The best split, if its gain is large, or has lasted for some windows."""
    table, gains = facts.config.policy.rebalance, _Seen.of(facts, memory).gains
    is_lasting = len(gains) == table.windows and min(gains) >= table.gain and gain.part >= table.gain
    return _proposed(facts, memory, gain, steps) if is_lasting or _is_large(facts, gain, steps) else None


def _proposed(facts: RunFacts, memory: Memory, gain: _Gain, steps: int, corrections: int = 0) -> Proposal:
    settings, table = facts.durable.settings, facts.config.policy.rebalance
    quiet = memory.kept.get("quiet", float(table.quiet_steps))
    remember = {
        "promised": gain.part,
        "seconds": gain.seconds,
        "version": float(settings.plan_version),
        "quiet until": facts.step + quiet,
        "quiet": quiet,
        "corrections": float(corrections),
    }
    before = {f"{SHARE}{rank}": float(setting.share) for rank, setting in settings.live.items()}
    reason = f"a step takes {gain.seconds:.3g} s by the medians of {min(steps, NEWEST)} steps; with this split"
    return Proposal(
        "rebalance",
        verbs.Rebalance(auto=True),
        f"{reason} {gain.best:.3g} s",
        remember={**remember, **before},
        is_urgent=corrections > 0,
    )


def _gain(facts: RunFacts, memory: Memory, stepped: Stepped) -> _Gain:
    """Return the gain of the best split. It is searched only if its lower bound would be so much better, and not again
    while the ranks are as fast as when whole samples and passes last allowed nothing. There is no gain from a split
    that brings a rank a micro-batch that ran out of memory."""
    settings, table, seen = facts.durable.settings, facts.config.policy.rebalance, _Seen.of(facts, memory)
    seconds = _slowest(settings, stepped.models)
    bound = share_edits.least_seconds(settings, stepped.models, stepped.most_micro)
    if seconds < bound * (1 + table.gain) or seen.is_settled(seconds, bound):
        return _Gain(seconds, seconds)
    costs = share_edits.costs(settings, stepped.models, stepped.most_micro)
    counts = split(settings.global_batch, costs)
    fixed = counts.keys() - share_edits.free_ranks(settings, stepped.models, stepped.most_micro)
    if any(_is_barred(facts, rank, counts[rank]) for rank in fixed):
        return _Gain(seconds, seconds)
    gain = _Gain(seconds, slowest(counts, costs))
    if gain.part < table.gain:
        seen.settled = seconds, bound
    return gain


def _is_barred(facts: RunFacts, rank: int, share: int) -> bool:
    """Return whether the rank's micro-batch would grow with its share to a size that ran out of memory."""
    setting, kept = facts.durable.settings.ranks[rank], facts.durable.policies.get("micro-batch")
    bar = barred_size(kept.memory, rank, facts.step) if kept is not None else None
    return bar is not None and setting.micro_in_force < bar <= min(setting.micro_batch, share)


def _judged(facts: RunFacts, memory: Memory, stepped: Stepped) -> Proposal | None:
    """The split before, if the last command gained less than half of what it promised, that split would now be faster
    by the least gain, and the best one by little more. Otherwise the ranks have changed, or noise has."""
    kept, settings, table = memory.kept, facts.durable.settings, facts.config.policy.rebalance
    models = stepped.models
    memory.kept = {name: value for name, value in kept.items() if name != "promised"}
    before = {rank: int(kept.get(f"{SHARE}{rank}", 0)) for rank in settings.live}
    if settings.plan_version != kept["version"] + 1 or not all(before.values()):
        return None  # somebody has changed more than this split
    now, promised = _slowest(settings, models), kept["promised"]
    gained = kept["seconds"] / now - 1
    old = max(models[rank].seconds(share, settings.ranks[rank].micro_batch) for rank, share in before.items())
    if gained >= KEPT_PROMISE * promised or now < old * (1 + table.gain):
        memory.kept["quiet"] = float(table.quiet_steps)
        return None
    quiet = memory.kept["quiet"] = 2 * kept["quiet"]
    if old >= (1 + table.gain) * _gain(facts, memory, stepped).best:
        return None
    came = f"{percent(abs(gained))} {'faster' if gained >= 0 else 'slower'}"
    reason = f"the last rebalance made steps {came} where {percent(promised)} faster was expected"
    shares: dict[str, int | str] = dict(_by_node(settings, before))
    exactly = share_edits.edit(
        settings, before
    )  # a command deals a node's samples to its ranks by their present shares
    return Proposal(
        "rebalance",
        verbs.Rebalance(shares=shares),
        reason,
        edit=exactly,
        severity="warning",
        remember={"quiet": quiet, "quiet until": facts.step + quiet, "corrections": float(MOST_CORRECTIONS)},
    )


def _by_node(settings: Settings, shares: Mapping[int, int]) -> dict[str, int]:
    by_node: dict[str, int] = {}
    for rank, share in shares.items():
        node = settings.ranks[rank].node
        by_node[node] = by_node.get(node, 0) + share
    return by_node


class FirstShares(Policy):
    """Deals out what the shares of the run file leave, once, by what each node managed alone before step 1."""

    name = "first-shares"
    occasions = Measured

    def is_over(self, facts: RunFacts) -> bool:
        is_timed = facts.config.group.first_shares == "timed"
        return facts.step > facts.durable.first_step or facts.durable.timed or not is_timed or len(_open(facts)) < 2

    def propose(self, facts: RunFacts, memory: Memory) -> Proposal | None:
        if not isinstance(facts.occasion, Measured):
            return None
        settings, rates = facts.durable.settings, facts.occasion.rates
        shares = {rank: setting.share for rank, setting in settings.live.items()}
        free = {rank: rates[rank] for rank in _open(facts) if rank in rates}
        edit = share_edits.edit(settings, shares | apportion(sum(shares[rank] for rank in free), free))
        timed = ", ".join(f"{settings.label(rank)} {rate:,.3g}/s" for rank, rate in rates.items())
        by_node: dict[str, int | str] = {}
        for setting in edit.settings.live.values():
            by_node[setting.node] = int(by_node.get(setting.node, 0)) + setting.share
        reason = f"initial shares by measured samples per second: {timed}"
        return Proposal("rebalance", verbs.Rebalance(shares=by_node), reason, edit=edit)

    def sees(self, facts: RunFacts, memory: Memory) -> Assessment:
        figure = PolicyFigure("ranks whose share the run file leaves open", len(_open(facts)))
        why = "sets the shares once the ranks have been measured"
        if self.is_over(facts):
            why = "has nothing more to decide: the first shares are set"
        return Assessment((figure,), why)


def _open(facts: RunFacts) -> list[int]:
    """Live ranks whose share the run file leaves open."""
    given = {name for name, table in facts.config.nodes.items() if table.share is not None}
    return [rank for rank, setting in facts.durable.settings.live.items() if setting.node not in given]
