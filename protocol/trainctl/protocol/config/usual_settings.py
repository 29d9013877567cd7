"""Usual settings and their sources: probable mistakes of a run file, for `check` and `advise`.

A setting outside its usual range may be meant, so none of this refuses a run.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec

from trainctl.protocol.config.data_files import named_splits
from trainctl.protocol.config.objectives import OBJECTIVES, UsualRange, objective_name
from trainctl.protocol.config.run_tables import ComputeDtype, RunFile

MIN_BATCHES: Final = 8
"""Steps of an epoch below which a batch is large for its data."""
HELD_OUT_PART: Final = 0.1
"""Part of the samples that is held out on advice."""
MIN_HELD_OUT: Final = 8
"""Held-out samples below which their mean loss is mostly chance."""


@dataclass(frozen=True)
class DataSize:
    """The amount of data that a run has."""

    epoch: int  # samples of an epoch, without the held-out ones
    held_out: int | None = None  # samples that are evaluated; None: not known


class Unusual(msgspec.Struct, frozen=True):
    """A setting that is probably a mistake."""

    setting: str  # as in --set
    text: str  # the value, the usual range and its source
    change: str  # KEY=VALUE that brings it into the range


LEARNING_RATES: Final = {
    (name, has_adapter): row.rates[has_adapter] for name, row in OBJECTIVES.items() for has_adapter in (False, True)
}
"""Usual peak rates of AdamW by objective, and by whether adapters are trained. The ranges are wider than what their
sources used."""
_EPOCHS: Final = {
    True: UsualRange(0, 16, "epochs of text", "Muennighoff et al. 2023: up to 4 as good as new text"),
    False: UsualRange(0, 20, "epochs of answers", "Ouyang et al. 2022: 16"),
}
"""Usual epochs by whether every token of a text is learnt."""


def unusual_settings(config: RunFile, data: DataSize | None = None) -> tuple[Unusual, ...]:
    """Return what is probably a mistake. `data`: None if they weren't counted."""
    return tuple(found for rule in _RULES for found in rule(config, data))


def _learning_rate(config: RunFile, data: DataSize | None) -> Iterator[Unusual]:
    objective = objective_name(config.objective, config.data.kind)
    usual = LEARNING_RATES[objective, config.adapter.kind != "full"]
    rate = config.optimizer.learning_rate
    if not usual.low <= rate <= usual.high:
        yield _outside("optimizer.learning_rate", f"{rate:g}", usual, usual.low if rate < usual.low else usual.high)


def _batch(config: RunFile, data: DataSize | None) -> Iterator[Unusual]:
    batch = config.batch.global_
    if data is None or not data.epoch or batch * MIN_BATCHES <= max(data.epoch, MIN_BATCHES):
        return
    text = (
        f"batch.global {batch:,} is large for {data.epoch:,} samples: an epoch has {data.epoch / batch:.2g} steps; "
        f"usual are batches of 2 to 32, and more only with much data (Masters and Luschi 2018)"
    )
    yield Unusual("batch.global", text, f"batch.global={max(1, data.epoch // MIN_BATCHES)}")


def _epochs(config: RunFile, data: DataSize | None) -> Iterator[Unusual]:
    if data is None or not data.epoch:
        return
    epochs = config.run.epochs or config.run.steps * config.batch.global_ / data.epoch
    usual = _EPOCHS[objective_name(config.objective, config.data.kind) == "pretrain"]
    if epochs > usual.high:
        found = _outside("run.steps", f"{config.run.steps:,} makes {epochs:,.3g} epochs, which", usual, usual.high)
        yield msgspec.structs.replace(found, change=f"run.epochs={usual.high:g}")


def _held_out(config: RunFile, data: DataSize | None) -> Iterator[Unusual]:
    if data is None or data.held_out is None or not config.evaluate.every_steps or data.held_out >= MIN_HELD_OUT:
        return
    if config.data.held_out_path or config.data.held_out_fraction >= HELD_OUT_PART:
        return  # of so little data, more would be missed in training
    whole = data.epoch + data.held_out
    text = (
        f"data.held_out keeps {data.held_out} of {whole:,} samples for evaluation: its loss is mostly chance; usual is "
        f"up to a quarter of little data (Hastie, Tibshirani and Friedman 2009, section 7.2)"
    )
    yield Unusual("data.held_out", text, f"data.held_out={HELD_OUT_PART}")


def _splits(config: RunFile, data: DataSize | None) -> Iterator[Unusual]:
    splits = named_splits(Path(config.data.path), config.data.kind)
    if splits:
        others = " and ".join(path.name for split, path in splits.items() if split != "train")
        text = (
            f"data.path is a folder with {splits['train'].name} beside {others}: all of it is trained on; usual is to "
            "train on the first alone, and to name held-out data as data.held_out_path"
        )
        yield Unusual("data.path", text, f"data.path={splits['train']}")


