"""Plans beside training: when the run file has one made, and what its results lead to."""

import math
from collections.abc import Mapping

import msgspec

from trainctl.node_agent.autopilot.policy import HeldOutLoss, Measured
from trainctl.node_agent.conductor.background_writes import BackgroundWrites
from trainctl.node_agent.conductor.events import Drifted, Evaluated, Sampled
from trainctl.node_agent.conductor.proposals import Proposals
from trainctl.node_agent.conductor.state import CannotGoOnError, ConductorState
from trainctl.node_agent.planning import results
from trainctl.node_agent.planning.durable import Profiling
from trainctl.node_agent.planning.rank_models import Rates
from trainctl.node_agent.planning.results import Precision
from trainctl.protocol.config.policies import AUTHOR
from trainctl.protocol.messages import (
    FREED,
    EvaluationReport,
    Probed,
    ProfileWritten,
    Report,
    Sample,
    SampleReport,
    StepPlan,
    followed_pairs,
)
from trainctl.protocol.messages import events as run_events

Reports = Mapping[int, Report]
INTERRUPTED = {
    "sample": "the group re-formed before the model had answered; send the command again",
    "profile": "the group re-formed before the profile began; send the command again",
}
"""Verbs whose plans are not repeated, and what is said then: what interrupts them may be caused by them, such as a lack
of memory."""
ANSWER_CHARACTERS = 8000
"""Most characters of all answers in the reply to a command; an event in the record has fewer."""


