"""Step plans made from settings, with their learning rates and positions. Pure."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from trainctl.node_agent.planning.durable import Durable, LrRule
from trainctl.protocol.batch.split import apportion, spread
from trainctl.protocol.config.run_tables import ChatMessage, OptimizerTable, RunFile
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import Generation, PlanKind, Range, RankWork, Sampling, StepPlan
from trainctl.protocol.messages.verbs import Profile, SampleModel

# ---------------------------------------------------------------- learning rate


def base_rate(optimizer: OptimizerTable, steps: int, step: int) -> float:
    """The run file's learning rate at `step` (from 1) of `steps`.

    Linear warm-up to the peak at the last warm-up step, then to `final_fraction` of it at the last step, by a half
    cosine (Loshchilov and Hutter 2017, without restarts), a straight line, or not at all.
    """
    peak, warmup = optimizer.learning_rate, optimizer.warmup(steps)
    if step <= warmup:
        return peak * step / warmup
    if optimizer.schedule == "constant":
        return peak
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    left = 0.5 * (1 + math.cos(math.pi * progress)) if optimizer.schedule == "cosine" else 1 - progress
    return peak * (optimizer.final_fraction + (1 - optimizer.final_fraction) * left)


def check_extension(run: str, optimizer: OptimizerTable, before: int, after: int, done: int) -> None:
    """Check that the steps that a run has done, up to `done`, would have been the same with `after` steps in all in
    place of `before`. Raises InvalidInputError with the command that branches off."""
    steps = range(1, done + 1)
    others = [step for step in steps if base_rate(optimizer, before, step) != base_rate(optimizer, after, step)]
    if not others:
        return
    why = f"the {optimizer.schedule} schedule" if optimizer.schedule != "constant" else "warmup_ratio"
    problem = (
        f"{why} of {before:,} steps has other learning rates from step {others[0]:,} on than one of {after:,} steps"
    )
    remedy = f"trainctl run --branch {run}@{done} --set run.steps={after}"
    raise InvalidInputError("steps", f"{problem}; to train on with another schedule, branch off: {remedy}")


def rate(rule: LrRule, optimizer: OptimizerTable, steps: int, step: int) -> float:
    """The learning rate that `step` is planned with."""
    return rule.number if rule.kind == "constant" else rule.number * base_rate(optimizer, steps, step)


# ---------------------------------------------------------------- positions


def first_shares(total: int, wanted: Mapping[int, int | None]) -> dict[int, int]:
    """Shares of a run's start: those the run file gives, the rest dealt evenly. Raises InvalidInputError."""
    fixed = {rank: share for rank, share in wanted.items() if share is not None}
    free = [rank for rank, share in wanted.items() if share is None]
    left = total - sum(fixed.values())
    if left < len(free) or (left and not free):
        wanted_sum = f"shares sum to {total - left} and {len(free)} more ranks need at least one sample each"
        raise InvalidInputError("nodes", f"{wanted_sum}; batch.global is {total}")
    if not free:
        return dict(sorted(fixed.items()))
    return dict(sorted({**fixed, **apportion(left, dict.fromkeys(free, 1.0))}.items()))


def deal(start: int, shares: Mapping[int, int]) -> dict[int, tuple[Range, ...]]:
    """Positions from `start` on, to the ranks in ascending order."""
    dealt: dict[int, tuple[Range, ...]] = {}
    for rank in sorted(shares):
        share = shares[rank]
        dealt[rank] = (Range(start, share),) if share else ()
        start += share
    return dealt


def subtract(ranges: Iterable[Range], held: Iterable[Range]) -> list[Range]:
    """The positions of `ranges` that are in none of `held`, ascending, as few ranges as possible."""
    cuts = sorted(held)
    left: list[Range] = []
    for whole in sorted(ranges):
        at = whole.start
        for cut in cuts:
            if cut.stop <= at or cut.start >= whole.stop:
                continue
            if cut.start > at:
                left.append(Range(at, cut.start - at))
            at = max(at, cut.stop)
        if at < whole.stop:
            left.append(Range(at, whole.stop - at))
    return merge(left)


def merge(ranges: Iterable[Range]) -> list[Range]:
    """Return the positions as ascending ranges that don't touch. The input must not overlap."""
    merged: list[Range] = []
    for piece in sorted(ranges):
        if merged and merged[-1].stop == piece.start:
            merged[-1] = Range(merged[-1].start, merged[-1].count + piece.count)
        else:
            merged.append(piece)
    return merged


def cut(ranges: Sequence[Range], counts: Mapping[int, int]) -> dict[int, tuple[Range, ...]]:
    """`ranges` dealt in order to ranks, `counts[rank]` positions each; the counts sum to the positions there are."""
    queue = list(ranges)
    dealt: dict[int, tuple[Range, ...]] = {}
    for rank in sorted(counts):
        wanted, mine = counts[rank], []
        while wanted:
            head = queue.pop(0)
            taken = min(wanted, head.count)
            mine.append(Range(head.start, taken))
            if taken < head.count:
                queue.insert(0, Range(head.start + taken, head.count - taken))
            wanted -= taken
        dealt[rank] = tuple(mine)
    return dealt


def divisor(global_batch: int, mean_weight: float) -> float:
    """D: the power of two nearest (in ratio) to the expected global weight, so that scaling by it is exact."""
    return 2.0 ** round(math.log2(max(1.0, global_batch * mean_weight)))


# ---------------------------------------------------------------- plans


