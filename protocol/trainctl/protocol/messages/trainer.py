"""Messages between an agent and a trainer: orders down, answers up."""

import math
from collections.abc import Iterable
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from trainctl.protocol.calibration.profile import ProfileSummary
from trainctl.protocol.config.run_tables import Prompt
from trainctl.protocol.messages.base import (
    Count,
    Engine,
    Generation,
    Message,
    Name,
    PlanKind,
    Range,
    ReferenceName,
    Values,
)

FREED: Final = "memory_freed_bytes"
"""In the report of a `defragment` plan: what the allocator gave back to the device."""
PAIRS_FOLLOWED: Final = 32
"""Held-out pairs that every evaluation reports, the first ones."""
WORST_PAIRS: Final = 10
"""Held-out pairs with the lowest margins that every evaluation reports too."""


class RankWork(msgspec.Struct, frozen=True):
    """One rank's work in a plan."""

    rank: Count
    ranges: tuple[Range, ...]  # positions (train, measure), or indices of held-out samples (evaluate)
    micro_batch: Annotated[int, Meta(ge=1)]  # samples per forward and backward pass


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """The questions that a `sample` plan asks the model. A prompt is a text to continue, or messages to answer."""

    prompts: tuple[Prompt, ...]  # texts and conversations, in the order of the answers
    max_tokens: Annotated[int, Meta(ge=1)]  # most tokens per answer
    temperature: float  # 0: always the likeliest token
    top_p: float  # tokens are drawn from the likeliest ones with this total probability
    seed: Count  # seed of the random numbers, the same for each prompt
    use_generation_config: bool = False  # torch only: apply the other settings of generation_config.json


class StepPlan(Message, tag="step-plan", frozen=True):
    """One message for all ranks, identified by (generation, seq).

    `train` moves the cursor; `evaluate` and `checkpoint` don't. `sync` copies the lowest rank's state to all ranks.
    `measure` times micro-batches without adding gradients. `probe` checks that all ranks have the same model.
    `sample` has the model answer prompts; only one rank has work. `defragment` clears the allocators' caches.
    `profile` has the ranks with work record the steps that follow.

    A `checkpoint` plan with `recorded` false is sent to its writers again with true, and they give the checkpoint its
    final name after that. A plan is sent again because agents of 0.2.0, which host writers too, relay no message that
    they don't know.
    """

    run: Name
    generation: Generation
    seq: Count  # position in the run's plan journal
    kind: PlanKind
    step: Count  # train: the step that it commits, from 1; other kinds: the last committed step
    plan_version: Count  # grows with each change of shares, micro-batches, G, learning-rate rule or ranks
    cursor: Count  # first position in the step's global batch
    global_batch: Annotated[int, Meta(ge=1)]  # G, in samples
    work: tuple[RankWork, ...]
    learning_rate: float
    divisor: Annotated[float, Meta(gt=0)]  # D, the constant that divides each loss sum before backward
    finishes: Generation | None = None  # generation whose unfinished batch this plan completes
    writers: tuple[int, ...] = ()  # checkpoint: ranks that write it
    commands: tuple[str, ...] = ()  # IDs of the commands that take effect with this plan
    sampling: Sampling | None = None  # sample: what is asked
    profile_steps: Count = 0  # profile: number of steps to record, after one that warms up
    recorded: bool | None = None  # checkpoint: whether the lead's disk has its record up to this step; null: not said


class Offer(Message, tag="offer", frozen=True):
    """Open endpoints for the next generation and answer Offered."""

    run: Name
    generation: Generation
    engine: Engine


