"""Causes on a machine: swap, memory, disk, stolen processor time, other programs on a GPU.

A reading alone is no cause if the rank's passes are as fast as ever: pressure on a machine that ranks share is usual.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median

from trainctl.protocol.analysis.diagnosis.rule import NO_STEPS, Clear, Found, Unknown, Verdict
from trainctl.protocol.analysis.diagnosis.situation import Situation, megabytes, percent
from trainctl.protocol.analysis.rolling import LONGER
from trainctl.protocol.batch.split import set_threads
from trainctl.protocol.config.run_tables import NodeTable, RunFile
from trainctl.protocol.messages import GpuProcess, RankView, WhatIf
from trainctl.protocol.messages.event_prose import seconds

SWAP_BYTES = 1e6
"""Bytes per second swapped in and out."""
MEMORY_PRESSURE = 10.0
"""Percent of the time in which tasks waited for memory."""
MEMORY_USED = 0.97
"""Part of the machine's memory in use."""
IO_PRESSURE, DISK_BUSY = 10.0, 85.0
"""Percent of the time in which tasks waited for input or output, or in which the disk was busy."""
STEAL_PERCENT, MUCH_STEAL = 3.0, 10.0
"""Percent of processor time given to other virtual machines: with slower passes, and by itself."""
CPU_PRESSURE, RISEN = 25.0, 15.0
"""Percent of the time in which a task waited for a processor, and points by which it has risen, or it is half way
to 100: ranks that share a machine always wait for each other."""
FULL_PRESSURE = 90.0
"""Percent from which a machine with one rank of the run has other work, whether that has risen or not."""
ALL_USED = 95.0
"""Percent of the processors' time from which all of them are in use."""
FROM_THE_START = 0.15
"""Part by which passes are slower than calibrated, for pressure that may have been there from the start."""
MOST_PREFETCH = 64
"""Micro-batches that a run file may let be assembled ahead."""
OTHERS_BYTES = 300e6
"""Device memory of another program that is no trouble: a desktop has some."""


def each_node(check: Callable[[Situation, str], Iterable[Verdict]]) -> Callable[[Situation], Iterator[Verdict]]:
    """Ask a check of each node that has ranks with steps."""

    @functools.wraps(check)
    def of_all(s: Situation) -> Iterator[Verdict]:
        nodes = [*dict.fromkeys(its.node for its in s.ranks.values())]
        if not nodes:
            yield NO_STEPS
        for node in nodes:
            yield from check(s, node)

    return of_all


def slower(s: Situation, node: str) -> tuple[float | None, int | None]:
    """The largest slowdown of a node's ranks, and whose it is; None: not known."""
    known = [(found, rank) for rank in s.ranks_of(node) if (found := s.slowdown(rank)) is not None]
    return max(known, default=(None, None))


def without_slowdown(s: Situation, node: str, what: str) -> WhatIf | None:
    """A step with the node's passes as fast as they were; None where that isn't known."""
    removed = {}
    for rank in s.ranks_of(node):
        part = s.slowdown(rank)
        removed[rank] = s.ranks[rank].busy * max(part or 0.0, 0.0) / (1 + max(part or 0.0, 0.0))
    return s.without(removed, what) if any(removed.values()) else None


def impact(s: Situation, node: str) -> str:
    """The slowdown as a line of evidence; empty: none is known."""
    part, rank = slower(s, node)
    if part is None or rank is None or part < LONGER:
        return ""
    return f"{s.label(rank)}'s data, forward and backward take {percent(part)} longer than they did"


def is_slower(s: Situation, node: str) -> bool:
    part, _ = slower(s, node)
    return part is not None and part >= LONGER


def is_crowded(s: Situation) -> bool | None:
    """Return whether more tasks want some node's processors than there are. None: not known, and all of them are in
    use."""
    waits = cpu_pressure(s)
    if any((s.reading(node, "cpu_steal_percent") or 0.0) >= STEAL_PERCENT for node in s.nodes):
        return True
    if waits is None and any(_cpu_used(s, node) >= ALL_USED for node in s.nodes):
        return None
    return waits is not None and waits >= CPU_PRESSURE


def _cpu_used(s: Situation, node: str) -> float:
    used = [one.cpu_percent for one in s.window_readings(node) if one.cpu_percent is not None]
    return median(used) if used else 0.0


def cpu_pressure(s: Situation) -> float | None:
    """The highest of the nodes, in percent; None: not known."""
    return max((waits for node in s.nodes if (waits := s.reading(node, "cpu_pressure")) is not None), default=None)


# ---------------------------------------------------------------- memory and swap


