"""Predictions for a set of nodes in one mode: alone, in step, or each with work of its own. Pure."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple

import msgspec

from trainctl.protocol.advice.advice_facts import AdviceFacts, Source
from trainctl.protocol.advice.group_links import GroupLink, link_of
from trainctl.protocol.advice.memory_fit import TOGETHER, MemoryFit, fit_of, shared_fits
from trainctl.protocol.advice.node_speed import ERRORS, NodeSpeed, agent_seconds, speed_of, why_unknown
from trainctl.protocol.batch.cost import HOUR_SECONDS
from trainctl.protocol.batch.eta import Eta, Predicted, Schedule, TimeLeft, loop_seconds
from trainctl.protocol.batch.pass_curve import sent_bytes
from trainctl.protocol.batch.split import slowest, split

Mode = Literal["alone", "sync", "separate"]
JOULES_PER_KWH: Final = 3.6e6
FORWARD_PART: Final = 1 / 3
"""Part of a forward and a backward pass that the forward pass takes: 2 of 6 operations per parameter."""
_DISK_BYTES: Final = 1e9
"""Bytes per second that a disk writes which wasn't measured."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The prediction for a set of nodes; None: not known, or the mode has no such figure."""

    nodes: tuple[str, ...]
    mode: Mode
    source: Source  # the least known of its nodes decides
    memory: tuple[MemoryFit, ...]  # of each node
    samples_per_second: float | None = None  # of all nodes together
    tokens_per_second: float | None = None
    step_seconds: float | None = None  # separate: of the slowest node
    sum_seconds: float | None = None  # of the step, in which gradients are summed
    sent_bytes: float | None = None  # per rank and step, and as many received
    link: str = ""  # the slowest one
    link_measured: bool = True
    efficiency: float | None = None  # relative to the sum of the nodes' rates apart
    shares: Mapping[str, int] = {}  # samples of each node
    micro: Mapping[str, int] = {}  # micro-batch of each node
    smaller: Mapping[str, int] = {}  # of these, those that memory made smaller than what the node would begin with
    best_seconds: float | None = None
    expected_seconds: float | None = None
    worst_seconds: float | None = None
    cost: float | None = None  # of the expected time, of the nodes that have a price
    unpriced: tuple[str, ...] = ()  # nodes without one
    energy_kwh: float | None = None
    shared_memory: tuple[MemoryFit, ...] = ()  # of each machine whose nodes share it, all of them together
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool | None:
        """Return whether every node's memory suffices, and that of machines whose nodes share it; None: not known of
        some, and none is known to lack any."""
        found = {one.fits for one in (*self.memory, *self.shared_memory)}
        return False if False in found else None if None in found else True

    @property
    def can_run(self) -> bool:
        """Return whether it has a rate, and memory isn't known to be short."""
        return self.samples_per_second is not None and self.fits is not False


def plan_of(
    facts: AdviceFacts,
    names: Sequence[str],
    mode: Mode,
    *,
    global_batch: int | None = None,
    link: GroupLink | None = None,
) -> Plan:
    """Return the plan of these nodes. `global_batch` and `link` stand in place of the run's own: for what would change
    the answer."""
    batch = global_batch or facts.run.global_batch
    speeds = speeds_of(facts, names)
    wanted = {name: speed.micro for name, speed in speeds.items()}
    micro, memory, shared = _fitting(facts, names, wanted, in_group=mode == "sync")
    speeds = {name: speed._replace(micro=micro[name]) for name, speed in speeds.items()}
    if len(speeds) < len(names):
        return Plan(
            nodes=tuple(names),
            mode=mode,
            source="unknown",
            memory=memory,
            shared_memory=shared,
            notes=_unknown(facts, names, speeds),
        )
    source: Source = "estimated" if any(speed.source == "estimated" for speed in speeds.values()) else "measured"
    base = Plan(
        nodes=tuple(names),
        mode=mode,
        source=source,
        memory=memory,
        shared_memory=shared,
        micro=micro,
        notes=_notes(speeds),
        smaller={name: size for name, size in micro.items() if size < wanted[name]},
    )
    if mode == "sync":
        return _in_step(facts, base, speeds, batch, link or link_of(facts, names))
    seconds = {name: speed.seconds(batch) for name, speed in speeds.items()}
    rate = sum(batch / one for one in seconds.values())
    plan = msgspec.structs.replace(base, step_seconds=max(seconds.values()), efficiency=1.0)
    return _timed(facts, plan, rate, ERRORS[source])


class _Memory(NamedTuple):
    micro: dict[str, int]
    fits: tuple[MemoryFit, ...]
    shared: tuple[MemoryFit, ...]


