"""The tables of a run file: their fields, types and defaults, and the micro-batch of a node by them."""

import math
from fractions import Fraction
from typing import Annotated, ClassVar, Final, Literal

import msgspec
from msgspec import Meta

from trainctl.protocol.config.alert_rules import AlertsTable
from trainctl.protocol.config.names import NAME_PATTERN
from trainctl.protocol.config.objectives import ObjectiveTable
from trainctl.protocol.config.policies import PolicyTables
from trainctl.protocol.config.quantization import QuantizedFormat
from trainctl.protocol.config.validation_errors import REFUSED

PROMPT_CHARACTERS, MAX_ANSWER_TOKENS = 2000, 1024
PromptText = Annotated[str, Meta(min_length=1, max_length=PROMPT_CHARACTERS)]


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One message of a conversation."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]  # role, for example user or system
    content: Annotated[str, Meta(max_length=PROMPT_CHARACTERS)]  # text of the message


Prompt = PromptText | Annotated[tuple[ChatMessage, ...], Meta(min_length=1, max_length=32)]
"""A text to continue, or a conversation to answer."""


PositiveInt = Annotated[int, Meta(ge=1, le=2**40)]
NonNegativeInt = Annotated[int, Meta(ge=0, le=2**40)]
GradientCheckpointing = Literal["none", "alternate", "all"]
ChunkedLoss = Literal["auto", "on", "off"]
Attention = Literal["auto", "varlen"]
Compile = Literal["off", "default", "reduce-overhead", "max-autotune"]
LayerNames = Annotated[
    tuple[Annotated[str, Meta(min_length=1, max_length=256)], ...],
    Meta(min_length=1, examples=[["q_proj", "v_proj"]], title="layer names"),
]
DataKind = Literal["text", "rows", "samples"]
ComputeDtype = Literal["float32", "bfloat16", "float16"]
Precision = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    Meta(
        extra={
            REFUSED: {
                "fp32": 'write "float32"',
                "bf16": 'write "bfloat16"',
                "fp16": 'write "float16"',
                "tf32": 'set model.tf32 = true, with "float32"',
            }
        }
    ),
]
SumEngine = Annotated[
    Literal["auto", "gloo", "ring"],
    Meta(
        extra={
            REFUSED: {
                "nccl": 'it has not been tried with two NVIDIA GPUs; several GPUs are several ranks: use "gloo". A job '
                "on the GPUs of one machine runs faster under torchrun",
                "jaccl": "it needs Macs joined by Thunderbolt 5 with RDMA turned on, and has not been tried on them; "
                'use "ring", which needs any network. trainctl doctor shows the devices that it would use',
            }
        }
    ),
]
PathText = Annotated[str, Meta(min_length=1, max_length=4096)]


SUFFIXES: Final[dict[DataKind, tuple[str, ...]]] = {
    "text": (".txt",),
    "rows": (".jsonl", ".ndjson", ".parquet"),
    "samples": (".jsonl",),
}
"""Suffixes of the files that data of a kind are read from in a folder."""

DEFAULT_HELD_OUT = 0.01
"""Fraction of samples kept for evaluation if the run file gives neither a fraction nor files."""


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The root of the tables below."""

    is_of_run_file: ClassVar[bool] = True


class RunTable(_Table, frozen=True):
    """`[run]`: the run's name, and how long it trains."""

    name: Annotated[str, Meta(pattern=NAME_PATTERN)]  # lower case, from which the run's id is made
    steps: PositiveInt = 0  # updates; left out: as many as epochs need
    epochs: Annotated[float, Meta(ge=0, le=1e6)] = 0.0  # passes over the training samples; 0: steps are given
    seed: NonNegativeInt = 0  # of the order of samples, dropout and new weights
    orphan_seconds: Annotated[float, Meta(ge=1, le=86400)] = 1800.0  # a trainer whose agent is gone this long exits
    load_seconds: Annotated[float, Meta(ge=1, le=86400)] = 600.0  # one that loads and makes no progress for so long
    defragment_every: NonNegativeInt = 0  # steps between two times at which allocators give unused memory back; 0: none


