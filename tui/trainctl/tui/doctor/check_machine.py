"""Findings that one machine's own facts show: installation, keys, disk, memory, open files, power, environment
variables."""

import shlex
from collections.abc import Iterator

from trainctl.protocol.config import addresses
from trainctl.protocol.config.run_file import needs_torch, on_node
from trainctl.protocol.config.run_tables import NodeTable, RunFile
from trainctl.protocol.config.variables import meaning_of
from trainctl.protocol.errors import installing
from trainctl.protocol.machine.facts import lacks_of
from trainctl.protocol.messages import Facts
from trainctl.tui.doctor.findings import Finding, Level, Look

GB = 1e9
LEAST_FREE_BYTES, LOW_FREE_BYTES = 5 * GB, 20 * GB
LEAST_FILES, LOW_FILES = 256, 4096
TIGHT_MEMORY = 0.8
"""A limit below this part of the machine's memory is worth a word."""


def of_machine(look: Look, facts: Facts) -> Iterator[Finding]:
    """Yield all findings of one node."""
    for check in (_installation, _keys, _sockets, _disk, _memory, _files, _compiler, _power):
        yield from check(look, facts)


def _installation(look: Look, facts: Facts) -> Iterator[Finding]:
    backends = [f"{name} {facts.libraries[name]}" for name in ("torch", "mlx") if name in facts.libraries]
    what = f"trainctl {facts.version or '(not installed)'}, Python {facts.python}, {facts.system} {facts.machine}"
    if tuple(int(part) for part in facts.python.split(".")[:2]) < (3, 11):
        yield Finding(
            "fail", look.name, "version", f"{what}: Python is too old", "install Python 3.11 or newer on that machine"
        )
    elif not backends:
        yield Finding(
            "warn",
            look.name,
            "version",
            f"{what}; it has neither torch nor mlx, so it can't host a rank",
            f"{installing('torch', 'mlx')} there",
        )
    else:
        yield Finding("ok", look.name, "version", f"{what}, {', '.join(backends)}")
    for name in facts.namesakes:
        project = name.partition(" ")[0]
        if project == "trainctl":
            text, remedy = "is another project's package of the same name", f"then {installing('tui')}"
        else:
            text, remedy = "lists files that belong to trainctl now", "then install trainctl again"
        yield Finding(
            "fail",
            look.name,
            "version",
            f"{name} is installed there and {text}",
            f"run pip uninstall {project} there, {remedy}",
        )


def _keys(look: Look, facts: Facts) -> Iterator[Finding]:
    if not facts.key_files:
        if addresses.socket_path(look.address) is not None:
            yield Finding("ok", look.name, "keys", "no keys; a Unix socket needs none")
        elif addresses.is_near(look.address):
            yield Finding(
                "warn",
                look.name,
                "keys",
                "no keys: every user of that machine is an operator of its agent",
                "start it without --listen and --no-keys, or run trainctl keys new there",
            )
        else:
            yield Finding(
                "fail",
                look.name,
                "keys",
                f"no keys in {facts.keys_folder}, which TCP needs",
                "run trainctl keys new on that machine",
            )
        return
    wrong = list(_wrong_modes(look.name, facts))
    yield from wrong
    if not wrong:
        yield Finding("ok", look.name, "keys", f"only its user can read {facts.keys_folder}")


def _wrong_modes(node: str, facts: Facts) -> Iterator[Finding]:
    for file in facts.key_files:
        folder = file.path == facts.keys_folder
        if not file.is_own:
            yield Finding(
                "fail",
                node,
                "keys",
                f"{file.path} belongs to another user",
                f"give it to the agent's user: chown $USER {shlex.quote(file.path)}",
            )
        elif file.mode & 0o077:
            yield Finding(
                "fail",
                node,
                "keys",
                f"other users can access {file.path} (mode {file.mode:04o})",
                f"chmod {'700' if folder else '600'} {shlex.quote(file.path)}, and create new keys if other "
                f"people use that machine",
            )


def _sockets(look: Look, facts: Facts) -> Iterator[Finding]:
    for path in facts.lost_sockets:
        folder = path.rpartition("/")[0]
        text = (
            f"its socket {path} is gone, and its folder can't be made: programs that know only this path can't reach it"
        )
        yield Finding(
            "warn", look.name, "socket", text, f"make {folder} possible again (log in, or loginctl enable-linger)"
        )


