"""What the run file wants beside training, and at which boundary: it fills the desk's `scheduled`."""

from trainctl.node_agent.conductor.pending import Desk
from trainctl.node_agent.conductor.rendezvous import Formation
from trainctl.node_agent.conductor.state import Book
from trainctl.protocol import messages as m


class Agenda:
    """First shares, periodic plans and the ending's, each once at its step, however often a fence undoes them."""

    def __init__(self, book: Book, formation: Formation, desk: Desk) -> None:
        self._book, self._formation, self._desk = book, formation, desk
        self._done: dict[str, int] = {}  # step of the last plan of each kind
        self._ending_scheduled = False

    def note_done(self, plan: m.StepPlan) -> None:
        self._done[plan.kind] = plan.step

    def schedule_probe(self) -> None:
        """The comparison of models that comes before the first step of a rank."""
        if self._formation.live.keys() - set(self._book.durable.probed or ()):
            self._desk.scheduled.add("probe")

    def schedule_first(self) -> None:
        """The measurement that a new run's shares come from."""
        config, durable = self._book.config, self._book.durable
        is_new = self._book.progress.step == 0 and not durable.timed
        is_open = all(table.share is None for table in config.nodes.values())
        if is_new and is_open and config.group.first_shares == "timed" and len(self._formation.live) > 1:
            self._desk.scheduled.add("measure")

    def schedule_periodic(self, step: int) -> None:
        """What is due after `step`."""
        config = self._book.config
        every = {
            "sync": config.group.sync_weights_every if len(self._formation.live) > 1 else 0,
            "evaluate": config.evaluate.every_steps if self._formation.any_ready().held_out else 0,
            "checkpoint": config.checkpoint.every_steps,
        }
        if self._book.durable.eval_step == step:
            every["evaluate"] = 0
        if 0 < step < config.run.steps:
            self._desk.scheduled |= {
                kind for kind, steps in every.items() if steps and step % steps == 0 and self._done.get(kind) != step
            }

    def schedule_ending(self, step: int) -> None:
        """The last evaluation and checkpoint of a run of which `step` is planned, once."""
        durable, config = self._book.durable, self._book.config
        finishing = step >= config.run.steps
        if self._ending_scheduled or not (finishing or durable.mode == "stopping"):
            return
        self._ending_scheduled = True
        if finishing and self._formation.any_ready().held_out and self._done.get("evaluate") != step:
            self._desk.scheduled.add("evaluate")
        if self.owes_checkpoint(step):
            self._desk.scheduled.add("checkpoint")

    def owes_checkpoint(self, step: int) -> bool:
        """Whether a run that ends after `step` wants one that has not been written."""
        durable, config = self._book.durable, self._book.config
        wanted = config.checkpoint.at_end if step >= config.run.steps else durable.stop_writes_checkpoint
        return wanted and step > 0 and self._done.get("checkpoint") != step

    def call_ending_off(self) -> None:
        """The run doesn't end after all; when it does, what belongs to it is scheduled again."""
        self._ending_scheduled = False

    def start_over(self, step: int, *, was_passed: bool) -> None:
        """Plans beyond `step` are not under way any more. What belongs to it is wanted, unless the next step had been
        planned: that comes after."""
        self._desk.scheduled.clear()
        self._ending_scheduled = False
        if not was_passed:
            self.schedule_periodic(step)
