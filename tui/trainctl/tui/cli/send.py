"""The subcommands that change a run or its cluster: `send` and `promote`."""

import contextlib
from typing import Annotated, Literal

import typer

from trainctl.protocol import messages as m
from trainctl.protocol.errors import TrainctlError
from trainctl.protocol.messages.verbs import VERBS
from trainctl.tui.cli import agent_call, command_result, output
from trainctl.tui.cli.help_topics import VerbCommand
from trainctl.tui.cli.options import ClusterFile, Connect, Json, Run, Timeout, subcommands, where
from trainctl.tui.commands import arguments, command, targets

app = subcommands()


def _verbs(incomplete: str) -> list[tuple[str, str]]:
    return [(verb.name, verb.summary) for verb in VERBS.values() if verb.name.startswith(incomplete)]


def _words(ctx: typer.Context, incomplete: str) -> list[str]:
    """What may follow, for the shell."""
    given = [ctx.params["verb"], *(ctx.params.get("words") or ())]
    if given[-1] == "=":  # bash makes three words of `name=value`
        return [word.partition("=")[2] for word in arguments.next_words(given[:-2], f"{given[-2]}={incomplete}")]
    return arguments.next_words(given, incomplete)


@app.command(
    cls=VerbCommand,
    help=f"Send a command, such as trainctl send {arguments.EXAMPLE}. VERB --help shows its arguments and an example.",
    epilog=arguments.verbs_summary(),
)
def send(
    ctx: typer.Context,
    verb: Annotated[str, typer.Argument(metavar="VERB", show_default=False, autocompletion=_verbs)],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", show_default=False, autocompletion=_words)
    ] = None,
    node: Annotated[str | None, typer.Option("--node", help="The node to act on.")] = None,
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
    connect: Connect = None,
    cluster: ClusterFile = None,
    json: Json = False,
) -> int:
    args = arguments.verb_args(verb, words or [], local=False)  # a bad argument is an error with or without an agent
    at = where(ctx, connect, cluster)
    if targets.is_local(at.addresses[0]):
        args = arguments.verb_args(verb, words or [], local=True)
    for name, text in (("--node", node), ("--run", run)):
        arguments.check_text(text or "", name)
    order = command.make_order(verb, args, id=id_, node=node, run=run, if_plan=if_plan, ttl_seconds=ttl)
    with command_result.told(order, json=json):
        lead = agent_call.find_lead(at.addresses)
        reply = command_result.send(lead, order, wait, timeout)
    if wait == "none":
        # Nobody has answered: there is no state.
        fields = {**command_result.fields(order, reply), "state": None}
        return output.answer(f"{order.verb} sent without waiting; id {reply.id}", json=json, **fields)
    more = _perplexity(lead, reply) if verb == "evaluate" and reply.after and not json else ""
    return command_result.finish(order, reply, json=json, code=command.exit_code(reply), more=more)


def _perplexity(address: str, reply: m.CommandReply) -> str:
    """Of the evaluation that a reply is of; empty if it isn't known, or the loss is in another unit."""
    run = None
    with contextlib.suppress(TrainctlError):
        run = agent_call.call(address, lambda client: client.snapshot(0, reply.run)).run
    if run is None or run.eval_step != reply.step or run.perplexity is None:
        return ""
    return f", perplexity {run.perplexity:.4g}"


@app.command()
def promote(
    ctx: typer.Context,
    node: Annotated[str, typer.Argument(metavar="NODE", show_default=False, help="The new lead.")],
    old_lead_is_off: Annotated[
        bool,
        typer.Option("--old-lead-is-off", help="Skip the vote. Use it only if the old lead is powered off."),
    ] = False,
    run: Run = None,
    timeout: Timeout = 60.0,
    connect: Connect = None,
    cluster: ClusterFile = None,
    json: Json = False,
) -> int:
    """Make another node the lead. The old lead hands over the run; if it is gone, a majority of nodes votes."""
    at = where(ctx, connect, cluster)
    for name, text in (("NODE", node), ("--run", run)):
        arguments.check_text(text or "", name)
    order = command.make_order("promote", {"old_lead_is_off": old_lead_is_off}, node=node, run=run)
    with command_result.told(order, json=json):
        reply = command_result.send(_own_agent(at, node), order, "applied", timeout)
    return command_result.finish(order, reply, json=json, code=command.exit_code(reply))


def _own_agent(at: targets.Where, node: str) -> str:
    """The address of a node's agent. If it isn't at the one in the cluster file, the other agents are asked."""
    if at.cluster is None:
        return agent_call.find_lead(at.addresses)
    own = at.cluster.address_of(node)
    others = [address for address in at.addresses if address != own]
    return agent_call.find_any([own, *others])
