"""Checks of real runs: a checkpoint and what resumes from it, and two ranks with a command between two steps."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from trainctl.protocol import messages as m
from trainctl.protocol.machine.check_outcome import CheckOutcome, absent, combined, judged
from trainctl.protocol.messages.events import CheckpointWritten
from trainctl.tui.selftest.shared_parts import SharedParts
from trainctl.tui.selftest.small_runs import MOST_STEPS, SAMPLES, backend_table, losses, parts, run_tables

STEPS, FORK = 8, 4
"""Of the run with checkpoints, and the step of the one that is resumed from."""
BEFORE, AFTER = (8, 4), (6, 6)
"""Shares of the ranks before and after the command."""
COMMAND_AFTER: Final = 3
"""Step after which the command is sent."""
STEPS_AFTER: Final = 3
"""Steps that the new shares compute."""
MOST_COMPARED: Final = 100
"""Steps that one rank repeats: on a fast device, hundreds pass before the command arrives."""
TOLERANCE: Final = 5e-6
"""Largest relative difference between the losses of two ranks and of one, in float32."""
JUDGED: Final = 50
"""Steps within which it holds. Later, a difference in rounding grows by itself: on an H200 it was 3e-7 until step 60,
and 3e-4 at step 80."""


# ---------------------------------------------------------------- a checkpoint


async def checkpoint(shared: SharedParts) -> CheckOutcome:
    """Write checkpoints in the background, and resume from one, on each backend."""
    if not shared.backends:
        return absent("neither torch nor mlx is installed")
    return combined([(backend, await _checkpoint(shared, backend)) for backend in shared.backends])


async def _checkpoint(shared: SharedParts, backend: str) -> CheckOutcome:
    async def run() -> CheckOutcome:
        cluster = await shared.cluster()
        tables = run_tables(shared.home.assets, {"a": backend_table(backend)}, STEPS, checkpoint_every=FORK)
        parent = await cluster.start(config=tables)
        parent = await cluster.until_end()
        page = await cluster.client.events(parent.run, limit=500)
        await cluster.start(branch=f"{parent.run}@{FORK}")
        branch = await cluster.until_end()
        written = [event.data for event in page.events if isinstance(event.data, CheckpointWritten)]
        return judge_checkpoint(losses(parent), losses(branch), written, _device(branch))

    found: CheckOutcome = await shared.once(f"checkpoint {backend}", run)
    return found


def judge_checkpoint(
    parent: Mapping[int, float | None], branch: Mapping[int, float | None], written: Sequence[CheckpointWritten],
    device: str,
) -> CheckOutcome:  # fmt: skip
    """Whether the losses after the checkpoint are the same bits."""
    after = {step: loss for step, loss in parent.items() if step > FORK}
    faults = []
    if FORK not in [one.step for one in written]:
        faults.append(f"no event says that the checkpoint of step {FORK} was written")
    if after != dict(branch) or len(after) != STEPS - FORK:
        faults.append(f"after resuming at step {FORK} the losses are {dict(branch)} instead of {after}")
    said = f"{device}: resumed at step {FORK}, {len(after)} losses are the same bits" if not faults else device
    return judged(
        faults, said, device=device, losses=[*parent.values()], resumed_losses=[*branch.values()],
        written=[{"step": one.step, "bytes": one.size_bytes, "loop_seconds": one.loop_seconds} for one in written],
    )  # fmt: skip


def _device(view: m.RunView) -> str:
    return ", ".join(f"{rank.backend} {rank.device}" for rank in view.ranks)


# ---------------------------------------------------------------- two ranks


class TwoRanks(NamedTuple):
    """A run of two ranks, which a command changed, and the same run on one rank."""

    losses: dict[int, float | None]
    alone: dict[int, float | None]
    parts: Sequence[m.RankStep]
    reply: m.CommandReply
    engine: str
    ranks: str  # backend and device of each


async def group(shared: SharedParts) -> CheckOutcome:
    """The losses of two ranks."""
    if not shared.backends:
        return absent("neither torch nor mlx is installed")
    return judge_losses(await shared.once("two ranks", lambda: _two_ranks(shared)))


async def command(shared: SharedParts) -> CheckOutcome:
    """The step of a command."""
    if not shared.backends:
        return absent("neither torch nor mlx is installed")
    return judge_command(await shared.once("two ranks", lambda: _two_ranks(shared)))


async def _two_ranks(shared: SharedParts) -> TwoRanks:
    first, last = shared.backends[0], shared.backends[-1]
    cluster = await shared.cluster()
    tables = {
        name: {**backend_table(backend), "share": share}
        for name, backend, share in zip(("a", "b"), (first, last), BEFORE, strict=True)
    }
    await cluster.start(config=run_tables(shared.home.assets, tables, MOST_STEPS))
    await cluster.until_step(COMMAND_AFTER)
    shares: dict[str, Any] = dict(zip(tables, AFTER, strict=True))
    reply = await cluster.send("rebalance", {"shares": shares})
    view = await cluster.until_step((reply.step or COMMAND_AFTER) + STEPS_AFTER)
    await cluster.stop_run()
    step = reply.step or COMMAND_AFTER
    found = losses(view, last=min(MOST_COMPARED, step + STEPS_AFTER))
    around = parts(view, max(1, step - STEPS_AFTER), step + STEPS_AFTER)
    await cluster.start(config=run_tables(shared.home.assets, {"a": backend_table(first)}, len(found)))
    alone = losses(await cluster.until_end())
    return TwoRanks(found, alone, around, reply, view.engine, _device(view))


def judge_losses(run: TwoRanks) -> CheckOutcome:
    """Whether two ranks had one rank's losses."""
    judged_losses, alone = (
        {step: loss for step, loss in losses.items() if step <= JUDGED} for losses in (run.losses, run.alone)
    )
    apart = worst_difference(judged_losses, alone)
    faults = [] if apart <= TOLERANCE else [
        f"the losses of two ranks differ by {apart:.1e} from one rank's; at most {TOLERANCE:g} is expected"
    ]  # fmt: skip
    said = f"{run.ranks} by {run.engine}: {len(judged_losses)} losses differ by {apart:.1e} from one rank's"
    return judged(
        faults, said, ranks=run.ranks, engine=run.engine, difference=apart, tolerance=TOLERANCE,
        difference_of_all=worst_difference(run.losses, run.alone),
        losses=[*run.losses.values()], losses_alone=[*run.alone.values()],
    )  # fmt: skip


