"""Help: `trainctl help` prints pages of the documentation, `trainctl send VERB --help` one verb by its declaration."""

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import verbs
from trainctl.protocol.messages.verb_arguments import Argument, arguments_of
from trainctl.tui.cli import output, tables
from trainctl.tui.cli.options import subcommands
from trainctl.tui.commands import arguments
from trainctl.tui.setup import docs_pages

app = subcommands()
_VERB = "trainctl.verb"


def _topics(incomplete: str) -> list[str]:
    return [topic for topic in docs_pages.pages() if topic.startswith(incomplete)]


@app.command(name="help")
def show(
    topic: Annotated[
        str | None,
        typer.Argument(metavar="[TOPIC]", show_default=False, autocompletion=_topics, help="The topic to print."),
    ] = None,
) -> int:
    """Print a documentation page, or list the topics. Works offline."""
    pages = docs_pages.pages()
    if topic is None:
        output.say(tables.table(("topic", "about"), [(page.topic, page.about) for page in pages.values()]))
        return 0
    if topic not in pages:
        raise InvalidInputError("TOPIC", f"no topic {topic!r}; the topics are {', '.join(pages)}")
    output.say(pages[topic].path.read_text("utf-8").rstrip())
    return 0


class VerbCommand(TyperCommand):
    """A command whose help is that of the verb it was given, if it was given one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[_VERB] = next((verbs.VERBS[word] for word in args if word in verbs.VERBS), None)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help for the verb, or for the command without a verb."""
        verb: verbs.Verb | None = ctx.meta.get(_VERB)
        if verb is None:
            super().format_help(ctx, formatter)
        else:
            _write(verb, ctx.command_path, formatter)


def _write(verb: verbs.Verb, command: str, formatter: Any) -> None:
    formatter.write_usage(command, arguments.signature(verb) + _optional_node(verb))
    formatter.write_paragraph()
    with formatter.indentation():
        formatter.write_text(f"{verb.summary[0].upper()}{verb.summary[1:]}.")
    if told := arguments_of(verb):
        with formatter.section("Arguments"):
            formatter.write_dl([(argument.typed, _meaning(argument)) for argument in told])
        if verb.first:
            formatter.write_paragraph()
            formatter.write_text(f"The first argument may be given without `{verb.first}=`.")
    with formatter.section("Effect"):
        formatter.write_dl(_facts(verb))
    with formatter.section("Example"):
        formatter.write_text(f"{command} {verb.typed}")
    formatter.write_paragraph()
    formatter.write_text(f"`{command} --help` lists the options that every verb takes.")


def _optional_node(verb: verbs.Verb) -> str:
    return " [--node NODE]" if verb.takes_node and not verb.needs_node else ""


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
