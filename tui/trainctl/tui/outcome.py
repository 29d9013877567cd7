"""A command sent from the command line, and how its end is told."""

from typing import Any

from trainctl.protocol import messages as m
from trainctl.tui import calls, output


def send(address: str, order: calls.Order, wait: calls.Wait, timeout: float) -> m.CommandReply:
    """The last reply that `wait` asks for, within `timeout` seconds. Raises as `calls.send` does."""
    answer_seconds = min(calls.ANSWER_SECONDS, timeout)
    return calls.call(address, lambda client: calls.send(client, order, wait, timeout), answer_seconds=answer_seconds)


def finish(verb: str, reply: m.CommandReply, *, json: bool, code: int) -> int:
    """Say how a command ended, where a script or a person looks for it; the exit code."""
    line = output.reply_line(verb, reply)
    if json and code:
        output.emit_error(reply.state, line, verb=verb, **fields(reply))
    elif json:
        output.emit_ok(verb=verb, **fields(reply))
    elif code:
        output.complain(line)
    else:
        output.say(line)
    return code


def fields(reply: m.CommandReply) -> dict[str, Any]:
    """What `--json` tells of a reply."""
    names = ("id", "state", "step", "reason", "field", "before", "after", "plan_version", "run")
    return {name: getattr(reply, name) for name in names}