class SidePlans:
    """First shares, periodic plans and the ending's, each once at its step, however often a fence undoes them."""

    def __init__(self, state: ConductorState, proposals: Proposals, rates: Rates, writes: BackgroundWrites) -> None:
        self._state, self._proposals, self._rates, self._writes = state, proposals, rates, writes
        self.done: dict[str, int] = {}  # step of the last plan of each kind
        if state.durable.writing is not None:  # since another conductor's life
            self.done["checkpoint"] = state.durable.writing.step
        self.ending_scheduled = False
        config = state.config
        every_steps = {
            "sync": config.group.sync_weights_every,
            "evaluate": config.evaluate.every_steps,
            "sample": config.samples.every_steps if config.samples.prompts else 0,
            "defragment": config.run.defragment_every,
            "checkpoint": config.checkpoint.every_steps,
        }
        self._every_steps = {kind: steps for kind, steps in every_steps.items() if steps}

    def schedule_probe(self) -> None:
        """The comparison of models that comes before the first step of a rank."""
        if self._state.live.keys() - set(self._state.durable.probed or ()):
            self._state.pending.scheduled.add("probe")

    def schedule_first(self) -> None:
        """Schedule what comes before the first step of a new run: the measurement of the shares that its file leaves
        open, and what later results are compared with."""
        config, scheduled = self._state.config, self._state.pending.scheduled
        if self._state.progress.step == self._state.durable.first_step == 0:
            if config.evaluate.at_start and self._is_due("evaluate", 0):
                scheduled.add("evaluate")
            if config.samples.at_start and config.samples.prompts and self._is_due("sample", 0):
                scheduled.add("sample")
        if self._proposals.is_pending("first-shares"):
            scheduled.add("measure")

    def schedule_periodic(self, step: int) -> None:
        """Schedule what is due after `step`."""
        if not 0 < step < self._state.config.run.steps:
            return
        due = [kind for kind, steps in self._every_steps.items() if step % steps == 0 and self._is_due(kind, step)]
        self._state.pending.scheduled.update(due)

    def _is_due(self, kind: str, step: int) -> bool:
        """Return whether a plan of that step is of use and hasn't been done."""
        if kind == "evaluate" and (self._state.any_ready.held_out == 0 or self._state.durable.eval_step == step):
            return False
        return self.done.get(kind) != step and (kind != "sync" or len(self._state.settings.live) > 1)

    def schedule_ending(self, step: int) -> None:
        """The last evaluation and checkpoint of a run of which `step` is planned, once."""
        scheduled, is_paused = self._state.pending.scheduled, self._state.pending.wants_pause
        finishing = step >= self._state.config.run.steps and not is_paused
        if self.ending_scheduled or not (finishing or self._state.durable.mode == "stopping"):
            return
        self.ending_scheduled = True
        if finishing and self._state.any_ready.held_out and self.done.get("evaluate") != step:
            scheduled.add("evaluate")
        if finishing and "sample" in self._every_steps and self.done.get("sample") != step:
            scheduled.add("sample")
        if self.owes_checkpoint(step):
            scheduled.add("checkpoint")

    def owes_checkpoint(self, step: int) -> bool:
        """Return whether a run that ends after `step` wants one that has not been written."""
        durable, config = self._state.durable, self._state.config
        wanted = durable.stop_writes_checkpoint if durable.mode == "stopping" else config.checkpoint.at_end
        is_under_way = durable.writing is not None and durable.writing.step == step
        is_done = self.done.get("checkpoint") == step and (durable.written == step or is_under_way)
        return wanted and step > 0 and not is_done

    def start_over(self, step: int, *, was_passed: bool, owes_checkpoint: bool) -> None:
        """Plans beyond `step` are given up. What belongs to it is wanted, unless the next step had been planned; a
        scheduled checkpoint stays wanted if the one before it is being written or was lost (`owes_checkpoint`)."""
        self._state.pending.scheduled.intersection_update({"checkpoint"} if owes_checkpoint else ())
        self.ending_scheduled = False
        if not was_passed:
            self.schedule_periodic(step)

    # ------------------------------------------------------------ results

    def take_results(self, plan: StepPlan, reports: Reports) -> str:
        """Do whatever the kind of a plan that all its ranks have reported asks for. Return why a checkpoint that was to
        be written is missing, else an empty string; that fails the commands, never the run."""
        reports = dict(sorted(reports.items()))  # whichever came first, sums and texts are the same
        match plan.kind:
            case "measure":
                self._measured(reports)
            case "sync":
                levelling(self._state, plan, reports)
            case "evaluate":
                evaluation(self._state, self._proposals, plan, reports)
            case "sample":
                sample(self._state, plan, reports)
            case "defragment":
                defragmentation(self._state, plan, reports)
            case "profile":
                profile(self._state, plan, reports)
            case "checkpoint":
                self._writes.begin(plan, reports)
                return self._writes.end()
            case "train" | "probe":
                pass  # concluded by the commit and by the probe's own rules
        return ""

    def _measured(self, reports: Reports) -> None:
        """Give the policy of first shares what each rank managed alone; they are unchanged if one timed nothing."""
        state, seen = self._state, {rank: report.samples_per_second or 0.0 for rank, report in reports.items()}
        state.keep(timed=True)
        untimed = [state.settings.label(rank) for rank, rate in seen.items() if not 0 < rate < math.inf]
        if untimed:
            state.persist()
            state.happen(run_events.SharesUnmeasured(tuple(untimed)), "warning", by=f"{AUTHOR}first-shares")
            return
        for rank, rate in seen.items():
            self._rates.measured(rank, rate, reports[rank].micro_batch)
        self._proposals.ask(Measured(seen))
        state.persist()  # also of a policy that has proposed nothing


def why_no_evaluation(state: ConductorState) -> str:
    """Return why there is nothing to evaluate with; empty as long as no rank has said so."""
    if all(ready.held_out for ready in state.ready.values()):
        return ""
    fraction = state.config.data.held_out_fraction
    return f"there are no held-out samples: data.held_out = {fraction:g} comes to none; start a run with a larger one"


def levelling(state: ConductorState, plan: StepPlan, reports: Reports) -> None:
    """The drift that a sync found."""
    drift = {rank: report.drift for rank, report in reports.items() if report.drift is not None}
    if not drift:
        return
    state.decide(Drifted(plan.step, drift))
    worst = max(drift, key=lambda rank: (math.inf if math.isnan(drift[rank]) else drift[rank], -rank))
    where = state.settings.label(worst) if drift[worst] else ""
    state.happen(run_events.StateShared(state.node(min(reports)), drift[worst], where), step=plan.step)


