"""Commands to a run: each is refused at once, kept for the next boundary, or turned into a mode."""

from typing import assert_never

from trainctl.node_agent.conductor.events import Commanded, Happened
from trainctl.node_agent.conductor.pipeline import Pipeline
from trainctl.node_agent.conductor.proposals import Proposals
from trainctl.node_agent.conductor.state import EXPIRED, ConductorState
from trainctl.node_agent.planning import edits, plans
from trainctl.node_agent.planning.durable import Rollback, Settings
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import verbs
from trainctl.protocol.messages.events import CommandApplied, NoteWritten, RunStateChanged


class Commands:
    """Takes commands. The conductor looks for the next plan after each of them."""

    def __init__(self, state: ConductorState, pipeline: Pipeline, proposals: Proposals) -> None:
        self._state, self._pipeline, self._proposals = state, pipeline, proposals
        self.wants_new_generation = False  # a resumed run forms again

    def take(self, command: Commanded, state: str) -> None:
        """`state`: the run's, in the words that clients see."""
        settings = self._state.folded(self._pipeline.facts())
        if command.if_plan is not None and command.if_plan != settings.plan_version:
            self.refuse(
                command, "if_plan", f"the plan has changed from version {command.if_plan} to {settings.plan_version}"
            )
        elif self._state.stage == "leaving":
            self.refuse(command, "run", f"the run is {state}")
        elif command.verb in self.not_taken:
            self.refuse(command, "verb", self.not_taken[command.verb])
        else:
            self._dispatch(command, settings, state)

    def refuse(self, command: Commanded, field: str, reason: str) -> None:
        self._state.end(command.id, "rejected", reason=reason, field=field)

    def _dispatch(self, command: Commanded, settings: Settings, state: str) -> None:
        args = command.args
        if isinstance(args, verbs.AgentArgs):
            self.refuse(command, "verb", f"{command.verb} cannot act on an active run")
        elif isinstance(args, verbs.EditArgs):
            self._edit(command, settings)
        elif isinstance(args, verbs.BoundaryArgs):
            self._beside_training(command, args)
        elif isinstance(args, verbs.RunArgs):
            self._of_run(command, args, state)
        else:
            assert_never(args)

    def _of_run(self, command: Commanded, args: verbs.RunArgs, state: str) -> None:
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
            case verbs.Autopilot() as args:
                self._proposals.set_mode(command, args)
            case _ as missing:
                assert_never(missing)

    def _edit(self, command: Commanded, settings: Settings) -> None:
        step, config = self._state.planned_step + 1, self._state.config
        if self._state.durable.mode == "stopping" or step > config.run.steps:
            self.refuse(command, "run", "no step is left at which the command could take effect")
            return
        try:
            edits.apply(settings, command.args, command.node, step, config, self._pipeline.facts())
        except InvalidInputError as error:
            self.refuse(command, error.where, error.problem)
            return
        self._state.pending.staged.append(command)
        self._proposals.yield_to(command)
        if self._state.durable.mode == "paused" and self._pipeline.in_flight.is_still and self._state.stage == "formed":
            self._pipeline.hold_next_plan()

    @property
    def not_taken(self) -> dict[str, str]:
        """The verbs that make no sense for this run, each with why."""
        if any(not answer.held_out for answer in self._state.ready.values()):
            return {"evaluate": "there are no held-out samples: data.held_out is 0"}
        return {}

    def _beside_training(self, command: Commanded, args: verbs.BoundaryArgs) -> None:
        match args:
            case verbs.Evaluate():
                self._state.pending.side["evaluate"].append(command)
            case verbs.Checkpoint():
                self._state.pending.side["checkpoint"].append(command)
            case verbs.Defragment() if command.node is None or plans.on_node(self._state.durable, command.node):
                self._state.pending.side["defragment"].append(command)
            case verbs.Defragment():
                self.refuse(command, "node", f"no rank of {command.node} is in the group")
            case verbs.Profile():
                self._profile(command, args)
            case verbs.SampleModel(prompt=prompt):
                if prompt is None and not self._state.config.samples.prompts:
                    self.refuse(command, "prompt", "the run file has no [samples] prompts: add prompt=TEXT")
                elif command.node is not None and not plans.on_node(self._state.durable, command.node):
                    self.refuse(command, "node", f"no rank of {command.node} is in the group")
                else:
                    self._state.pending.side["sample"].append(command)
            case _ as missing:
                assert_never(missing)

    def _profile(self, command: Commanded, args: verbs.Profile) -> None:
        absent = [node for node in args.nodes if not plans.on_node(self._state.durable, node)]
        left = self._state.config.run.steps - self._state.planned_step
        if absent:
            self.refuse(command, "nodes", f"no rank of {', '.join(absent)} is in the group")
        elif self._state.durable.mode == "stopping" or left < args.steps + 1:
            need = f"a profile of {args.steps} needs {args.steps + 1}: the first warms up"
            left = 0 if self._state.durable.mode == "stopping" else left
            self.refuse(command, "steps", f"the run has {left} step{'s' if left != 1 else ''} left, and {need}")
        else:
            self._state.pending.side["profile"].append(command)

    # ------------------------------------------------------------ modes

    def _pause(self, command: Commanded, state: str) -> None:
        if self._state.durable.mode == "stopping" or (self._state.pending.wants_pause and not command.again):
            self.refuse(command, "verb", f"the run is already {state}")
            return
        self._state.pending.wants_pause = True
        self._state.pending.pausing.append(command)

    def enter_pause(self) -> None:
        """All that was planned is done."""
        durable = self._state.durable
        self._state.failures = 0  # a group that breaks while it idles is formed again as often as that takes
        if durable.mode != "paused":
            self._state.persist(mode="paused")
        for id, carried in list(durable.carried.items()):
            if carried.verb == "resume":
                self._state.end(id, "failed", self._state.progress.step, "paused again before any step ran")
        for command in self._state.pending.pausing:
            self._state.end(command.id, "applied", self._state.progress.step, made=RunStateChanged("running", "paused"))
        self._state.pending.pausing.clear()
        # Killed before the outcome of what the held plan carries was journaled: it is held once more.
        if self._state.pending.staged or any(
            carried.step > self._state.progress.step for carried in self._state.durable.carried.values()
        ):
            self._pipeline.hold_next_plan()

    def _resume(self, command: Commanded, state: str) -> None:
        if not self._state.pending.wants_pause:
            self.refuse(command, "verb", f"the run is {state}, not paused")
            return
        self._state.pending.wants_pause = False
        self._fail_pausing("resumed before the pause took effect")
        self._state.carry(command, self._state.planned_step + 1, RunStateChanged("paused", "running"))
        self.wants_new_generation = self._state.durable.mode == "paused" and self._state.stage == "formed"
        self._state.persist(mode="running")

    def _stop(self, command: Commanded, checkpoint: bool) -> None:
        if self._state.durable.mode == "stopping" and not command.again:
            self.refuse(command, "verb", "the run is already stopping")
            return
        self._state.pending.stopping.append(command)
        self._state.pending.wants_pause = False
        self._fail_pausing("the run was stopped")
        self._state.persist(mode="stopping", stop_writes_checkpoint=checkpoint)

    def _roll_back(self, command: Commanded, args: verbs.Rollback, state: str) -> None:
        """To a checkpoint that is kept for sure. Whichever agent takes the run up carries it out."""
        step, durable = self._state.progress.step, self._state.durable
        table = self._state.config.checkpoint
        planned = self._pipeline.in_flight.has("checkpoint")
        kept = durable.kept_for_sure(table.keep_last, table.keep_every, planned=planned)
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

    def call_stop_off(self, why: str) -> None:
        """Nothing is lost to a disk that takes no checkpoint: the run pauses, and can be stopped without one."""
        for command in self._state.pending.stopping:
            self._state.end(command.id, "failed", self._state.progress.step, f"{why}; paused instead")
        self._state.pending.stopping.clear()
        self._pipeline.side_plans.call_ending_off()
        self._state.pending.wants_pause = True
        self._state.keep(mode="running")

    def expire(self) -> bool:
        """End what no boundary took in time; True if a pause was among it, so that the run continues."""
        for command in self._state.pending.take_expired(self._state.now):
            self._state.end(command.id, "expired", reason=EXPIRED)
        is_wanted = self._state.pending.pausing or self._state.durable.mode == "paused"
        if not self._state.pending.wants_pause or is_wanted or self._state.stage != "formed":
            return False
        self._state.pending.wants_pause = False
        return True

    def _fail_pausing(self, why: str) -> None:
        for pausing in self._state.pending.pausing:
            self._state.end(pausing.id, "failed", reason=why)
        self._state.pending.pausing.clear()
