"""A trainer's log lines: how it joined the group, what it wrote, and what went wrong; steps are in the
record."""

import faulthandler
import logging

from trainctl.protocol.machine.shim import STACKS_SIGNAL
from trainctl.protocol.messages import Form, Formed, GroupFailed, Ready, Report, Sealed
from trainctl.protocol.record.log_format import Formatter

log = logging.getLogger("trainctl.trainer")


def configure() -> None:
    """Log to standard error, which is the rank's log: ours from INFO on, libraries' warnings."""
    handler = logging.StreamHandler()
    handler.setFormatter(Formatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.captureWarnings(True)
    log.setLevel(logging.INFO)


def write_stacks_on_signal() -> None:
    """Let the agent ask for the stacks of all threads; they are written even while the main thread hangs in C code."""
    faulthandler.register(STACKS_SIGNAL, all_threads=True)


def ready(said: Ready) -> None:
    """Log that the rank has loaded."""
    loaded = f"{said.parameters:,} parameters, {said.samples:,} samples"
    log.info("ready: %s on %s, %s, at step %s", said.backend, said.device, loaded, f"{said.last_step:,}")


def sealed(said: Sealed) -> None:
    """Log that a growing file has its first chunk, or has ended."""
    if said.ended:
        log.info("the data have ended: %s samples in %s chunks", f"{said.samples:,}", f"{said.chunks:,}")
    elif said.chunks == 1:
        log.info("sealed the first chunk of the growing data: %s samples", f"{said.samples:,}")


def concluded(order: Form, outcome: Formed | GroupFailed) -> None:
    """Log that a group is formed, or isn't."""
    if isinstance(outcome, GroupFailed):
        log.warning("did not join %s: %s", outcome.generation, outcome.reason)
        return
    level = ""
    if order.source is not None:
        level = f"; received rank {order.source}'s state in {outcome.level_seconds:.2f} s"
    if len(order.ranks) == 1:
        log.info("ready alone (%s)%s", outcome.generation, level)
        return
    ranks = f"{len(order.ranks)} ranks with {order.engine}"
    log.info("joined %s: %s in %.2f s%s", outcome.generation, ranks, outcome.join_seconds, level)


def reported(report: Report) -> None:
    """Log the outcome of a plan, where it is more than a step like any other."""
    step = f"{report.step:,}"
    if report.kind == "evaluate" and report.weight > 0:
        loss, weight = report.loss_sum / report.weight, f"{report.weight:,.0f}"
        log.info("evaluated after step %s: loss %.4f, weight %s", step, loss, weight)
    if (written := report.checkpoint) is not None:
        size = f"{written.size_bytes / 1e6:,.1f}"
        log.info("checkpoint after step %s: %s MB in %.2f s", step, size, written.loop_seconds)
    if report.replays:
        log.warning("step %s: out of memory, micro-batch %s from now on", step, report.micro_batch)
    if report.skipped and report.kind == "train":
        log.warning("step %s skipped: %s", step, report.skipped)
    elif report.skipped:
        log.error("step %s: %s", step, report.skipped)