def evaluation(state: ConductorState, proposals: Proposals, plan: StepPlan, reports: Reports) -> None:
    """The loss over all held-out samples, and what else was measured: the ranks' sums over their weights.

    It is one event: that of the command that asked for it, if one did."""
    result = results.evaluation(state.config, [*reports.values()])
    seconds = max(report.step_seconds for report in reports.values())
    said = [pair for report in reports.values() if isinstance(report, EvaluationReport) for pair in report.pairs]
    # Of all ranks' pairs the first ones and the worst ones.
    state.decide(Evaluated(plan.step, result.loss, result.weight, seconds, result.values, followed_pairs(said)))
    made = run_events.Evaluated(result.loss, seconds)
    if not plan.commands:
        state.happen(made, step=plan.step)
    # Kept together with what policies make of it, and not before the result: killed between, it is done again.
    state.keep(eval_loss=result.loss, eval_step=plan.step, eval_values=result.values)
    proposals.ask(HeldOutLoss(plan.step, result.loss))
    state.persist()
    for id in plan.commands:
        state.end(id, "applied", plan.step, made=made)


def sample(state: ConductorState, plan: StepPlan, reports: Reports) -> None:
    """The model's answers, in one event: that of the command that asked for them, if one did. Without any the commands
    fail, never the run."""
    ((rank, report),) = reports.items()
    node, answers = state.node(rank), report.answers if isinstance(report, SampleReport) else ()
    if not answers:
        sample_failed(state, plan, report.skipped or "it sent none")
        return
    asked_by = next((state.durable.carried[id].by for id in plan.commands if id in state.durable.carried), "auto")
    eval_loss = state.durable.eval_loss if state.durable.eval_step == plan.step else None
    how = plan.sampling
    assert how is not None, "a sample plan says what it asks"
    for number, answer in enumerate(answers):
        row = Sample(
            run=plan.run,
            step=plan.step,
            at=report.finished_at,
            number=number,
            prompt=answer.prompt,
            answer=answer.text,
            tokens=answer.tokens,
            ended=answer.ended,
            seconds=answer.seconds,
            loss=state.progress.loss,
            eval_loss=eval_loss,
            max_tokens=how.max_tokens,
            temperature=how.temperature,
            top_p=how.top_p,
            seed=how.seed,
            node=node,
            by=asked_by,
        )
        state.decide(Sampled(row))
    tokens, seconds = sum(answer.tokens for answer in answers), sum(answer.seconds for answer in answers)
    done = run_events.Sampled(node, len(answers), tokens, seconds)
    if not plan.commands:
        state.happen(done, step=plan.step)
    texts = [answer.text if len(answers) == 1 else f"{answer.prompt}\n{answer.text}" for answer in answers]
    made = msgspec.structs.replace(done, answer="\n\n".join(texts)[:ANSWER_CHARACTERS])
    for id in plan.commands:
        state.end(id, "applied", plan.step, made=made)


def defragmentation(state: ConductorState, plan: StepPlan, reports: Reports) -> None:
    """End the commands with what the ranks gave back to their devices."""
    freed = [report.values[FREED] for report in reports.values() if FREED in report.values]
    result = f"{sum(freed) / 1e9:.2f} GB of caches cleared" if freed else "caches cleared"
    for id in plan.commands:
        node = state.durable.carried[id].node if id in state.durable.carried else None
        state.end(id, "applied", plan.step, made=run_events.CommandApplied(node or "", result))


