"""Parsing of a typed command: its arguments, the whole `:` line in the grammar of `trainctl send`, and back."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import verbs
from trainctl.protocol.messages.verb_arguments import completions
from trainctl.tui.commands.command import Order
from trainctl.tui.state.filter_language import TypedLineError

EXAMPLE = next(verb.typed for verb in verbs.VERBS.values() if verb.scope == "edit")
"""A whole command, as it is typed."""


def verb_args(verb: str, words: Sequence[str], *, local: bool) -> dict[str, Any]:
    """Return the arguments of `trainctl send VERB key=value ...`.

    `config=@FILE` reads a run file; with `local` (the agent is on this machine) its model and data must be there too.
    Raises InvalidInputError naming the verb or the argument.
    """
    given = pairs(with_first_name(verb, words), verb)
    if verb != "start-run" or "config" not in given:
        return verbs.parse_args(verb, given)
    text = given.pop("config")
    if not text.startswith("@"):
        raise InvalidInputError("config", f"{text!r} must be written as config=@run.toml")
    from trainctl.tui.commands.checked_run_file import check_run_file  # with all that reads models: not for each start

    return {**verbs.parse_args(verb, given), "config": check_run_file(Path(text[1:]), {}, local=local).message}


def verbs_summary() -> str:
    """Return every verb with its arguments, for the help text; those that may be left out in brackets."""
    return f"Verbs: {'; '.join(signature(verb) for verb in verbs.VERBS.values())}."


def signature(verb: verbs.Verb) -> str:
    """Return a verb with its arguments, as they are typed."""
    if verb.args.usage:
        return f"{verb.name} {verb.args.usage}"
    if verb.needs_node:
        return f"{verb.name} --node NODE"
    words = [f"{field.name}=" if field.required else f"[{field.name}=]" for field in msgspec.structs.fields(verb.args)]
    return " ".join([verb.name, *words])


def next_words(words: Sequence[str], begun: str) -> list[str]:
    """Return what may follow the `words` of a command and begins with `begun`: a verb, or what that verb takes."""
    if not words:
        return [name for name in verbs.VERBS if name.startswith(begun)]
    verb = verbs.VERBS.get(words[0])
    if verb is None:
        return []
    node = ["--node"] if verb.takes_node and "--node" not in words and "--node".startswith(begun) else []
    found = completions(verb, words[1:], begun)
    return [*node, *found] if verb.needs_node else [*found, *node]


def completed(text: str) -> str | None:
    """Return a command line that begins with `text`, a word longer; None where there is nothing to propose."""
    *words, begun = text.split(" ")
    words = [word for word in words if word]
    found = next_words(words, begun if words else begun.lower())
    if not text.strip() or not found:
        return None
    first = found[0]
    if not words:
        more = next_words([first], "")
        first = f"{first} {more[0]}" if more else first
    return text.removesuffix(begun) + first + (" " if first.endswith("--node") else "")


def with_first_name(verb: str, words: Sequence[str]) -> list[str]:
    """Return the words of a command with the name of the verb's first argument, which may be left out. Raises
    InvalidInputError for an unknown verb."""
    first = verbs.entry_of(verb).first
    if not first or not words or "=" in words[0]:
        return [*words]
    return [f"{first}={words[0]}", *words[1:]]


def pairs(words: Sequence[str], where: str) -> dict[str, str]:
    """Return `key=value` words by key. Raises InvalidInputError for another form and for a key given twice."""
    found: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise InvalidInputError(where, f"{word!r} must be written as key=value")
        if key in found:
            raise InvalidInputError(where, f"{key!r} is given twice: remove one")
        found[key] = check_text(value, key)
    return found


def check_text(text: str, where: str) -> str:
    """Return `text` as given. Raises InvalidInputError if it holds bytes that are not UTF-8: no message could carry
    it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidInputError(where, "is not UTF-8 text") from None
    return text


def spoken(order: Order) -> str:
    """Return the command as the command line takes it."""
    return verbs.written(order.verb, order.args, order.node)


_CLOSED = re.compile(r"(?:[^'\"\\]|\\.|'[^']*'|\"(?:[^\"\\]|\\.)*\")*")
"""The text before a quotation mark that nothing closes."""


def parse(text: str) -> Order:
    """Return `stop checkpoint=false --run RUN` as a command. Raises TypedLineError with the column of what is wrong, or
    of the end where something is missing."""
    try:
        return _order(text)
    except InvalidInputError as error:
        where = "" if error.where in ("command", "verb", *text.split()[:1]) else f"{error.where}: "
        raise TypedLineError(_column(text, error), where + error.problem) from None


def _column(text: str, error: InvalidInputError) -> int:
    closed = _CLOSED.match(text)
    if closed is not None and closed.end() < len(text):
        return closed.end() + 1
    for name in (*re.findall("'([^']+)'", error.problem)[:1], f"--{error.where}", error.where):
        places = [match.end() for match in re.finditer(rf"(?<![^\s'\"=]){re.escape(name)}(?![^\s'\"=])", text)]
        if places:
            return places[-1] - len(name) + 1
    return len(text) + 1


def _order(text: str) -> Order:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise InvalidInputError("command", str(error).lower()) from None
    if not words:
        raise InvalidInputError("command", f"type a verb, such as `{EXAMPLE}`")
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
    args = verbs.parse_args(verb, pairs(with_first_name(verb, arguments_typed), verb))
    verbs.check(verb, args, options.get("node"))
    plan = options.get("if-plan")
    if plan is not None and not plan.isdecimal():
        raise InvalidInputError("--if-plan", f"{plan!r} is not a plan version: give a whole number")
    return Order(verb, args, options.get("node"), options.get("run"), int(plan) if plan is not None else None)
