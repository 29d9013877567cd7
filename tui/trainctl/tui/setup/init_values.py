"""Values of a first run file that follow from the model, the data and the device."""

import math
from typing import Final, Literal

from trainctl.protocol.batch.memory_estimate import estimate_memory
from trainctl.protocol.config.model_facts import ModelFacts
from trainctl.protocol.config.run_tables import NodeTable, RunFile
from trainctl.protocol.config.usual_settings import LEARNING_RATES

Objective = Literal["pretrain", "sft", "dpo", "orpo", "seq2seq"]
AdapterKind = Literal["full", "lora", "rslora"]

CONTINUED_RATE = 1e-4
"""Learning rate for more text on a trained model, whose rate had come down at the end."""
T5_RATES: Final[tuple[float, float]] = (1e-4, 1e-3)
"""Learning rates for T5, which needs more than other models: of all weights, as transformers' page on T5 says, and of
adapters."""
T5_FAMILIES: Final = ("t5", "mt5", "umt5", "longt5")
SMALL_PARAMETERS, SMALL_FACTOR = 10**7, 10
"""A model of fewer parameters takes so many times the rate (Brown et al. 2020: the smaller, the higher)."""
EPOCHS: Final[dict[Objective, float]] = {"pretrain": 1, "sft": 3, "seq2seq": 3, "dpo": 1, "orpo": 1}
"""Passes over the data to begin with: text is rarely worth a second one, and answers are learnt in a few."""
TIMED_PART = 0.7
"""Part of the time that a run may take, for steps: the rest is for its start, evaluations, answers and checkpoints, and
for other work on the machine."""
STEP_TOKENS = 16_384
"""Of a step: steps of less are noisy, and of more rarely learn more in the time on a small machine."""
LEAST_SAMPLES = 4
"""Of a step: fewer are one kind of sample."""
WARMUP_RATIO = 0.03
HELD_OUT_SAMPLES, MAX_HELD_OUT = 64, 0.1
"""Samples that are evaluated, in a tenth of a second each on a small machine, and the largest part of all."""
TIMES = 10
"""Evaluations and checkpoints in a run."""
MEMORY_PART = 0.6
"""Of the device's memory that the estimate may take; other programs and the estimate's error need the rest."""
_RANKS = ((10**8, 8), (10**10, 16))
_MICROS = (64, 32, 16, 8, 4, 2)


def learning_rate(
    objective: Objective, adapter: AdapterKind, *, random: bool, family: str = "", parameters: int = SMALL_PARAMETERS
) -> float:
    """Return AdamW's rate at its peak, for a model of a family (`model_type`) with so many parameters."""
    is_adapter = adapter != "full"
    if objective == "seq2seq" and family in T5_FAMILIES:
        return T5_RATES[is_adapter]
    rate = LEARNING_RATES[objective, is_adapter].first
    if objective in ("dpo", "orpo"):
        return rate
    if objective == "pretrain" and not (is_adapter or random):
        rate = CONTINUED_RATE
    return round(rate * SMALL_FACTOR, 5) if parameters < SMALL_PARAMETERS else rate


def rank(parameters: int) -> int:
    """Of adapters: 8, 16 from 100 M parameters, 32 from 10 B. Wider layers need more columns for the same part of their
    weights; more than that rarely helps on a few thousand rows."""
    return next((found for below, found in _RANKS if parameters < below), 32)


def alpha(kind: AdapterKind, rank_: int) -> float:
    """So that adapters are scaled by 2, whatever their rank: alpha / rank for LoRA, alpha / sqrt(rank) for rsLoRA."""
    return 2.0 * rank_ if kind == "lora" else round(2 * math.sqrt(rank_), 1)


def every(steps: int) -> int:
    """Steps between two evaluations or checkpoints: a tenth of the run, but not every step."""
    return max(2, -(-steps // TIMES))


def held_out(samples: int) -> float:
    """Return the part of the samples to be kept for evaluation."""
    return float(f"{min(MAX_HELD_OUT, HELD_OUT_SAMPLES / samples):.2g}")


def global_batch(mean_tokens: float, samples: int | None) -> int:
    """Samples per step that have about STEP_TOKENS, a power of two; of few `samples` at most an eighth."""
    wanted = STEP_TOKENS / max(1.0, mean_tokens)
    if samples is not None:
        wanted = min(wanted, samples / 8)
    return max(LEAST_SAMPLES, 1 << math.floor(math.log2(max(1.0, wanted))))


def micro_batch(config: RunFile, facts: ModelFacts | None, backend: str, memory_bytes: int) -> int:
    """The most samples of full length per forward and backward pass whose estimate fits the memory, at least 1; at most
    STEP_TOKENS."""
    length, whole = config.data.sequence_length, config.batch.global_
    if facts is None:
        return 1
    for samples in _MICROS:
        if samples > whole or samples * length > STEP_TOKENS:
            continue
        node = NodeTable(micro=samples, micro_tokens=0, memory_limit_gb=memory_bytes / 1e9)
        found = estimate_memory(config, facts, node, "mlx" if backend == "mlx" else "torch", "run file")
        if found.total <= MEMORY_PART * memory_bytes:
            return samples
    return 1
