"""Prints the active run, moves samples between its nodes, and prints the step at which that took effect.

    python steer.py studio=16 mbp=8
    python steer.py --connect tcp://studio:7474 mbp=30%

Exit codes are those of `trainctl send`: 0 applied, 2 usage, 3 rejected or failed, 4 expired, 5 unreachable,
6 not authorised.
"""

import argparse
import sys
import uuid
from typing import Any

from trainctl.protocol import messages as m
from trainctl.protocol.client import BlockingClient
from trainctl.protocol.errors import ExpiredError, TrainctlError, UnreachableError
from trainctl.protocol.messages import verbs

TRIES = 3


def main() -> int:
    """Print the status, rebalance if the plan is still the same, print the outcome; return the exit code."""
    given = arguments()
    try:
        args = verbs.parse_args("rebalance", dict(word.split("=", 1) for word in given.shares if "=" in word))
        verbs.check("rebalance", args)
        with BlockingClient(given.connect, by="steer.py") as client:
            run = client.ask(m.SnapshotRequest, columns=0).run
            if run is None:
                print("steer.py: no active run", file=sys.stderr)
                return 3
            print(status(run))
            reply = send(client, "rebalance", args, if_plan=run.plan_version)
    except TrainctlError as error:
        print(f"steer.py: {error}", file=sys.stderr)
        return error.exit_code
    print(outcome(reply), file=sys.stdout if reply.state == "applied" else sys.stderr)
    return {"applied": 0, "expired": 4}.get(reply.state, 3)


def send(client: BlockingClient, verb: str, args: dict[str, Any], **options: Any) -> m.CommandReply:
    """Send a command and return its outcome. A retry has the same id, so the command is carried out at most once.

    Raises UnreachableError if no try is answered, ExpiredError if it isn't applied in time.
    """
    command_id = str(uuid.uuid4())
    for left in reversed(range(TRIES)):
        try:
            return client.send(verb, args, id=command_id, timeout_seconds=60, **options)
        except (UnreachableError, ExpiredError):
            if left == 0:
                raise
    raise AssertionError("unreachable")


def status(run: m.RunView) -> str:
    """The run, and one line per rank."""
    head = f"{run.run} {run.state}, step {run.step}/{run.steps}, plan {run.plan_version}, batch {run.global_batch}"
    return "\n".join([head, *(f"  {rank.node} {rank.state}: {rank.share} samples" for rank in run.ranks)])


def outcome(reply: m.CommandReply) -> str:
    """Return how a command ended, with the step or the reason."""
    if reply.state == "applied":
        return f"rebalance applied at step {reply.step}: {reply.before} -> {reply.after}"
    field = f"{reply.field}: " if reply.field else ""
    return f"rebalance {reply.state}: {field}{reply.reason}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Change the nodes' shares of the batch.")
    parser.add_argument("--connect", help="the agent [the one on this machine]")
    parser.add_argument("shares", nargs="+", metavar="NODE=SHARE")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
