"""`python -m tools.protocol_docs.agents_page [--check] [PATH]`: writes the tables of docs/protocol-agents.md.

It has the conversations of agents with each other and with trainers; what clients need is in docs/protocol.md.
"""

import re
import sys
from pathlib import Path

from tools.protocol_docs import docs, generated
from tools.protocol_docs.conversations import UNIONS

DEFAULT_PATH = Path("docs/protocol-agents.md")
SHOWN = (("agent to trainer", "step-plan"), ("trainer to agent", "formed"))
"""The byte vectors on the page."""


def page() -> str:
    """Return the page; a link to a type that only the clients' page describes leads there."""
    described = set(docs.client_parts())
    talks = [talk for talk in UNIONS if talk not in docs.CLIENT_TALKS]
    parts = [kind for kind in docs.part_types() if kind not in described]
    text = docs.filled(DEFAULT_PATH, {"bytes": docs.shown_bytes(SHOWN), **docs.messages(talks, parts)})
    elsewhere = docs.anchors(docs.page()) - docs.anchors(text)
    return re.sub(
        r"\]\(#([^)]+)\)", lambda link: f"](protocol.md#{link[1]})" if link[1] in elsewhere else link[0], text
    )


def main() -> int:
    """Write or check it; the exit status."""
    return generated.main("tools.protocol_docs.agents_page", page, DEFAULT_PATH)


if __name__ == "__main__":
    sys.exit(main())
