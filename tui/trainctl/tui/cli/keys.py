"""`trainctl keys`: this machine's keys, and whose keys may do what here."""

from typing import Annotated, Any

import typer

from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import AuditRequest
from trainctl.protocol.security import keys
from trainctl.tui.cli import agent_call, output, tables
from trainctl.tui.cli.options import ClusterFile, Connect, Json, subcommands, subgroup, where

app = subcommands()
group = subgroup("Manage this machine's keys and the keys it accepts.")
app.add_typer(group, name="keys")

KeyName = Annotated[str, typer.Argument(metavar="NAME", show_default=False, help="The key's name on this machine.")]


@group.command()
def new(
    name: Annotated[
        str | None, typer.Option("--name", help="This machine's name [its host name].", show_default=False)
    ] = None,
    json: Json = False,
) -> int:
    """Create this machine's missing keys. Its own user can then send any command to its agent."""
    folder = keys.KeyFolder()
    made = folder.make(name)
    agent, user = folder.agent(), folder.user()
    if json:
        output.emit_ok(made=list(made), folder=str(folder.path), agent=_public(agent), user=_public(user))
        return 0
    output.say(f"{'created' if made else 'already exist'}: {folder.path}")
    output.say(f"agent  {agent.public}  {agent.name}: add it to the other machines' cluster files ([nodes.NAME] key)")
    output.say(
        f"user   {user.public}  {user.name}: to send commands to another machine, run trainctl keys authorize there"
    )
    return 0


@group.command()
def authorize(
    name: KeyName,
    public: Annotated[str, typer.Argument(metavar="KEY", show_default=False, help="The public key, in quotes.")],
    role: Annotated[
        str, typer.Option("--role", help="viewer: read only. operator: every verb. node: the agent of node NAME.")
    ],
    json: Json = False,
) -> int:
    """Accept a key on this machine's agent, effective immediately."""
    if role not in keys.ROLES:
        raise InvalidInputError("--role", f"{role!r} is not a role; the roles are {', '.join(keys.ROLES)}")
    keys.KeyFolder().authorize(name, public, role)
    return output.answer(f"{name} is accepted as {role}", json=json, name=name, public=public, role=role)


@group.command()
def revoke(name: KeyName, json: Json = False) -> int:
    """Revoke a key, also for open connections."""
    from trainctl.protocol.config import cluster_file  # ZeroMQ: not for `--help`

    named = cluster_file.read_default().nodes.get(name)
    public = keys.KeyFolder().revoke(name, named.key if named is not None else None)
    return output.answer(f"{name} is revoked: {public}", json=json, name=name, public=public)


@group.command(name="list")
def list_keys(json: Json = False) -> int:
    """List this machine's own keys, the keys it accepts, and the keys revoked here."""
    folder = keys.KeyFolder()
    own = {which: getattr(folder, which)() for which in ("agent", "user") if folder.has(which)}
    table = folder.authorized()
    if json:
        listed = [
            {"name": name, "public": one.public, "role": one.role, "since": one.since}
            for name, one in table.keys.items()
        ]
        gone = [{"name": name, "public": one.public, "since": one.since} for name, one in table.revoked.items()]
        pairs = {which: _public(pair) for which, pair in own.items()}
        output.emit_ok(folder=str(folder.path), own=pairs, keys=listed, revoked=gone)
        return 0
    if not own and not table.keys:
        output.tell(f"no keys in {folder.path}; create them with trainctl keys new")
    for which, pair in own.items():
        output.say(f"{which:9} {pair.public}  {pair.name} (this machine's)")
    for name, entry in table.keys.items():
        output.say(f"{entry.role:9} {entry.public}  {name}, since {tables.date_and_time(entry.since)}")
    for name, gone_entry in table.revoked.items():
        output.say(f"{'revoked':9} {gone_entry.public}  {name}, {tables.date_and_time(gone_entry.since)}")
    return 0


@group.command()
def audit(
    ctx: typer.Context,
    last: Annotated[
        int, typer.Option("--last", "-n", min=1, max=500, help="Number of newest refusals to print.")
    ] = 100,
    connect: Connect = None,
    cluster: ClusterFile = None,
    json: Json = False,
) -> int:
    """List the requests an agent refused, newest first. Operators only."""
    address = agent_call.find_agent(where(ctx, connect, cluster).addresses, leads=False)
    found = agent_call.call(address, lambda client: client.ask(AuditRequest, last))
    if json:
        output.emit_ok(refused=found.refused)
        return 0
    if not found.refused:
        output.tell("no refused requests")
    for one in found.refused:
        who = one.name or one.key or "no key"
        times = f" ({one.count:,} times)" if one.count > 1 else ""
        output.say(f"{tables.date_and_time(one.last_at)}  {who} {one.address}  {one.what}: {one.why}{times}")
    return 0


def _public(pair: keys.KeyPair) -> dict[str, Any]:
    return {"name": pair.name, "public": pair.public}
