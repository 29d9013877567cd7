"""Messages between an agent and a trainer: orders down, answers up."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from trainctl.protocol.messages.base import Count, Engine, Generation, Message, Name, PlanKind, Range, Values


class RankWork(msgspec.Struct, frozen=True):
    """What one rank does in a plan."""

    rank: Count
    ranges: tuple[Range, ...]  # positions (train, measure) or indices of held-out samples (evaluate)
    micro_batch: Annotated[int, Meta(ge=1)]  # samples per forward/backward


class StepPlan(Message, tag="step-plan", frozen=True):
    """One message for all ranks; its identity is (generation, seq).

    `train` moves the cursor; `evaluate` and `checkpoint` don't; `sync` gives all ranks the lowest one's state;
    `measure` times micro-batches and adds nothing; `probe` shows whether all ranks hold the same model.
    """

    run: Name
    generation: Generation
    seq: Count  # place in the run's journal of plans
    kind: PlanKind
    step: Count  # train: the step it commits, from 1; else the last committed step
    plan_version: Count  # grows with each edit of shares, micro-batches, G, learning-rate rule or ranks
    cursor: Count  # first position of the step's global batch
    global_batch: Annotated[int, Meta(ge=1)]  # G, samples
    work: tuple[RankWork, ...]
    learning_rate: float
    divisor: Annotated[float, Meta(gt=0)]  # D: each loss sum is divided by this constant before backward
    finishes: Generation | None = None  # the generation whose unfinished batch this plan completes
    writers: tuple[int, ...] = ()  # checkpoint: the ranks that write
    commands: tuple[str, ...] = ()  # ids of the commands that take effect with it


class Offer(Message, tag="offer", frozen=True):
    """Open endpoints for a generation that will be formed, and answer Offered."""

    run: Name
    generation: Generation
    engine: Engine


class Form(Message, tag="form", frozen=True):
    """Join a generation: forget any older one, receive the state if behind, and answer Formed (or GroupFailed).

    A rank that isn't in `ranks` leaves the group and waits. All lists are in the order of `ranks`.
    """

    run: Name
    generation: Generation
    engine: Literal["none", "gloo", "ring"]
    ranks: tuple[int, ...]  # live ranks, ascending; a rank's index here is its place in the engine
    endpoints: tuple[tuple[str, ...], ...] = ()  # host:port of each rank's offer; none for engine "none"
    layout_digest: str = ""  # the layout that every rank's parameters must have
    step: Count = 0  # last committed step when the generation begins
    cursor: Count = 0  # first position after it
    source: Count | None = None  # the rank that gives its state to those behind; None: none is behind
    behind: tuple[int, ...] = ()  # ranks that receive that state
    deadline_seconds: float = 30.0  # for joining and transfer; then the reducer is ended and the answer is GroupFailed


class Fence(Message, tag="fence", frozen=True):
    """Leave the generation before this one at once, and answer Fenced."""

    run: Name
    generation: Generation


class Leave(Message, tag="leave", frozen=True):
    """End the trainer process with exit status 0."""

    run: Name
    reason: str


ToTrainer = StepPlan | Offer | Form | Fence | Leave


class Phases(msgspec.Struct, frozen=True):
    """Where one rank's step went, in seconds."""

    data: float = 0.0  # reading and collating samples
    forward: float = 0.0
    backward: float = 0.0
    sync: float = 0.0  # all-reduce, the wait for slower ranks included
    optimizer: float = 0.0  # scale, clip and update
    wait: float = 0.0  # for the next plan

    @property
    def busy(self) -> float:
        """What the rank itself needs for its share: data, forward and backward."""
        return self.data + self.forward + self.backward


PHASES = Phases.__struct_fields__
BUSY_PHASES = ("data", "forward", "backward")
"""Phases that the rank itself needs for its share, as in `Phases.busy`."""


class FileDigest(msgspec.Struct, array_like=True, frozen=True):
    """One file of a model or of data."""

    name: str
    digest: str  # SHA-256 of name, size and content


class Compute(msgspec.Struct, frozen=True):
    """How a rank computes, as its backend chose it."""

    dtype: str  # of forward and backward: float32, bfloat16
    tf32: bool | None = None  # whether products of float32 matrices may be rounded to TF32; None: the device has none
    compile: str = "off"  # the mode of the model's compiler
    attention: str = ""  # its kernel: sdpa, eager, mx.fast; empty: not known


