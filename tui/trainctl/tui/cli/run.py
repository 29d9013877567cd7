"""The subcommands that take a run file: `run` starts or resumes a run, `check` and `data` look at it first."""

import asyncio
import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

import msgspec
import typer

from trainctl.protocol import messages as m
from trainctl.protocol.batch.core_sharing import Machine, share_cores
from trainctl.protocol.config import run_file as runfile
from trainctl.protocol.config.names import node_name
from trainctl.protocol.config.objectives import sample_unit
from trainctl.protocol.config.run_tables import NodeTable, RunFile
from trainctl.protocol.config.usual_settings import unusual_settings
from trainctl.protocol.errors import Collected, InvalidInputError, NotCachedError, RefusedError
from trainctl.protocol.machine.cgroups import usable_cores
from trainctl.protocol.messages import verbs
from trainctl.protocol.messages.events import CommandFailed, RunStateChanged
from trainctl.tui.cli import agent_call, command_result, output, run_lookup
from trainctl.tui.cli.options import (
    ClusterFile,
    Connect,
    Json,
    JsonLines,
    Set,
    Timeout,
    complete_nodes,
    subcommands,
    subgroup,
    where,
)
from trainctl.tui.cli.run_lookup import complete_runs
from trainctl.tui.commands import arguments, command, targets
from trainctl.tui.setup import (
    data_bench,
    data_check,
    data_preview,
    hub_download,
    memory_report,
    standard_input,
    start_agent,
)
from trainctl.tui.setup.standard_input import InputCopy

LOOK_SECONDS = 2.0
"""Time between looks at what the ranks of a starting run do."""
app = subcommands()
group = subgroup("Inspect a run's training data.")
app.add_typer(group, name="data")


@app.command()
def run(
    ctx: typer.Context,
    file: Annotated[Path | None, typer.Argument(metavar="RUN.toml", show_default=False)] = None,
    set_: Set = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            metavar="RUN",
            help="Resume this run instead of starting a new one.",
            autocompletion=complete_runs,
        ),
    ] = None,
    branch: Annotated[
        str | None,
        typer.Option(
            "--branch",
            metavar="RUN@STEP",
            help="Start a new run from this checkpoint of RUN, with RUN's own run file unless RUN.toml is given.",
            autocompletion=complete_runs,
        ),
    ] = None,
    node: Annotated[
        str | None,
        typer.Option(
            "--node",
            metavar="NODE",
            show_default=False,
            help="The node that will lead the run.",
            autocompletion=complete_nodes,
        ),
    ] = None,
    old_lead_is_off: Annotated[
        bool,
        typer.Option(
            "--old-lead-is-off",
            help="With --resume: skip the vote. Use it only if the old lead is powered off.",
        ),
    ] = False,
    from_step: Annotated[
        int | None,
        typer.Option(
            "--from-step",
            min=0,
            show_default=False,
            metavar="STEP",
            help="With --resume: continue from the checkpoint of this step, not from the newest. 0 starts over.",
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            min=1,
            show_default=False,
            metavar="N",
            help="With --resume: train to this step, if no earlier step would have been different.",
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print its steps and events as they happen (Ctrl-C detaches).")
    ] = False,
    connect: Connect = None,
    cluster: ClusterFile = None,
    timeout: Timeout = 600.0,
    json: JsonLines = False,
) -> int:
    """Start or resume a run, or branch off one, and print its id.

    With data.path = "-", its data are the rows on standard input. It reads them to their end; the run then continues.
    """
    if (file is None and branch is None) == (resume is None):
        wanted = "RUN.toml to start a run, --branch RUN@STEP to branch off one, or --resume RUN to resume one"
        raise InvalidInputError("run", f"give {wanted}")
    if resume is not None and set_:
        raise InvalidInputError(
            "--set",
            "a resumed run keeps its own run file: leave out --set, and change it with trainctl send, or use "
            "--branch in place of --resume",
        )
    if resume is None and from_step is not None:
        raise InvalidInputError("--from-step", "only a run that is resumed has earlier steps: add --resume RUN")
    if resume is None and steps is not None:
        raise InvalidInputError("--steps", "only extends a run that is resumed: for a new one, --set run.steps=N")
    at = where(ctx, connect, cluster)
    overrides = arguments.pairs(set_ or [], "--set")
    with standard_input.copied(file, overrides, at.addresses[0], output.tell) as copy:
        settings = {**overrides, **(copy.overrides if copy else {})}
        settings = data_check.with_steps(file, settings) if file is not None else settings
        chosen = _Chosen(file, settings, resume, branch, node, timeout, from_step, steps)
        code = _start(at, chosen, copy, old_lead_is_off=old_lead_is_off, follow=follow, json=json)
        if copy is not None and copy.begun and not follow:
            copy.wait()
    return code


