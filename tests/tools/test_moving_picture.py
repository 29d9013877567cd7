"""One SVG of several pictures: each is whole in it, and shown in its turn."""

import xml.etree.ElementTree as ElementTree

from tools import moving_picture

PICTURE = '<svg viewBox="0 0 10 20" xmlns="http://www.w3.org/2000/svg"><text class="a-{0}">{0}</text></svg>'


def test_each_picture_has_its_turn() -> None:
    text = moving_picture.moving([PICTURE.format(number) for number in range(3)], seconds=2.0)
    root = ElementTree.fromstring(text)
    assert [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")] == ["0", "1", "2"]
    assert all(f".scene-{number} {{ animation-delay: {at}s; }}" in text for number, at in enumerate((-6, -4, -2)))