def _outside(setting: str, value: str, usual: UsualRange, nearest: float) -> Unusual:
    side = "below" if nearest == usual.low else "above"
    within = f"at most {usual.high:g}" if not usual.low else f"{usual.low:g} to {usual.high:g}"
    text = f"{setting} {value} is {side} the usual {within} of {usual.where} ({usual.source})"
    return Unusual(setting, text, f"{setting}={nearest:g}")


_RULES: Final[tuple[Callable[[RunFile, DataSize | None], Iterator[Unusual]], ...]] = (
    _learning_rate,
    _batch,
    _epochs,
    _held_out,
    _splits,
)


@dataclass(frozen=True)
class Preset:
    """Settings with which a run on one card starts."""

    name: str
    dtype: ComputeDtype
    base: Literal["stored", "nf4"]  # of a model that isn't quantized yet
    micro: int | None  # samples of a pass; None: by memory
    accumulation: int  # passes of a step, with `micro`
    sequence_length: int | None = None  # at most, in tokens; None: by the data

    @property
    def batch(self) -> int | None:
        """Samples of a step; None: by the data."""
        return None if self.micro is None else self.micro * self.accumulation

    @property
    def text(self) -> str:
        """All of it, in words."""
        base = "a base in nf4" if self.base == "nf4" else "the base as stored"
        passes = "samples by memory" if self.micro is None else f"{self.micro} x {self.accumulation} samples"
        length = "" if self.sequence_length is None else f", at most {self.sequence_length} tokens"
        return f"{self.dtype}, {base}, {passes}{length}"


HOPPER: Final = Preset("Hopper", "bfloat16", "stored", None, 1)
AMPERE: Final = Preset("Ampere, Ada or RTX 50", "bfloat16", "nf4", 4, 2)
TURING: Final = Preset("Turing", "float16", "nf4", 2, 4)
GTX_16: Final = Preset("GTX 16", "float16", "nf4", 1, 8, 512)
PASCAL: Final = Preset("Pascal", "float32", "nf4", 1, 8, 512)
"""Pascal computes float16 at 1/64 of float32's rate (but for the P100)."""


def preset_of(capability: tuple[int, int], name: str = "") -> Preset:
    """Return the preset for a card by its compute capability and name. GTX 16 cards are Turing without tensor cores,
    and have 4 to 6 GB. Volta counts as Turing, Blackwell in data centres (10 and 11) as Hopper, GeForce and RTX PRO
    cards of that architecture (12) as Ampere, and older architectures than Pascal as Pascal."""
    if (9, 0) <= capability < (12, 0):
        return HOPPER
    if capability >= (8, 0):
        return AMPERE
    if capability >= (7, 0):
        return GTX_16 if "GTX 16" in name else TURING
    return PASCAL


_CAPABILITIES: Final = (
    (re.compile(r"\b(GTX 10\d\d|TITAN Xp?|P100|P40|P4)\b"), (6, 1)),
    (re.compile(r"\b(V100|TITAN V)\b"), (7, 0)),
    (re.compile(r"\b(GTX 16\d\d|RTX 20[678]0|Quadro RTX \d000|TITAN RTX|T4)\b"), (7, 5)),
    (re.compile(r"\b(RTX [34]0\d\d|RTX 2050|RTX A\d{3,4}|RTX \d{3,4}E? .*Ada)\b"), (8, 0)),
    (re.compile(r"\b(A100|A800|A10G?|A16|A30|A40|L4|L40S?)\b"), (8, 0)),
    (re.compile(r"\b(H100|H200|H800|GH200|B200|B300|GB200)\b"), (9, 0)),
    (re.compile(r"\b(RTX 50\d\d|RTX PRO \d000|GB10)\b"), (12, 0)),
)
"""Compute capability of NVIDIA's architectures, at least, by names of their devices."""


def capability_of_device(device: str) -> tuple[int, int] | None:
    """Return the compute capability by the name that a driver reports. None for a device that isn't NVIDIA's, or whose
    name isn't known here."""
    if not any(vendor in device.lower() for vendor in ("nvidia", "tesla", "quadro")):
        return None
    return next((capability for pattern, capability in _CAPABILITIES if pattern.search(device)), None)


def preset_of_device(device: str) -> Preset | None:
    """Return the preset by the name that a driver reports. None where `capability_of_device` has none."""
    capability = capability_of_device(device)
    return None if capability is None else preset_of(capability, device)
