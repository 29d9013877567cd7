"""Setups of ranks: the node, libraries, device and precision that each computes with, and how a resumed group
differs."""

from collections.abc import Mapping

import msgspec

from trainctl.protocol import messages as m


class RankSetup(msgspec.Struct, frozen=True):
    """One rank's. With all of them the same on one device, a resumed run continues bit for bit."""

    node: str
    backend: str
    device: str
    compute: m.Compute | None = None  # None: reported by a version that didn't say


class Resumed(msgspec.Struct, frozen=True):
    """What the step of a loaded checkpoint was made with, until the group that continues it has formed."""

    step: int
    ranks: dict[int, RankSetup]


def setup_of(node: str, ready: m.Ready) -> RankSetup:
    """Of a rank that has loaded."""
    return RankSetup(node, ready.backend, ready.device, ready.compute)


def differences(before: Mapping[int, RankSetup], now: Mapping[int, RankSetup]) -> tuple[str, ...]:
    """What differs, each in words; empty if nothing does."""
    found = []
    if [(rank, before[rank].node) for rank in sorted(before)] != [(rank, now[rank].node) for rank in sorted(now)]:
        found.append(f"the ranks are those of {_nodes(now)} instead of {_nodes(before)}")
    alike: dict[str, list[str]] = {}  # nodes by what differs on them
    for rank in sorted(before.keys() & now.keys()):
        then, there = _words(before[rank]), _words(now[rank])
        changed = [
            f"{there[name]} instead of {then[name]}" for name in there if name in then and there[name] != then[name]
        ]
        if changed:
            alike.setdefault(", ".join(changed), []).append(now[rank].node)
    found += [f"{', '.join(nodes)}: {changed}" for changed, nodes in alike.items()]
    return tuple(found)


def _nodes(ranks: Mapping[int, RankSetup]) -> str:
    return ", ".join(ranks[rank].node for rank in sorted(ranks))


def _words(setup: RankSetup) -> dict[str, str]:
    compute = setup.compute
    words = {"backend": setup.backend, "device": f"device {setup.device}"}
    if compute is not None:
        words |= {
            "dtype": f"passes in {compute.dtype}", "weights": f"weights in {compute.weights or 'an unknown form'}",
            "tf32": "TF32" if compute.tf32 else "no TF32", "compile": f"compile {compute.compile}",
            "attention": f"attention {compute.attention or 'unknown'}",
            "deterministic": "deterministic kernels" if compute.deterministic else "any kernels",
        }  # fmt: skip
        words |= {"update": f"updates by {compute.update}"} if compute.update else {}
        words |= {f"version of {name}": f"{name} {version}" for name, version in compute.versions}
    return words