def _disk(look: Look, facts: Facts) -> Iterator[Finding]:
    free, total = facts.disk_free_bytes, facts.disk_total_bytes
    if free is None or not total:
        yield Finding("warn", look.name, "disk", f"the disk holding {facts.state_folder} can't be read")
        return
    text = f"{free / GB:,.0f} GB of {total / GB:,.0f} GB free at {facts.state_folder}"
    if free < LOW_FREE_BYTES:
        level: Level = "fail" if free < LEAST_FREE_BYTES else "warn"
        yield Finding(
            level,
            look.name,
            "disk",
            f"{text}: checkpoints will fill it",
            "remove old run directories, or set TRAINCTL_STATE to a folder on a larger disk",
        )
    else:
        yield Finding("ok", look.name, "disk", text)


def _memory(look: Look, facts: Facts) -> Iterator[Finding]:
    limit, total = facts.memory_limit_bytes, facts.memory_total_bytes
    if limit is not None and total and limit < TIGHT_MEMORY * total:
        yield Finding(
            "warn",
            look.name,
            "memory",
            f"a control group limits it to {limit / GB:,.1f} GB of {total / GB:,.1f} GB: the kernel kills a "
            f"rank that uses more",
            "raise the service's or container's memory limit, or set [nodes.X] memory_limit_gb below it",
        )
    elif total:
        yield Finding("ok", look.name, "memory", f"{total / GB:,.1f} GB" + ("" if limit else ", not limited"))


def _files(look: Look, facts: Facts) -> Iterator[Finding]:
    limit = facts.open_files
    if limit is not None and limit < LOW_FILES:
        level: Level = "fail" if limit < LEAST_FILES else "warn"
        yield Finding(
            level,
            look.name,
            "files",
            f"at most {limit:,} open files: too few for many clients",
            "run ulimit -n 65536 before you start the agent, or install it as a service",
        )
    else:
        yield Finding("ok", look.name, "files", f"up to {limit:,} open files" if limit else "unlimited open files")


def _compiler(look: Look, facts: Facts) -> Iterator[Finding]:
    if "torch" not in facts.libraries:
        return
    text = f"C++ compiler: {facts.compiler}" if facts.compiler else "no C++ compiler"
    known = facts.compile_lacks or {}
    if able := [kind for kind, lacks in known.items() if not lacks]:
        text += f"; [model] compile can be used on {' and '.join(able)}"
    for kind, lacks in known.items():
        text += f"; [model] compile can't be used on {kind}: no {' and no '.join(lacks)}" if lacks else ""
        text += ", and updates in bfloat16 take several times as long" if lacks and kind == "cuda" else ""
    if facts.compile_lacks is None and not facts.compiler:  # of an agent that doesn't say it by device
        text += ": torch needs one for compile in [model], which is off by default"
    yield Finding("ok", look.name, "compiler", text)


def of_compile(look: Look, facts: Facts, run: RunFile | None) -> Iterator[Finding]:
    """Yield whether a node can compile the model, if the run file wants it there."""
    if run is None or look.name not in (run.nodes or {look.name}):
        return
    table, mode = run.nodes.get(look.name, NodeTable()), on_node(run, look.name).model.compile
    by_default = facts.system == "Darwin" and "mlx" in facts.libraries and not needs_torch(run)
    on_mlx = table.backend == "mlx" or (table.backend == "auto" and by_default)
    lacks = lacks_of(facts.compile_lacks, table.device) if not on_mlx and mode != "off" else None
    if lacks:
        text = f'compile is "{mode}" here, but there is no {" and no ".join(lacks)}'
        do = f'install what is missing, or set compile = "off" in [nodes.{look.name}]'
        yield Finding("fail", look.name, "compiler", text, do)


def _power(look: Look, facts: Facts) -> Iterator[Finding]:
    if facts.lid_closed:
        yield Finding(
            "warn", look.name, "power", "the lid is closed: the machine runs hotter and may sleep", "open the lid"
        )
    if facts.on_battery:
        charge = f" ({facts.battery_percent:.0f} %)" if facts.battery_percent is not None else ""
        yield Finding(
            "warn", look.name, "power", f"on battery{charge}: it runs slower, and only for a few hours", "plug it in"
        )
    elif facts.on_battery is not None and not facts.lid_closed:
        yield Finding("ok", look.name, "power", "plugged in")


def of_environment(look: Look, facts: Facts) -> Iterator[Finding]:
    """Yield a line for each variable that is set; they are the agent's, and its trainers inherit them."""
    for name, value in facts.environment.items():
        if (meaning := meaning_of(name, value)) is not None:
            yield Finding(meaning.level, look.name, "environment", f"{name}={value}: {meaning.text}", meaning.do)
