"""The subcommands that command a run or its cluster: `send`, with a help for each verb, `profile` and `promote`."""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer
from typer.core import TyperCommand

from trainctl.protocol.errors import ExpiredError, InvalidInputError, RefusedError, TrainctlError
from trainctl.protocol.messages import (
    ACTIVE_RUN_STATES,
    CommandReply,
    DryRun,
    DryRunRequest,
    SnapshotRequest,
    StepProfiles,
    StepProfilesRequest,
    verbs,
)
from trainctl.protocol.messages.events import ProfileFailed
from trainctl.protocol.messages.verb_arguments import Argument, arguments_of
from trainctl.protocol.messages.verbs import MAX_PROFILE_STEPS, VERBS
from trainctl.tui.cli import agent_call, output, runs
from trainctl.tui.cli.options import ClusterFile, Connect, Json, Node, Timeout, complete_nodes, subcommands, where
from trainctl.tui.cli.runs import Run, RunAtAgent
from trainctl.tui.commands import arguments, command, targets
from trainctl.tui.commands.forms import forecast
from trainctl.tui.commands.verbs import DESCRIPTIONS

if TYPE_CHECKING:
    from trainctl.protocol.client.client import Client

app = subcommands()
_VERB = "trainctl.verb"
"""The key of a context's verb."""
UNDO = "undo"
"""Stands for the command that undoes the newest change of a run."""


def _verbs(incomplete: str) -> list[tuple[str, str]]:
    verbs = [*((verb.name, verb.summary) for verb in VERBS.values()), (UNDO, "undo the run's newest change")]
    return [(name, summary) for name, summary in verbs if name.startswith(incomplete)]