class _Chosen(NamedTuple):
    """The run to start, to resume or to branch off."""

    file: Path | None
    overrides: dict[str, str]
    resume: str | None
    branch: str | None
    node: str | None
    timeout: float
    from_step: int | None
    steps: int | None


def _start(
    at: targets.Where, chosen: _Chosen, copy: InputCopy | None, *, old_lead_is_off: bool, follow: bool, json: bool
) -> int:
    file, overrides, resume, branch, node, timeout, from_step, steps = chosen
    args: dict[str, Any] = {} if resume is None else {"resume": arguments.check_text(resume, "--resume")}
    if branch is not None:
        args["branch"] = arguments.check_text(branch, "--branch")
    if file is not None:
        local = targets.is_local(at.addresses[0])
        args["config"] = _run_file(file, overrides, local=local, cluster=at.cluster, json=json).message
    elif overrides:
        args["overrides"] = overrides
    args |= {"old_lead_is_off": True} if old_lead_is_off else {}
    args |= {"from_step": from_step} if from_step is not None else {}
    args |= {"steps": steps} if steps is not None else {}
    order = command.make_order("start-run", args, node=node, ttl_seconds=min(86400.0, max(60.0, timeout)))
    if not json:
        start_agent.offer(at, output.tell)
    with command_result.told(order, json=json):
        args = run_lookup.with_ids(at.addresses, args)
        order, resume = replace(order, args=args), args.get("resume")
        address = _asked(at, args, node)
        before = agent_call.call(address, lambda client: _as_it_was(client, resume)) if follow and resume else None
        begins = follow or copy is not None  # its first step may be far off
        wait: command.Wait = "accepted" if begins else "applied"
        if begins or json:
            reply = command_result.send(address, order, wait, agent_call.ANSWER_SECONDS if begins else timeout)
        else:
            reply = agent_call.call(address, lambda client: _sent_and_told(client, order, timeout))
    if copy is not None:
        copy.begun = not command.exit_code(reply)
    reply = reply if json or file is None else _by_file(reply, file)
    if follow:
        return _run_and_follow(address, order, reply, before, json=json)
    if (code := command.exit_code(reply)) or reply.run is None:
        return command_result.finish(order, reply, json=json, code=code)
    return _show_started(order, reply, reply.run, json=json)


def _asked(at: targets.Where, args: dict[str, Any], node: str | None) -> str:
    """Return the address of the agent that is asked: one that knows the run which is resumed or branched off, else one
    of the nodes that will take part. Raises UnreachableError if none answers."""
    if known := args.get("resume") or (args.get("branch") and verbs.branch_point(args["branch"])[0]):
        return agent_call.find_lead(at.addresses, known)
    wanted = [node] if node is not None else [*args["config"].get("nodes", ())]
    own = [at.cluster.address_of(name) for name in wanted if name in at.cluster.nodes] if at.cluster is not None else []
    return agent_call.find_any(own) if own else agent_call.find_lead(at.addresses)


async def _sent_and_told(client: Any, order: command.Order, seconds: float) -> m.CommandReply:
    """Send the command and wait until it is applied. Tell what the ranks do until then: loading and calibrating may
    take minutes."""
    telling = asyncio.create_task(_tell_of_start(client), name="start")
    try:
        return await command.send(client, order, "applied", seconds)
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)


async def _tell_of_start(client: Any, name: str | None = None) -> None:
    """Tell the run's id, then what its ranks do until all of them train: not until a step, which a resumed run has."""
    words: dict[str, str] = {}
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        run = (await client.snapshot(0, name)).run
        if run is None or run.state not in m.ACTIVE_RUN_STATES:
            continue
        if not words:
            output.tell(f"{run.run} is starting")
        if run.state == "running" and all(rank.state == "run" for rank in run.ranks):
            output.tell("all ranks are ready; evaluations and answers that the run file asks for come before a step")
            return
        for rank in run.ranks:
            if rank.state == "starting" and rank.why and words.get(rank.node) != rank.why:
                output.tell(f"{rank.node}: {rank.why}")
            words[rank.node] = rank.why


