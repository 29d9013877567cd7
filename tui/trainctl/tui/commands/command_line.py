"""The grammar of the `:` line, the same as that of `trainctl send`: a command from words, and back."""

import shlex

from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import verbs
from trainctl.tui.commands import arguments
from trainctl.tui.commands.command import Order


def spoken(order: Order) -> str:
    """The command as the command line takes it."""
    return verbs.written(order.verb, order.args, order.node)


def parse(text: str) -> Order:
    """`stop checkpoint=false --run RUN` as a command. Raises InvalidInputError naming what is wrong with it."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise InvalidInputError("command", str(error).lower()) from None
    if not words:
        raise InvalidInputError("command", f"type a verb, such as `{arguments.EXAMPLE}`")
    verb, rest = words[0], words[1:]
    arguments_typed: list[str] = []
    options: dict[str, str] = {}
    while rest:
        word = rest.pop(0)
        if word.startswith("--"):
            name, found, value = word[2:].partition("=")
            if name not in ("node", "run", "if-plan"):
                raise InvalidInputError(word, "no such option here; use --node, --run or --if-plan")
            if not found and not rest:
                raise InvalidInputError(word, "needs a value after it")
            if name in options:
                raise InvalidInputError(word, "is given twice: remove one")
            options[name] = value if found else rest.pop(0)
            continue
        arguments_typed.append(word)
    args = verbs.parse_args(verb, arguments.pairs(arguments.with_first_name(verb, arguments_typed), verb))
    verbs.check(verb, args, options.get("node"))
    plan = options.get("if-plan")
    if plan is not None and not plan.isdecimal():
        raise InvalidInputError("--if-plan", f"{plan!r} is not a plan version: give a whole number")
    return Order(verb, args, options.get("node"), options.get("run"), int(plan) if plan is not None else None)