class Form(Message, tag="form", frozen=True):
    """Leave any older generation and join this one, receive the state if behind, and answer Formed (or GroupFailed).

    A rank that isn't in `ranks` leaves the group and waits. All lists have the same order as `ranks`.
    """

    run: Name
    generation: Generation
    engine: Literal["none", "gloo", "ring"]
    ranks: tuple[int, ...]  # live ranks, ascending; a rank's index in this list is its rank in the engine
    endpoints: tuple[tuple[str, ...], ...] = ()  # host:port endpoints that each rank offered; empty for engine "none"
    layout_digest: str = ""  # required layout of every rank's parameters
    step: Count = 0  # last committed step at the start of the generation
    cursor: Count = 0  # first position after that step
    source: Count | None = None  # rank that sends its state to the ranks behind; None: no rank is behind
    behind: tuple[int, ...] = ()  # ranks that receive the state
    deadline_seconds: float = 30.0  # limit for joining and state transfer, then GroupFailed


class Fence(Message, tag="fence", frozen=True):
    """Leave all older generations at once and answer Fenced."""

    run: Name
    generation: Generation


class Leave(Message, tag="leave", frozen=True):
    """Exit the trainer process with status 0."""

    run: Name
    reason: str
    checkpoint: bool = False  # whether to write a checkpoint of the last step first; agents before 0.3 don't say


class WorkSlice(Message, tag="work-slice", frozen=True):
    """A slice of separate work: process its rows and return a result for each."""

    run: Name  # work ID
    slice: Count  # slice ID
    first: Count  # index of the first row; the first row of the work has index 0
    rows: tuple[str, ...]  # rows as JSON objects


class ReferenceSlice(Message, tag="reference-slice", frozen=True):
    """Answer to ReferenceAsk: units to compute, and a part of the values that all ranks have computed so far."""

    run: Name
    ask: Count  # number of the ask
    reference: ReferenceName  # which values
    known: bool = True  # whether the lead knows the sizes of the units; false: send them
    slice: Count | None = None  # slice ID; None: nothing to compute now
    first: Count = 0  # index of the slice's first unit
    units: Count = 0  # units of the slice
    offset: Count = 0  # index of the first value in `values`
    values: bytes = b""  # natural logarithms: little-endian float32
    answered: Count = 0  # units that have values so far
    digest: str = ""  # SHA-256 digest of all values once they are complete
    problem: str = ""  # reason why the lead can't keep the values; empty: none


ToTrainer = StepPlan | Offer | Form | Fence | Leave | ReferenceSlice


class Phases(msgspec.Struct, frozen=True):
    """Time that one rank's step spent in each phase, in seconds."""

    data: float = 0.0  # time for reading and collating samples
    forward: float = 0.0
    backward: float = 0.0
    sync: float = 0.0  # time in the all-reduce, including the wait for slower ranks
    optimizer: float = 0.0  # time for scaling, clipping and the update
    wait: float = 0.0  # time spent waiting for the next plan

    @property
    def busy(self) -> float:
        """Return what the rank itself needs for its share: data, forward and backward."""
        return self.data + self.forward + self.backward

    @property
    def timed_busy(self) -> float | None:
        """Return `busy`; None if no phase was timed, as in a training loop that is attached."""
        return self.busy if self != _UNTIMED else None


_UNTIMED = Phases()
PHASES = Phases.__struct_fields__
BUSY_PHASES = ("data", "forward", "backward")
"""Phases that the rank itself needs for its share, as in `Phases.busy`."""


class FileDigest(msgspec.Struct, array_like=True, frozen=True):
    """One model or data file."""

    name: str
    digest: str  # SHA-256 of the name, size and content


class Compute(msgspec.Struct, frozen=True):
    """The precision and kernels of a rank, as chosen by its backend."""

    dtype: str  # data type of forward and backward passes, for example float32 or bfloat16
    tf32: bool | None = None  # whether float32 matrix products may use TF32; None: not supported by the device
    compile: str = "off"  # mode of the model compiler
    attention: str = ""  # attention kernel, for example sdpa, eager or mx.fast; empty: unknown
    weights: str = ""  # form of the trained weights, for example float32 or bfloat16; empty: unknown
    deterministic: bool | None = (
        None  # whether all kernels give the same bits each time; None: not chosen on the device
    )
    cudnn_benchmark: bool | None = None  # whether cuDNN times its algorithms; None: not a CUDA device
    update: str = ""  # library whose kernel updates the weights: torch or bitsandbytes; empty: not a CUDA device
    versions: tuple[tuple[str, str], ...] = ()  # pairs (name, version) of python, torch, numpy, cuda, driver ...


