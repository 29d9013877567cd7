"""A command sent from the command line, and how its end is reported."""

import contextlib
from collections.abc import Iterator
from typing import Any

import typer

from trainctl.protocol import messages as m
from trainctl.protocol.errors import ExpiredError, InvalidInputError, TrainctlError
from trainctl.tui.cli import agent_call, output, tables
from trainctl.tui.commands import command

INTERRUPTED = 130
"""128 + SIGINT, as a shell tells it."""
FIELDS = ("id", "state", "step", "reason", "field", "before", "after", "plan_version", "run")
"""What `--json` says of a command's reply, beside its verb and its node, whatever became of it."""


@contextlib.contextmanager
def told(order: command.Order, *, json: bool) -> Iterator[None]:
    """With `json`, print an error that ends a command as one object and exit with the error's code. The object has the
    id for repeating the command. Without `json`, and for invalid arguments, the exception is passed on.
    """
    try:
        yield
    except InvalidInputError:
        raise
    except TrainctlError as error:
        if not json:
            raise
        state = "accepted" if isinstance(error, ExpiredError) else None
        output.emit_error(output.error_code(error), str(error), **_unsettled(order, state))
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        if not json:
            raise
        output.emit_error("interrupted", "interrupted", **_unsettled(order, None))
        raise typer.Exit(INTERRUPTED) from None


def _unsettled(order: command.Order, state: str | None) -> dict[str, Any]:
    settled = {"id": order.id, "state": state, "reason": "", "run": order.run}
    return {"verb": order.verb, "node": order.node, **dict.fromkeys(FIELDS), **settled}


def send(address: str, order: command.Order, wait: command.Wait, timeout: float) -> m.CommandReply:
    """Send a command and return the last reply that `wait` asks for. The exceptions of `calls.send` are passed on."""
    answer_seconds = min(agent_call.ANSWER_SECONDS, timeout)
    return agent_call.call(
        address, lambda client: command.send(client, order, wait, timeout, output.tell), answer_seconds=answer_seconds
    )


def finish(order: command.Order, reply: m.CommandReply, *, json: bool, code: int, more: str = "") -> int:
    """Print how a command ended, with `more` to say of it, and return the exit code."""
    line = tables.reply_line(order.verb, reply, order.node) + more
    if json and code:
        output.emit_error(reply.state, line, **fields(order, reply))
    elif json:
        output.emit_ok(**fields(order, reply))
    elif code:
        output.complain(line)
    else:
        output.say(line)
        if order.verb == "sample" and reply.state == "applied":
            output.say(output.log_text(reply.after or "", raw=False).strip() or "(the answer is empty)")
    return code


def fields(order: command.Order, reply: m.CommandReply) -> dict[str, Any]:
    """The `--json` fields for a command and its reply."""
    return {"verb": order.verb, "node": order.node, **{name: getattr(reply, name) for name in FIELDS}}
