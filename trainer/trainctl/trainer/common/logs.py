"""A trainer's log lines: how it joined the group, what it wrote, and what went wrong; steps are in the
record."""

import faulthandler
import logging

from trainctl.protocol.machine.shim import STACKS_SIGNAL
from trainctl.protocol.messages import Form, Formed, GroupFailed, Ready, Report, Sealed
from trainctl.protocol.record.log_format import Formatter

log = logging.getLogger("trainctl.trainer")


def configure() -> None:
    """All that is logged goes to standard error, which is the rank's log: ours from INFO on, libraries' warnings."""
    handler = logging.StreamHandler()
    handler.setFormatter(Formatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.captureWarnings(True)
    log.setLevel(logging.INFO)


def write_stacks_on_signal() -> None:
    """Let the agent ask for the stacks of all threads; they are written even while the main thread hangs in C code."""
    faulthandler.register(STACKS_SIGNAL, all_threads=True)


def ready(said: Ready) -> None:
    """The rank has loaded."""
    log.info(
        "ready: %s on %s, %s parameters, %s samples, at step %s",
        said.backend, said.device, f"{said.parameters:,}", f"{said.samples:,}", f"{said.last_step:,}",
    )  # fmt: skip


def sealed(said: Sealed) -> None:
    """A growing file has its first chunk, or has ended."""
    if said.ended:
        log.info("the data have ended: %s samples in %s chunks", f"{said.samples:,}", f"{said.chunks:,}")
    elif said.chunks == 1:
        log.info("sealed the first chunk of the growing data: %s samples", f"{said.samples:,}")


def concluded(order: Form, outcome: Formed | GroupFailed) -> None:
    """A group is formed, or isn't."""
    if isinstance(outcome, GroupFailed):
        log.warning("did not join %s: %s", outcome.generation, outcome.reason)
        return
    given = ""
    if order.source is not None:
        given = f"; received rank {order.source}'s state in {outcome.level_seconds:.2f} s"
    if len(order.ranks) == 1:
        log.info("ready alone (%s)%s", outcome.generation, given)
        return
    ranks = f"{len(order.ranks)} ranks with {order.engine}"
    log.info("joined %s: %s in %.2f s%s", outcome.generation, ranks, outcome.join_seconds, given)


def reported(report: Report) -> None:
    """What a plan came to, where it is more than a step like any other."""
    step = f"{report.step:,}"
    if report.kind == "evaluate" and report.weight > 0:
        log.info(
            "evaluated after step %s: loss %.4f, weight %s",
            step, report.loss_sum / report.weight, f"{report.weight:,.0f}",
        )  # fmt: skip
    if report.checkpoint is not None:
        made = report.checkpoint
        log.info("checkpoint after step %s: %s MB in %.2f s", step, f"{made.size_bytes / 1e6:,.1f}", made.loop_seconds)
    if report.replays:
        log.warning("step %s: out of memory, micro-batch %s from now on", step, report.micro_batch)
    if report.skipped and report.kind == "train":
        log.warning("step %s skipped: %s", step, report.skipped)
    elif report.skipped:
        log.error("step %s: %s", step, report.skipped)
