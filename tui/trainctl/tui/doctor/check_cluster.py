"""Findings that only nodes together show: how they are reached, versions, clocks and files that differ, interfaces."""

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from ipaddress import IPv4Interface
from pathlib import Path, PurePosixPath
from typing import get_args

from trainctl.protocol.advice.group_links import JacclNode, cables_of, jaccl_settings
from trainctl.protocol.config import addresses
from trainctl.protocol.config.data_files import glob_root, is_glob
from trainctl.protocol.config.model_facts import is_hub_id
from trainctl.protocol.config.run_tables import NodeTable
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import Facts
from trainctl.tui.doctor.findings import Asset, ClusterFacts, Finding, Hashed, Level, Look, Subject, Trouble

CLOCK_WARN_SECONDS, CLOCK_FAIL_SECONDS = 0.5, 30.0
SLOW_SECONDS = 0.05
"""A round trip over this much is felt: a plan goes to every rank in every step."""


def of_reach(look: Look, here: Facts) -> Iterator[Finding]:
    """Yield whether its agent answers, and publishes where it can be heard."""
    if look.trouble is not None:
        yield _unreached(look, look.trouble, here, "reach", look.address)
        return
    milliseconds = look.round_trip_seconds * 1000
    text = f"{look.address} answers in {milliseconds:.1f} ms"
    if look.round_trip_seconds > SLOW_SECONDS:
        yield Finding(
            "warn",
            look.name,
            "reach",
            f"{text}: too slow for efficient training",
            "use a cable instead of Wi-Fi or a tunnel",
        )
    else:
        yield Finding("ok", look.name, "reach", text)
    if look.live_trouble is not None:
        yield _unreached(look, look.live_trouble, here, "port", look.live_address)
    elif look.live_address:
        yield Finding("ok", look.name, "port", f"its live messages at {look.live_address} are reachable")


def _unreached(look: Look, trouble: Trouble, here: Facts, subject: Subject, address: str) -> Finding:
    text, do = _reasons(look, trouble, here, address)
    return Finding("fail", look.name, subject, f"{address}: {text}", do)


def _reasons(look: Look, trouble: Trouble, here: Facts, address: str) -> tuple[str, str]:
    host = addresses.host(address)
    match trouble.kind:
        case "refused":
            name = f" --name {look.name}" if look.name else ""
            return "nothing listens at that address", f"start the agent on that machine: trainctl-agent run{name}"
        case "no-route" if here.system == "Darwin":
            return (
                "no route to host (EHOSTUNREACH): on macOS, Local Network Privacy may be blocking this program",
                "allow this terminal or agent under System Settings > Privacy & Security > Local Network, or install "
                "the agent as a LaunchDaemon (exempt)",
            )
        case "no-route":
            return "no route to host", f"check the cable and the address: ping {host}, ip route get {host}"
        case "timeout":
            return (
                "no answer: the machine is off or asleep, or a firewall drops the connection",
                f"ping {host}; open the port in its firewall",
            )
        case "silent":
            return (
                f"something listens, but no agent answers ({trouble.text})",
                "compare trainctl keys list on both machines; if the keys match, run trainctl-agent status on the node",
            )
        case "not-authorised":
            return (
                f"the agent refuses this machine's key: {trouble.text}",
                "run trainctl keys authorize on that machine",
            )
        case "version":
            return f"different protocol version: {trouble.text}", "install the same trainctl on all nodes"
        case "protocol" | "other":
            return trouble.text, ""


def of_versions(scene: ClusterFacts) -> Iterator[Finding]:
    """Yield what all nodes should have alike: the program, and the libraries that compute."""
    for name in ("trainctl", "torch", "mlx", "mlx-lm", "transformers", "numpy"):
        found: dict[str, list[str]] = {}
        for look, facts in scene.met:
            version = facts.version if name == "trainctl" else facts.libraries.get(name)
            if version:
                found.setdefault(version, []).append(look.name)
        if len(found) > 1:
            said = "; ".join(f"{version} on {', '.join(nodes)}" for version, nodes in sorted(found.items()))
            level: Level = "warn"
            means, remedy = "sums may differ slightly", f"run pip install '{name}=={max(found, key=_parts)}'"
            if name == "trainctl":  # no index has it
                level, means = "fail", "nodes with different versions may refuse each other"
                remedy = "install the newest, for example by trainctl cluster add,"
            yield Finding(level, "", "version", f"{name} differs: {said}: {means}", f"{remedy} where it is older")


def _parts(version: str) -> tuple[tuple[int, str], ...]:
    """Sorts 0.9 before 0.10."""
    return tuple((int(part) if part.isdecimal() else -1, part) for part in version.replace("+", ".").split("."))


