"""The facts that advice is computed from: the run file, its model and data, and what is known of the nodes."""

import asyncio
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from trainctl.protocol.advice.advice_facts import AdviceFacts, NodeFacts, PlannedRun
from trainctl.protocol.advice.checklist import Check, checklist
from trainctl.protocol.batch.data_statistics import DataStatistics
from trainctl.protocol.batch.device_table import device_named, device_of
from trainctl.protocol.batch.eta import Schedule
from trainctl.protocol.batch.flops import step_flops
from trainctl.protocol.batch.memory_estimate import MemoryEstimate, MemoryModel
from trainctl.protocol.batch.pass_curve import links_of
from trainctl.protocol.calibration.profile import DeviceProfile, settings_digest, summary
from trainctl.protocol.config import addresses, run_file
from trainctl.protocol.config.adapted_layers import adapted_layers
from trainctl.protocol.config.cluster_file import SimulatedNode
from trainctl.protocol.config.model_facts import ModelFacts
from trainctl.protocol.config.names import node_directory, node_name
from trainctl.protocol.config.objectives import objective_of
from trainctl.protocol.config.run_tables import AUTO, AdapterTable, NodeTable, RunFile
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.machine.devices import AUTO_TYPES, devices_named, read_devices, resolve
from trainctl.protocol.machine.facts import lacks_of
from trainctl.protocol.machine.file_digests import model_digests
from trainctl.protocol.machine.shim import boot_id
from trainctl.protocol.messages import DeviceTypes
from trainctl.tui.advise.node_looks import NodeLook, descriptions, look_at, with_described
from trainctl.tui.commands.targets import ClusterFile
from trainctl.tui.setup import data_check, data_preview, memory_report

CHECKPOINT_BYTES = 4 + 8
"""Bytes of a checkpoint for each trained parameter: float32 weights and two moments."""
APPLE_PART = 0.75
"""Part of an Apple machine's memory that Metal lets a process use, unless a profile says it."""


@dataclass(frozen=True)
class Gathered:
    """Everything that `advise` reads."""

    facts: AdviceFacts
    checks: tuple[Check, ...]
    notes: tuple[str, ...]  # what couldn't be read, and what that means


def gather(
    file: Path,
    overrides: Mapping[str, str],
    cluster: ClusterFile | None,
    agent: str | None,
    *,
    read_data: bool,
    parameters: int | None = None,
) -> Gathered:
    """Collect what advice on a run file needs. `agent` is the address of the only agent, without a cluster;
    `parameters` are the trained ones, if the model isn't here. Raises InvalidInputError by the field of the run
    file."""
    asked, overrides = overrides, data_check.with_steps(file, overrides) if read_data else overrides
    config = run_file.read(file, dict(overrides))
    if not config.run.steps:
        raise InvalidInputError(f"{file}: run.epochs", "its samples are counted with the data: leave out --no-data")
    entries = cluster.cluster.nodes if cluster is not None else {}
    names = _names(config, [*entries] if cluster is not None else None)
    at = {name: entries[name].address if name in entries else agent for name in names}
    real = {name: address for name, address in at.items() if name not in descriptions(cluster)}
    looks = dict.fromkeys(names, NodeLook()) | asyncio.run(look_at(real))
    if cluster is None and not config.nodes and (facts := looks[names[0]].facts) is not None:  # the only agent's name
        names, looks, at = [facts.node], {facts.node: looks[names[0]]}, {facts.node: agent}
    written, config = config, _resolved(config, names, looks, descriptions(cluster), str(file))
    model = memory_report.facts_here(config, names, str(file))
    digest = _model_digest(config, names[0], looks)
    found, notes = _statistics(file, names[0], overrides, config) if read_data else (None, ["the data were not read"])
    report = memory_report.report_of(config, names, str(file))
    estimates = report.nodes if report is not None else {}
    lines = memory_report.memory_lines(config, model, names, str(file)) if estimates and model is not None else {}
    prices = {name: entry.price_per_hour for name, entry in entries.items()}
    nodes = tuple(
        msgspec.structs.replace(
            _node(config, name, looks[name], at[name], digest, lines.get(name)), price_per_hour=prices.get(name)
        )
        for name in names
    )
    linked = {name: profile for name, look in looks.items() if (profile := _with_links(look)) is not None}
    lead = _lead(names, [*linked.values()])
    links = links_of({name: summary(profile) for name, profile in linked.items()}, lead)
    run = _run(file, config, model, next(iter(estimates.values()), None), found, lead)
    currency = cluster.cluster.currency if cluster is not None else run.currency
    run = msgspec.structs.replace(run, currency=currency, overrides=asked)
    run = _with_parameters(run, parameters)
    advised = with_described(AdviceFacts(run=run, nodes=nodes, links=links), cluster)
    if model is None and parameters is None:
        notes.append(f"{config.model.path} isn't on this machine: sums, memory and estimates need its sizes")
    caches = run_file.cache_folder(config, names[0], node_directory(names[0]) / "data")
    return Gathered(
        advised, checklist(written, advised, model.family if model else "", found, str(caches)), tuple(notes)
    )


