"""A rank's part of a step beside its device's peak and its calibration, as metrics. Pure."""

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from trainctl.protocol import messages as m
from trainctl.protocol.batch.against_profile import links_of, passes_seconds, sum_seconds
from trainctl.protocol.batch.flops import peak_parts
from trainctl.protocol.calibration.profile import LinkRate, ProfileSummary


class Links(NamedTuple):
    """What connects the ranks of a group."""

    ranks: int = 0
    calibrated: tuple[LinkRate, ...] = ()  # empty if a link isn't calibrated, or there is none


def links(nodes: Mapping[int, str], profiles: Mapping[int, ProfileSummary], lead: str) -> Links:
    """Of the group whose ranks are on these nodes; `profiles`: by rank."""
    known = links_of({node: profiles[rank] for rank, node in nodes.items() if rank in profiles}, lead)
    others = {*nodes.values()} - {lead}
    return Links(len(nodes), tuple(known[node] for node in sorted(others)) if others <= known.keys() else ())


def compared(part: m.RankStep, own: m.Ready | None, links: Links) -> m.RankStep:
    """With what is known; the part itself if nothing is. `own`: what the rank said when it had loaded."""
    if own is None:
        return part
    found = _peaks(part, own) | _passes(part, own) | _sum(part, links)
    return msgspec.structs.replace(part, values=part.values | found) if found else part


def _peaks(part: m.RankStep, own: m.Ready) -> dict[str, float]:
    rate = part.values.get("tflops")
    if rate is None or own.compute is None:
        return {}
    return peak_parts(1e12 * rate, own.device, own.compute.dtype, own.profile)


def _passes(part: m.RankStep, own: m.Ready) -> dict[str, float]:
    took = part.phases.forward + part.phases.backward
    expected = passes_seconds(part, own.profile) if own.profile is not None else None
    return {"calibrated_speed": expected / took} if expected is not None and took > 0 else {}


def _sum(part: m.RankStep, links: Links) -> dict[str, float]:
    size = part.values.get("sum_bytes")
    if not size or not links.calibrated or part.phases.sync <= 0:
        return {}
    return {"link_use": sum_seconds(size, links.ranks, links.calibrated) / part.phases.sync}
