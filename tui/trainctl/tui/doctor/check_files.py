"""Findings about files: the same model and data on all nodes of a run, with the fix for a difference, and fast disks
for tokens."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import get_args

from trainctl.protocol.config import addresses
from trainctl.protocol.config.data_files import glob_root, is_glob
from trainctl.protocol.config.model_facts import is_hub_id
from trainctl.tui.doctor.check_cluster import shell_copy
from trainctl.tui.doctor.findings import Asset, ClusterFacts, Finding, Hashed

SHOWN_FILES = 3
MB = 1e6
SLOW_DISK_BYTES_PER_SECOND = 50 * MB
"""A slower disk is a warning: tokenizing on many cores waits for it, and so do ranks whose token cache is larger than
memory."""


def of_disks(scene: ClusterFacts) -> Iterator[Finding]:
    """Yield the disks that hold token caches."""
    for measured in scene.measured:
        node, path, disk = measured.node, measured.cache_path, measured.disk
        write, read = disk.write_bytes_per_second, disk.read_bytes_per_second
        if not disk.named:
            yield Finding("ok", node, "disk", f"{path} isn't measured: {disk.problem}")
            continue
        if disk.problem or write is None:
            text = f"the speed of the disk for token caches can't be measured: {disk.problem}"
            do = f"set [nodes.{node}] cache_path to a folder where the agent can write" if path else ""
            yield Finding("fail" if path else "warn", node, "disk", text, do)
            continue
        text = f"token caches in {path or disk.folder}: writes {write / MB:,.0f} MB/s"
        text += f", reads {read / MB:,.0f} MB/s" if read is not None else ""
        if min(write, read or write) < SLOW_DISK_BYTES_PER_SECOND:
            yield Finding(
                "warn",
                node,
                "disk",
                f"{text}: tokenizing and training may wait for it",
                f"set [nodes.{node}] cache_path in the run file to a folder on a faster disk",
            )
        else:
            yield Finding("ok", node, "disk", text)


def of_files(scene: ClusterFacts) -> Iterator[Finding]:
    """Yield each asset of all nodes asked. What most nodes have counts as right; of two alike, the first node's."""
    if scene.run is not None and scene.run.data.growing:
        yield Finding("ok", "", "data", f"{scene.run.data.path} may still grow, so it isn't compared")
    for what in get_args(Asset):
        hashed = [one for one in scene.hashed if one.what == what]
        for one in hashed:
            if not one.digests.named:
                yield Finding(
                    "warn",
                    one.node,
                    one.what,
                    f"{one.path} isn't compared: {one.digests.problem}",
                    "trainctl cluster sync RUN.toml --dry-run compares it over SSH",
                )
            elif one.digests.problem:
                yield Finding(
                    "fail",
                    one.node,
                    one.what,
                    f"{one.path} can't be read: {one.digests.problem}",
                    _fix(scene, _source(hashed), one),
                )
        source = _source(hashed)
        if source is not None:
            yield from _compared(scene, source, [one for one in hashed if not one.digests.problem])


def _source(hashed: list[Hashed]) -> Hashed | None:
    whole = [one for one in hashed if not one.digests.problem]
    if not whole:
        return None
    counts = Counter(one.digests.digest for one in whole)
    return max(whole, key=lambda one: counts[one.digests.digest])  # the first of the best


def _compared(scene: ClusterFacts, source: Hashed, whole: list[Hashed]) -> Iterator[Finding]:
    alike = [one.node for one in whole if one.digests.digest == source.digests.digest]
    for one in whole:
        if one.digests.digest != source.digests.digest:
            text = f"{one.path} differs from {source.node}'s in {_difference(source, one)}: the run wouldn't start"
            yield Finding("fail", one.node, one.what, text, _fix(scene, source, one))
    said = f"identical on {', '.join(alike)}" if len(alike) > 1 else f"read on {source.node}"
    yield Finding("ok", "", source.what, f"{said} ({source.digests.digest[:12]})")


def _difference(source: Hashed, other: Hashed) -> str:
    ours, theirs = ({file.name: file.digest for file in one.digests.files} for one in (source, other))
    changed = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    more = f" and {len(changed) - SHOWN_FILES} more" if len(changed) > SHOWN_FILES else ""
    return ", ".join(changed[:SHOWN_FILES]) + more if changed else "the order of its files"


def _fix(scene: ClusterFacts, source: Hashed | None, other: Hashed) -> str:
    """Return the rsync line, to be run on the node that is wrong."""
    if is_hub_id(other.path):
        return f"on that machine, run: hf download {other.path}"
    if source is None or source.node == other.node:
        return "copy it to that machine, or give its path there in [nodes.X] model_path, data_path or held_out_path"
    hosts = {look.name: addresses.host(look.address) for look in scene.looks}
    host = hosts.get(source.node, source.node)
    path, target = (_copied(one.path) for one in (source, other))
    place = path if host == hosts.get(other.node) or addresses.is_loopback(host) else f"{host}:{path}"
    if place == target:
        return "the files changed during the check, or two machines share one address: run the doctor again"
    is_folder = (
        source.what == "model"
        or path != source.path
        or [file.name for file in source.digests.files] != [PurePosixPath(source.path).name]
    )
    return f"on {other.node}: {shell_copy(place, target, is_folder=is_folder)}"


def _copied(path: str) -> str:
    """Return what rsync copies: of a glob, its folder."""
    return str(glob_root(Path(path))) if is_glob(Path(path)) else path