class ModelTable(_Table, frozen=True):
    """`[model]`: the model, and how it is computed."""

    path: PathText  # a Hugging Face directory: config.json, model.safetensors; or a cached model's id, org/name
    dtype: Precision = "float32"  # of compute; auto: by all ranks' devices
    gradient_checkpointing: GradientCheckpointing = "none"  # layers whose activations backward computes again
    init: Literal["pretrained", "random"] = "pretrained"  # random: train from scratch; path needs no weights
    base: Literal["stored", "nf4"] | QuantizedFormat = (
        "stored"  # format that path must have; nf4: packed as it is loaded
    )
    double_quantization: bool = False  # nf4: the scales are quantized too
    compute_dtype: Literal["", "float32", "bfloat16", "float16"] = ""  # nf4: of products with packed weights; "": dtype
    chunked_loss: ChunkedLoss = "auto"  # logits of some tokens at a time; auto: if all take over 10 % of free memory
    tf32: bool = False  # float32 products may use TF32 (10 bits of fraction) on CUDA and, with MLX, on M5; sums don't
    compile: Compile = "off"  # mode of torch.compile for decoder layers; no effect on MLX
    attention: Attention = "auto"  # auto: as the library chooses; varlen: torch's varlen_attn for packs, on CUDA

    @property
    def computed(self) -> ComputeDtype:
        """The data type of forward and backward passes. Of "auto" before it is resolved, float32."""
        return "float32" if self.dtype == "auto" else self.dtype


class DataTable(_Table, frozen=True):
    """`[data]`: the training data, and the evaluation data."""

    path: PathText  # a file; text and rows: or a folder or glob of *.txt, of *.jsonl and *.parquet
    kind: DataKind = "text"  # rows: prompts and answers; samples: {"tokens": [], "mask": []}
    tokenizer: Literal["bytes", "model"] = "model"  # bytes: 256 and specials; model: tokenizer.json in model.path
    sequence_length: Annotated[int, Meta(ge=2, le=1_048_576)] = 512  # tokens a sample has at most
    held_out: Annotated[float, Meta(ge=0, le=0.5)] | None = None  # fraction of samples kept for evaluation; None: 0.01
    overlong: Literal["truncate", "drop", "refuse"] = "truncate"  # samples of more than sequence_length targets
    prefetch: Annotated[int, Meta(ge=0, le=64)] = 2  # micro-batches assembled before they are needed; 0: none
    workers: Annotated[int, Meta(ge=1, le=64)] = 1  # threads that assemble them
    packing: Literal["none", "best-fit"] = "none"  # best-fit: rows and samples, put together up to sequence_length
    held_out_path: Annotated[str, Meta(max_length=4096)] = ""  # evaluation data of the same kind, in place of held_out
    growing: bool = False  # rows and samples: the file still grows; PATH.end marks its end
    chunk_samples: PositiveInt = 1024  # growing: lines that are shuffled together, once all of them are there

    @property
    def held_out_fraction(self) -> float:
        """The fraction of samples kept for evaluation: none if evaluation has files of its own, or the file grows."""
        if self.held_out is None:
            return 0.0 if self.held_out_path or self.growing else DEFAULT_HELD_OUT
        return 0.0 if self.held_out_path else self.held_out


class BatchTable(_Table, frozen=True):
    """`[batch]`: the samples of a step and of a pass."""

    global_: PositiveInt = msgspec.field(name="global")  # G, samples per step over all ranks
    micro: PositiveInt | Literal["auto"] = 8  # samples per forward/backward, where [nodes.NAME] says nothing
    micro_tokens: NonNegativeInt = 0  # padded tokens per forward/backward, at least one sample; 0: no limit


class GroupTable(_Table, frozen=True):
    """`[group]`: the sum of the ranks' gradients; one rank alone needs none of it."""

    engine: SumEngine = "auto"  # auto: gloo if all are Linux with torch, else ring with mlx
    links_per_peer: Annotated[int, Meta(ge=1, le=8)] = 1  # ring: rings summing at once, a process each
    chunk_mb: Annotated[int, Meta(ge=1, le=64)] = 64  # 10^6 bytes summed at a time
    first_shares: Literal["even", "timed"] = "timed"  # where [nodes.NAME] gives no share; timed: by a short measurement
    sync_weights_every: NonNegativeInt = 0  # steps between giving all ranks the lowest one's state; 0: never
    hung_seconds: Annotated[float, Meta(ge=1, le=86400)] = 120.0  # a rank that makes no progress for so long hangs
    unreachable_seconds: Annotated[float, Meta(ge=1, le=604800)] = 300.0  # a node with the only state, unreachable


