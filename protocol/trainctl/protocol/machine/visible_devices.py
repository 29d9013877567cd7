"""The devices that a rank sees, by CUDA's environment variables in the run file, its default first. Pure.

A rank's agent says what its own environment shows (`cuda:0`), and all cards by their numbers (`nvidia:0`) if that hides
or reorders some. `[nodes.NAME] env` is laid over the agent's environment, so it chooses among all cards.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from trainctl.protocol.config.env_policy import BY_BUS, DEVICE_ORDER, VISIBLE
from trainctl.protocol.machine.nvidia import visible
from trainctl.protocol.messages import DeviceTypes

CARD: Final = "nvidia:"
"""How a card's name begins that is numbered as its driver does."""


def seen(devices: Sequence[DeviceTypes], env: Mapping[str, str]) -> Iterator[DeviceTypes]:
    """By backend. `env`: of the run file."""
    for backend in dict.fromkeys(one.backend for one in devices):
        its = [one for one in devices if one.backend == backend]
        shown = [one for one in its if _is_shown_card(one)]
        yield from _cards(shown, [one for one in its if one.device.startswith(CARD)] or shown, env)
        yield from (one for one in without_cards(its) if not _is_shown_card(one))


def without_cards(devices: Iterable[DeviceTypes]) -> list[DeviceTypes]:
    """What backends show, without the cards that only the driver names."""
    return [one for one in devices if not one.device.startswith(CARD)]


def _is_shown_card(device: DeviceTypes) -> bool:
    return device.device.startswith("cuda:") or device.device == "gpu"


def _cards(shown: Sequence[DeviceTypes], every: Sequence[DeviceTypes], env: Mapping[str, str]) -> Sequence[DeviceTypes]:
    """Of one backend. torch's ranks take the card that can do most, where none is named; MLX's take the first."""
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
    """Those that CUDA_VISIBLE_DEVICES shows. Only their machine knows UUIDs: such a card may be any of them."""
    names = chosen.split(",")
    if any(name.strip()[:1].isalpha() for name in names):
        return _alike(every)[: len(names)]
    return [every[number] for number in visible(chosen, range(len(every)), {})]


def _alike(cards: Sequence[DeviceTypes]) -> Sequence[DeviceTypes]:
    """With the types that all of them have."""
    first = cards[0].types if cards else ()
    shared = tuple(kind for kind in first if all(kind in one.types for one in cards))
    return [msgspec.structs.replace(one, types=shared) for one in cards]