class DeviceTypes(msgspec.Struct, array_like=True, frozen=True):
    """A device that one of a machine's backends can compute on."""

    backend: Literal["torch", "mlx"]
    device: str  # as in the run file, for example cpu, cuda:0, mps or gpu; nvidia:0: a card by its driver's number
    types: tuple[str, ...]  # 16-bit data types that it computes faster than float32


class Ready(Message, tag="ready", frozen=True):
    """The trainer has loaded its model and data and can join a generation."""

    run: Name
    rank: Count
    pid: Count
    backend: Literal["torch", "mlx"]
    device: str  # trainer's device, for example cpu, cuda:0 NVIDIA H200 or gpu Apple M2 Ultra
    parameters: Count  # number of trainable scalars
    samples: Count  # N, the number of samples in one epoch
    held_out: Count  # number of samples held out for evaluation
    mean_weight: float  # mean loss weight per sample
    layout_digest: str  # digest of (name, shape, offset), sorted by Hugging Face name
    model_digest: str  # digest of the model's configuration and weights
    data_digest: str
    last_step: Count  # last committed step that its parameters include
    cursor: Count  # first position after that step
    memory_cap_bytes: Count | None = None
    system: str = ""  # Linux or Darwin; gloo can't mix systems in one group
    engines: tuple[Engine, ...] = ()  # engines that the rank's reducer can load
    model_files: tuple[FileDigest, ...] = ()  # digests of the model's files, at most 64
    data_files: tuple[FileDigest, ...] = ()  # digests of the data files, at most 64
    compute: Compute | None = None
    profile: ProfileSummary | None = None  # stored profile that fits this rank, added by the agent of its node
    machine: str = ""  # identifies the processors that it may use: equal for ranks that share them; empty: unknown
    cores: float = 0.0  # how many of them; 0: unknown


class Alive(Message, tag="alive", frozen=True):
    """The trainer is alive. Sent once per second, even during computation."""

    run: Name
    rank: Count
    generation: Generation | None
    step: Count  # step in progress
    phase: str
    progress: Count | None = None  # counter of the main thread's phases and micro-batches
    ready: Ready | None = None  # repeated so that a restarted agent receives it
    detail: str = ""  # progress within the phase, for example tokenizing 45% of 1.2 GB; empty: none
    preflight: "Preflight | None" = None  # until the first group is formed, of ranks that have something long to do


class Sealed(Message, tag="sealed", frozen=True):
    """The rank's growing file has more samples to train on. Sent for each sealed chunk, and with every heartbeat."""

    run: Name
    rank: Count
    chunks: Count  # number of sealed chunks
    samples: Count  # number of samples in them, which are the positions that can be trained on
    digest: str  # digest of the chunks; ranks with the same number of chunks must have the same digest
    ended: bool = False  # whether the end of the file is marked; then training continues with another pass


class Soon(Message, tag="soon", frozen=True):
    """The rank has accumulated the gradients of this plan and will soon need the next plan."""

    run: Name
    rank: Count
    generation: Generation
    seq: Count


class CheckpointInfo(msgspec.Struct, frozen=True):
    """A complete checkpoint on disk."""

    path: str
    step: Count
    size_bytes: Count
    loop_seconds: float  # time that the training loop was stopped
    write_seconds: float = 0.0  # time for writing the files and reading them back
    kept: tuple[Count, ...] = ()  # steps of the checkpoints that the node keeps, ascending; empty: unknown
    unpruned: str = ""  # reason why older checkpoints couldn't be removed, on one line; empty: they were


class CheckpointProgress(Message, tag="checkpoint-progress", frozen=True):
    """The rank is writing a checkpoint in the background. Sent once per second while it does."""

    run: Name
    rank: Count
    step: Count  # step whose state is written
    done_bytes: Count  # bytes written and read back so far
    total_bytes: Count  # bytes to write and to read back