def _names(config: RunFile, known: list[str] | None) -> list[str]:
    """Return the run's nodes, or all of the cluster's (`known`), or this machine. Raises InvalidInputError for an
    unknown one."""
    unknown = [name for name in config.nodes if known is not None and name not in known]
    if known is not None and unknown:
        raise InvalidInputError(f"nodes.{unknown[0]}", f"not in the cluster file; its nodes are {', '.join(known)}")
    return [*config.nodes] or known or [node_name()]


def _resolved(
    config: RunFile,
    names: Sequence[str],
    looks: Mapping[str, NodeLook],
    described: Mapping[str, SimulatedNode],
    where: str,
) -> RunFile:
    """Return the run file as an agent would start it: of these nodes, and with a data type in place of "auto" if the
    devices of all are known."""
    config = msgspec.structs.replace(config, nodes={name: config.nodes.get(name, NodeTable()) for name in names})
    devices = {name: _devices(looks[name], described.get(name)) for name in names}
    try:
        return resolve(config, devices, where)[0]
    except InvalidInputError:
        return config


def _devices(look: NodeLook, described: SimulatedNode | None) -> Sequence[DeviceTypes]:
    """Return what its agent says, else this machine's, for a node that has its folder here."""
    if described is not None:
        device = device_named(described.device)
        return () if device is None else devices_named(device.title)
    if look.facts is not None and look.facts.devices:
        return look.facts.devices
    return read_devices() if look.profiles and look.facts is None else ()


def _model_digest(config: RunFile, node: str, looks: Mapping[str, NodeLook]) -> str | None:
    """Return the digest of the model on this machine; None if it isn't here, or no profile needs to be compared with
    it."""
    model = Path(run_file.on_this_machine(config, node).model.path)
    if not (model / "config.json").is_file() or not any(look.profiles for look in looks.values()):
        return None
    return model_digests(model).whole


def _statistics(
    file: Path, node: str, overrides: Mapping[str, str], config: RunFile
) -> tuple[DataStatistics | None, list[str]]:
    """Return the data's statistics, if their lengths matter: texts fill their blocks, and only evaluations need their
    number."""
    if config.data.kind == "text" and not config.evaluate.every_steps:
        return None, []
    try:
        return data_preview.read(file, node, 0, overrides), []
    except InvalidInputError as error:
        return None, [f"the data couldn't be read here ({error}): sequence_length stands for their lengths"]


def _run(
    file: Path,
    config: RunFile,
    model: ModelFacts | None,
    memory: MemoryEstimate | None,
    data: DataStatistics | None,
    lead: str,
) -> PlannedRun:
    objective = objective_of(config.objective, config.data.kind)
    tokens = config.data.sequence_length * objective.sequences
    every, kept = config.evaluate.every_steps, config.checkpoint
    return PlannedRun(
        file=str(file),
        steps=config.run.steps,
        global_batch=config.batch.global_,
        unit=objective.sample_unit,
        tokens_per_sample=data.tokens / data.samples if data is not None and data.packing == "none" else tokens,
        sequences=objective.sequences,
        dtype=config.model.computed,
        auto_dtype=config.model.dtype == "auto",
        lead=lead,
        parameters=memory.parameters if memory else None,
        trained=memory.trained if memory else None,
        gradient_bytes=memory.gradient_bytes if memory else None,
        adapter_gradient_bytes=_with_adapter(config, model),
        flops=step_flops(config.adapter, model, str(file)),
        schedules={"checkpoint": Schedule(kept.every_steps, kept.at_end), "evaluate": Schedule(every)},
        checkpoint_bytes=CHECKPOINT_BYTES * memory.trained if memory else 0,
        background_checkpoints=kept.background,
        held_out=data.held_out if data is not None else 0,
    )


def _with_parameters(run: PlannedRun, trained: int | None) -> PlannedRun:
    """Return a plan whose number of trained parameters is a person's, because the model's files aren't here."""
    if trained is None:
        return run
    return msgspec.structs.replace(
        run, trained=trained, gradient_bytes=4 * trained, checkpoint_bytes=CHECKPOINT_BYTES * trained
    )


def _with_adapter(config: RunFile, model: ModelFacts | None) -> int | None:
    """Bytes of gradients with LoRA of the default rank; None if the run has adapters, or its model can't have any."""
    if model is None or config.adapter.kind != "full" or model.crossing or config.model.init == "random":
        return None
    table = AdapterTable(kind="lora")
    try:
        found = adapted_layers(table, model.shapes, "")
    except InvalidInputError:
        return None
    return 4 * table.rank * sum(rows + columns for rows, columns in found.shapes.values())


