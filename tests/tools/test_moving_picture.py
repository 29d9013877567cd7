"""One SVG of several pictures: each is whole in it, and shown in its turn."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

from tools import moving_picture

ROOT = Path(__file__).resolve().parents[2]
PICTURE = '<svg viewBox="0 0 10 20" xmlns="http://www.w3.org/2000/svg"><text class="a-{0}">{0}</text></svg>'


def test_each_picture_has_its_turn() -> None:
    made = moving_picture.moving([PICTURE.format(number) for number in range(3)], seconds=2.0)
    root = ElementTree.fromstring(made)
    assert root.get("viewBox") == "0 0 10 20"
    assert [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")] == ["0", "1", "2"]
    assert "animation: scene 6s" in made and "33.333%" in made
    delays = [f".scene-{number} {{ animation-delay: {at}s; }}" for number, at in enumerate((-6, -4, -2))]
    assert all(delay in made for delay in delays)


def test_the_readmes_picture_is_one() -> None:
    root = ElementTree.fromstring((ROOT / "docs" / "pictures" / "overview.svg").read_text("utf-8"))
    scenes = [one for one in root if (one.get("class") or "").startswith("scene")]
    assert len(scenes) == len(moving_picture.SCENES)