class Checkpointed(Message, tag="checkpointed", frozen=True):
    """The rank has finished a checkpoint in the background, or has failed to. Repeated with every heartbeat.

    Its plan was reported when the state had been copied. Without a plan, a signal ended the only rank.
    """

    run: Name
    rank: Count
    generation: Generation | None  # generation of the checkpoint plan; None: written without a plan
    seq: Count | None  # seq of the checkpoint plan; None: written without a plan
    step: Count  # step whose state it contains
    checkpoint: CheckpointInfo | None = None  # None: it failed
    problem: str = ""  # reason for the failure, on one line; empty: none


class CheckpointCopy(Message, tag="checkpoint-copy", frozen=True):
    """The rank's node has begun to copy a complete checkpoint to another place, has copied it, or has failed to."""

    run: Name
    rank: Count
    step: Count  # step whose state it contains
    to: str  # target: a path, an rsync target or a command
    state: Literal["copying", "copied", "failed"]  # it has begun; it is complete; no try succeeded
    seconds: float = 0.0  # time that it took, with all tries
    problem: str = ""  # reason for the failure, on one line; empty: none


OPERATORS_KEPT: Final = 10
"""Operators of a phase that a profile names, those with the most time of their own."""
TRACE_NAME: Final = r"^[a-z0-9][a-z0-9.-]{0,119}\Z"
TraceName = Annotated[str, Meta(pattern=TRACE_NAME)]
"""Name of a trace's file in the run's folder `profiles`."""


class OperatorTime(msgspec.Struct, array_like=True, frozen=True):
    """One operator in one phase, over all profiled steps."""

    name: Annotated[str, Meta(max_length=80)]  # name as in the trace, for example aten::addmm
    calls: Count  # number of calls, over all profiled steps
    seconds: float  # self time on the CPU, without the operators that it called
    device_seconds: float  # time of the kernels that it launched; 0 on a CPU


class PhaseProfile(msgspec.Struct, frozen=True):
    """One phase of a rank's step, over all profiled steps."""

    name: str  # data, forward, backward, sync or optimizer
    seconds: float  # wall time in the phase
    device_seconds: float = 0.0  # time of all kernels launched in it; 0 on a CPU
    operators: Annotated[tuple[OperatorTime, ...], Meta(max_length=OPERATORS_KEPT)] = ()  # longest first

    def share(self, operator: OperatorTime) -> float:
        """An operator's part of the phase: of its kernels' time where it has some, else of the wall time."""
        if self.device_seconds > 0:
            return operator.device_seconds / self.device_seconds
        return operator.seconds / self.seconds if self.seconds > 0 else 0.0


class ProfileWritten(Message, tag="profile-written", frozen=True):
    """The rank has written the trace of the steps that a `profile` plan asked for, or has failed to. Repeated with 20
    heartbeats."""

    run: Name
    rank: Count
    seq: Count  # seq of the profile plan
    first_step: Count = 0  # first profiled step
    last_step: Count = 0  # last profiled step
    file: Annotated[str, Meta(max_length=120)] = ""  # name of the trace in the run's folder `profiles`
    size_bytes: Count = 0  # size of the trace
    digest: str = ""  # SHA-256 digest of the trace
    phases: tuple[PhaseProfile, ...] = ()  # phases of the steps, in their order
    loop_seconds: float = 0.0  # time that the training loop was stopped for it
    lacks: str = ""  # what the trace lacks on this device, and why; empty: nothing
    problem: str = ""  # reason for the failure, on one line; empty: none


