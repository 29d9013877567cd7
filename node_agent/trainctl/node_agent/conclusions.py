"""What follows when all ranks have reported a plan beside training: a held-out loss, or a checkpoint."""

from collections.abc import Mapping

from trainctl.node_agent import decisions as d
from trainctl.node_agent.book import Book
from trainctl.protocol import messages as m


def evaluation(book: Book, plan: m.StepPlan, reports: Mapping[int, m.Report]) -> None:
    """The loss over all held-out samples: the ranks' sums over their weights."""
    weight = sum(report.weight for report in reports.values())
    loss = sum(report.loss_sum for report in reports.values()) / weight if weight else float("nan")
    seconds = max(report.step_seconds for report in reports.values())
    book.keep(eval_loss=loss, eval_step=plan.step)
    book.decide(d.Persist(book.durable))
    book.decide(d.Evaluated(plan.step, loss, weight, seconds))
    book.happen("evaluation", "info", f"held-out loss {loss:.4f}", plan.step)
    for id in plan.commands:
        book.end(id, "applied", plan.step, after=f"loss {loss:.4f}")


def checkpoint(book: Book, plan: m.StepPlan, reports: Mapping[int, m.Report]) -> str:
    """Every writer's copy. Gives why one is missing, else an empty string; that fails the commands, never the run."""
    failed = ""
    for rank in plan.writers:
        written, node = reports[rank].checkpoint, book.durable.settings.ranks[rank].node
        if written is None:
            failed = f"no checkpoint on {node}: {reports[rank].skipped or 'nothing was written'}"
            book.happen("checkpoint", "error", failed, plan.step)
        else:
            size, paid = f"{written.size_bytes / 1e6:,.1f} MB", f"{written.loop_seconds * 1e3:,.0f} ms"
            book.happen("checkpoint", "good", f"checkpoint step-{plan.step}, {size}, loop paid {paid}", plan.step)
    for id in plan.commands:
        after = None if failed else f"step-{plan.step}"
        book.end(id, "failed" if failed else "applied", plan.step, failed, after=after)
    return failed