def _words(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return what may follow, for the shell."""
    given = [ctx.params["verb"], *(ctx.params.get("words") or ())]
    if given[0] == "rebalance" and "=" not in incomplete:
        shares = [f"{node}=" for node in complete_nodes(ctx, incomplete)]
        return [*shares, *arguments.next_words(given, incomplete)]
    if given[-1] == "=":  # bash makes three words of `name=value`
        return [word.partition("=")[2] for word in arguments.next_words(given[:-2], f"{given[-2]}={incomplete}")]
    return arguments.next_words(given, incomplete)


class VerbCommand(TyperCommand):
    """A command whose help is that of the verb it was given, if it was given one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options, _, _ = self.make_parser(ctx).parse_args([*args])  # which takes an option's value for no verb
        ctx.meta[_VERB] = verbs.VERBS.get(options.get("verb") or "")
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help for the verb, or for the command without a verb."""
        verb: verbs.Verb | None = ctx.meta.get(_VERB)
        if verb is None:
            super().format_help(ctx, formatter)
        else:
            _write_help(verb, ctx.command_path, formatter)


def _write_help(verb: verbs.Verb, command: str, formatter: Any) -> None:
    node = " [--node NODE]" if verb.takes_node and not verb.needs_node else ""
    formatter.write_usage(command, arguments.signature(verb) + node)
    formatter.write_paragraph()
    with formatter.indentation():
        formatter.write_text(f"{verb.summary[0].upper()}{verb.summary[1:]}.")
    if described := arguments_of(verb):
        with formatter.section("Arguments"):
            formatter.write_dl([(argument.typed, _meaning(argument)) for argument in described])
        if verb.first:
            formatter.write_paragraph()
            formatter.write_text(f"The first argument may be given without `{verb.first}=`.")
    with formatter.section("Effect"):
        formatter.write_dl(_facts(verb))
    with formatter.section("Example"):
        formatter.write_text(f"{command} {verb.typed}")
    formatter.write_paragraph()
    formatter.write_text(f"`{command} --help` lists the options that every verb takes.")


def _meaning(argument: Argument) -> str:
    """`the size of a pass; whole number from 1 to 8, samples; required`."""
    kind = ", ".join(part for part in (argument.kind, argument.unit) if part)
    default = "required" if argument.default is None else f"default {argument.default}" if argument.default else ""
    return "; ".join(part for part in (argument.meaning, kind, default) if part)


def _facts(verb: verbs.Verb) -> list[tuple[str, str]]:
    found = [("kind", f"{verb.scope}: {verbs.SCOPES[verb.scope]}"), ("affects", verbs.AFFECTS[verb.affects])]
    if verb.knobs:
        found.append(("changes", ", ".join(sorted(verb.knobs))))
    return [*found, ("undone by", verb.inverse or "nothing")]


@app.command(
    cls=VerbCommand,
    help=f"Send a command, such as trainctl send {arguments.EXAMPLE}. VERB --help shows its arguments and an example. "
    "trainctl send undo undoes the newest change that a person made.",
    epilog=arguments.verbs_summary(),
)
def send(
    ctx: typer.Context,
    verb: Annotated[str, typer.Argument(metavar="VERB", show_default=False, autocompletion=_verbs)],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", show_default=False, autocompletion=_words)
    ] = None,
    node: Node = None,
    run: Run = None,
    id_: Annotated[
        str | None,
        typer.Option(
            "--id",
            metavar="UUID",
            help="Id of an earlier command, to get its outcome. A command is never applied twice.",
        ),
    ] = None,
    if_plan: Annotated[
        int | None, typer.Option("--if-plan", min=0, help="Apply it only if the plan still has this version.")
    ] = None,
    ttl: Annotated[
        float, typer.Option("--ttl", min=0.001, max=86400, help="Seconds until the command expires.")
    ] = 60.0,
    wait: Annotated[
        Literal["applied", "accepted", "none"], typer.Option(help="State to wait for before returning.")
    ] = "applied",
    timeout: Timeout = 60.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what the command would do, or why it would be refused.")
    ] = False,
    connect: Connect = None,
    cluster: ClusterFile = None,
    json: Json = False,
) -> int:
    for name, text in (("--node", node), ("--run", run)):
        arguments.check_text(text or "", name)
    options: dict[str, Any] = {"id": id_, "node": node, "if_plan": if_plan, "ttl_seconds": ttl}
    if verb == UNDO:
        if words or node is not None or id_ is not None:
            problem = "takes no arguments, no --node and no --id: it undoes the run's newest change"
            raise InvalidInputError(UNDO, problem)
        at = runs.at_agent(ctx, connect, cluster, run)
        order = agent_call.call(at.address, lambda client: _undoing(client, at.run, options), lead=True)
        if dry_run:
            return _dry_run((at.address,), order, json=json)
        return _send((at.address,), order, wait, timeout, json=json)
    args = arguments.verb_args(verb, words or [], local=False)  # a bad argument is an error with or without an agent
    addresses = where(ctx, connect, cluster).addresses
    if targets.is_local(addresses[0]):
        args = arguments.verb_args(verb, words or [], local=True)
    order = command.make_order(verb, args, run=run, **options)
    if dry_run:
        return _dry_run(addresses, order, json=json)
    is_first = not json and wait != "none" and id_ is None and if_plan is None
    return _send(addresses, order, wait, timeout, json=json, says_what_follows=is_first)


async def _undoing(client: "Client", run: str | None, options: dict[str, Any]) -> command.Order:
    """Return the command that undoes the newest change that a person made to a run. Raises RefusedError."""
    from trainctl.tui.commands import undo

    seen = await client.ask(SnapshotRequest, 0, run)
    inverses = undo.newest(seen.run, seen.events, most=len(seen.events))
    inverse = next((inverse for inverse in inverses if not inverse.event.by.startswith("auto")), None)
    if inverse is None or seen.run is None:
        raise RefusedError("undo: no change of this run can be undone now; trainctl events lists its changes")
    if inverse.order.verb == "start-run":  # who means a setting must not start a run that has ended
        raise RefusedError(
            f"undo: the newest change ended the run; to take it up: trainctl run --resume {seen.run.run}"
        )
    output.tell("; ".join((inverse.says, *inverse.remarks)))
    order = inverse.order
    is_against = DESCRIPTIONS[order.verb].against_plan and options["if_plan"] is None
    plan = seen.run.plan_version if is_against else options["if_plan"]
    named = {**options, "node": order.node, "if_plan": plan, "undoes": order.undoes}
    return command.make_order(order.verb, dict(order.args), run=seen.run.run, **named)


def _send(
    addresses: Sequence[str],
    order: command.Order,
    wait: command.Wait,
    timeout: float,
    *,
    json: bool,
    says_what_follows: bool = False,
) -> int:
    with agent_call.told(order, json=json):
        named = runs.with_ids(addresses, order.args) if order.verb == "start-run" else order.args
        order = replace(order, args=named, run=runs.id_at(addresses, order.run))
        lead = agent_call.find_agent(addresses, order.run)
        if says_what_follows:
            _say_what_follows(lead, order)
        reply = agent_call.send(lead, order, wait, timeout)
    if wait == "none":
        # Nobody has answered: there is no state.
        fields = {**agent_call.fields(order, reply), "state": None}
        return output.answer(f"{order.verb} sent without waiting; id {reply.id}", json=json, **fields)
    more = _perplexity(lead, reply) if order.verb == "evaluate" and reply.after and not json else ""
    return agent_call.finish(order, reply, json=json, code=command.exit_code(reply), more=more)


def _asked(lead: str, order: command.Order) -> DryRun:
    """Return what a command would do, by the lead of its run. Raises what `Client.ask` raises."""
    asked = (order.verb, order.run, dict(order.args), order.node, order.if_plan)
    return agent_call.call(lead, lambda client: client.ask(DryRunRequest, *asked))


def _say_what_follows(lead: str, order: command.Order) -> None:
    """Print what a command that changes the run will do, and which policies then only advise."""
    if VERBS[order.verb].scope != "edit":
        return
    with contextlib.suppress(TrainctlError):
        found = _asked(lead, order)
        if not found.refused:  # the reply says why
            output.tell(f"{order.verb}: {output.one_line(forecast(found))}")


def _dry_run(addresses: Sequence[str], order: command.Order, *, json: bool) -> int:
    """Print what a command would do; exit as if it were refused if it would be."""
    order = replace(order, run=runs.id_at(addresses, order.run))
    found = _asked(agent_call.find_agent(addresses, order.run), order)
    fields = msgspec.to_builtins(found)
    names = (field for field in found.__struct_fields__ if field not in ("rid", "v"))
    text = f"{order.verb}: {'would be refused: ' if found.refused else ''}{forecast(found)}"
    output.answer(output.one_line(text), json=json, **{name: fields[name] for name in names})
    return RefusedError.exit_code if found.refused else 0


def _perplexity(address: str, reply: CommandReply) -> str:
    """Return the perplexity of the evaluation that a reply is about; empty if it isn't known, or the loss is in another
    unit."""
    run = None
    with contextlib.suppress(TrainctlError):
        run = agent_call.call(address, lambda client: client.ask(SnapshotRequest, 0, reply.run)).run
    if run is None or run.eval_step != reply.step or run.perplexity is None:
        return ""
    return f", perplexity {run.perplexity:.4g}"


PROFILE_POLL_SECONDS = 0.5
"""Seconds between two questions for the profile."""


@app.command()
def profile(
    ctx: typer.Context,
    run: RunAtAgent = None,
    steps: Annotated[int, typer.Option("--steps", min=1, max=MAX_PROFILE_STEPS, help="Steps to profile.")] = 3,
    node: Annotated[
        list[str] | None,
        typer.Option(
            "--node", help="A node to profile; repeatable. Default: all nodes.", autocompletion=complete_nodes
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Copy the traces to this folder.", show_default=False)
    ] = None,
    last: Annotated[
        bool, typer.Option("--last", help="Record nothing; show the newest profile of the run, which may have ended.")
    ] = False,
    timeout: Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds to wait for the traces.")] = 600.0,
    connect: Connect = None,
    cluster: ClusterFile = None,
    json: Json = False,
) -> int:
    """Record how long each operator takes in the next steps, and print the ten longest of each phase. A step before
    them warms up the profiler."""
    at = where(ctx, connect, cluster)
    for text in (run, *(node or ())):
        arguments.check_text(text or "", "RUN" if text == run else "--node")
    run_id = runs.id_at(at.addresses, run)
    lead = agent_call.find_agent(at.addresses, run_id)
    order = command.make_order("profile", {"steps": steps, "nodes": node or []}, run=run_id)
    with agent_call.told(order, json=json):
        events = (
            agent_call.call(lead, lambda client: client.ask(StepProfilesRequest, run_id), lead=run is None)
            if last
            else _record(lead, order, timeout, json=json)
        )
        return _show_profile(lead, events, out, json=json)


def _record(lead: str, order: command.Order, seconds: float, *, json: bool) -> StepProfiles:
    """Send the command, and wait for the events of its traces. Exits if it is refused. Raises ExpiredError."""
    reply = agent_call.send(lead, order, "applied", seconds)
    code = command.exit_code(reply)
    if code:
        agent_call.finish(order, reply, json=json, code=code)
        raise typer.Exit(code)
    output.tell(f"profiles {reply.after}")
    nodes = order.args["nodes"]
    return agent_call.call(lead, lambda client: _profiled(client, reply, nodes, seconds), lead=True)


async def _profiled(client: "Client", asked: CommandReply, nodes: list[str], seconds: float) -> StepProfiles:
    """Return the events of the command's profile, once every rank has said how it ended. Raises ExpiredError."""
    until, run, wanted = time.monotonic() + seconds, asked.run, None
    while True:
        view = (await client.ask(SnapshotRequest, 0, run)).run
        found = await client.ask(StepProfilesRequest, run)
        new = tuple(event for event in found.profiles if event.command == asked.id)
        if wanted is None:  # a rank that joins later has no part in it
            wanted = [rank.node for rank in (view.live_ranks if view else ()) if not nodes or rank.node in nodes]
        ended = view is None or view.state not in ACTIVE_RUN_STATES
        if len(new) >= max(len(wanted), 1) or (ended and new):
            return msgspec.structs.replace(found, profiles=new)
        if ended or time.monotonic() >= until:
            why = "the run ended" if ended else f"{seconds:g} s passed"
            raise ExpiredError(f"profile: {why} before all ranks had written their traces; see trainctl profile --last")
        await asyncio.sleep(PROFILE_POLL_SECONDS)


def _show_profile(lead: str, events: StepProfiles, out: Path | None, *, json: bool) -> int:
    """Print the newest profile, and copy its traces if asked. Raises what `download_trace` raises."""
    from trainctl.protocol.client.downloads import download_trace
    from trainctl.tui.screens import step_profile_view

    groups, run = [group for group in step_profile_view.profiles_of(events.profiles) if group.ranks], events.run or ""
    if not groups:
        failures = [event.data for event in events.profiles if isinstance(event.data, ProfileFailed)]
        said = "; ".join(map(step_profile_view.failure_words, failures)) or "the run has no profile yet"
        raise RefusedError(f"no profile: {said}")
    newest, files = groups[-1], list[str]()
    if out is not None:
        folder = out

        async def copied(client: "Client") -> list[str]:
            return [str(await download_trace(client, run, rank, folder)) for rank in newest.ranks]

        files = agent_call.call(lead, copied)
    text = step_profile_view.text(newest) + "".join(f"\n{file}" for file in files)
    return output.answer(text, json=json, run=run, files=files, **step_profile_view.objects(newest))


@app.command()
def promote(
    ctx: typer.Context,
    node: Annotated[
        str, typer.Argument(metavar="NODE", show_default=False, help="The new lead.", autocompletion=complete_nodes)
    ],
    run: RunAtAgent = None,
    old_lead_is_off: Annotated[
        bool, typer.Option("--old-lead-is-off", help="Skip the vote. Use it only if the old lead is powered off.")
    ] = False,
    timeout: Timeout = 60.0,
    connect: Connect = None,
    cluster: ClusterFile = None,
    json: Json = False,
) -> int:
    """Make another node the lead. The old lead hands over the run; if it is gone, a majority of nodes votes."""
    at = where(ctx, connect, cluster)
    for name, text in (("NODE", node), ("RUN", run)):
        arguments.check_text(text or "", name)
    order = command.make_order("promote", {"old_lead_is_off": old_lead_is_off}, node=node)
    with agent_call.told(order, json=json):
        order = replace(order, run=runs.id_at(at.addresses, run))
        reply = agent_call.send(_own_agent(at, node), order, "applied", timeout)
    return agent_call.finish(order, reply, json=json, code=command.exit_code(reply))


def _own_agent(at: targets.Where, node: str) -> str:
    """Return the address of a node's agent. If it isn't at the one in the cluster file, the other agents are asked."""
    if at.cluster is None:
        return agent_call.find_agent(at.addresses)
    own = at.cluster.address_of(node)
    others = [address for address in at.addresses if address != own]
    return agent_call.find_agent([own, *others], leads=False)
