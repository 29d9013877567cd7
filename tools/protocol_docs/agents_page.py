"""`python -m tools.protocol_docs.agents_page [--check] [PATH]`: writes docs/protocol-agents.md.

It has the conversations of agents with each other and with trainers; what clients need is in docs/protocol.md.
"""

import re
import sys
from pathlib import Path

from tools.protocol_docs import agents_prose, docs, generated
from tools.protocol_docs.conversations import UNIONS
from trainctl.protocol.messages.base import PROTOCOL_VERSION

DEFAULT_PATH = Path("docs/protocol-agents.md")


def page() -> str:
    """The page; a link to a type that only the clients' page describes leads there."""
    described = set(docs.client_parts())
    text = docs.joined(
        agents_prose.INTRODUCTION.format(version=PROTOCOL_VERSION),
        agents_prose.SOCKETS,
        agents_prose.LEADS,
        docs.messages(
            [talk for talk in UNIONS if talk not in docs.CLIENT_TALKS],
            [kind for kind in docs.part_types() if kind not in described],
        ),
        docs.shown_bytes(agents_prose.BYTES, agents_prose.SHOWN),
    )
    elsewhere = docs.anchors(docs.page()) - docs.anchors(text)
    return re.sub(
        r"\]\(#([^)]+)\)", lambda link: f"](protocol.md#{link[1]})" if link[1] in elsewhere else link[0], text
    )


def main() -> int:
    """Write or check it; the exit status."""
    return generated.main("tools.protocol_docs.agents_page", page, DEFAULT_PATH)


if __name__ == "__main__":
    sys.exit(main())
