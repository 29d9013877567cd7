"""All rules in their order: a cause comes before those that follow from it."""

from collections.abc import Callable, Iterable
from typing import Final

from trainctl.protocol.analysis.diagnosis.rule import Found, Rule, Rung, Verdict
from trainctl.protocol.analysis.diagnosis.rules import machine, ranks, settings, stopped, training
from trainctl.protocol.analysis.diagnosis.situation import Situation
from trainctl.protocol.batch.device_table import types_of_device
from trainctl.protocol.batch.settings_rules import ATTENTION, PACKING, PRECISION, RECOMPUTED, SettingsRule
from trainctl.protocol.config.objectives import objective_of
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.messages import ACTIVE_RUN_STATES

_SPEED: Final = ("slow-rank", "below-calibration", "low-use", "late-data", "tokens-not-cached")
"""Findings that follow on a node whose device or processors are slow."""
PREFETCH: Final = 4
"""Micro-batches assembled ahead that are enough for an idle GPU."""


def _several(s: Situation, _: Found) -> bool:
    return len(s.ranks) > 1


def _is_active(s: Situation, _: Found) -> bool:
    return s.facts.view is not None and s.facts.view.state in ACTIVE_RUN_STATES


def _can_resume(s: Situation, _: Found) -> bool:
    """A checkpoint is there, and the run has ended."""
    view = s.facts.view
    has_ended = view is not None and view.state in ("failed", "stopped")
    return has_ended and s.facts.checkpoint_step is not None


def _if(test: Callable[[RunFile], bool]) -> Callable[[Situation, Found], bool]:
    """Offer a remedy if the run file passes a test, or isn't known."""
    return lambda s, _: s.facts.config is None or test(s.facts.config)


_is_float16 = _if(lambda config: config.model.dtype == "float16")
_has_float32 = _if(lambda config: config.model.dtype == "float32")
_has_16_bits = _if(lambda config: config.model.dtype != "float32")
_not_chunked = _if(lambda config: config.model.chunked_loss != "on")
_not_recomputed = _if(lambda config: config.model.gradient_checkpointing != "all")
_has_fixed_micro = _if(lambda config: config.batch.micro != "auto")
_has_small_prefetch = _if(lambda config: config.data.prefetch < PREFETCH)
_waits_for_writes = _if(lambda config: not config.checkpoint.background)


def _has_float16_for_bfloat16(s: Situation, _: Found) -> bool:
    """float16, on devices of which none is known to lack bfloat16."""
    views = s.facts.view.ranks if s.facts.view is not None else ()
    known = (types_of_device(view.device or "") for view in views)
    return _is_float16(s, _) and all(types is None or "bfloat16" in types for types in known)


def _has_adapter(s: Situation, _: Found) -> bool:
    return s.facts.config is not None and s.facts.config.adapter.kind != "full"


def _could_be_packed(s: Situation, _: Found) -> bool:
    """In nf4, by bitsandbytes: not on MLX, nor compiled, nor with an encoder."""
    config, view = s.facts.config, s.facts.view
    if config is None or config.model.base != "stored" or not _has_adapter(s, _):
        return False
    on_mlx = any(rank.backend == "mlx" for rank in (view.ranks if view is not None else ()))
    compiled = {config.model.compile, *(table.compile for table in config.nodes.values())} - {None, "off"}
    encodes = objective_of(config.objective, config.data.kind).encodes_prompts
    return not (on_mlx or compiled or encodes)


def _has_one_link(s: Situation, _: Found) -> bool:
    """Only a ring can have several."""
    config, view = s.facts.config, s.facts.view
    return view is not None and view.engine == "ring" and (config is None or config.group.links_per_peer == 1)


def _run(setting: str) -> str:
    """The command that starts a run with another setting; a resumed run keeps its own. A setting of a node names the
    others too: a run file without nodes would run on that node alone."""
    nodes = "--set nodes={nodes} " if setting.startswith("nodes.") else ""
    return f"trainctl run RUN.toml {nodes}--set {setting}"


