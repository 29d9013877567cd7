"""`trainctl run` starts, resumes or branches off a run, and follows it."""

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
import typer

from trainctl.protocol.config import run_file as runfile
from trainctl.protocol.errors import InvalidInputError, RefusedError
from trainctl.protocol.messages import ACTIVE_RUN_STATES, CommandReply, Event, Snapshot, SnapshotRequest, verbs
from trainctl.protocol.messages.events import CommandFailed, RunStateChanged
from trainctl.tui.cli import agent_call, output, runs
from trainctl.tui.cli.check import checked_run_file
from trainctl.tui.cli.options import ClusterFile, Connect, JsonLines, Set, Timeout, complete_nodes, subcommands, where
from trainctl.tui.cli.runs import complete_runs
from trainctl.tui.commands import arguments, command, targets
from trainctl.tui.setup import data_check, offers, standard_input
from trainctl.tui.setup.standard_input import InputCopy

LOOK_SECONDS = 2.0
"""Time between looks at what the ranks of a starting run do."""
app = subcommands()


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
            "--old-lead-is-off", help="With --resume: skip the vote. Use it only if the old lead is powered off."
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
        options = {
            "resume": resume and arguments.check_text(resume, "--resume"),
            "branch": branch and arguments.check_text(branch, "--branch"),
            "old_lead_is_off": old_lead_is_off or None,
            "from_step": from_step,
            "steps": steps,
        }
        args: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        if file is not None:
            local = targets.is_local(at.addresses[0])
            args["config"] = checked_run_file(file, settings, local=local, cluster=at.cluster, json=json).message
        elif settings:
            args["overrides"] = settings
        code = _start(at, args, file, copy, node=node, timeout=timeout, follow=follow, json=json)
        if copy is not None and copy.begun and not follow:
            copy.wait()
    return code


def _start(
    at: targets.Where,
    args: dict[str, Any],
    file: Path | None,
    copy: InputCopy | None,
    *,
    node: str | None,
    timeout: float,
    follow: bool,
    json: bool,
) -> int:
    order = command.make_order("start-run", args, node=node, ttl_seconds=min(86400.0, max(60.0, timeout)))
    if not json:
        offers.offer_agent(at, output.tell)
    with agent_call.told(order, json=json):
        args = runs.with_ids(at.addresses, args)
        order, resume = replace(order, args=args), args.get("resume")
        address = _asked(at, args, node)
        before = agent_call.call(address, lambda client: _as_it_was(client, resume)) if follow and resume else None
        begins = follow or copy is not None  # its first step may be far off
        wait: command.Wait = "accepted" if begins else "applied"
        if begins or json:
            reply = agent_call.send(address, order, wait, agent_call.ANSWER_SECONDS if begins else timeout)
        else:
            reply = agent_call.call(address, lambda client: _sent_and_told(client, order, timeout))
    if copy is not None:
        copy.begun = not command.exit_code(reply)
    reply = reply if json or file is None else _by_file(reply, file)
    if follow:
        return _run_and_follow(address, order, reply, before, json=json)
    if (code := command.exit_code(reply)) or reply.run is None:
        return agent_call.finish(order, reply, json=json, code=code)
    return _show_started(order, reply, reply.run, json=json)


def _asked(at: targets.Where, args: dict[str, Any], node: str | None) -> str:
    """Return the address of the agent that is asked: one that knows the run which is resumed or branched off, else one
    of the nodes that will take part. Raises UnreachableError if none answers."""
    if known := args.get("resume") or (args.get("branch") and verbs.branch_point(args["branch"])[0]):
        return agent_call.find_agent(at.addresses, known)
    wanted = [node] if node is not None else [*args["config"].get("nodes", ())]
    own = [at.cluster.address_of(name) for name in wanted if name in at.cluster.nodes] if at.cluster is not None else []
    return agent_call.find_agent(own, leads=False) if own else agent_call.find_agent(at.addresses)


async def _sent_and_told(client: Any, order: command.Order, seconds: float) -> CommandReply:
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
        run = (await client.ask(SnapshotRequest, 0, name)).run
        if run is None or run.state not in ACTIVE_RUN_STATES:
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


def _by_file(reply: CommandReply, file: Path) -> CommandReply:
    """Name the field that was refused as the person wrote it: in the run file, not in the message."""
    field = (reply.field or "").removeprefix("config: ")
    if field == (reply.field or ""):
        return reply
    reason = runfile.with_remedy(reply.reason, field, "the agent")
    return msgspec.structs.replace(reply, field=f"{file}: {field}", reason=reason)


async def _as_it_was(client: Any, run: str) -> Snapshot | None:
    """Return a snapshot of the run before it is resumed, or None if the agent doesn't know it: the command says so."""
    with contextlib.suppress(RefusedError, InvalidInputError):
        return cast(Snapshot, await client.ask(SnapshotRequest, 0, run))
    return None


def _run_and_follow(
    address: str, order: command.Order, reply: CommandReply, before: Snapshot | None, *, json: bool
) -> int:
    """Follow the run from its start, or a resumed one from where it was `before`."""
    if code := command.exit_code(reply):
        return agent_call.finish(order, reply, json=json, code=code)
    active = agent_call.call(address, lambda client: client.ask(SnapshotRequest, 0, reply.run)).run
    run = reply.run or (active.run if active is not None else "")
    _show_started(order, reply, run, json=json)
    try:
        return agent_call.call(address, lambda client: _followed(client, run, before, json=json))
    except KeyboardInterrupt:
        output.tell(
            f"detached; {run} continues. Watch it with trainctl attach or trainctl watch; stop it with trainctl send "
            f"stop"
        )
        return output.INTERRUPTED


async def _followed(client: Any, run: str, before: Snapshot | None, *, json: bool) -> int:
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
    now = (await client.ask(SnapshotRequest, 0, run)).run or view
    output.complain(f"{run} failed: {now.reason or 'no reason given'}")
    return RefusedError.exit_code


def _says_why_it_failed(item: Any) -> bool:
    """Return whether it is an event with the reason for which the run failed: the last line says it."""
    if not isinstance(item, Event):
        return False
    ended = isinstance(item.data, RunStateChanged) and item.data.after == "failed"
    return ended or (item.verb == "start-run" and isinstance(item.data, CommandFailed))


def _show_started(order: command.Order, reply: CommandReply, run: str, *, json: bool) -> int:
    return output.answer(run, json=json, **{**agent_call.fields(order, reply), "run": run})