class Ready(Message, tag="ready", frozen=True):
    """The trainer has loaded its model and data and can join a generation."""

    run: Name
    rank: Count
    pid: Count
    backend: Literal["torch", "mlx"]
    device: str  # cpu, cuda:0 NVIDIA H200, gpu Apple M2 Ultra
    parameters: Count  # trainable scalars
    samples: Count  # N: samples of one epoch
    held_out: Count  # samples kept for evaluation
    mean_weight: float  # mean loss weight of a sample
    layout_digest: str  # of (name, shape, offset) sorted by Hugging Face name
    model_digest: str  # of the model directory's configuration and weights
    data_digest: str
    last_step: Count  # last committed step in its parameters
    cursor: Count  # first position after that step
    memory_cap_bytes: Count | None = None
    system: str = ""  # Linux, Darwin: gloo cannot join different systems in one group
    engines: tuple[Engine, ...] = ()  # engines that its reducer can load
    model_files: tuple[FileDigest, ...] = ()  # at most 64, so that a difference can be named
    data_files: tuple[FileDigest, ...] = ()  # at most 64
    compute: Compute | None = None


class Alive(Message, tag="alive", frozen=True):
    """The trainer is alive. Sent at 1 Hz, also while it computes."""

    run: Name
    rank: Count
    generation: Generation | None
    step: Count  # the step in progress
    phase: str
    progress: Count | None = None  # grows with each phase and micro-batch of the main thread
    ready: Ready | None = None  # repeated, so that a restarted agent has it


class Soon(Message, tag="soon", frozen=True):
    """The rank has accumulated the gradients of this plan, and will soon need the next one."""

    run: Name
    rank: Count
    generation: Generation
    seq: Count


class CheckpointInfo(msgspec.Struct, frozen=True):
    """A complete checkpoint on disk."""

    path: str
    step: Count
    size_bytes: Count
    loop_seconds: float  # for which the training loop stood still


class Report(Message, tag="report", frozen=True):
    """A rank has done a plan. The sums of `train` are global (after the reduce), those of `evaluate` the rank's own."""

    run: Name
    rank: Count
    generation: Generation
    seq: Count
    kind: PlanKind
    step: Count
    loss_sum: float  # sum of the weighted per-token losses, nats
    weight: float  # global weight of the batch: what its loss is divided by
    own_weight: float  # this rank's part of it
    own_samples: Count
    tokens: Count = 0  # processed by all ranks: those without a loss count, padding doesn't
    own_tokens: Count = 0  # this rank's part of them
    grad_norm: float = 0.0  # before clipping
    skipped: str | None = None  # why parameters were not updated: nan, overflow; None: they were updated
    micro_batch: Count = 0  # in use at the end of the step
    replays: Count = 0  # micro-batches run again after an out-of-memory error
    phases: Phases = Phases()
    step_seconds: float = 0.0  # from the plan's start to its end, the wait for it included
    finished_at: float = 0.0
    values: Values = msgspec.field(default_factory=dict)  # metrics that have no field of their own, by name
    checkpoint: CheckpointInfo | None = None
    drift: float | None = None  # sync: largest |own - source| over the source's root mean square, of all parameters
    samples_per_second: float | None = None  # measure: of forward and backward alone


class Probed(Report, tag="probed", kw_only=True, frozen=True):
    """The report of a `probe` plan: log-probabilities of the first training samples, for comparison between ranks."""

    family: str  # model_type in the model's config.json
    tokens_digest: str  # SHA-256 of the tokens
    lengths: tuple[Count, ...]  # targets of each sample
    log_probabilities: bytes  # natural logarithms, one for each target, sample by sample: float32, little endian
    weight_norms: bytes  # of the first 4,096 trainable parameters by name: float32, little endian
    tf32: bool = False  # whether products of float32 matrices may be rounded to TF32


class Fenced(Message, tag="fenced", frozen=True):
    """The answer to Fence: from here on, the rank commits and adds nothing under an older generation."""

    run: Name
    rank: Count
    generation: Generation  # the one fenced to
    last_step: Count  # last committed step
    held_from: Generation | None = None  # the generation of the batch that its accumulators belong to
    held: tuple[Range, ...] = ()  # positions whose gradients the accumulators hold, of step last_step + 1
    reports: tuple[Report, ...] = ()  # the newest, oldest first, since the agent may have missed them


class Offered(Message, tag="offered", frozen=True):
    """The answer to Offer: the endpoints that the rank opened."""

    run: Name
    rank: Count
    generation: Generation
    endpoints: tuple[str, ...]  # host:port; gloo: one, its store's; ring: one for each link to a peer


class Formed(Message, tag="formed", frozen=True):
    """The answer to Form: the rank has joined the generation, and has the state of its step."""

    run: Name
    rank: Count
    generation: Generation
    join_seconds: float = 0.0  # until the engine had connected all ranks
    level_seconds: float = 0.0  # spent on transferring state to the ranks behind


class GroupFailed(Message, tag="group-failed", frozen=True):
    """Joining, state transfer or reducing failed. The rank keeps its gradients and waits for a fence."""

    run: Name
    rank: Count
    generation: Generation
    reason: str  # one line


class TrainerFailed(Message, tag="trainer-failed", frozen=True):
    """The trainer cannot continue; it exits after this."""

    run: Name
    rank: Count
    reason: str  # one line


FromTrainer = Ready | Alive | Soon | Report | Probed | Fenced | Offered | Formed | GroupFailed | TrainerFailed
