"""The subcommands that look at a run file before it is run: `check`, and `data` at its data."""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from trainctl.protocol.batch.settings_rules import unusual_settings
from trainctl.protocol.batch.split import Machine, share_cores
from trainctl.protocol.config import run_file as runfile
from trainctl.protocol.config.names import node_name
from trainctl.protocol.config.objectives import sample_unit
from trainctl.protocol.config.run_tables import NodeTable, RunFile
from trainctl.protocol.errors import Collected, InvalidInputError, NotCachedError
from trainctl.protocol.machine.cgroups import usable_cores
from trainctl.tui.cli import output
from trainctl.tui.cli.options import ClusterFile, Json, Set, subcommands, subgroup
from trainctl.tui.commands import arguments, targets
from trainctl.tui.commands.checked_run_file import CheckedRunFile, check_run_file, nodes_here
from trainctl.tui.setup import data_check, data_preview, memory_report, offers

app = subcommands()
group = subgroup("Inspect a run's training data.")
app.add_typer(group, name="data")


def checked_run_file(
    file: Path, overrides: dict[str, str], *, local: bool, cluster: targets.ClusterFile | None, json: bool
) -> CheckedRunFile:
    """Return the run file, checked. A person is asked before a model that isn't in the Hugging Face cache is
    downloaded."""
    try:
        checked = check_run_file(file, overrides, local=local, cluster=cluster)
    except NotCachedError as missing:
        offers.offer_download(missing, may_ask=not json, tell=output.tell)
        checked = check_run_file(file, overrides, local=local, cluster=cluster)
    for hint in runfile.old_names(file):
        output.tell(f"{file}: {hint}")
    return checked


@app.command()
def check(
    file: Annotated[Path, typer.Argument(metavar="RUN.toml", show_default=False)],
    set_: Set = None,
    cluster: ClusterFile = None,
    json: Json = False,
) -> int:
    """Check a run file before you run it. Reports every problem it can find, one per line (--json: error.problems).

    It checks the fields, that the nodes are in the cluster, and that the model and data exist and aren't empty. It
    reads the weights' headers. If nothing is wrong with these, it reads all data as a trainer does, up to 64 MB, with
    PyTorch or MLX installed. It can't see files on other machines: their agents check them when the run starts. A node
    with a loopback address may also be on a different machine, behind a forwarded port. No model is loaded, and nothing
    is started. On a terminal, it offers to download a model that isn't in the Hugging Face cache.

    It prints how many parameters are trained, the gradients that each step sums, and an estimate of each node's memory.
    It warns of settings that are probably mistakes, with the usual range and its source; they don't fail the check.
    For dpo with reference = "cached", it prints whether the reference's log-probabilities are there, and their size.
    """
    found = targets.cluster_file(cluster)
    overrides = arguments.pairs(set_ or [], "--set")
    overrides = data_check.with_steps(file, overrides)
    read = checked_run_file(file, overrides, local=True, cluster=found, json=json)
    config, unseen, here = read.config, read.unseen, read.here
    parsed = runfile.parse(config, str(file))
    nodes = tuple(config["nodes"]) or (found.nodes if found is not None else ())
    if found is None and len(nodes) > 1:
        output.tell("the run has several nodes: give --cluster FILE to check their names and the files on this machine")
    wrong, report, data = Collected(), None, data_check.DataRead()
    with wrong.going_on():
        report = memory_report.report_of(parsed, nodes, str(file), here)
    with wrong.going_on():
        data = data_check.read(parsed, file, here, overrides)
    wrong.raise_any()
    epoch = data.size.epoch if data.size is not None else None
    unusual = unusual_settings(parsed, data.size)
    if json:
        references = msgspec.to_builtins(dict(data.references))
        output.emit_ok(
            config=config,
            nodes=nodes,
            unseen=unseen,
            data_read=not data.unread,
            model=report and report.plain,
            references=references,
            epoch_samples=epoch,
            unusual=msgspec.to_builtins(unusual),
        )
        return 0
    if any(not field.endswith(".cache_path") for field in unseen):
        output.tell(f"to copy model and data to the nodes that lack them, run trainctl cluster sync {file}")
    for field, path in unseen.items():
        output.tell(f"{field}: {path} isn't on this machine; that node's agent checks for it when the run starts")
    if data.unread:
        output.tell(data.unread)
    if runfile.grows(parsed):
        output.tell(f"{config['data']['path']} still grows: what is written to it later is checked during the run")
    ranks = f" on {len(nodes)} nodes: {', '.join(nodes)}" if len(nodes) > 1 else ""
    unit, steps, batch = sample_unit(parsed.objective.kind), config["run"]["steps"], config["batch"]["global"]
    epochs = f", {steps * batch / epoch:,.3g} epochs of {epoch:,}" if epoch else ""
    output.say(f"{file}: no problems found; {steps:,} steps of {batch:,} {unit}{epochs}{ranks}")
    for line in _shared_cores(parsed, nodes, here):
        output.say(line)
    for line in memory_report.report_lines(report) if report is not None else ():
        output.say(line)
    for each in unusual:
        output.say(f"warning: {each.text}; to change it: --set {each.change}")
    for node, reference in data.references.items():
        output.say(f"reference{f' on {node}' if node else ''}: {data_preview.reference_text(reference)}")
    return 0