class OptimizerTable(_Table, frozen=True):
    """AdamW (Loshchilov and Hutter 2019) with bias correction, after clipping by the global norm."""

    learning_rate: Annotated[float, Meta(gt=0, le=100)]  # at its peak, after the warm-up
    kind: Literal["adamw", "adamw-8bit", "paged-adamw", "paged-adamw-8bit"] = "adamw"  # others: bitsandbytes, on torch
    beta1: Annotated[float, Meta(ge=0, lt=1)] = 0.9  # decay of the mean of the gradients
    beta2: Annotated[float, Meta(ge=0, lt=1)] = 0.95  # decay of the mean of their squares
    epsilon: Annotated[float, Meta(gt=0, le=1)] = 1e-8  # added to the root of the mean square
    weight_decay: Annotated[float, Meta(ge=0, le=10)] = 0.0  # on matrices only, not on norms and biases
    clip_norm: Annotated[float, Meta(ge=0)] = 1.0  # 0: no clipping
    schedule: Literal["cosine", "linear", "constant"] = "cosine"  # of the learning rate after the warm-up
    warmup_steps: NonNegativeInt = 0  # over which the learning rate rises to its peak
    final_fraction: Annotated[float, Meta(ge=0, le=1)] = 0.1  # of the peak, at the last step
    warmup_ratio: Annotated[float, Meta(ge=0, lt=1)] = 0.0  # fraction of run.steps, in place of warmup_steps
    update_ratio_every: NonNegativeInt = 0  # steps between measurements of the update relative to the weights; 0: none

    def warmup(self, steps: int) -> int:
        """Warm-up steps of a run of so many: a ratio is rounded up, but leaves one step at the peak or after."""
        if not self.warmup_ratio:
            return self.warmup_steps
        return min(steps - 1, math.ceil(Fraction(str(self.warmup_ratio)) * steps))


class AdapterTable(_Table, frozen=True):
    """The weights that are trained: all, or low-rank adapters beside frozen ones (LoRA, Hu et al. 2021)."""

    kind: Literal["full", "lora", "rslora"] = "full"  # full: all weights
    rank: Annotated[int, Meta(ge=1, le=4096)] = 16  # columns of each adapter
    alpha: Annotated[float, Meta(gt=0, le=65536)] = 32.0  # what it adds is scaled by alpha / rank; rslora: / root rank
    targets: Literal["linear"] | LayerNames = "linear"  # all linear layers of the decoder layers, or those of a name
    layers: NonNegativeInt = 0  # the last so many decoder layers; 0: all
    dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.0  # fraction of an adapter's inputs set to zero in training


class CheckpointTable(_Table, frozen=True):
    """`[checkpoint]`: when checkpoints are written, and which are kept."""

    every_steps: NonNegativeInt = 0  # 0: only when asked and at the end
    keep_last: PositiveInt = 2  # the newest so many are kept
    keep_best: bool = True  # also the one with the lowest held-out loss
    keep_every: NonNegativeInt = 0  # also the first at or after each multiple of this step; 0: none
    at_end: bool = True  # also after the last step
    compression: Literal["none", "zstd"] = "none"  # of the optimizer's state; zstd needs the extra of that name
    background: bool = True  # training continues while a checkpoint is written; false: it waits
    copy_to: Annotated[str, Meta(max_length=4096)] = ""  # each is copied there: path, rsync target, store, "command"


class EvaluateTable(_Table, frozen=True):
    """`[evaluate]`: when the held-out loss is computed."""

    every_steps: NonNegativeInt = 0  # 0: only when asked
    at_start: bool = False  # also before step 1 of a new run, to compare with


class CalibrationTable(_Table, frozen=True):
    """`[calibration]`: the measurement of a node."""

    at_start: Literal["missing", "never"] = "missing"  # of 0.2.0; no effect: runs begin at once
    seconds: Annotated[float, Meta(ge=5, le=900)] = 60.0  # time of `trainctl calibrate` on a node, from loading on


class SamplesTable(_Table, frozen=True):
    """Prompts that the model answers while it trains."""

    prompts: Annotated[tuple[Prompt, ...], Meta(max_length=16)] = ()  # texts to continue, or lists of messages
    every_steps: NonNegativeInt = 0  # 0: only when asked
    at_start: bool = False  # also before step 1 of a new run, to compare with
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_ANSWER_TOKENS)] = 128  # tokens an answer has at most
    temperature: Annotated[float, Meta(ge=0, le=10)] = 0.0  # 0: always the likeliest token
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0  # draws from the likeliest tokens of this total probability
    seed: NonNegativeInt = 0  # of the random numbers; those of the training are others
    use_generation_config: bool = False  # torch: generation_config.json also chooses tokens, by its penalties and rules
    node: Annotated[str, Meta(pattern=rf"^$|{NAME_PATTERN}")] = ""  # whose rank answers; empty: the lowest rank's


