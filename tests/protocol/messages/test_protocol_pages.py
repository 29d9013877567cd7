"""docs/protocol.md and docs/protocol-agents.md: they are complete, and any language can use them."""

import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from tools.protocol_docs import agents_page, conversations, docs

from trainctl.protocol.messages import verbs

PAGES = {docs: docs.page(), agents_page: agents_page.page()}
PYTHON = r"\b(None|True|False|METRICS|msgspec|struct|dict|tuple|kwargs|str\.|int\.|python -m)\b"


def described(text: str) -> dict[str, str]:
    """Each type of a page with its section, up to the next heading."""
    return dict(re.findall(r"^#### (\w+)\n(.*?)(?=^#|\Z)", text, flags=re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("talk", conversations.UNIONS)
def test_every_message_and_field_is_on_the_page_of_its_conversation(talk: str) -> None:
    page = described(PAGES[docs if talk in docs.CLIENT_TALKS else agents_page])
    for kind in conversations.types_of(talk):
        assert page[kind.__name__].startswith(f"\n`type` is `{conversations.tag_of(kind)}`")
        for field in msgspec.structs.fields(kind):
            assert field.name == "v" or f"| `{field.encode_name}` |" in page[kind.__name__]


def test_every_type_is_on_one_page() -> None:
    clients, agents = (set(described(text)) for text in PAGES.values())
    assert not clients & agents
    assert {kind.__name__ for kind in docs.part_types()} <= clients | agents


def test_every_verb_is_on_the_page_of_clients() -> None:
    assert [verb for verb in verbs.VERBS if f"### {verb}\n" not in PAGES[docs]] == []


@pytest.mark.parametrize("text", PAGES.values(), ids=["clients", "agents"])
def test_every_type_and_every_field_is_explained(text: str) -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", text, flags=re.MULTILINE)
    assert rows
    assert [name for name, meaning in rows if not meaning.strip()] == []
    bare = [name for name, section in described(text).items() if re.fullmatch(r"`type` is `[\w-]+`\.", _head(section))]
    assert bare == []


def _head(section: str) -> str:
    return section.strip().partition("\n\n")[0]


@pytest.mark.parametrize("text", PAGES.values(), ids=["clients", "agents"])
def test_no_name_of_python_is_on_a_page(text: str) -> None:
    assert re.findall(PYTHON, text) == []


def test_a_link_between_the_pages_leads_somewhere() -> None:
    clients = docs.anchors(PAGES[docs])
    linked = set(re.findall(r"\]\(protocol\.md#([^)]+)\)", PAGES[agents_page]))
    assert {"stepcommitted", "rankstep", "event", "hostreading"} <= linked <= clients


def test_comments_beside_fields_reach_the_page() -> None:
    comments = docs.field_comments(*docs.SOURCES)
    assert comments["StepCommitted"]["loss"] == "weighted mean loss, in nats per unit of weight"
    assert "| weighted mean loss, in nats per unit of weight |" in PAGES[docs]


@pytest.mark.parametrize("main", [docs.main, agents_page.main], ids=["clients", "agents"])
def test_check_tells_an_old_page_from_a_new_one(
    main: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "protocol.md"
    for arguments, status in ((["--check"], 1), ([], 0), (["--check"], 0)):
        monkeypatch.setattr("sys.argv", ["docs", *arguments, str(page)])
        assert main() == status
    page.write_text(page.read_text("utf-8") + "by hand\n", "utf-8")
    monkeypatch.setattr("sys.argv", ["docs", "--check", str(page)])
    assert main() == 1