class PlanMaker(msgspec.Struct, frozen=True):
    """Makes the next plan of a run: the one that commits `step`, or one beside training once it is committed. The
    cursor is the first position that isn't trained on yet."""

    run: str
    durable: Durable
    config: RunFile
    step: int
    cursor: int
    commands: tuple[str, ...] = ()  # IDs of those that the plan carries

    def train(self) -> StepPlan:
        """The plan of a step, whose global batch begins at the cursor."""
        settings = self.durable.settings
        learning_rate = rate(settings.lr, self.config.optimizer, self.config.run.steps, self.step)
        return self.plan("train", deal(self.cursor, settings.shares), learning_rate=learning_rate)

    def evaluate(self, held_out: int) -> StepPlan:
        """A pass over the `held_out` samples kept for it, split by share."""
        return self.plan("evaluate", deal(0, spread(held_out, _weights(self.durable))))

    def checkpoint(self, failing: Collection[int] = ()) -> StepPlan:
        """A checkpoint of the step by the lowest live rank, and by the lowest one of another node; by `failing` ones
        only where there are no others."""
        ranks = self.durable.settings.live
        first, *others = sorted(ranks, key=lambda rank: (rank in failing, rank))
        elsewhere = [rank for rank in others if ranks[rank].node != ranks[first].node]
        return self.plan("checkpoint", writers=(first, *elsewhere[:1]), recorded=False)

    def measure(self) -> StepPlan:
        """Two micro-batches of every live rank, the first to warm up, all from the same position on: nothing is
        consumed, and ranks of one micro-batch size are timed by the same samples."""
        micros = self.durable.settings.micros
        return self.plan("measure", {rank: (Range(self.cursor, 2 * micro),) for rank, micro in micros.items()})

    def sample(self, asked: SampleModel, node: str | None) -> StepPlan:
        """The model's answers, by one rank: the lowest live one of a node, or of all if it has none."""
        rank = min(on_node(self.durable, node or self.config.samples.node) or self.durable.settings.live)
        return self.plan("sample", only={rank}, sampling=_sampling(asked, self.config))

    def defragment(self, nodes: Collection[str | None]) -> StepPlan:
        """Caches cleared by the live ranks of `nodes`; by all if one of these is None, or if none of them is live."""
        return self.plan("defragment", only=() if None in nodes else self._on(nodes))

    def profile(self, asked: Profile) -> StepPlan:
        """The ranks of some nodes, or all, record the steps that follow."""
        return self.plan("profile", only=self._on(asked.nodes), profile_steps=asked.steps)

    def _on(self, nodes: Collection[str | None]) -> set[int]:
        return {rank for rank, setting in self.durable.settings.live.items() if setting.node in nodes}

    def plan(
        self,
        kind: PlanKind,
        dealt: Mapping[int, tuple[Range, ...]] | None = None,
        *,
        only: Collection[int] = (),
        learning_rate: float = 0.0,
        **more: Any,
    ) -> StepPlan:
        """A plan by the live ranks, or `only` some of them."""
        durable, work = self.durable, _work(self.durable, dealt or {})
        return StepPlan(
            run=self.run,
            generation=durable.generation,
            seq=durable.seq,
            kind=kind,
            step=self.step,
            plan_version=durable.settings.plan_version,
            cursor=self.cursor,
            global_batch=durable.settings.global_batch,
            work=tuple(part for part in work if part.rank in only) if only else work,
            learning_rate=learning_rate,
            divisor=durable.divisor,
            commands=self.commands,
            **more,
        )


def finishing(plan: StepPlan, durable: Durable, held: dict[int, tuple[Range, ...]], held_from: Generation) -> StepPlan:
    """The rest of a half-done `plan`: its positions less those held, dealt to the live ranks by their shares.

    Learning rate, G, D and commands stay the plan's own, so that the step is the same step.
    """
    done = [piece for pieces in held.values() for piece in pieces]
    left = subtract((piece for work in plan.work for piece in work.ranges), done)
    count = sum(piece.count for piece in left)
    work = _work(durable, cut(left, spread(count, _weights(durable))))
    return msgspec.structs.replace(plan, generation=durable.generation, seq=durable.seq, work=work, finishes=held_from)


def again(plan: StepPlan, durable: Durable) -> StepPlan:
    """A step that was made and is lost: the same positions, learning rate, D and commands, by those that are live."""
    counts = spread(plan.global_batch, _weights(durable))
    work = _work(durable, deal(plan.cursor, counts))
    return msgspec.structs.replace(plan, generation=durable.generation, seq=durable.seq, work=work, finishes=None)


def _sampling(asked: SampleModel, config: RunFile) -> Sampling:
    """Return what a command asks, the rest as in the run file."""
    table = config.samples
    own = (ChatMessage("user", asked.prompt),) if asked.prompt is not None and asked.chat else asked.prompt
    chosen = msgspec.structs.asdict(asked)
    names = ("max_tokens", "temperature", "seed", "use_generation_config")
    settings = {name: getattr(table, name) if chosen[name] is None else chosen[name] for name in names}
    return Sampling(prompts=table.prompts if own is None else (own,), top_p=table.top_p, **settings)


def on_node(durable: Durable, node: str) -> list[int]:
    """The live ranks of a node."""
    return [rank for rank, setting in durable.settings.live.items() if setting.node == node]


def _work(durable: Durable, dealt: Mapping[int, tuple[Range, ...]]) -> tuple[RankWork, ...]:
    return tuple([RankWork(rank, dealt.get(rank, ()), micro) for rank, micro in durable.settings.micros.items()])


def _weights(durable: Durable) -> dict[int, float]:
    return {rank: float(share) for rank, share in durable.settings.shares.items()}