def of_alert_hooks(look: Look) -> Iterator[Finding]:
    """Return what is wrong with the alert hooks of a node."""
    if look.hook_problem:
        do = "run trainctl alerts --test on that machine once it is corrected"
        yield Finding("warn", look.name, "alerts", f"{look.hook_problem}: alerts are not delivered there", do)


def of_clock(look: Look) -> Iterator[Finding]:
    """Compare its clock with this machine's, as far as the round trip lets one tell."""
    if look.facts is None or look.is_here:
        return
    offset, error = look.clock_offset_seconds, look.round_trip_seconds / 2
    text = f"{offset * 1000:+,.1f} ms off this machine's clock, ±  {error * 1000:.1f} ms"
    sure = max(0.0, abs(offset) - error)
    if sure <= CLOCK_WARN_SECONDS:
        yield Finding("ok", look.name, "clock", text)
        return
    level: Level = "fail" if sure > CLOCK_FAIL_SECONDS else "warn"
    yield Finding(
        level,
        look.name,
        "clock",
        f"{text}: the nodes' logs and events will be out of order",
        "turn on network time there (timedatectl set-ntp true; macOS: Set time automatically)",
    )


def of_interfaces(look: Look, facts: Facts, scene: ClusterFacts) -> Iterator[Finding]:
    """Yield whether the run's interface for the node is there, up, and inside the networks that are trusted."""
    table = scene.run.nodes.get(look.name) if scene.run is not None else None
    if table is None:
        return
    if table.interface:
        yield _interface(look, facts, table.interface, scene)
    elif scene.run is not None and len(scene.run.nodes) > 1 and not addresses.is_near(look.address):
        name = _likely(look, facts) or "NAME"
        yield Finding(
            "fail",
            look.name,
            "interface",
            "the run file names no interface: gradients would use only loopback",
            f'set [nodes.{look.name}] interface = "{name}" in the run file',
        )


def _interface(look: Look, facts: Facts, name: str, scene: ClusterFacts) -> Finding:
    found = next((interface for interface in facts.interfaces if interface.name == name), None)
    usable = ", ".join(one.name for one in facts.interfaces if one.is_up and one.addresses)
    if found is None:
        return Finding(
            "fail", look.name, "interface", f"there is no interface {name}", f"use one of {usable} in the run file"
        )
    if not found.is_up or not found.addresses:
        lacks = "is down" if not found.is_up else "has no IPv4 address"
        return Finding("fail", look.name, "interface", f"{name} {lacks}", f"bring it up, or use one of {usable}")
    address = IPv4Interface(found.addresses[0])
    text = f"{name} has {address}"
    if address.is_loopback or any(address.ip in network for network in scene.trusted_networks):
        return Finding("ok", look.name, "interface", text)
    return Finding(
        "fail",
        look.name,
        "interface",
        f"{text}, outside trusted_networks: gradients are unencrypted, so none are sent there",
        f'if only your machines are on that network, set trusted_networks = ["{address.network}"] in cluster.toml',
    )


def of_jaccl(scene: ClusterFacts) -> Iterator[Finding]:
    """Yield what MLX's engine jaccl would use, if the run's Macs are joined by Thunderbolt cables."""
    tables = {} if scene.run is None else scene.run.nodes
    met = {look.name: facts for look, facts in scene.met}
    nodes = [_jaccl_node(name, met[name], tables) for name in tables or met if name in met]
    if len(nodes) < 2 or not cables_of(nodes) or any(met[node.name].system != "Darwin" for node in nodes):
        return
    try:
        settings = jaccl_settings(nodes)
        text = f"a {settings.topology} with MLX_JACCL_COORDINATOR={settings.coordinator} and the devices "
        text += settings.devices_json()
    except InvalidInputError as error:
        text = f"more cables: {error.problem}"
    yield Finding("ok", "", "interface", f"MLX's engine jaccl, which trainctl doesn't offer yet, would need {text}")


def _jaccl_node(name: str, facts: Facts, tables: Mapping[str, NodeTable]) -> JacclNode:
    interface = tables[name].interface if name in tables else ""
    return JacclNode(name, interface, {one.name: one.addresses for one in facts.interfaces if one.is_up})


def _likely(look: Look, facts: Facts) -> str:
    """Return the interface that has the address of its agent."""
    host = addresses.host(look.address)
    return next(
        (
            interface.name
            for interface in facts.interfaces
            for address in interface.addresses
            if address.split("/")[0] == host
        ),
        "",
    )


def shell_copy(source: str, target: str, *, is_folder: bool) -> str:
    """Return the line that makes `target` like `source` (`host:path`, or a path)."""
    slash = "/" if is_folder else ""
    return f"rsync -av --checksum {shlex.quote(source + slash)} {shlex.quote(target + slash)}"


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