def profile(state: ConductorState, plan: StepPlan, reports: Reports) -> None:
    """Keep which ranks record the steps that follow. The commands fail only if none does."""
    refused = {rank: report.skipped for rank, report in reports.items() if report.skipped}
    first, last = plan.step + 2, plan.step + 1 + plan.profile_steps
    command = next(iter(plan.commands), None)
    for rank, why in refused.items():
        state.happen(run_events.ProfileFailed(state.node(rank), why), "warning", command=command)
    begun = {rank: Profiling(plan.seq, command, last) for rank in reports if rank not in refused}
    state.persist(profiling={**state.durable.profiling, **begun})
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    result = f"{steps} on {state.nodes(begun)}; step {first - 1} warms up"
    for id in plan.commands:
        if begun:
            state.end(id, "applied", plan.step, made=run_events.CommandApplied("", result))
        else:
            state.end(id, "failed", plan.step, "; ".join(dict.fromkeys(refused.values())))


def profiled(state: ConductorState, said: ProfileWritten) -> None:
    """A rank's trace is written, or failed; repeated messages are ignored."""
    asked = state.durable.profiling.get(said.rank)
    if asked is None or asked.seq != said.seq:
        return
    if said.problem:
        profile_failed(state, said.rank, said.problem)
        return
    _forget_profile(state, said.rank)
    done = run_events.Profiled(
        state.node(said.rank),
        said.rank,
        said.first_step,
        said.last_step,
        said.file,
        said.size_bytes,
        said.digest,
        said.phases,
        said.loop_seconds,
        said.lacks,
    )
    state.happen(done, step=said.last_step, command=asked.command)


def profile_failed(state: ConductorState, rank: int, why: str) -> None:
    """End the profile that a rank was recording or writing, if it was."""
    asked = state.durable.profiling.get(rank)
    if asked is not None:
        _forget_profile(state, rank)
        state.happen(run_events.ProfileFailed(state.node(rank), why), "warning", command=asked.command)


def _forget_profile(state: ConductorState, rank: int) -> None:
    state.persist(profiling={other: asked for other, asked in state.durable.profiling.items() if other != rank})


def sample_failed(state: ConductorState, plan: StepPlan, why: str) -> None:
    """A plan to sample has brought no answer: its commands fail."""
    state.happen(run_events.SampleFailed(state.node(plan.work[0].rank), why), "warning", plan.step)
    for id in plan.commands:
        state.end(id, "failed", plan.step, why)


def probe(state: ConductorState, plan: StepPlan, reports: Reports) -> dict[int, str]:
    """Compare the models of all ranks. Return why, of each new rank that holds another model than those that train.
    Raises CannotGoOnError if none of them has trained."""
    probes = {rank: report for rank, report in sorted(reports.items()) if isinstance(report, Probed)}
    passed = [rank for rank in state.durable.probed or () if rank in probes]
    if len(probes) < len(reports):
        silent = ", ".join(state.settings.label(rank) for rank in sorted(reports.keys() - probes))
        raise CannotGoOnError(
            f"no answer to the probe from {silent}; install the same version of trainctl on all nodes"
        )
    refused: dict[int, str] = {}
    seconds = max(report.step_seconds - report.phases.wait for report in reports.values())
    for each in results.compare(probes, passed, _precision(state)):
        if each.is_refused:
            refused[each.rank] = results.refusal(each, probes, state.settings.label)
            continue
        names = state.settings.label(each.rank), state.settings.label(each.other)
        state.happen(run_events.ProbePassed(*names, each.largest, each.limit, each.tokens, seconds), "good", plan.step)
    if refused and not passed:
        raise CannotGoOnError(next(iter(refused.values())))
    state.persist(probed=tuple(rank for rank in probes if rank not in refused))  # not before it, as an evaluation
    return refused


def check_preflights(state: ConductorState, probes: Mapping[int, Probed]) -> None:
    """Compare the ranks of a new group before they have formed one. Raises CannotGoOnError."""
    (worst,) = results.compare(probes, (), _precision(state))
    if worst.is_refused:
        raise CannotGoOnError(results.refusal(worst, probes, state.settings.label))


def _precision(state: ConductorState) -> Precision:
    return Precision(state.config.model.computed, state.config.model.tf32)
