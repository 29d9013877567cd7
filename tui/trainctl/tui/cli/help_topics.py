"""`trainctl help`: the pages of the documentation, which are installed with the program."""

from typing import Annotated

import typer

from trainctl.protocol.errors import InvalidInputError
from trainctl.tui.cli import output, tables
from trainctl.tui.cli.options import subcommands
from trainctl.tui.setup import docs_pages

app = subcommands()


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