def _with_links(look: NodeLook) -> DeviceProfile | None:
    """Return the newest profile of a node that has links, whatever it was made for."""
    return next((profile for profile in look.profiles if profile.links), None)


def _lead(names: Sequence[str], profiles: Sequence[DeviceProfile]) -> str:
    """Return the node to which most links were measured, or the first."""
    peers = Counter(link.peer for profile in profiles for link in profile.links)
    known = [peer for peer, _ in peers.most_common() if peer in names]
    return known[0] if known else names[0]


# ---------------------------------------------------------------- nodes


def _node(
    config: RunFile, name: str, look: NodeLook, address: str | None, digest: str | None, memory: MemoryModel | None
) -> NodeFacts:
    table = config.nodes.get(name, NodeTable())
    fitting = [profile for profile in look.profiles if _fits(profile, config, name, digest)]
    newest = fitting[0] if fitting else next(iter(look.profiles), None)
    gpu = look.host.gpu_of(table.device) if look.host is not None else None
    device = newest.key.device if newest is not None else gpu.name if gpu is not None else ""
    datasheet = device_of(device)
    return NodeFacts(
        name=name,
        profiles=tuple(fitting),
        other_profile=newest,
        device=device,
        machine=_machine(look, address),
        cores=look.facts.cpu_count if look.facts else None,
        threads=table.threads,
        cpu_quota=look.facts.cpu_quota if look.facts else None,
        system=look.facts.system if look.facts else _system_of(device),
        cap_bytes=_cap(table, device, fitting, look),
        shared_bytes=_shared(device, look),
        backend=newest.key.backend if newest is not None else "" if table.backend == AUTO else table.backend,
        micro=config.batch.micro if table.micro is None else table.micro,
        share=table.share,
        memory=memory,
        watts=datasheet.watts if datasheet is not None else None,
        compile_lacks=lacks_of(look.facts.compile_lacks, table.device) if look.facts else None,
        problem="" if newest is not None else look.problem or "it has no profile: run trainctl calibrate",
    )


def _fits(profile: DeviceProfile, config: RunFile, node: str, digest: str | None) -> bool:
    """Return whether a profile is of this run, whatever versions of the libraries made it.

    Where "auto" couldn't be resolved, the profile says what it was when it was calibrated.
    """
    key = profile.key
    types = (*AUTO_TYPES, "float32") if config.model.dtype == "auto" else (config.model.dtype,)
    return (
        key.sequence_length == config.data.sequence_length
        and key.dtype in types
        and key.settings == settings_digest(config, node)
        and digest in (None, key.model_digest)
    )


def _machine(look: NodeLook, address: str | None) -> str:
    """Equal for nodes of one machine: its boot, or its host by the address."""
    if look.facts is not None and look.facts.boot:
        return look.facts.boot
    if address is None or addresses.is_near(address):
        return boot_id() or "this machine"
    return addresses.host(address)


def _system_of(device: str) -> str:
    return "Darwin" if "apple" in device.lower() else ""


def _cap(table: NodeTable, device: str, fitting: Sequence[DeviceProfile], look: NodeLook) -> int | None:
    """Bytes that the node's rank may take: as set, as calibrated with these settings, of its GPU, or of its machine.
    Other profiles don't count: their settings may have limited it."""
    if table.memory_limit_gb is not None:
        return int(table.memory_limit_gb * 1e9)
    if fitting and fitting[0].memory_cap_bytes is not None:
        return fitting[0].memory_cap_bytes
    gpu = look.host.gpu_of(table.device) if look.host is not None else None
    if gpu is not None and gpu.memory_total_bytes and "apple" not in gpu.name.lower():
        return gpu.memory_total_bytes
    if _has_own_memory(device):
        return None  # its datasheet's, if that is known
    total = look.facts.memory_total_bytes if look.facts is not None else _memory_here(look)
    part = APPLE_PART if look.facts is not None and look.facts.system == "Darwin" else 1.0
    limits = [look.facts.memory_limit_bytes if look.facts is not None else None, int(part * total) if total else None]
    return min((limit for limit in limits if limit), default=None)


def _shared(device: str, look: NodeLook) -> int | None:
    """Bytes of a machine whose ranks compute in its main memory: on CPUs and Apple's GPUs."""
    if _has_own_memory(device):
        return None
    return look.facts.memory_total_bytes if look.facts is not None else _memory_here(look)


def _has_own_memory(device: str) -> bool:
    return "nvidia" in device.lower() or device.startswith("cuda")


def _memory_here(look: NodeLook) -> int | None:
    """Return this machine's memory, for a node whose profiles are in its folder here and whose agent doesn't run."""
    if not look.profiles:
        return None
    import psutil

    total: int = psutil.virtual_memory().total
    return total if sys.platform != "darwin" else int(APPLE_PART * total)
