"""Step plans made from settings: pure functions, one per kind of plan."""

from collections.abc import Collection, Mapping, Sequence

import msgspec

from trainctl.node_agent.planning import ranges
from trainctl.node_agent.planning.durable import Durable
from trainctl.node_agent.planning.lr_schedule import rate
from trainctl.protocol.batch.split import spread
from trainctl.protocol.config.prompts import ChatMessage
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.messages import Generation, PlanKind, Range, RankWork, Sampling, StepPlan
from trainctl.protocol.messages.verbs import Profile, SampleModel


def train(run: str, durable: Durable, config: RunFile, step: int, cursor: int, commands: Sequence[str]) -> StepPlan:
    """The plan that commits `step`, whose global batch begins at position `cursor`."""
    settings = durable.settings
    dealt = ranges.deal(cursor, settings.shares)
    learning_rate = rate(settings.lr, config.optimizer, config.run.steps, step)
    work = _work(durable, dealt)
    return _plan(run, durable, "train", step, cursor, work, learning_rate=learning_rate, commands=tuple(commands))


def finishing(plan: StepPlan, durable: Durable, held: dict[int, tuple[Range, ...]], held_from: Generation) -> StepPlan:
    """The rest of a half-done `plan`: its positions less those held, dealt to the live ranks by their shares.

    Learning rate, G, D and commands stay the plan's own, so that the step is the same step.
    """
    done = [piece for ranges in held.values() for piece in ranges]
    left = ranges.subtract((piece for work in plan.work for piece in work.ranges), done)
    count = sum(piece.count for piece in left)
    work = _work(durable, ranges.cut(left, spread(count, _weights(durable))))
    return msgspec.structs.replace(plan, generation=durable.generation, seq=durable.seq, work=work, finishes=held_from)


def again(plan: StepPlan, durable: Durable) -> StepPlan:
    """A step that was made and is lost: the same positions, learning rate, D and commands, by those that are live."""
    counts = spread(plan.global_batch, _weights(durable))
    work = _work(durable, ranges.deal(plan.cursor, counts))
    return msgspec.structs.replace(plan, generation=durable.generation, seq=durable.seq, work=work, finishes=None)


def evaluate(run: str, durable: Durable, step: int, cursor: int, held_out: int, commands: Sequence[str]) -> StepPlan:
    """A pass over the `held_out` samples kept for it, split by share."""
    dealt = ranges.deal(0, spread(held_out, _weights(durable)))
    return _plan(run, durable, "evaluate", step, cursor, _work(durable, dealt), commands=tuple(commands))


def checkpoint(
    run: str, durable: Durable, step: int, cursor: int, commands: Sequence[str], failing: Collection[int] = ()
) -> StepPlan:
    """A checkpoint of `step` by the lowest live rank, and by the lowest one of another node; by `failing` ones only
    where there are no others."""
    ranks = durable.settings.live
    first, *others = sorted(ranks, key=lambda rank: (rank in failing, rank))
    elsewhere = [rank for rank in others if ranks[rank].node != ranks[first].node]
    writers = (first, *elsewhere[:1])
    work = _work(durable, {})
    plan = _plan(run, durable, "checkpoint", step, cursor, work, writers=writers, commands=tuple(commands))
    return msgspec.structs.replace(plan, recorded=False)


def sync(run: str, durable: Durable, step: int, cursor: int) -> StepPlan:
    """The lowest live rank's state for all of them."""
    return _plan(run, durable, "sync", step, cursor, _work(durable, {}))


def measure(run: str, durable: Durable, step: int, cursor: int) -> StepPlan:
    """Two micro-batches of every live rank, the first to warm up, all from the same position on: nothing is consumed,
    and ranks of one micro-batch size are timed by the same samples."""
    ranks = durable.settings.live
    dealt = {rank: (Range(cursor, 2 * setting.micro_in_force),) for rank, setting in ranks.items()}
    return _plan(run, durable, "measure", step, cursor, _work(durable, dealt))


def probe(run: str, durable: Durable, step: int, cursor: int) -> StepPlan:
    """What every live rank's model says of the same first samples of the data: nothing is consumed."""
    return _plan(run, durable, "probe", step, cursor, _work(durable, {}))


def sample(
    run: str, durable: Durable, config: RunFile, step: int, cursor: int, asked: SampleModel, node: str | None,
    commands: Sequence[str],
) -> StepPlan:  # fmt: skip
    """The model's answers, by one rank: the lowest live one of a node, or of all if it has none."""
    rank = min(on_node(durable, node or config.samples.node) or durable.settings.live)
    work = tuple(work for work in _work(durable, {}) if work.rank == rank)
    plan = _plan(run, durable, "sample", step, cursor, work, commands=tuple(commands))
    return msgspec.structs.replace(plan, sampling=_sampling(asked, config))


def _sampling(asked: SampleModel, config: RunFile) -> Sampling:
    """What a command asks, the rest as in the run file."""
    table = config.samples
    own = (ChatMessage("user", asked.prompt),) if asked.prompt is not None and asked.chat else asked.prompt
    chosen = msgspec.structs.asdict(asked)
    names = ("max_tokens", "temperature", "seed", "use_generation_config")
    settings = {name: getattr(table, name) if chosen[name] is None else chosen[name] for name in names}
    return Sampling(prompts=table.prompts if own is None else (own,), top_p=table.top_p, **settings)


def defragment(
    run: str, durable: Durable, step: int, cursor: int, nodes: Collection[str | None], commands: Sequence[str]
) -> StepPlan:
    """Caches cleared by the live ranks of `nodes`; by all if one of these is None, or if none of them is live."""
    chosen = {rank for node in nodes if node for rank in on_node(durable, node)} if None not in nodes else set()
    work = tuple(work for work in _work(durable, {}) if work.rank in chosen or not chosen)
    return _plan(run, durable, "defragment", step, cursor, work, commands=tuple(commands))


def profile(run: str, durable: Durable, step: int, cursor: int, asked: Profile, commands: Sequence[str]) -> StepPlan:
    """The ranks of some nodes, or all, record the steps that follow."""
    chosen = {rank for node in asked.nodes for rank in on_node(durable, node)}
    work = tuple(work for work in _work(durable, {}) if work.rank in chosen or not asked.nodes)
    plan = _plan(run, durable, "profile", step, cursor, work, commands=tuple(commands))
    return msgspec.structs.replace(plan, profile_steps=asked.steps)


def on_node(durable: Durable, node: str) -> list[int]:
    """The live ranks of a node."""
    return [rank for rank, setting in durable.settings.live.items() if setting.node == node]


def _plan(
    run: str, durable: Durable, kind: PlanKind, step: int, cursor: int, work: tuple[RankWork, ...], *,
    learning_rate: float = 0.0, writers: tuple[int, ...] = (), commands: tuple[str, ...] = (),
) -> StepPlan:  # fmt: skip
    return StepPlan(
        run=run, generation=durable.generation, seq=durable.seq, kind=kind, step=step,
        plan_version=durable.settings.plan_version, cursor=cursor, global_batch=durable.settings.global_batch,
        work=work, learning_rate=learning_rate, divisor=durable.divisor, writers=writers, commands=commands,
    )  # fmt: skip


def _work(durable: Durable, dealt: Mapping[int, tuple[Range, ...]]) -> tuple[RankWork, ...]:
    return tuple([RankWork(rank, dealt.get(rank, ()), micro) for rank, micro in durable.settings.micros.items()])


def _weights(durable: Durable) -> dict[int, float]:
    return {rank: float(share) for rank, share in durable.settings.shares.items()}