def _fitting(facts: AdviceFacts, names: Sequence[str], wanted: Mapping[str, int], *, in_group: bool) -> _Memory:
    """Halve the micro-batches of nodes whose memory, or that of their machine, is short, as a trainer that runs out of
    memory does; down to 1, if nothing is enough."""
    micro, nodes = dict(wanted), [facts.node(name) for name in names]
    while True:
        fits = tuple(fit_of(node, facts.run, micro.get(node.name, 1), in_group=in_group) for node in nodes)
        shared = shared_fits(nodes, fits)
        short = {fit.node for fit in fits if fit.fits is False}
        for machine in shared:
            short |= set(machine.node.split(TOGETHER)) if machine.fits is False else set()
        halved = {name: -(-micro[name] // 2) for name in short if micro.get(name, 1) > 1}
        if not halved:
            return _Memory(micro, fits, shared)
        micro |= halved


def speeds_of(facts: AdviceFacts, names: Sequence[str]) -> dict[str, NodeSpeed]:
    """Return the speeds of the nodes that are known, while all of `names` work."""
    found = {}
    for name in names:
        node = facts.node(name)
        sharing = [facts.node(one) for one in names if node.machine and facts.node(one).machine == node.machine]
        speed = speed_of(node, facts.run, [other.name for other in sharing if other.name != name])
        if speed is not None:
            found[name] = speed.with_agent(agent_seconds(node, sharing))
    return found


def _in_step(facts: AdviceFacts, base: Plan, speeds: Mapping[str, NodeSpeed], batch: int, link: GroupLink) -> Plan:
    names, run = base.nodes, facts.run
    if batch < len(names):
        return msgspec.structs.replace(base, notes=(*base.notes, f"a global batch of {batch} has too few samples"))
    if run.gradient_bytes is None:
        return msgspec.structs.replace(base, notes=(*base.notes, "the size of its gradients isn't known"))
    added = link.seconds(run.gradient_bytes, len(names))
    costs = {rank: speeds[name].cost(added) for rank, name in enumerate(names)}
    shares = _given_shares(facts, names, batch) or split(batch, costs)
    step = slowest(shares, costs)
    apart = sum(batch / speed.seconds(batch) for speed in speeds.values())
    plan = msgspec.structs.replace(
        base,
        step_seconds=step,
        sum_seconds=added,
        sent_bytes=sent_bytes(run.gradient_bytes, len(names)),
        link=link.name,
        link_measured=link.measured,
        efficiency=batch / step / apart,
        shares={name: shares[rank] for rank, name in enumerate(names)},
    )
    return _timed(facts, plan, batch / step, ERRORS[base.source if link.measured else "estimated"])


def _given_shares(facts: AdviceFacts, names: Sequence[str], batch: int) -> dict[int, int] | None:
    given = {rank: facts.node(name).share for rank, name in enumerate(names)}
    shares = {rank: share for rank, share in given.items() if share is not None}
    return shares if len(shares) == len(names) and sum(shares.values()) == batch else None


def _timed(facts: AdviceFacts, plan: Plan, rate: float, error: float) -> Plan:
    run = facts.run
    left = time_of(facts, run.global_batch / rate, error, plan.nodes)
    hours = left.expected / HOUR_SECONDS
    nodes = [facts.node(name) for name in plan.nodes]
    prices = [node.price_per_hour for node in nodes if node.price_per_hour is not None]
    watts = [node.watts for node in nodes if node.watts is not None]
    return msgspec.structs.replace(
        plan,
        samples_per_second=rate,
        tokens_per_second=rate * run.tokens_per_sample,
        best_seconds=left.best,
        expected_seconds=left.expected,
        worst_seconds=left.worst,
        cost=sum(prices) * hours if prices else None,
        unpriced=tuple(node.name for node in nodes if node.price_per_hour is None),
        energy_kwh=sum(watts) * left.expected / JOULES_PER_KWH if len(watts) == len(nodes) else None,
    )


def time_of(facts: AdviceFacts, step_seconds: float, error: float, names: Sequence[str]) -> TimeLeft:
    """Return how long all steps take, with the evaluations and checkpoints that are due and the faults that may
    come."""
    found = Eta(facts.run.steps, predicted=Predicted(step_seconds, error)).left(_schedules(facts, step_seconds, names))
    assert found is not None, "a time was predicted"
    return found


def _schedules(facts: AdviceFacts, step_seconds: float, names: Sequence[str]) -> dict[str, Schedule]:
    """Return the schedules with what each plan is assumed to take: a checkpoint as long as it stops the training, and
    an evaluation a third of training's seconds per sample, because it has no backward pass."""
    run = facts.run
    profile = facts.node(names[0]).profile
    disk = profile.disk.write_bytes_per_second if profile is not None and profile.disk is not None else _DISK_BYTES
    seconds = {
        "checkpoint": loop_seconds(run.checkpoint_bytes, disk, background=run.background_checkpoints),
        "evaluate": run.held_out * step_seconds / run.global_batch * FORWARD_PART,
    }
    return {
        kind: dataclasses.replace(schedule, assumed_seconds=seconds.get(kind, 0.0))
        for kind, schedule in run.schedules.items()
    }


def _unknown(facts: AdviceFacts, names: Sequence[str], speeds: Mapping[str, NodeSpeed]) -> tuple[str, ...]:
    missing = [facts.node(name) for name in names if name not in speeds]
    return tuple(f"{node.name} is unknown: {why_unknown(node, facts.run)}" for node in missing)


def _notes(speeds: Mapping[str, NodeSpeed]) -> tuple[str, ...]:
    return tuple(f"{name}: {speed.how}" for name, speed in speeds.items() if speed.source == "estimated")
