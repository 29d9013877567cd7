"""Compatibility of what the ranks have loaded, with the engine that can sum their gradients, and their setups."""

from collections.abc import Mapping, Sequence

import msgspec

from trainctl.protocol.config.run_tables import GroupTable
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import Compute, Engine, FileDigest, Ready

FIELD = "group.engine"
_LIBRARIES: dict[Engine, str] = {"gloo": "torch", "ring": "mlx"}


def choose(group: GroupTable, ready: Mapping[str, Ready]) -> Engine:
    """Return the engine for the ranks that said `ready`, by their names.

    `auto`: gloo if all are on Linux with torch, else ring if all have mlx. Raises InvalidInputError naming the node and
    what it lacks.
    """
    if group.engine != "auto":
        lack = _lack(group.engine, ready)
        if lack:
            raise InvalidInputError(FIELD, f"{group.engine}: {lack}")
        return group.engine
    others = (f"{node} is not on Linux" for node, answer in ready.items() if answer.system != "Linux")
    gloo_lack = _lack("gloo", ready) or next(others, "")
    if not gloo_lack:
        return "gloo"
    ring_lack = _lack("ring", ready)
    if ring_lack:
        raise InvalidInputError(FIELD, f"no engine fits all nodes; gloo: {gloo_lack}; ring: {ring_lack}")
    return "ring"


def _lack(engine: Engine, ready: Mapping[str, Ready]) -> str:
    for node, answer in ready.items():
        if engine not in answer.engines:
            return f"{node} has no {_LIBRARIES[engine]}"
    first_node, first = next(iter(ready.items()))
    for node, answer in ready.items():
        if engine == "gloo" and answer.system != first.system:
            return (
                f"{node} is on {answer.system} and {first_node} on {first.system}: gloo's builds for them cannot form "
                f"one group"
            )
    return ""


def disagreement(ready: Mapping[str, Ready]) -> str | None:
    """Return the first difference between what the nodes loaded, with the file that makes it; None if there is none."""
    first_node, first = next(iter(ready.items()))
    for node, mine in ready.items():
        for what, files in (("layout", "model_files"), ("data", "data_files"), ("model", "model_files")):
            digest = f"{what}_digest"
            if getattr(mine, digest) != getattr(first, digest):
                difference = _unlike_file(getattr(mine, files), getattr(first, files), node, first_node)
                hint = "; to make the files alike, run trainctl cluster sync RUN.toml" if difference else ""
                return f"{what} digests of {node} and {first_node} differ{difference}{hint}"
    return None


def _unlike_file(mine: Sequence[FileDigest], others: Sequence[FileDigest], node: str, other_node: str) -> str:
    """The first file by name that one of them lacks or that differs, after a colon; empty if none is known to."""
    here, there = ({file.name: file.digest for file in files} for files in (mine, others))
    for name in sorted(here | there):
        if name not in here or name not in there:
            return f": {name} is only on {node if name in here else other_node}"
        if here[name] != there[name]:
            return f": {name} differs"
    return ""


class RankSetup(msgspec.Struct, frozen=True):
    """Setup of one rank. With all setups the same on one device, a resumed run continues bit for bit."""

    node: str
    backend: str
    device: str
    compute: Compute | None = None  # None: reported by a version that didn't say


class Resumed(msgspec.Struct, frozen=True):
    """Setups that made the step of a loaded checkpoint, until the group that continues it has formed."""

    step: int
    ranks: dict[int, RankSetup]


def setup_of(node: str, ready: Ready) -> RankSetup:
    """Return the setup of a rank that has loaded."""
    return RankSetup(node, ready.backend, ready.device, ready.compute)


def differences(before: Mapping[int, RankSetup], now: Mapping[int, RankSetup]) -> tuple[str, ...]:
    """Return what differs after a resume, each in words; empty if nothing does."""
    changes = []
    if [(rank, before[rank].node) for rank in sorted(before)] != [(rank, now[rank].node) for rank in sorted(now)]:
        changes.append(f"the ranks are those of {_nodes(now)} instead of {_nodes(before)}")
    alike: dict[str, list[str]] = {}  # nodes by what differs on them
    for rank in sorted(before.keys() & now.keys()):
        then, there = _words(before[rank]), _words(now[rank])
        changed = [
            f"{there[name]} instead of {then[name]}" for name in there if name in then and there[name] != then[name]
        ]
        if changed:
            alike.setdefault(", ".join(changed), []).append(now[rank].node)
    changes += [f"{', '.join(nodes)}: {changed}" for changed, nodes in alike.items()]
    return tuple(changes)


def _nodes(ranks: Mapping[int, RankSetup]) -> str:
    return ", ".join(ranks[rank].node for rank in sorted(ranks))


def _words(setup: RankSetup) -> dict[str, str]:
    compute = setup.compute
    words = {"backend": setup.backend, "device": f"device {setup.device}"}
    if compute is not None:
        words |= {
            "dtype": f"passes in {compute.dtype}",
            "weights": f"weights in {compute.weights or 'an unknown form'}",
            "tf32": "TF32" if compute.tf32 else "no TF32",
            "compile": f"compile {compute.compile}",
            "attention": f"attention {compute.attention or 'unknown'}",
            "deterministic": "deterministic kernels" if compute.deterministic else "any kernels",
        }
        words |= {"update": f"updates by {compute.update}"} if compute.update else {}
        words |= {f"version of {name}": f"{name} {version}" for name, version in compute.versions}
    return words
