"""NVIDIA devices of this machine, as their driver numbers them and as a rank sees them: by NVML, or by nvidia-smi
without NVML's module."""

import functools
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from trainctl.protocol.config.env_policy import BY_BUS, DEVICE_ORDER, VISIBLE
from trainctl.protocol.messages import DeviceTypes

Capability = tuple[int, int]
"""Compute capability: major and minor."""
QUERY_SECONDS: Final = 10.0
"""Longest that the driver may take to answer nvidia-smi."""
_CARD = re.compile(r"(\d+)\.(\d+),\s*(\S+)")


def nvidia_smi(*fields: str) -> str:
    """Return fields of each device, a line each. Raises OSError or SubprocessError without a driver that answers."""
    words = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=QUERY_SECONDS).stdout


@dataclass(frozen=True)
class Card:
    """One device."""

    capability: Capability
    uuid: str = ""


@functools.cache
def cards() -> tuple[Card, ...]:
    """All devices in the order of their PCI buses, whatever the environment shows; () without a driver."""
    try:
        import pynvml
    except ImportError:
        return _by_nvidia_smi()
    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        found = [(nvml.nvmlDeviceGetCudaComputeCapability(one), nvml.nvmlDeviceGetUUID(one)) for one in handles]
        nvml.nvmlShutdown()
    except nvml.NVMLError:
        return ()
    return tuple(
        Card((int(major), int(minor)), uuid.decode() if isinstance(uuid, bytes) else uuid)
        for (major, minor), uuid in found
    )


@functools.cache
def driver_version() -> str:
    """Such as 570.86.10; empty without a driver."""
    try:
        import pynvml
    except ImportError:
        return _driver_by_nvidia_smi()
    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
        found = nvml.nvmlSystemGetDriverVersion()
        nvml.nvmlShutdown()
    except nvml.NVMLError:
        return ""
    return found.decode() if isinstance(found, bytes) else str(found)


def capabilities() -> tuple[Capability, ...]:
    """Return the capabilities of `cards`."""
    return tuple(card.capability for card in cards())


def visible(chosen: str, by_index: Sequence[Any], by_uuid: Mapping[str, Any]) -> list[Any]:
    """The devices that `CUDA_VISIBLE_DEVICES` names by index or by the beginning of a UUID, in its order. As in CUDA's
    programming guide, names after the first one that is unknown or ambiguous count for nothing."""
    found: list[Any] = []
    for word in filter(None, (part.strip() for part in chosen.split(","))):
        if word.isdigit():
            matching = [by_index[int(word)]] if int(word) < len(by_index) else []
        else:
            matching = [device for uuid, device in by_uuid.items() if uuid.startswith(word)]
        if len(matching) != 1 or matching[0] is None or matching[0] in found:
            break
        found += matching
    return found


def _by_nvidia_smi() -> tuple[Card, ...]:
    try:
        return parse_cards(nvidia_smi("compute_cap", "uuid"))
    except (OSError, subprocess.SubprocessError):
        return ()


def _driver_by_nvidia_smi() -> str:
    try:
        return next(iter(nvidia_smi("driver_version").split()), "")
    except (OSError, subprocess.SubprocessError):
        return ""


def parse_cards(text: str) -> tuple[Card, ...]:
    """Return the cards by what `nvidia-smi --query-gpu=compute_cap,uuid` prints; () if a capability is missing, as
    devices go by their number."""
    found = [_CARD.fullmatch(line.strip()) for line in text.splitlines() if line.strip()]
    known = [one for one in found if one is not None]
    return tuple(Card((int(one[1]), int(one[2])), one[3]) for one in known) if len(known) == len(found) else ()


CARD: Final = "nvidia:"
"""Prefix of the names of cards that are numbered as their driver does."""


def seen(devices: Sequence[DeviceTypes], env: Mapping[str, str]) -> Iterator[DeviceTypes]:
    """Yield the devices that a rank sees, by backend. `env`: of the run file."""
    for backend in dict.fromkeys(one.backend for one in devices):
        its = [one for one in devices if one.backend == backend]
        shown = [one for one in its if _is_shown_card(one)]
        yield from _cards(shown, [one for one in its if one.device.startswith(CARD)] or shown, env)
        yield from (one for one in without_cards(its) if not _is_shown_card(one))


def without_cards(devices: Iterable[DeviceTypes]) -> list[DeviceTypes]:
    """Return what backends show, without the cards that only the driver names."""
    return [one for one in devices if not one.device.startswith(CARD)]


def _is_shown_card(device: DeviceTypes) -> bool:
    return device.device.startswith("cuda:") or device.device == "gpu"


def _cards(shown: Sequence[DeviceTypes], every: Sequence[DeviceTypes], env: Mapping[str, str]) -> Sequence[DeviceTypes]:
    """Return the cards of one backend. torch's ranks take the card that can do most, where none is named; MLX's take
    the first."""
    is_mlx = any(one.backend == "mlx" for one in every)
    if env.get(DEVICE_ORDER, BY_BUS) != BY_BUS:  # whichever cards the numbers mean
        every, shown = _alike(every), _alike(every)[: len(shown)]
    if VISIBLE in env and not (is_mlx and len(every) == 1):  # one GPU of MLX may be Apple's
        shown = _chosen(every, env[VISIBLE])
    if is_mlx:
        return [msgspec.structs.replace(one, device="gpu") for one in shown]
    named = [msgspec.structs.replace(one, device=f"cuda:{number}") for number, one in enumerate(shown)]
    return sorted(named, key=lambda one: -len(one.types))


def _chosen(every: Sequence[DeviceTypes], chosen: str) -> Sequence[DeviceTypes]:
    """Return those that CUDA_VISIBLE_DEVICES shows. Only their machine knows UUIDs: such a card may be any of them."""
    names = chosen.split(",")
    if any(name.strip()[:1].isalpha() for name in names):
        return _alike(every)[: len(names)]
    return [every[number] for number in visible(chosen, range(len(every)), {})]


def _alike(cards: Sequence[DeviceTypes]) -> Sequence[DeviceTypes]:
    """Return the devices with the types that all of them have."""
    first = cards[0].types if cards else ()
    shared = tuple(kind for kind in first if all(kind in one.types for one in cards))
    return [msgspec.structs.replace(one, types=shared) for one in cards]