@each_node
def swap(s: Situation, node: str) -> Iterator[Verdict]:
    """A machine that moves memory to its disk and back."""
    rates = [s.reading(node, f"swap_{way}_bytes_per_second") for way in ("in", "out")]
    moved = sum(rate for rate in rates if rate is not None)
    if all(rate is None for rate in rates):
        yield Unknown(f"swap rates of {node}", node)
    elif moved < SWAP_BYTES:
        yield Clear(f"swap {megabytes(moved)}/s", node)
    else:
        used = s.reading(node, "swap_used_bytes")
        evidence = [f"{megabytes(moved)}/s swapped in and out"]
        evidence += [f"{megabytes(used)} of swap in use"] if used else []
        evidence += [line for line in (_pressure(s, node, "memory"), impact(s, node)) if line]
        yield Found(
            f"{node} swaps",
            tuple(evidence),
            node,
            what_if=without_slowdown(s, node, f"swapping on {node}"),
            values={"node": node, "smaller": _smaller(s, node)},
        )


def _pressure(s: Situation, node: str, what: str) -> str:
    found = s.reading(node, f"{what}_pressure")
    return f"{what} pressure {found:.0f} %" if found is not None else ""


def _smaller(s: Situation, node: str) -> int | None:
    """Half of the largest micro-batch of the node's ranks; None if that is 1 or not known."""
    micro = max((s.ranks[rank].micro for rank in s.ranks_of(node)), default=0)
    return micro // 2 if micro > 1 else None


@each_node
def memory_pressure(s: Situation, node: str) -> Iterator[Verdict]:
    """Tasks that wait for memory."""
    waits, readings = s.reading(node, "memory_pressure"), s.window_readings(node)
    used = [
        one.memory_used_bytes / one.memory_total_bytes
        for one in readings
        if one.memory_used_bytes is not None and one.memory_total_bytes
    ]
    if waits is None and not used:
        yield Unknown(f"memory of {node}", node)
        return
    full = median(used) if used else 0.0
    if (waits or 0.0) >= MEMORY_PRESSURE or (full >= MEMORY_USED and is_slower(s, node)):
        evidence = [f"{percent(full)} of the machine's memory in use"] if used else []
        evidence += [line for line in (_pressure(s, node, "memory"), impact(s, node)) if line]
        what_if = without_slowdown(s, node, f"waits for memory on {node}")
        values = {"node": node, "smaller": _smaller(s, node)}
        yield Found(f"{node} is short of memory", tuple(evidence), node, what_if=what_if, values=values)
    else:
        yield Clear(_pressure(s, node, "memory") or f"{percent(full)} of the machine's memory in use", node)


# ---------------------------------------------------------------- disk


@each_node
def slow_disk(s: Situation, node: str) -> Iterator[Verdict]:
    """Data that wait for a busy disk."""
    waits, busy = s.reading(node, "io_pressure"), s.reading(node, "disk_busy_percent")
    if waits is None and busy is None:
        yield Unknown(f"I/O pressure and disk use of {node}", node)
        return
    said = [_pressure(s, node, "io").replace("io", "I/O")] if waits is not None else []
    said += [f"the disk is busy {busy:.0f} % of the time"] if busy is not None else []
    is_busy = (waits or 0.0) >= IO_PRESSURE or (busy or 0.0) >= DISK_BUSY
    late = {rank: s.data_waits[rank] for rank in s.ranks_of(node) if rank in s.data_waits}
    if not is_busy or not late or not s.step_seconds:
        hidden = "; no rank waits long for data" if is_busy else ""
        yield Clear(f"{', '.join(said)}{hidden}", node)
        return
    rank = max(late, key=lambda one: late[one])
    read = s.reading(node, "disk_read_bytes_per_second")
    said += [f"{megabytes(read)}/s read"] if read is not None else []
    part = percent(late[rank] / s.step_seconds)
    said.append(f"{s.label(rank)} waits {seconds(late[rank])} for data in a step, {part} of it")
    usual = {one: max(late[one] - _usual_data(s, one), 0.0) for one in late}
    yield Found(
        f"{node}'s disk is slow",
        tuple(said),
        node,
        what_if=s.without(usual, f"{node}'s waits for its disk"),
        values={"node": node, "prefetch": more_prefetch(s)},
    )


def more_prefetch(s: Situation) -> int | None:
    """A larger `data.prefetch`; None if it is the largest already, or not known."""
    prefetch = s.facts.config.data.prefetch if s.facts.config is not None else MOST_PREFETCH
    return min(max(2 * prefetch, 4), MOST_PREFETCH) if prefetch < MOST_PREFETCH else None


def _usual_data(s: Situation, rank: int) -> float:
    return s.before[rank].data_mean if rank in s.before else 0.0


# ---------------------------------------------------------------- processor


