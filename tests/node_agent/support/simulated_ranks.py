"""A trainer and its reducer without a model: order by order, stride by stride, with the faults of real ones.

A rank's parameters are a hash of every update they have had, so that two ranks that should be alike can be compared;
`TORN` stands for parameters that were overwritten in part, with which no step may be made.
"""

import dataclasses
import random
import struct
from collections import deque
from collections.abc import Callable

import msgspec

from trainctl.node_agent.planning import plans
from trainctl.protocol import messages as m
from trainctl.protocol.calibration.profile import ProfileSummary

RUN = "sim"
TORN = "torn"


class SimGroup:
    """One generation's reducers: a sum comes out for everybody once all have put their part in, unless it is broken."""

    def __init__(self, form: m.Form) -> None:
        self.ranks, self.form = form.ranks, form
        self.broken = False
        self.parts: dict[object, dict[int, object]] = {}

    def put(self, what: object, rank: int, part: object) -> None:
        self.parts.setdefault(what, {})[rank] = part

    def has_put(self, what: object, rank: int) -> bool:
        return rank in self.parts.get(what, {})

    def is_whole(self, what: object) -> bool:
        return len(self.parts.get(what, {})) == len(self.ranks)


class SimWorld:
    """Things that ranks share: the groups, and the states that updates have led to."""

    def __init__(self, seed: int, silent_failures: float = 0.3) -> None:
        self.random, self.silent_failures = random.Random(seed), silent_failures
        self.groups: dict[m.Generation, SimGroup] = {}
        self.states: dict[int, object] = {0: 0}  # by step: what every rank that is there must have
        self.batches: dict[int, tuple[int, int]] = {}  # by step: cursor and G of the update
        self.chunks: int | None = None  # of the growing file; None: it doesn't grow
        self.chunk_samples = 7
        self.data_ended = False

    def group(self, form: m.Form) -> SimGroup:
        return self.groups.setdefault(form.generation, SimGroup(form))

    def go_back(self, step: int) -> None:
        """Later steps are undone: the next ones may be others."""
        for later in [known for known in self.states if known > step]:
            del self.states[later]
            self.batches.pop(later, None)

    def updated(self, plan: m.StepPlan, before: object) -> object:
        """The state after an update, the same on every rank: a step that one rank has made is never another."""
        batch = (plan.cursor, plan.global_batch)
        assert self.batches.setdefault(plan.step, batch) == batch, f"step {plan.step} was made again, of another batch"
        after = hash((before, plan.step, batch, plan.learning_rate))
        assert self.states.setdefault(plan.step, after) == after, f"step {plan.step} was made again, otherwise"
        return after


