"""Commands to a run: each is refused at once, kept for the next boundary, or turned into a mode."""

from collections.abc import Collection
from typing import assert_never

from trainctl.node_agent.conductor import side_plans
from trainctl.node_agent.conductor.events import Commanded, Happened
from trainctl.node_agent.conductor.pipeline import Pipeline
from trainctl.node_agent.conductor.proposals import Proposals
from trainctl.node_agent.conductor.restarts import Restarts
from trainctl.node_agent.conductor.state import EXPIRED, ConductorState, SideKind
from trainctl.node_agent.planning import edits
from trainctl.node_agent.planning.durable import Rollback, Settings
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import verbs
from trainctl.protocol.messages.events import CommandApplied, NoteWritten, Notice, RunStateChanged


class Commands:
    """Takes commands. The conductor looks for the next plan after each of them."""

    def __init__(self, state: ConductorState, pipeline: Pipeline, proposals: Proposals, restarts: Restarts) -> None:
        self._state, self._pipeline, self._proposals, self._restarts = state, pipeline, proposals, restarts
        self.wants_new_generation = False  # a resumed run forms again

    def take(self, command: Commanded, state: str) -> None:
        """`state`: the run's, in the words that clients see."""
        settings, args = self._state.folded(self._pipeline.facts()), command.args
        if command.if_plan is not None and command.if_plan != settings.plan_version:
            why = f"the plan has changed from version {command.if_plan} to {settings.plan_version}"
            self.refuse(command, "if_plan", why)
        elif self._state.stage == "leaving":
            self.refuse(command, "run", f"the run is {state}")
        elif command.verb in self.not_taken:
            self.refuse(command, "verb", self.not_taken[command.verb])
        elif isinstance(args, verbs.AgentArgs):
            self.refuse(command, "verb", f"{command.verb} cannot act on an active run")
        elif isinstance(args, verbs.EditArgs):
            self._edit(command, settings)
        else:
            self._carry_out(command, args, state)

    def refuse(self, command: Commanded, field: str, reason: str) -> None:
        self._state.end(command.id, "rejected", reason=reason, field=field)

    def _carry_out(self, command: Commanded, args: verbs.RunArgs | verbs.BoundaryArgs, state: str) -> None:
        match args:
            case verbs.Note(text=text):
                step = self._state.progress.step
                self._state.decide(Happened(NoteWritten(text), "info", command.by, step, command=command.id))
                self._state.end(command.id, "applied", step)
            case verbs.Pause():
                self._pause(command, state)
            case verbs.Resume():
                self._resume(command, state)
            case verbs.Rollback():
                self._roll_back(command, args, state)
            case verbs.Stop(checkpoint=checkpoint):
                self._stop(command, checkpoint)
            case verbs.Autopilot():
                self._proposals.set_mode(command, args)
            case verbs.Evaluate():
                self._keep_beside(command, "evaluate")
            case verbs.Checkpoint():
                self._keep_beside(command, "checkpoint")
            case verbs.Defragment():
                self._keep_beside(command, "defragment", "node", self._absent({command.node}))
            case verbs.SampleModel(prompt=None) if not self._state.config.samples.prompts:
                self.refuse(command, "prompt", "the run file has no [samples] prompts: add prompt=TEXT")
            case verbs.SampleModel():
                self._keep_beside(command, "sample", "node", self._absent({command.node}))
            case verbs.Profile():
                self._profile(command, args)
            case _ as missing:
                assert_never(missing)

    def _edit(self, command: Commanded, settings: Settings) -> None:
        step, config = self._state.planned_step + 1, self._state.config
        if self._state.durable.mode == "stopping" or step > config.run.steps:
            self.refuse(command, "run", "no step is left at which the command could take effect")
            return
        if isinstance(command.args, verbs.Admit) and (after := self._restarts.try_again(command.node)):
            made = CommandApplied(command.node or "", after)
            self._state.end(command.id, "applied", self._state.progress.step, made=made)
            return
        try:
            edits.apply(settings, command.args, command.node, step, config, self._pipeline.facts())
        except InvalidInputError as error:
            self.refuse(command, error.where, error.problem)
            return
        self._state.pending.staged.append(command)
        self._proposals.yield_to(command)
        if self._state.durable.mode == "paused" and self._pipeline.in_flight.is_empty and self._state.stage == "formed":
            self._pipeline.hold_next_plan()

    @property
    def not_taken(self) -> dict[str, str]:
        """The verbs that make no sense for this run, each with why."""
        why = side_plans.why_no_evaluation(self._state)
        return {"evaluate": why} if why else {}

    # ------------------------------------------------------------ beside training

    def _keep_beside(self, command: Commanded, kind: SideKind, field: str = "", refusal: str = "") -> None:
        """Keep a command for the next boundary, unless it is refused."""
        if refusal:
            self.refuse(command, field, refusal)
        else:
            self._state.pending.side[kind].append(command)

    def _absent(self, nodes: Collection[str | None]) -> str:
        """Return which of these nodes have no live rank; empty if none."""
        live = {setting.node for setting in self._state.settings.live.values()}
        absent = [node for node in nodes if node is not None and node not in live]
        return f"no rank of {', '.join(absent)} is in the group" if absent else ""

    def _profile(self, command: Commanded, args: verbs.Profile) -> None:
        is_stopping = self._state.durable.mode == "stopping"
        left = 0 if is_stopping else self._state.config.run.steps - self._state.planned_step
        absent = self._absent(args.nodes)
        if absent or left > args.steps:
            self._keep_beside(command, "profile", "nodes", absent)
        else:
            need = f"a profile of {args.steps} needs {args.steps + 1}: the first warms up"
            self.refuse(command, "steps", f"the run has {left} step{'s' if left != 1 else ''} left, and {need}")

    # ------------------------------------------------------------ modes

    def _pause(self, command: Commanded, state: str) -> None:
        pending = self._state.pending
        if self._state.durable.mode == "stopping" or (pending.wants_pause and not command.again):
            self.refuse(command, "verb", f"the run is already {state}")
            return
        pending.wants_pause = True
        pending.pausing.append(command)

    def enter_pause(self) -> None:
        """All that was planned is done."""
        state, step = self._state, self._state.progress.step
        state.failed_formations = 0  # a group that breaks while it idles is formed again as often as that takes
        if state.durable.mode != "paused":
            state.persist(mode="paused")
        for id in [id for id, carried in state.durable.carried.items() if carried.verb == "resume"]:
            state.end(id, "failed", step, "paused again before any step ran")
        state.end_all(state.pending.pausing, "applied", step, made=RunStateChanged("running", "paused"))
        # Killed before the outcome of what the held plan carries was journaled: it is held once more.
        if state.pending.staged or any(carried.step > step for carried in state.durable.carried.values()):
            self._pipeline.hold_next_plan()

    def _resume(self, command: Commanded, state: str) -> None:
        if not self._state.pending.wants_pause:
            self.refuse(command, "verb", f"the run is {state}, not paused")
            return
        self._call_pause_off("resumed before the pause took effect")
        made, step = RunStateChanged("paused", "running"), self._state.planned_step
        if step < self._state.config.run.steps:
            self._state.carry(command, step + 1, made)
        else:  # it is to end, and no step will carry it
            self._state.end(command.id, "applied", step, made=made)
        self.wants_new_generation = self._state.durable.mode == "paused" and self._state.stage == "formed"
        self._state.persist(mode="running")

    def _call_pause_off(self, why: str) -> None:
        self._state.pending.wants_pause = False
        self._state.end_all(self._state.pending.pausing, "failed", None, why)

    def _stop(self, command: Commanded, checkpoint: bool) -> None:
        if self._state.durable.mode == "stopping" and not command.again:
            self.refuse(command, "verb", "the run is already stopping")
            return
        self._state.pending.stopping.append(command)
        self._call_pause_off("the run was stopped")
        self._state.persist(mode="stopping", stop_writes_checkpoint=checkpoint)

    def _roll_back(self, command: Commanded, args: verbs.Rollback, state: str) -> None:
        """To a checkpoint that is kept for sure. Whichever agent takes the run up carries it out."""
        step, durable, table = self._state.progress.step, self._state.durable, self._state.config.checkpoint
        planned = self._pipeline.in_flight.has("checkpoint")
        kept = durable.kept_for_sure(table.keep_last, table.keep_every, planned=planned)
        kept = tuple(at for at in kept if at < self._state.config.run.steps)  # after the last step there is none to do
        latest = args.step if args.step is not None else step - (args.steps or 0)
        chosen = [at for at in kept if at == latest or (args.step is None and at < latest)]
        if durable.mode == "stopping":
            self.refuse(command, "run", f"the run is {state}")
        elif state == "starting" and not chosen:
            self.refuse(command, "run", "the run is starting and has no such checkpoint: send it once it trains")
        elif not chosen:
            field = "step" if args.step is not None else "steps"
            back = f"{args.steps} step{'s' if args.steps != 1 else ''}"
            which = f"of step {latest}" if args.step is not None else f"at least {back} before step {step}"
            steps = f"those kept are of steps {', '.join(map(str, kept))}" if kept else "none has been written"
            self.refuse(command, field, f"no checkpoint {which}; {steps}")
        else:
            self._proposals.goes_back(command)
            self._state.persist(rollback=Rollback(chosen[-1], args.skip_batches))
            count = f"{args.skip_batches} global batch{'es' if args.skip_batches != 1 else ''}"
            skips = f" and skip {count} after it; an event will name the positions" if args.skip_batches else ""
            result = f"the run will go back from step {step} to step {chosen[-1]}{skips}"
            self._state.end(command.id, "applied", step, made=CommandApplied("", result))

    def call_end_off(self, why: str) -> None:
        """Nothing is lost to a disk that takes no checkpoint: the run pauses, and can be stopped without one."""
        state = self._state
        if state.durable.mode != "stopping":
            state.happen(Notice(f"{why}; the run pauses at its end: resume it to write again"), "error")
        state.persist(mode="running")
        state.end_all(state.pending.stopping, "failed", state.progress.step, f"{why}; paused instead")
        self._pipeline.side_plans.ending_scheduled = False  # when the run does end, what belongs to it is wanted again
        state.pending.wants_pause = True

    def expire(self) -> bool:
        """End what no boundary took in time; True if a pause was among it, so that the run continues."""
        state, pending = self._state, self._state.pending
        was_asked = bool(pending.pausing)
        state.end_all(pending.take(until=state.now), "expired", None, EXPIRED)
        if not was_asked or pending.pausing or state.durable.mode == "paused":
            return False
        pending.wants_pause = False
        return state.stage == "formed"
