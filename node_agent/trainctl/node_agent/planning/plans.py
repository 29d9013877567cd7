"""Step plans made from settings: pure, one method per kind of plan."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from trainctl.node_agent.planning import ranges
from trainctl.node_agent.planning.durable import Durable
from trainctl.node_agent.planning.lr_schedule import rate
from trainctl.protocol.batch.split import spread
from trainctl.protocol.config.prompts import ChatMessage
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.messages import Generation, PlanKind, Range, RankWork, Sampling, StepPlan
from trainctl.protocol.messages.verbs import Profile, SampleModel


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
        return self._plan("train", ranges.deal(self.cursor, settings.shares), learning_rate=learning_rate)

    def evaluate(self, held_out: int) -> StepPlan:
        """A pass over the `held_out` samples kept for it, split by share."""
        return self._plan("evaluate", ranges.deal(0, spread(held_out, _weights(self.durable))))

    def checkpoint(self, failing: Collection[int] = ()) -> StepPlan:
        """A checkpoint of the step by the lowest live rank, and by the lowest one of another node; by `failing` ones
        only where there are no others."""
        ranks = self.durable.settings.live
        first, *others = sorted(ranks, key=lambda rank: (rank in failing, rank))
        elsewhere = [rank for rank in others if ranks[rank].node != ranks[first].node]
        return self._plan("checkpoint", writers=(first, *elsewhere[:1]), recorded=False)

    def sync(self) -> StepPlan:
        """The lowest live rank's state for all of them."""
        return self._plan("sync")

    def measure(self) -> StepPlan:
        """Two micro-batches of every live rank, the first to warm up, all from the same position on: nothing is
        consumed, and ranks of one micro-batch size are timed by the same samples."""
        micros = self.durable.settings.micros
        return self._plan("measure", {rank: (Range(self.cursor, 2 * micro),) for rank, micro in micros.items()})

    def probe(self) -> StepPlan:
        """Outputs of every live rank's model for the same first samples of the data: nothing is consumed."""
        return self._plan("probe")

    def sample(self, asked: SampleModel, node: str | None) -> StepPlan:
        """The model's answers, by one rank: the lowest live one of a node, or of all if it has none."""
        rank = min(on_node(self.durable, node or self.config.samples.node) or self.durable.settings.live)
        return self._plan("sample", only={rank}, sampling=_sampling(asked, self.config))

    def defragment(self, nodes: Collection[str | None]) -> StepPlan:
        """Caches cleared by the live ranks of `nodes`; by all if one of these is None, or if none of them is live."""
        return self._plan("defragment", only=() if None in nodes else self._on(nodes))

    def profile(self, asked: Profile) -> StepPlan:
        """The ranks of some nodes, or all, record the steps that follow."""
        return self._plan("profile", only=self._on(asked.nodes), profile_steps=asked.steps)

    def _on(self, nodes: Collection[str | None]) -> set[int]:
        return {rank for rank, setting in self.durable.settings.live.items() if setting.node in nodes}

    def _plan(
        self,
        kind: PlanKind,
        dealt: Mapping[int, tuple[Range, ...]] | None = None,
        *,
        only: Collection[int] = (),
        learning_rate: float = 0.0,
        **more: Any,
    ) -> StepPlan:
        """`only`: the ranks that take part; none: all that are live."""
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
    left = ranges.subtract((piece for work in plan.work for piece in work.ranges), done)
    count = sum(piece.count for piece in left)
    work = _work(durable, ranges.cut(left, spread(count, _weights(durable))))
    return msgspec.structs.replace(plan, generation=durable.generation, seq=durable.seq, work=work, finishes=held_from)


def again(plan: StepPlan, durable: Durable) -> StepPlan:
    """A step that was made and is lost: the same positions, learning rate, D and commands, by those that are live."""
    counts = spread(plan.global_batch, _weights(durable))
    work = _work(durable, ranges.deal(plan.cursor, counts))
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