def worst_difference(found: Mapping[int, float | None], alone: Mapping[int, float | None]) -> float:
    """The largest relative difference of two curves; infinite if they are not of the same steps."""
    if found.keys() != alone.keys() or not found:
        return float("inf")
    apart = [
        abs(found[step] - loss) / abs(loss) if loss and found[step] is not None else float("inf")  # type: ignore[operator]
        for step, loss in alone.items()
    ]
    return max(one if one == one else float("inf") for one in apart)


def judge_command(run: TwoRanks) -> CheckOutcome:
    """Whether both ranks had their old shares up to the command's step, and the new ones from it on."""
    reply, step = run.reply, run.reply.step
    if reply.state != "applied" or step is None:
        return judged([f"the command was {reply.state}: {reply.reason or 'no reason given'}"])
    wanted = {"before": dict(enumerate(BEFORE)), "from": dict(enumerate(AFTER))}
    odd = [
        f"rank {part.rank} had {part.samples} samples at step {part.step}; the command took effect at step {step}"
        for part in run.parts
        if part.samples != wanted["before" if part.step < step else "from"][part.rank]
    ]
    if not {step, step + STEPS_AFTER} <= {part.step for part in run.parts}:
        odd.append(f"the record lacks steps around step {step}")
    said = f"rebalance took effect at step {step} on both ranks: {BEFORE} of {SAMPLES} samples before, {AFTER} from it"
    return judged(odd, said, step=step, shares_before=BEFORE, shares_from=AFTER)
