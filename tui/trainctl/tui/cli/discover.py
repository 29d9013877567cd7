"""`trainctl discover`: the agents that advertise themselves on the local networks, and whether the cluster has them."""

from typing import Annotated

import typer

from trainctl.tui.cli import output, tables
from trainctl.tui.cli.options import ClusterFile, Json, subcommands
from trainctl.tui.commands import targets

app = subcommands()


@app.command()
def discover(
    cluster: ClusterFile = None,
    seconds: Annotated[float, typer.Option("--seconds", min=0.1, max=600, help="How long to listen.")] = 3.0,
    json: Json = False,
) -> int:
    """The agents that advertise themselves (trainctl-agent run --advertise) on this machine's networks.

    Anyone on the network can say anything there: it is a hint where to look. Keys are never taken from it; add a node
    with `trainctl cluster add`, which fetches its key over SSH.
    """
    from trainctl.tui.setup import discovery

    known = targets.cluster_file(cluster)
    found = discovery.listen(seconds)
    both = [(one, discovery.standing(one, known.cluster if known is not None else None)) for one in found]
    rows = [(one.node, one.address, one.version, one.fingerprint or "no key", said) for one, said in both]
    return output.answer(
        tables.table(("node", "address", "version", "fingerprint", "here"), rows) if rows else "", json=json,
        none=f"no agent has advertised itself within {seconds:g} s; agents do so with --advertise",
        found=[one._asdict() | {"standing": said} for one, said in both],
    )  # fmt: skip
