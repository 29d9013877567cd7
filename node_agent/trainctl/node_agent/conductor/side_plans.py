"""What follows when all ranks have reported a plan beside training: a comparison of models, first shares, a drift, a
loss, or a checkpoint."""

import math
from collections.abc import Mapping

from trainctl.node_agent.conductor import events as d
from trainctl.node_agent.conductor import probes
from trainctl.node_agent.conductor.probes import Difference
from trainctl.node_agent.conductor.state import Book, CannotGoOnError
from trainctl.node_agent.planning import share_edits
from trainctl.node_agent.planning.throughput import Rates
from trainctl.protocol import messages as m
from trainctl.protocol.batch.apportion import apportion

Reports = Mapping[int, m.Report]


def conclude(book: Book, rates: Rates, plan: m.StepPlan, reports: Reports) -> str:
    """Whatever the kind of `plan` asks for. Gives why a checkpoint that was to be written is missing, else nothing."""
    reports = dict(sorted(reports.items()))  # whichever came first, sums and texts are the same
    match plan.kind:
        case "measure":
            measurement(book, rates, reports)
        case "sync":
            levelling(book, plan, reports)
        case "evaluate":
            evaluation(book, plan, reports)
        case "checkpoint":
            return checkpoint(book, plan, reports)
        case "train" | "probe":
            pass
    return ""


def measurement(book: Book, rates: Rates, reports: Reports) -> None:
    """The first shares, by what each rank managed alone; a rank that timed nothing leaves them as they are."""
    seen = {rank: report.samples_per_second or 0.0 for rank, report in reports.items()}
    book.keep(timed=True)
    if not all(0 < rate < math.inf for rate in seen.values()):
        book.persist()
        unknown = book.nodes(rank for rank, rate in seen.items() if not 0 < rate < math.inf)
        book.happen("rank", "warning", f"first shares stay even: no rate could be measured on {unknown}")
        return
    for rank, rate in seen.items():
        rates.measured(rank, rate)
    edit = share_edits.edit(book.settings, apportion(book.settings.global_batch, seen))
    book.persist(settings=edit.settings)
    timed = ", ".join(f"{book.settings.label(rank)} {rate:,.3g}/s" for rank, rate in seen.items())
    text = f"rebalance {edit.before} → {edit.after}: first shares by measured samples per second, {timed}"
    book.decide(
        d.Happened("rank", "info", "auto", text, book.progress.step, "rebalance", edit.before, edit.after)
    )  # fmt: skip


def levelling(book: Book, plan: m.StepPlan, reports: Reports) -> None:
    """The drift that a sync found."""
    drift = {rank: report.drift for rank, report in reports.items() if report.drift is not None}
    if not drift:
        return
    book.decide(d.Drifted(plan.step, drift))
    worst = max(drift, key=lambda rank: (math.inf if math.isnan(drift[rank]) else drift[rank], -rank))
    source, text = book.node(min(reports)), f"drift {drift[worst]:.2g} at most"
    where = f", on {book.settings.label(worst)}" if drift[worst] else ""
    book.happen("run", "info", f"all ranks given {source}'s weights; {text}{where}", plan.step)


def evaluation(book: Book, plan: m.StepPlan, reports: Reports) -> None:
    """The loss over all held-out samples: the ranks' sums over their weights."""
    weight = sum(report.weight for report in reports.values())
    loss = sum(report.loss_sum for report in reports.values()) / weight if weight else float("nan")
    seconds = max(report.step_seconds for report in reports.values())
    book.decide(d.Evaluated(plan.step, loss, weight, seconds))
    book.persist(eval_loss=loss, eval_step=plan.step)  # not before it: killed between the two, it is done again
    book.happen("evaluation", "info", f"held-out loss {loss:.4f}, took {seconds:.3g} s", plan.step)
    for id in plan.commands:
        book.end(id, "applied", plan.step, after=f"loss {loss:.4f}")


def probe(book: Book, plan: m.StepPlan, reports: Reports) -> dict[int, str]:
    """Whether all ranks hold the same model. Gives why, of each new rank that holds another than those that train.
    Raises CannotGoOnError if none of them has trained."""
    found = {rank: report for rank, report in sorted(reports.items()) if isinstance(report, m.Probed)}
    passed = [rank for rank in book.durable.probed or () if rank in found]
    limit = probes.tolerance(next(iter(found.values())).family, book.config.model.dtype)
    differences = probes.compare(found, passed)
    refused = {each.rank: _refusal(book, each, found, limit) for each in differences if each.largest > limit}
    if refused and not passed:
        raise CannotGoOnError(next(iter(refused.values())))
    seconds = max(report.step_seconds - report.phases.wait for report in reports.values())
    for each in differences:
        if each.rank not in refused:
            named = f"{book.settings.label(each.rank)} and {book.settings.label(each.other)}"
            text = f"probe passed: a token's log-probability differs by at most {each.largest:.2g} between {named}"
            text += f" (tolerance {limit:g}, {each.tokens} tokens); took {seconds:.2g} s"
            book.decide(d.Happened("probe", "good", "auto", text, plan.step, after=f"{each.largest:.2g}"))
    book.persist(probed=tuple(rank for rank in found if rank not in refused))  # not before it, as an evaluation
    return refused


def _refusal(book: Book, each: Difference, found: Mapping[int, m.Probed], limit: float) -> str:
    rank, other = book.settings.label(each.rank), book.settings.label(each.other)
    text = (
        f"probe: {rank} differs from {other} by {each.largest:.2g} in a token's log-probability (tolerance {limit:g})"
    )
    return f"{text}; likely cause: {probes.likely_cause(found[each.rank], found[each.other])}"


def checkpoint(book: Book, plan: m.StepPlan, reports: Reports) -> str:
    """Every writer's copy. Gives why one is missing, else an empty string; that fails the commands, never the run."""
    failed = ""
    for rank in plan.writers:
        written, node = reports[rank].checkpoint, book.node(rank)
        if written is None:
            failed = f"no checkpoint on {node}: {reports[rank].skipped or 'nothing was written'}"
            book.happen("checkpoint", "error", failed, plan.step, node)
        else:
            size, paid = f"{written.size_bytes / 1e6:,.1f} MB", f"{written.loop_seconds * 1e3:,.0f} ms"
            book.happen("checkpoint", "good", f"checkpoint step-{plan.step}, {size}, loop paid {paid}", plan.step, node)
    if any(reports[rank].checkpoint is not None for rank in plan.writers):
        book.persist(written=plan.step)
    for id in plan.commands:
        after = None if failed else f"step-{plan.step}"
        book.end(id, "failed" if failed else "applied", plan.step, failed, after=after)
    return failed