def _run_file(
    file: Path, overrides: dict[str, str], *, local: bool, cluster: targets.ClusterFile | None, json: bool
) -> targets.RunFile:
    """The run file, checked. A person is asked before a model that isn't in the Hugging Face cache is downloaded."""
    try:
        return targets.run_file(file, overrides, local=local, cluster=cluster)
    except NotCachedError as missing:
        hub_download.offer(missing, may_ask=not json, tell=output.tell)
    return targets.run_file(file, overrides, local=local, cluster=cluster)


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
    read = _run_file(file, overrides, local=True, cluster=found, json=json)
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
            config=config, nodes=nodes, unseen=unseen, data_read=not data.unread, model=report and report.plain,
            references=references, epoch_samples=epoch, unusual=msgspec.to_builtins(unusual),
        )  # fmt: skip
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
    for sample in found.shown:
        output.say(f"\n{output.one_line(sample.place)}")
        output.say(data_preview.sample_text(sample, _clean, color=output.has_color()))
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
        str | None,
        typer.Option(metavar="NODE", help="Use this node's settings [this machine's].", show_default=False),
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
    here = node or next(iter(targets.nodes_here(config)), "") or node_name()
    known = data_bench.known_need(config, here, need)
    found = data_bench.measure(file, here, overrides, known, may_load=not no_model)
    if json:
        output.emit_ok(**msgspec.to_builtins(found))
        return 0
    for line in data_bench.lines(found):
        output.say(line)
    return 0


def _clean(text: str) -> str:
    return output.log_text(text, raw=False)


def _by_file(reply: m.CommandReply, file: Path) -> m.CommandReply:
    """With the field that was refused named as the person wrote it: in the run file, not in the message."""
    field = (reply.field or "").removeprefix("config: ")
    if field == (reply.field or ""):
        return reply
    reason = runfile.with_remedy(reply.reason, field, "the agent")
    return msgspec.structs.replace(reply, field=f"{file}: {field}", reason=reason)


async def _as_it_was(client: Any, run: str) -> m.Snapshot | None:
    """Return a snapshot of the run before it is resumed, or None if the agent doesn't know it: the command says so."""
    with contextlib.suppress(RefusedError, InvalidInputError):
        return cast(m.Snapshot, await client.snapshot(0, run))
    return None


def _run_and_follow(
    address: str, order: command.Order, reply: m.CommandReply, before: m.Snapshot | None, *, json: bool
) -> int:
    """Follow the run from its start, or a resumed one from where it was `before`."""
    if code := command.exit_code(reply):
        return command_result.finish(order, reply, json=json, code=code)
    active = agent_call.call(address, lambda client: client.snapshot(0, reply.run)).run
    run = reply.run or (active.run if active is not None else "")
    _show_started(order, reply, run, json=json)
    try:
        return agent_call.call(address, lambda client: _followed(client, run, before, json=json))
    except KeyboardInterrupt:
        output.tell(
            f"detached; {run} continues. Watch it with trainctl attach or trainctl watch; stop it with trainctl send "
            f"stop"
        )
        return command_result.INTERRUPTED


async def _followed(client: Any, run: str, before: m.Snapshot | None, *, json: bool) -> int:
    from trainctl.tui.cli import watch

    def keep(item: watch.Line) -> bool:
        return json or not _says_why_it_failed(item)

    telling = None if json else asyncio.create_task(_tell_of_start(client, run), name="start")
    try:
        view = await watch.show(
            client, keep, json=json, run=run, since=before, from_start=before is None, until_end=True
        )
    finally:
        if telling is not None:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)
    if view is None or view.state != "failed":
        return 0
    now = (await client.snapshot(0, run)).run or view
    output.complain(f"{run} failed: {now.reason or 'no reason given'}")
    return RefusedError.exit_code


def _says_why_it_failed(item: Any) -> bool:
    """Whether it is an event with the reason for which the run failed: the last line says it."""
    if not isinstance(item, m.Event):
        return False
    ended = isinstance(item.data, RunStateChanged) and item.data.after == "failed"
    return ended or (item.verb == "start-run" and isinstance(item.data, CommandFailed))


def _show_started(order: command.Order, reply: m.CommandReply, run: str, *, json: bool) -> int:
    return output.answer(run, json=json, **{**command_result.fields(order, reply), "run": run})