@dataclasses.dataclass
class SimRank:
    """One trainer, with its link: `down` from the agent and `up` to it, in order."""

    rank: int
    world: SimWorld
    backend: str = "torch"
    speed: float = 100.0  # samples per second
    step_seconds: float = 0.1
    run: str = RUN
    pid: int = 1
    held_out: int = 10
    generation: m.Generation | None = None
    highest: m.Generation | None = None
    group: SimGroup | None = None
    joining: bool = False
    failed: bool = False  # waits for a fence
    last_step: int = 0
    cursor: int = 0
    state: object = 0
    plans: deque = dataclasses.field(default_factory=deque)
    held: tuple[m.Range, ...] = ()
    held_step: int = 0
    held_from: m.Generation | None = None
    begun: tuple | None = None  # the plan that the accumulators were last begun for
    accumulated: bool = False
    compute: m.Compute | None = None
    loaded: bool = False
    gone: bool = False
    exit: object = None  # what tells the agent of its end
    disk_full: bool = False
    background: bool = False  # checkpoints are written while it makes steps
    writing: m.StepPlan | None = None  # the plan whose checkpoint is being written
    write_left: int = 0  # pieces of it that are still to be written
    checkpointed: m.Checkpointed | None = None  # the newest, which heartbeats repeat
    model: float = 0.0  # what its log-probabilities are off by
    next_model: float = 0.0  # of the process that takes its place
    probed: bool = False  # this process has been compared with others
    hung: bool = False  # it says that it is there, and does no work
    silent: bool = False  # stopped: it neither works nor says anything, nor takes an order
    parameters: int = 1000
    connected: bool = True
    progress: int = 0  # pieces of work done
    chunks: int = 0  # of the growing file that it has sealed
    data_ended: bool = False  # it has found the end of the file
    other_from: int = 1 << 30  # the chunk from which on it has other data than the others
    profile: ProfileSummary | None = None  # of a calibration
    detail: str = ""  # how far it has come while it loads
    save: Callable[[m.StepPlan], tuple[str, int]] | None = None  # writes a checkpoint's files; gives folder and bytes
    most_samples: int | None = None  # in a micro-batch, before it runs out of memory and goes on with half as many
    on_disk: list = dataclasses.field(default_factory=list)
    says: dict = dataclasses.field(default_factory=dict)  # more fields of its reports of steps
    measures: Callable[[m.RankWork, int], dict] | None = None  # the same, by its part of a plan and the step
    reports: deque = dataclasses.field(default_factory=lambda: deque(maxlen=8))
    down: deque = dataclasses.field(default_factory=deque)
    up: deque = dataclasses.field(default_factory=deque)

    # ------------------------------------------------------------ what it says

    def ready(self) -> m.Ready:
        return m.Ready(
            run=self.run,
            rank=self.rank,
            pid=self.pid,
            backend=self.backend,
            device="cpu",
            parameters=self.parameters,
            samples=100,
            held_out=self.held_out,
            mean_weight=4.0,
            layout_digest="l",
            model_digest="m",
            data_digest="d",
            last_step=self.last_step,
            cursor=self.cursor,
            system="Linux",
            engines=("gloo", "ring"),
            profile=self.profile,
            compute=self.compute,
        )

    def load(self) -> None:
        self.loaded = True
        self.up.append(self.ready())

    def restart(self) -> None:
        """Another process in its place, which has nothing of what it had."""
        self.generation = self.highest = self.held_from = self.begun = self.exit = None
        self.last_step, self.cursor, self.state, self.held, self.held_step = 0, 0, self.world.states[0], (), 0
        self.joining = self.failed = self.accumulated = self.loaded = self.gone = self.hung = self.silent = False
        self.model, self.probed = self.next_model, False
        self.chunks, self.data_ended = 0, False
        self.writing = self.checkpointed = None
        self.down.clear()
        self.plans.clear()
        self.reports.clear()

    def alive(self) -> m.Alive:
        ready = self.ready() if self.loaded else None
        return m.Alive(
            run=self.run, rank=self.rank, generation=self.highest, step=self.last_step, phase="idle", ready=ready,
            progress=self.progress, detail=self.detail,
        )  # fmt: skip

    # ------------------------------------------------------------ checkpoints in the background

    @property
    def can_write(self) -> bool:
        return self.writing is not None and not (self.gone or self.silent)

    def write(self) -> None:
        """One piece of a checkpoint, or its end."""
        if self.write_left:
            self.write_left -= 1
            return
        plan, self.writing = self.writing, None
        info = None if self.disk_full else self._saved(plan, write_seconds=0.1, kept=self.kept(plan.step))
        self.checkpointed = m.Checkpointed(
            run=self.run, rank=self.rank, generation=plan.generation, seq=plan.seq, step=plan.step, checkpoint=info,
            problem="the disk is full" if self.disk_full else "",
        )  # fmt: skip
        self.up.append(self.checkpointed)

    def _saved(self, plan: m.StepPlan, write_seconds: float = 0.0, kept: tuple[int, ...] = ()) -> m.CheckpointInfo:
        folder, size = self.save(plan) if self.save is not None else ("p", 1)
        return m.CheckpointInfo(folder, plan.step, size, 0.0, write_seconds, kept)

    def kept(self, step: int) -> tuple[int, ...]:
        """Steps of all checkpoints on its disk, with this one."""
        self.on_disk = sorted({*(at for at in self.on_disk if at < step), step})[-2:]
        return tuple(self.on_disk)

    def of_write(self) -> m.CheckpointProgress | m.Checkpointed | None:
        if self.writing is None:
            return self.checkpointed
        return m.CheckpointProgress(
            run=self.run,
            rank=self.rank,
            step=self.writing.step,
            done_bytes=10 - min(10, self.write_left),
            total_bytes=10,
        )

    # ------------------------------------------------------------ growing data

    @property
    def can_seal(self) -> bool:
        """Return whether the file has more than it has sealed."""
        world, works = self.world, not (self.gone or self.hung or self.silent)
        return works and world.chunks is not None and (self.chunks, self.data_ended) != (world.chunks, world.data_ended)

    def seal(self) -> None:
        """The next chunk, or the end."""
        if self.chunks < self.world.chunks:
            self.chunks += 1
        else:
            self.data_ended = self.world.data_ended
        self.up.append(self.sealed())

    def sealed(self) -> m.Sealed:
        digest = f"{self.chunks}" if self.chunks < self.other_from else f"other {self.chunks}"
        return m.Sealed(
            run=self.run,
            rank=self.rank,
            chunks=self.chunks,
            samples=self.chunks * self.world.chunk_samples,
            digest=digest,
            ended=self.data_ended,
        )

    def has_data(self, plan: m.StepPlan) -> bool:
        """Return whether it has the samples of a step."""
        needed, has = plan.cursor + plan.global_batch, self.chunks * self.world.chunk_samples
        return self.world.chunks is None or self.data_ended or needed <= has

    # ------------------------------------------------------------ orders

    def take_order(self) -> None:
        """The next order on the link."""
        order = self.down.popleft()
        match order:
            case m.Leave():
                self.gone = True
                self._drop_group()
                return
            case m.StepPlan():
                if order.generation == self.generation and not order.recorded:  # else it is known
                    self.plans.append(order)
                return
        if self.highest is not None and order.generation < self.highest:
            return
        self.highest = order.generation
        match order:
            case m.Fence():
                self._leave()
                self._say_fenced(order)
            case m.Offer():
                self._say(m.Offered, order.generation, endpoints=(f"127.0.0.1:{self.rank}",))
            case m.Form():
                self._leave()
                self._form(order)

    def _say(self, kind, generation: m.Generation, **fields) -> None:
        self.up.append(kind(run=self.run, rank=self.rank, generation=generation, **fields))

    def _leave(self) -> None:
        """Give up what is under way; what the accumulators hold stays."""
        self.generation, self.failed, self.joining, self.accumulated = None, False, False, False
        self.plans.clear()
        self._drop_group()

    def _drop_group(self) -> None:
        if self.group is not None:
            self.group.broken = True
            self.group = None

    def _say_fenced(self, fence: m.Fence) -> None:
        held = self.held if self.held else ()
        self._say(
            m.Fenced, fence.generation, last_step=self.last_step, held_from=self.held_from if held else None, held=held,
            reports=tuple(self.reports),
        )  # fmt: skip

    def _form(self, form: m.Form) -> None:
        self.generation = form.generation
        if self.rank not in form.ranks:
            return
        assert form.source is None or form.source in form.ranks
        if self.rank not in form.behind:
            assert (form.step, form.cursor) == (self.last_step, self.cursor), (form, self)
            assert self.state != TORN
        if form.engine == "none":
            assert form.ranks == (self.rank,) and not form.behind
            self._say(m.Formed, form.generation)
            return
        assert len(form.endpoints) == len(form.ranks) > 1
        self.group, self.joining = self.world.group(form), True

    # ------------------------------------------------------------ work

    @property
    def can_work(self) -> bool:
        """Return whether a stride may change anything: what waits for others does not."""
        if self.gone or self.hung or self.silent or self.failed or self.generation is None:
            return False
        if self.joining:
            return self._waits_for(("join",))
        if not self.plans:
            return False
        plan = self.plans[0]
        if plan.kind == "train" and self.accumulated:
            return self._waits_for((plan.kind, plan.seq))
        if plan.kind == "train" and not self.has_data(plan):
            return False
        if plan.kind == "checkpoint" and self.rank in plan.writers and self.writing is not None:
            return False  # one that was planned before a fence
        return plan.kind != "sync" or self._waits_for((plan.kind, plan.seq))

    def _waits_for(self, what: tuple) -> bool:
        group = self.group
        return group is None or group.broken or group.is_whole(what) or not group.has_put(what, self.rank)

    def work(self) -> None:
        """One stride."""
        self.progress += 1
        if self.joining:
            self._join()
            return
        plan = self.plans[0]
        mine = next((work for work in plan.work if work.rank == self.rank), None)
        assert mine is not None, (plan, self.rank)
        match plan.kind:
            case "train" if not self.accumulated:
                self._accumulate(plan, mine)
            case "train":
                self._update(plan, mine)
            case "sync":
                self._sync(plan, mine)
            case "probe":
                self._probe(plan, mine)
            case _:
                self._side(plan, mine)

    def _sum(self, what: tuple, part: object) -> dict[int, object] | None:
        """The parts of all, None if it is to be waited for or has failed; a broken sum may still come out for some."""
        group = self.group
        if group is None:
            return {self.rank: part}
        if not group.has_put(what, self.rank):
            if not group.broken:
                group.put(what, self.rank, part)
        elif group.is_whole(what) and not (group.broken and self.world.random.random() < 0.5):
            return group.parts[what]
        if group.broken:
            self.failed = True
            if self.world.random.random() >= self.world.silent_failures:  # else it hangs in it without a word
                self._say(m.GroupFailed, self.generation, reason="connection closed by peer")
        return None

    def _join(self) -> None:
        form = self.group.form
        parts = self._sum(("join",), (self.state, self.last_step, self.cursor))
        if self.rank in form.behind and self.group.has_put(("join",), self.rank):
            self.state = TORN
        if parts is None:
            return
        if self.rank in form.behind:
            state, step, cursor = parts[form.source]
            assert (state, step, cursor) == (self.world.states[form.step], form.step, form.cursor)
            self.state, self.last_step, self.cursor = state, step, cursor
            self.held, self.held_from, self.begun = (), None, None
        self.joining = False
        self._say(m.Formed, form.generation, join_seconds=0.01)

    def _accumulate(self, plan: m.StepPlan, mine: m.RankWork) -> None:
        """One micro-batch, or the end of them."""
        assert self.probed or self.group is None, "a step of a rank whose model was compared with nobody's"
        assert plan.step == self.last_step + 1, f"a plan for step {plan.step} after step {self.last_step}"
        assert plan.cursor == self.cursor
        assert self.state != TORN
        if self.begun != (plan.generation, plan.seq):
            self._begin(plan)
        left = plans.subtract(mine.ranges, self.held)
        if left:
            piece = m.Range(left[0].start, min(left[0].count, self._fitting(mine.micro_batch)))
            self.held = tuple(plans.merge((*self.held, piece)))
        if plans.subtract(mine.ranges, self.held):
            return
        self.accumulated = True
        self.up.append(m.Soon(run=self.run, rank=self.rank, generation=plan.generation, seq=plan.seq))
        if self.group is not None and not self.group.broken:
            self.group.put((plan.kind, plan.seq), self.rank, self.held)

    def _fitting(self, micro_batch: int) -> int:
        while self.most_samples is not None and micro_batch > max(1, self.most_samples):
            micro_batch = (micro_batch + 1) // 2
        return micro_batch

    def _begin(self, plan: m.StepPlan) -> None:
        """As the trainer's db does: a batch is continued only if the plan says it finishes that very one."""
        self.begun = (plan.generation, plan.seq)
        if plan.finishes is not None and self.held:
            assert (plan.finishes, plan.step) == (self.held_from, self.held_step), "finishes another batch than is held"
        else:
            self.held = ()
        self.held_from, self.held_step = plan.finishes or plan.generation, plan.step

    def _update(self, plan: m.StepPlan, mine: m.RankWork) -> None:
        parts = self._sum((plan.kind, plan.seq), self.held)
        if parts is None:
            return
        pieces = sorted(piece for held in parts.values() for piece in held)
        at = plan.cursor
        for piece in pieces:
            assert piece.start == at, f"step {plan.step}: positions {pieces} of the batch at {plan.cursor}"
            at = piece.stop
        assert at == plan.cursor + plan.global_batch, f"step {plan.step}: positions {pieces}"
        self.state = self.world.updated(plan, self.state)
        self.last_step, self.cursor = plan.step, at
        count = sum(piece.count for piece in self.held)
        self.held, self.held_from, self.accumulated = (), None, False
        measured = self.measures(mine, plan.step) if self.measures is not None else {}
        fitting = self._fitting(mine.micro_batch)
        replays = {"micro_batch": fitting, "replays": 1} if fitting < mine.micro_batch else {}
        fields = {"phases": m.Phases(forward=count / self.speed), **replays, **self.says, **measured}
        report = self._report(plan, mine, count, **fields)
        self.reports.append(report)

    def _probe(self, plan: m.StepPlan, mine: m.RankWork) -> None:
        assert plan.step == self.last_step and self.state != TORN
        self.probed = True
        said = struct.pack("<3f", -3.0, -1.0 + self.model, -2.0 + self.model)
        more = {
            "family": "llama", "tokens_digest": "t", "lengths": (2, 1), "weight_norms": struct.pack("<f", 1.0),
            "noise": 5e-6, "layers": struct.pack("<2f", 1.0, 1.0 + self.model),
            "layer_noise": struct.pack("<2f", 1e-6, 1e-6),
        }  # fmt: skip
        report = self._report(plan, mine, 0)
        self.up[-1] = m.Probed(**msgspec.structs.asdict(report), **more, log_probabilities=said)

    def _side(self, plan: m.StepPlan, mine: m.RankWork) -> None:
        assert plan.step == self.last_step and self.state != TORN
        count = sum(piece.count for piece in mine.ranges)
        writer = plan.kind == "checkpoint" and self.rank in plan.writers
        writes = writer and not self.disk_full and not self.background
        failed = writer and self.disk_full and not self.background
        if writer and self.background:
            self.writing, self.write_left, self.checkpointed = plan, self.world.random.randrange(12), None
        self._report(
            plan, mine, count,
            checkpoint=self._saved(plan) if writes else None,
            skipped="nothing was written" if failed else None,
            samples_per_second=self.speed if plan.kind == "measure" else None,
        )  # fmt: skip

    def _sync(self, plan: m.StepPlan, mine: m.RankWork) -> None:
        parts = self._sum((plan.kind, plan.seq), self.state)
        if parts is not None:
            assert set(parts.values()) == {self.state}, "ranks that are in step are not alike"
            self._report(plan, mine, 0, drift=self.rank * 1e-6)

    def _report(self, plan: m.StepPlan, mine: m.RankWork, count: int, **fields) -> m.Report:
        self.plans.popleft()
        report = m.Report(
            run=self.run, rank=self.rank, generation=plan.generation, seq=plan.seq, kind=plan.kind, step=plan.step,
            weight=1.0, own_weight=1.0, own_samples=count, tokens=2, own_tokens=count,
            step_seconds=self.step_seconds, **{"loss_sum": 2.0, "micro_batch": mine.micro_batch, **fields},
        )  # fmt: skip
        if plan.kind == "sample":
            answers = tuple(m.Answer(str(prompt), "yes", 1, True, 0.1) for prompt in plan.sampling.prompts)
            report = m.SampleReport(**msgspec.structs.asdict(report), answers=answers)
        self.up.append(report)
        return report
