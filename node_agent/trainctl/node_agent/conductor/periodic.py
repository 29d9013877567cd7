"""Periodic evaluations, samples, checkpoints, syncs and clearings of the run file: fills `Pending.scheduled`."""

from trainctl.node_agent.conductor.pending import Pending
from trainctl.node_agent.conductor.proposals import Proposals
from trainctl.node_agent.conductor.rendezvous import Rendezvous
from trainctl.node_agent.conductor.state import ConductorState
from trainctl.protocol import messages as m


class PeriodicPlans:
    """First shares, periodic plans and the ending's, each once at its step, however often a fence undoes them."""

    def __init__(self, state: ConductorState, rendezvous: Rendezvous, pending: Pending, proposals: Proposals) -> None:
        self._state, self._rendezvous, self._pending, self._proposals = state, rendezvous, pending, proposals
        self._done: dict[str, int] = {}  # step of the last plan of each kind
        if (writing := state.durable.writing) is not None:  # since another conductor's life
            self._done["checkpoint"] = writing.step
        self._ending_scheduled = False
        config = state.config
        every_steps = {
            "sync": config.group.sync_weights_every, "evaluate": config.evaluate.every_steps,
            "sample": config.samples.every_steps if config.samples.prompts else 0,
            "defragment": config.run.defragment_every, "checkpoint": config.checkpoint.every_steps,
        }  # fmt: skip
        self._every_steps = {kind: steps for kind, steps in every_steps.items() if steps}

    def note_done(self, plan: m.StepPlan) -> None:
        self._done[plan.kind] = plan.step

    def schedule_probe(self) -> None:
        """The comparison of models that comes before the first step of a rank."""
        if self._rendezvous.live.keys() - set(self._state.durable.probed or ()):
            self._pending.scheduled.add("probe")

    def schedule_first(self) -> None:
        """Schedule what comes before the first step of a new run: the measurement of the shares that its file leaves
        open, and what later results are compared with."""
        config, durable = self._state.config, self._state.durable
        if self._state.progress.step == durable.first_step == 0:
            if config.evaluate.at_start and self._done.get("evaluate") != 0 and self._is_of_use("evaluate", 0):
                self._pending.scheduled.add("evaluate")
            if config.samples.at_start and config.samples.prompts and self._done.get("sample") != 0:
                self._pending.scheduled.add("sample")
        if self._proposals.is_pending("first-shares"):
            self._pending.scheduled.add("measure")

    def schedule_periodic(self, step: int) -> None:
        """What is due after `step`."""
        if not 0 < step < self._state.config.run.steps:
            return
        for kind, steps in self._every_steps.items():
            if step % steps == 0 and self._done.get(kind) != step and self._is_of_use(kind, step):
                self._pending.scheduled.add(kind)

    def _is_of_use(self, kind: str, step: int) -> bool:
        if kind == "evaluate":
            return self._rendezvous.any_ready().held_out > 0 and self._state.durable.eval_step != step
        return kind != "sync" or len(self._state.settings.live) > 1

    def schedule_ending(self, step: int) -> None:
        """The last evaluation and checkpoint of a run of which `step` is planned, once."""
        durable, config = self._state.durable, self._state.config
        finishing = step >= config.run.steps
        if self._ending_scheduled or not (finishing or durable.mode == "stopping"):
            return
        self._ending_scheduled = True
        if finishing and self._rendezvous.any_ready().held_out and self._done.get("evaluate") != step:
            self._pending.scheduled.add("evaluate")
        samples = config.samples
        if finishing and samples.prompts and samples.every_steps and self._done.get("sample") != step:
            self._pending.scheduled.add("sample")
        if self.owes_checkpoint(step):
            self._pending.scheduled.add("checkpoint")

    def owes_checkpoint(self, step: int) -> bool:
        """Whether a run that ends after `step` wants one that has not been written."""
        durable, config = self._state.durable, self._state.config
        wanted = config.checkpoint.at_end if step >= config.run.steps else durable.stop_writes_checkpoint
        return wanted and step > 0 and self._done.get("checkpoint") != step

    def call_ending_off(self) -> None:
        """The run doesn't end after all; when it does, what belongs to it is scheduled again."""
        self._ending_scheduled = False

    def start_over(self, step: int, *, was_passed: bool, owes_checkpoint: bool) -> None:
        """Plans beyond `step` are given up. What belongs to it is wanted, unless the next step had been planned; a
        scheduled checkpoint stays wanted if the one before it is being written or was lost (`owes_checkpoint`)."""
        waiting = self._pending.scheduled & {"checkpoint"} if owes_checkpoint else set()
        self._pending.scheduled.clear()
        self._pending.scheduled |= waiting
        self._ending_scheduled = False
        if not was_passed:
            self.schedule_periodic(step)