def _shared_cores(config: RunFile, nodes: Sequence[str], here: Sequence[str]) -> tuple[str, ...]:
    """Return how ranks on this machine will divide its cores; nothing of one rank."""
    tables = {node: config.nodes.get(node, NodeTable()) for node in nodes}
    own = Machine("here", usable_cores())
    return share_cores(msgspec.structs.replace(config, nodes=tables), dict.fromkeys(here, own))[1]


@group.command()
def preview(
    file: Annotated[Path, typer.Argument(metavar="RUN.toml", show_default=False)],
    samples: Annotated[int, typer.Option("--samples", "-n", min=0, max=1000, help="Samples to print.")] = 3,
    node: Annotated[
        str | None, typer.Option(metavar="NODE", help="Use this node's paths [this machine's].", show_default=False)
    ] = None,
    set_: Set = None,
    json: Json = False,
) -> int:
    """Print statistics of a run's data, and its first samples with the tokens that count in the loss."""
    found = data_preview.read(file, node or node_name(), samples, arguments.pairs(set_ or [], "--set"))
    if json:
        output.emit_ok(**msgspec.to_builtins(found))
        return 0
    for line in data_preview.statistics_lines(found):
        output.say(line)
    clean = partial(output.log_text, raw=False)
    for sample in found.shown:
        output.say(f"\n{output.one_line(sample.place)}")
        output.say(data_preview.sample_text(sample, clean, color=output.has_color()))
    return 0


@group.command()
def bench(
    file: Annotated[Path, typer.Argument(metavar="RUN.toml", show_default=False)],
    need: Annotated[
        float | None,
        typer.Option(
            metavar="TOKENS_PER_SECOND", min=1, show_default=False, help="Rate that training needs on this machine."
        ),
    ] = None,
    no_model: Annotated[bool, typer.Option("--no-model", help="Don't load the model to time it.")] = False,
    node: Annotated[
        str | None, typer.Option(metavar="NODE", help="Use this node's settings [this machine's].", show_default=False)
    ] = None,
    set_: Set = None,
    json: Json = False,
) -> int:
    """Measure how fast a run's data are tokenized and read, beside what training takes.

    It tokenizes all data into a temporary folder. Then it assembles micro-batches for a few seconds, from the disk and
    from memory. The rate that training needs is --need, or the rate of the newest run with the same settings on
    this machine. Without either, a few micro-batches of the model are timed.
    """
    if need is not None and not math.isfinite(need):
        raise InvalidInputError("--need", "must be a finite number of tokens per second")
    overrides = arguments.pairs(set_ or [], "--set")
    config = runfile.read(file, overrides)
    here = node or next(iter(nodes_here(config)), "") or node_name()
    known = data_preview.known_need(config, here, need)
    found = data_preview.measure_speed(file, here, overrides, known, may_load=not no_model)
    if json:
        output.emit_ok(**msgspec.to_builtins(found))
        return 0
    for line in data_preview.speed_lines(found):
        output.say(line)
    return 0