def shared_cores(s: Situation) -> Iterator[Verdict]:
    """Ranks of one machine that have more threads than it has cores."""
    views = s.facts.view.ranks if s.facts.view is not None else ()
    on_cpu = [rank for rank in views if (rank.device or "").startswith("cpu") and rank.machine and rank.cores]
    machines = {rank.machine: [other for other in on_cpu if other.machine == rank.machine] for rank in on_cpu}
    if not machines or s.facts.config is None:
        yield Unknown("ranks that compute on processors whose number is known")
        return
    for ranks in machines.values():
        yield _shared(s.facts.config, ranks)


def _shared(config: RunFile, ranks: Sequence[RankView]) -> Verdict:
    cores = min(rank.cores for rank in ranks)
    tables = {rank.node: config.nodes.get(rank.node, NodeTable()) for rank in ranks}
    threads = {node: set_threads(table) or table.shared_threads or int(cores) for node, table in tables.items()}
    part, most = max(1, int(cores) // len(ranks)), max(threads, key=lambda node: threads[node])
    said = f"{', '.join(f'{node} {count}' for node, count in threads.items())} threads on {cores:g} cores"
    if sum(threads.values()) <= cores or threads[most] <= part:
        return Clear(said, most)
    return Found(
        "ranks have more threads than their machine has cores", (said,), most, values={"node": most, "threads": part}
    )


@each_node
def stolen_cpu(s: Situation, node: str) -> Iterator[Verdict]:
    """Processor time that others take."""
    steal, waits = s.reading(node, "cpu_steal_percent"), s.reading(node, "cpu_pressure")
    said = [f"{steal:.0f} % of the processors' time goes to other virtual machines"] if steal is not None else []
    said += [_pressure(s, node, "cpu").replace("cpu", "CPU")] if waits is not None else []
    if not said:
        yield Unknown(f"CPU steal and CPU pressure of {node}", node)
        return
    is_stolen = (steal or 0.0) >= STEAL_PERCENT and is_slower(s, node)
    if (steal or 0.0) >= MUCH_STEAL or is_stolen or _is_crowded(s, node, waits or 0.0):
        more = (impact(s, node),) if impact(s, node) else ()
        what_if = without_slowdown(s, node, f"other programs on {node}'s processors")
        yield Found(
            f"others take processor time from {node}", (*said, *more), node, what_if=what_if, values={"node": node}
        )
    elif (waits or 0.0) >= FULL_PRESSURE:
        yield Unknown(f"whose tasks wait on {node}, which several ranks share ({', '.join(said)})", node)
    else:
        yield Clear(", ".join(said), node)


def _is_crowded(s: Situation, node: str, waits: float) -> bool:
    """Return whether more tasks want the node's processors than before, or than its one rank has."""
    before, (part, _) = s.reading_before(node, "cpu_pressure"), slower(s, node)
    if waits >= FULL_PRESSURE and not _is_shared(s, node):
        return True
    if waits < CPU_PRESSURE or part is None:
        return False
    if before is None:
        return part >= FROM_THE_START
    return waits >= min(before + RISEN, (before + 100) / 2) and part >= LONGER


def _is_shared(s: Situation, node: str) -> bool:
    """Return whether several ranks of the run compute on the node's machine, as far as machines are known."""
    views = s.facts.view.ranks if s.facts.view is not None else ()
    machine = next((view.machine for view in views if view.node == node), "")
    return not machine or sum(view.machine == machine for view in views) > 1


# ---------------------------------------------------------------- GPU


def gpu_shared(s: Situation) -> Iterator[Verdict]:
    """Other programs on a rank's GPU."""
    if not s.ranks:
        yield NO_STEPS
    for rank, its in s.ranks.items():
        gpus = s.gpus(rank)
        if not gpus:
            yield Unknown(f"device readings of {its.node}", its.node)
            continue
        others = [one for one in gpus[-1].others if one.memory_bytes is None or one.memory_bytes >= OTHERS_BYTES]
        if not others:
            yield Clear("no other program on the GPU that can be seen", its.node)
            continue
        lines = tuple(_who(one) for one in others)
        more = (impact(s, its.node),) if impact(s, its.node) else ()
        yield Found(
            f"{s.label(rank)} shares its GPU with other programs",
            (*lines, *more),
            its.node,
            rank,
            without_slowdown(s, its.node, f"other programs on {its.node}'s GPU"),
            "warning" if more else "info",
            {"node": its.node},
        )


def _who(process: GpuProcess) -> str:
    size = f", {megabytes(process.memory_bytes)} of device memory" if process.memory_bytes is not None else ""
    return f"{process.name} (pid {process.pid}, {process.user}){size}"