_REBALANCE = Rung(
    "give each rank the share that its present speed allows", "trainctl send rebalance auto=true", _several
)
_DRAIN = Rung("train without {node} until it is fast again", "trainctl send drain --node {node}", _several)
_SMALLER = Rung(
    "a smaller micro-batch; more passes then make up the same batch, and the loss doesn't change",
    "trainctl send resize-batch micro={smaller} --node {node}",
)
_RESIZE = "trainctl send resize-batch micro={micro} --node {node}"


def _of_settings(cause: str, rule: SettingsRule, check: Callable[[Situation], Iterable[Verdict]], *more: Rung) -> Rule:
    """A rule of settings, judged by what ranks report of them."""
    own = (Rung(rule.remedy, _run(rule.change)),) if rule.remedy else ()
    return Rule(cause, rule.title, rule.sign, check, (), (*own, *more))


_BY_PROFILE = Rung("let the program choose it by the profile", _run("batch.micro=auto"), _has_fixed_micro)
_SHORTER_ADAPTER = Rung("a smaller rank of the adapters", _run("adapter.rank={less_rank}"), _has_adapter)
_CHUNKED = Rung("compute the loss for some tokens at a time", _run("model.chunked_loss=on"), _not_chunked)
_RECOMPUTE = Rung(
    "compute activations again in the backward pass", _run("model.gradient_checkpointing=all"), _not_recomputed
)
_ROLLBACK = Rung(
    "go back to the checkpoint of step {back} and skip the samples that followed",
    "trainctl send rollback step={back} skip_batches=200",
    _is_active,
)
_BFLOAT16 = Rung(
    "compute in bfloat16, which has float32's range, if the devices of all ranks have it",
    _run("model.dtype=auto"),
    _has_float16_for_bfloat16,
)
_LOOK_AT_SAMPLES = Rung("look at the samples of these steps", "trainctl data preview RUN.toml")
_LOWER_RATE = Rung("a lower learning rate; the loss curve changes", "trainctl send set-lr value={half_rate}")
_CALIBRATE = Rung("measure the device again", "trainctl calibrate --node {node}")