class Report(Message, tag="report", frozen=True):
    """A rank has finished a plan. Sums are global for `train` and the rank's own for `evaluate`."""

    run: Name
    rank: Count
    generation: Generation
    seq: Count
    kind: PlanKind
    step: Count
    loss_sum: float  # sum of the weighted per-token losses, in nats
    weight: float  # total weight of the batch; it divides the loss
    own_weight: float  # this rank's part of the weight
    own_samples: Count
    tokens: Count = 0  # tokens processed by all ranks, including tokens without a loss but no padding
    own_tokens: Count = 0  # this rank's part of the tokens
    grad_norm: float = 0.0  # gradient norm before clipping
    skipped: str | None = None  # reason why the parameters were not updated: nan or overflow; None: they were
    micro_batch: Count = 0  # micro-batch at the end of the step
    replays: Count = 0  # number of micro-batches repeated after an out-of-memory error
    phases: Phases = Phases()
    step_seconds: float = 0.0  # duration of the plan, including the wait for it
    finished_at: float = 0.0
    values: Values = msgspec.field(default_factory=dict)  # metrics without a field, by name
    checkpoint: CheckpointInfo | None = None
    drift: float | None = None  # sync: max |own - source| / RMS(source) across all parameters
    samples_per_second: float | None = None  # measure: rate of forward and backward passes only


class Probed(Report, tag="probed", kw_only=True, frozen=True):
    """Report of a `probe` plan: log-probabilities of the first training samples, for comparison across ranks."""

    family: str  # `model_type` from the model's config.json
    tokens_digest: str  # SHA-256 digest of the tokens
    lengths: tuple[Count, ...]  # number of targets in each sample
    log_probabilities: bytes  # natural logarithms, one per target: little-endian float32
    weight_norms: bytes  # norms of the first 4,096 trainable parameters by name: little-endian float32
    tf32: bool = False  # whether float32 matrix products may use TF32
    noise: float | None = None  # nats: how far rounding moves a log-probability; None: not measured, before 0.3
    layers: bytes = b""  # [layers, first targets], one value of the hidden states each: little-endian float32
    layer_noise: bytes = b""  # how far rounding moves the values of each layer: little-endian float32


class Preflight(msgspec.Struct, frozen=True):
    """All that a group of ranks is judged by, before a reference pass."""

    ready: Ready  # as after loading; the rank isn't ready yet
    probe: Probed  # of a plan that isn't: step and seq are 0


class Answer(msgspec.Struct, frozen=True):
    """The model's answer to one prompt."""

    prompt: str  # the prompt's text, at most 1,000 bytes; of messages: the last one's content
    text: str  # the answer, at most 4,000 bytes
    tokens: Count  # number of tokens in the answer, including the end token
    ended: bool  # whether the model ended its answer; false: it reached `max_tokens`
    seconds: float  # time that the answer took


class SampleReport(Report, tag="sample-report", kw_only=True, frozen=True):
    """Report of a `sample` plan. If it failed, there are no answers, and `skipped` has the reason."""

    answers: tuple[Answer, ...] = ()  # in the order of the prompts


class EvaluatedPair(msgspec.Struct, frozen=True):
    """The model's judgement of one held-out pair."""

    index: Count  # the pair's place among the held-out pairs
    chosen: float  # reward of the chosen answer
    rejected: float  # reward of the rejected answer
    prompt: str = ""  # end of the prompt, at most 160 bytes
    chosen_text: str = ""  # beginning of the chosen answer, at most 240 bytes
    rejected_text: str = ""  # beginning of the rejected answer, at most 240 bytes

    @property
    def margin(self) -> float:
        """The chosen answer's reward less the rejected one's."""
        return self.chosen - self.rejected


def followed_pairs(pairs: Iterable[EvaluatedPair]) -> tuple[EvaluatedPair, ...]:
    """The first PAIRS_FOLLOWED of a run's held-out pairs and the WORST_PAIRS with the lowest margins, NaN among them,
    by index. The same over parts first and then over what they kept."""
    found = sorted(pairs, key=lambda pair: pair.index)
    worst = sorted(found, key=lambda pair: -math.inf if math.isnan(pair.margin) else pair.margin)[:WORST_PAIRS]
    wanted = {pair.index for pair in worst}
    return tuple(pair for pair in found if pair.index < PAIRS_FOLLOWED or pair.index in wanted)