class NodeTable(_Table, frozen=True):
    """`[nodes.NAME]`: one node's part and its own settings."""

    share: PositiveInt | None = None  # samples of the global batch; None: what others leave
    micro: PositiveInt | Literal["auto"] | None = None  # auto: the fastest by the node's profile or first steps
    backend: Literal["auto", "torch", "mlx"] = "auto"  # array library; auto: mlx on macOS, torch elsewhere
    device: Annotated[str, Meta(pattern=r"^(auto|cpu|gpu|mps|cuda(:\d+)?)$")] = "auto"  # gpu: MLX's
    threads: Annotated[int, Meta(ge=0, le=1024)] = 0  # 0: all cores, or a part of them if nodes share a machine
    memory_limit_gb: Annotated[float, Meta(gt=0)] | None = None  # 10^9 bytes the trainer may take on its device
    model_path: PathText | None = None  # where this machine keeps the model, if not at model.path
    data_path: PathText | None = None  # where this machine keeps the data, if not at data.path
    interface: Annotated[str, Meta(max_length=64)] = ""  # network interface of the sums, such as en5; empty: loopback
    priority: Annotated[int, Meta(ge=-20, le=19)] | None = None  # nice value of its processes; None: the agent's
    env: dict[str, str] = {}  # environment variables of its processes, over the agent's
    gradient_checkpointing: GradientCheckpointing | None = None  # None: as [model] says
    micro_tokens: NonNegativeInt | None = None  # None: batch.micro_tokens
    held_out_path: PathText | None = None  # where this machine keeps the held-out data, if not at data.held_out_path
    cache_path: PathText | None = None  # folder for its token caches; None: in the agent's folder
    cudnn_benchmark: bool = True  # CUDA: cuDNN times its algorithms and keeps the fastest
    compile: Compile | None = None  # None: as [model] says
    attention: Attention | None = None  # None: as [model] says
    deterministic: bool = False  # CUDA: only kernels that give the same bits each time, which bit-exact resume needs
    shared_threads: Annotated[int, Meta(ge=0, le=1024)] = 0  # by the lead, at each start: its part of shared cores

    @property
    def rank_threads(self) -> int:
        """CPU threads of its rank: as a person set them, or else its part of shared cores; 0: any number."""
        return self.threads or self.shared_threads


class RunFile(_Table, frozen=True):
    """A run file: one training run."""

    run: RunTable
    model: ModelTable
    data: DataTable
    batch: BatchTable
    optimizer: OptimizerTable
    adapter: AdapterTable = AdapterTable()
    checkpoint: CheckpointTable = CheckpointTable()
    evaluate: EvaluateTable = EvaluateTable()
    calibration: CalibrationTable = CalibrationTable()
    samples: SamplesTable = SamplesTable()
    group: GroupTable = GroupTable()
    alerts: AlertsTable = AlertsTable()
    objective: ObjectiveTable = ObjectiveTable()
    policy: PolicyTables = PolicyTables()
    nodes: dict[Annotated[str, Meta(pattern=NAME_PATTERN)], NodeTable] = {}  # those that take part; none: all


Wanted = int | Literal["auto"]
"""A micro-batch as the run file sets it."""

AUTO: Final = "auto"
"""Value of `micro` for the fastest micro-batch of the node's profile; without one, the first steps look for it."""
FIRST: Final = 2
"""Micro-batch of the first step of a node without a profile: one that fits wherever the model does."""
UNMEASURED: Final = 8
"""Micro-batch that other passes and estimates take for a node without a profile."""


def is_auto(config: RunFile, table: NodeTable) -> bool:
    """Return whether the profile or the first steps of the node with this table decide."""
    return wanted_micro(config, table) == AUTO


def wanted_micro(config: RunFile, table: NodeTable) -> Wanted:
    """Return the setting of the node with this table, or else the run's."""
    return config.batch.micro if table.micro is None else table.micro


def unmeasured_micro(wanted: Wanted, global_batch: int, share: int | None) -> int:
    """Return the micro-batch of a node that no profile is known of. `share`: as the run file sets it."""
    return wanted if isinstance(wanted, int) else min(UNMEASURED, global_batch, share or UNMEASURED)


def micro_of(config: RunFile, table: NodeTable) -> int:
    """Samples per forward and backward pass of the node with this table, as long as no profile is known."""
    return unmeasured_micro(wanted_micro(config, table), config.batch.global_, table.share)


def micro_tokens_of(config: RunFile, table: NodeTable) -> int:
    """Return the most padded tokens of a pass of the node with this table; 0: no limit."""
    return config.batch.micro_tokens if table.micro_tokens is None else table.micro_tokens


def first_micro(config: RunFile, table: NodeTable) -> int:
    """Return the samples per pass of the first step of the node with this table, as long as no profile is known."""
    micro = micro_of(config, table)
    return min(FIRST, micro) if is_auto(config, table) else micro