RULES: Final = (
    Rule(
        "hang",
        "The run makes no progress",
        "no step for 60 s and 10 times a step, in a run that isn't paused and doesn't wait for data",
        stopped.hang,
        ("not-finite", "unstable", "clip-bound", *_SPEED),
        (
            Rung(
                "read where the trainer is: before it is killed, its stacks are in its log",
                "trainctl logs --rank {rank}",
            ),
            Rung("train without {node}", "trainctl send drain --node {node}", _several),
            Rung("resume from step {checkpoint}", "trainctl run --resume {run}", _can_resume),
        ),
    ),
    Rule(
        "out-of-memory",
        "A rank runs out of memory",
        "ranks that ended for lack of memory, or passes repeated in 3 of 100 steps",
        stopped.out_of_memory,
        ("memory-pressure", "slow-rank"),
        (
            _SMALLER,
            _CHUNKED,
            Rung(
                "compute in 16 bits, if the devices of all ranks have a type for it",
                _run("model.dtype=auto"),
                _has_float32,
            ),
            _RECOMPUTE,
            Rung("4-bit base weights", _run("model.base=nf4"), _could_be_packed),
            Rung("shorter sequences", _run("data.sequence_length={shorter}")),
            _SHORTER_ADAPTER,
        ),
    ),
    Rule(
        "not-finite",
        "Losses or gradients are NaN",
        "3 of the last 100 steps, or the newest one",
        stopped.not_finite,
        ("unstable", "clip-bound"),
        (_ROLLBACK, _LOWER_RATE, _BFLOAT16, _LOOK_AT_SAMPLES),
    ),
    Rule(
        "overflow",
        "Gradients overflow in float16",
        "3 of the last 100 steps",
        stopped.overflow,
        ("unstable", "clip-bound"),
        (_BFLOAT16, _LOWER_RATE, Rung("compute in float32", _run("model.dtype=float32"), _is_float16)),
    ),
    Rule(
        "throttled",
        "A device is held back",
        "NVIDIA's clock limits in most readings (a power cap: with slower "
        "passes), a clock 10 % lower under load, thermal pressure 2 of 4, or a CPU quota",
        settings.throttled,
        (*_SPEED, "stolen-cpu"),
        (Rung("cool the machine, or raise its power limit or quota"), _REBALANCE, _DRAIN),
    ),
    Rule(
        "swap",
        "A machine swaps",
        "1 MB/s swapped in and out",
        machine.swap,
        (*_SPEED, "memory-pressure", "slow-disk", "stolen-cpu", "long-checkpoint"),
        (Rung("end other programs on {node}"), _SMALLER, _RECOMPUTE, _DRAIN),
    ),
    Rule(
        "memory-pressure",
        "A machine is short of memory",
        "memory pressure (PSI) 10 %, or 97 % in use and slower passes",
        machine.memory_pressure,
        (*_SPEED, "slow-disk", "stolen-cpu"),
        (Rung("end other programs on {node}"), _SMALLER, _CHUNKED, _RECOMPUTE),
    ),
    Rule(
        "slow-disk",
        "A disk is slow",
        "I/O pressure (PSI) 10 % or a disk that is busy 85 % of the time, and data that take 5 % of a step",
        machine.slow_disk,
        (*_SPEED, "long-checkpoint"),
        (
            Rung(
                "measure how fast the data can be read, and find what else uses the disk",
                "trainctl data bench RUN.toml",
            ),
            Rung("keep the token caches of {node} on a faster disk", _run("nodes.{node}.cache_path=/FASTER/DISK")),
            Rung("assemble more micro-batches ahead", _run("data.prefetch={prefetch}")),
        ),
    ),
    Rule(
        "shared-cores",
        "Ranks use each other's cores",
        "ranks that compute on one machine's processors, with more threads than it has cores",
        machine.shared_cores,
        (*_SPEED, "stolen-cpu"),
        (Rung("give each of its ranks a part of the cores", _run("nodes.{node}.threads={threads}")),),
    ),
    Rule(
        "stolen-cpu",
        "Others take processor time",
        "steal 3 %, or CPU pressure (PSI) 25 % that has risen by 15 "
        "points or half way to 100 %, with passes 5 % slower than before; or steal 10 %",
        machine.stolen_cpu,
        _SPEED,
        (Rung("end other programs on {node}, or give its processors to it alone"), _REBALANCE, _DRAIN),
    ),
    Rule(
        "gpu-shared",
        "Other programs use a GPU",
        "300 MB of device memory held by another program",
        machine.gpu_shared,
        _SPEED,
        (Rung("end these programs, or move them to a different device"), _REBALANCE),
    ),
    Rule(
        "late-data",
        "Ranks wait for data",
        "5 % of a step",
        ranks.late_data,
        ("slow-rank", "low-use"),
        (
            Rung("assemble more micro-batches ahead", _run("data.prefetch={prefetch}")),
            Rung("use more threads to assemble them", _run("data.workers={workers}")),
            Rung("find what limits the reading", "trainctl data bench RUN.toml"),
            Rung("keep the token caches on a faster disk", _run("nodes.{node}.cache_path=/FASTER/DISK")),
        ),
    ),
    Rule(
        "slow-rank",
        "A rank is slow",
        "for 10 s or 300 steps another split of the batch is 5 % faster, or the rank's "
        "own slowdown explains half of the others' wait",
        ranks.slow_rank,
        ("below-calibration", "low-use"),
        (
            Rung(
                "give each rank the share that its present speed allows",
                "trainctl send rebalance auto=true",
                lambda s, found: bool(found.values.get("split")),
            ),
            Rung("look at what else {node} does", "trainctl doctor"),
            _DRAIN,
            _CALIBRATE,
        ),
    ),
    Rule(
        "lossy-link",
        "A link loses segments",
        "the sum of gradients takes 10 % of a step, and TCP segments are sent again: 1 per second and 0.2 %",
        ranks.lossy_link,
        ("slow-link", "low-use"),
        (
            Rung("check the cable, the switch and the duplex mode; a cable instead of Wi-Fi"),
            Rung("several connections recover sooner", _run("group.links_per_peer=4"), _has_one_link),
            Rung("one rank alone takes {alone} a step: train without {other}", "trainctl send drain --node {other}"),
        ),
    ),
    Rule(
        "slow-link",
        "The sum of gradients takes long",
        "10 % of a step and 20 ms, waits for slower ranks subtracted, and bytes that cross a network",
        ranks.slow_link,
        ("low-use",),
        (
            Rung("one rank alone takes {alone} a step: train without {other}", "trainctl send drain --node {other}"),
            Rung("measure the link, and use a faster one", "trainctl calibrate"),
            Rung("check the cable, the switch and the duplex mode; a cable instead of Wi-Fi"),
            Rung("several connections use a fast link better", _run("group.links_per_peer=4"), _has_one_link),
            Rung(
                "with this batch the sum takes a tenth of a step; the loss curve changes",
                "trainctl send set-global-batch value={batch} schedule=scale",
            ),
        ),
    ),
    Rule(
        "small-micro",
        "A micro-batch is small",
        "another size makes passes 10 % faster by the node's curve",
        training.small_micro,
        ("low-use", "below-calibration"),
        (Rung("a larger micro-batch; the loss doesn't change", _RESIZE), _BY_PROFILE),
    ),
    Rule(
        "large-micro",
        "A micro-batch is large",
        "a smaller size makes passes 10 % faster by the node's curve",
        training.large_micro,
        ("low-use", "below-calibration"),
        (
            Rung("a smaller micro-batch, with more passes for the same batch; the loss doesn't change", _RESIZE),
            _BY_PROFILE,
        ),
    ),
    Rule(
        "clip-bound",
        "Clipping holds the training back",
        "median clip scale below 0.01 in 100 steps",
        training.clip_bound,
        (),
        (Rung("a higher limit; the loss curve changes", _run("optimizer.clip_norm={norm}")),),
    ),
    Rule(
        "unstable",
        "The loss is unstable",
        "a jump of the loss and the gradient norm, or a rising loss",
        training.unstable,
        (),
        (
            _ROLLBACK,
            _LOWER_RATE,
            Rung("clip gradients to a lower norm; the loss curve changes", _run("optimizer.clip_norm={clip}")),
            Rung("a longer warm-up; the loss curve changes", _run("optimizer.{warmup}")),
            _BFLOAT16,
            Rung("compute in float32", _run("model.dtype=float32"), _has_16_bits),
            _LOOK_AT_SAMPLES,
        ),
    ),
    Rule(
        "below-calibration",
        "A device is slower than calibrated",
        "passes 15 % slower",
        training.below_calibration,
        (),
        (Rung("look for other programs, heat and a lower clock on {node}", "trainctl doctor"), _CALIBRATE),
    ),
    Rule(
        "long-checkpoint",
        "Checkpoints take long",
        "5 % of the training time",
        training.long_checkpoint,
        (),
        (
            Rung("continue the training while they are written", _run("checkpoint.background=true"), _waits_for_writes),
            Rung("write them less often", _run("checkpoint.every_steps={every}")),
            Rung("keep the runs on a faster disk", fits=_waits_for_writes),
        ),
    ),
    Rule(
        "low-use",
        "A GPU is often idle",
        "used less than 50 % of the time, and nothing before explains it",
        training.low_use,
        (),
        (
            Rung(
                "a larger micro-batch; the loss doesn't change",
                "trainctl send resize-batch micro={double} --node {node}",
            ),
            Rung("find the fastest micro-batch", "trainctl calibrate --node {node}"),
            Rung("assemble more micro-batches ahead", _run(f"data.prefetch={PREFETCH}"), _has_small_prefetch),
        ),
    ),
    _of_settings("float32", PRECISION, settings.float32),
    _of_settings(
        "eager-attention",
        ATTENTION,
        settings.attention,
        Rung("install a library version with fused attention on {node}", "trainctl doctor"),
    ),
    _of_settings("recomputed", RECOMPUTED, settings.checkpointing),
    _of_settings(
        "unpacked",
        PACKING,
        settings.packing,
        Rung(
            "shorter sequences, if no sample is longer: trainctl data preview shows their lengths",
            "trainctl data preview RUN.toml",
        ),
    ),
    Rule(
        "tokens-not-cached",
        "Tokens are not in memory",
        "1 MB/s read from the disk, and data that take 5 % of a step",
        settings.tokens_cached,
        (),
        (
            Rung("leave more memory to the system's file cache: end other programs on {node}"),
            Rung("keep the token caches on a faster disk", _run("nodes.{node}.cache_path=/FASTER/DISK")),
        ),
    ),
)
"""Every rule, in order."""