class EvaluationReport(Report, tag="evaluation-report", kw_only=True, frozen=True):
    """Report of an `evaluate` plan: the sums over the rank's held-out samples, and what divides them."""

    losses: Values = msgspec.field(default_factory=dict)  # loss in nats, by the name of the weight that divides it
    weights: Values = msgspec.field(default_factory=dict)  # by name
    sums: Values = msgspec.field(default_factory=dict)  # of the objective's metrics, by their names in a step
    pairs: tuple[EvaluatedPair, ...] = ()  # of its held-out pairs: the first ones and the worst ones


class Fenced(Message, tag="fenced", frozen=True):
    """Answer to Fence: the rank no longer commits or adds anything under an older generation."""

    run: Name
    rank: Count
    generation: Generation  # generation from the Fence message
    last_step: Count  # number of the last committed step
    held_from: Generation | None = None  # generation of the batch in the rank's accumulators
    held: tuple[Range, ...] = ()  # positions accumulated for step last_step + 1
    reports: tuple[Report, ...] = ()  # newest reports, oldest first, in case the agent missed them


class Offered(Message, tag="offered", frozen=True):
    """Answer to Offer: the endpoints that the rank opened."""

    run: Name
    rank: Count
    generation: Generation
    endpoints: tuple[str, ...]  # host:port; gloo: the store's endpoint; ring: one endpoint per link to a peer


class Formed(Message, tag="formed", frozen=True):
    """Answer to Form: the rank has joined the generation and has its state."""

    run: Name
    rank: Count
    generation: Generation
    join_seconds: float = 0.0  # time until the engine had connected all ranks
    level_seconds: float = 0.0  # time for transferring state to the ranks behind


class GroupFailed(Message, tag="group-failed", frozen=True):
    """The join, the state transfer or the reduce failed. The rank keeps its gradients and waits for a Fence."""

    run: Name
    rank: Count
    generation: Generation
    reason: str  # reason, on one line


class TrainerFailed(Message, tag="trainer-failed", frozen=True):
    """The trainer can't continue and exits after this message."""

    run: Name
    rank: Count
    reason: str  # reason, on one line


class WorkAsk(Message, tag="work-ask", frozen=True):
    """A worker asks for a slice and returns the results of its last one. It repeats this until a slice arrives."""

    run: Name  # work ID
    rank: Count  # always 0: a node has one worker
    device: str
    answered: Count | None = None  # ID of the last slice; None: no slice yet
    results: tuple[bytes, ...] = ()  # one JSON object per row of that slice, in order


class ReferenceAsk(Message, tag="reference-ask", frozen=True):
    """A rank that loads asks for the reference's log-probabilities, and for a part of the work of computing them.

    A unit is one sample or several consecutive ones. The rank repeats an ask until its answer arrives.
    """

    run: Name
    rank: Count
    ask: Count  # number of the ask; a repeated ask has the same number, the next one a higher number
    reference: ReferenceName  # which values: the name of their folder in each node's caches
    wants: bool  # whether the rank can compute a slice now
    offset: Count  # number of values that the rank has; it wants the following ones
    counts: bytes = b""  # number of values of each unit: little-endian uint32; empty: not asked for
    tokens: bytes = b""  # number of tokens of each unit: little-endian uint32
    digest: str = ""  # SHA-256 digest of all values if the rank has them from an earlier run
    slice: Count | None = None  # ID of the slice that the rank has computed; None: none
    first: Count = 0  # index of that slice's first unit
    units: Count = 0  # units of that slice
    values: tuple[bytes, ...] = ()  # values of that slice: little-endian float32, in parts of at most 60 KiB


FromTrainer = (
    Ready
    | Alive
    | Sealed
    | ReferenceAsk
    | Soon
    | CheckpointProgress
    | Checkpointed
    | CheckpointCopy
    | ProfileWritten
    | Report
    | Probed
    | SampleReport
    | EvaluationReport
    | Fenced
    | Offered
    | Formed
    | GroupFailed
    | TrainerFailed
)
