"""The wheel of the program as it runs here, from a checkout as from an installed package; it needs no build tool.

The layout is that of https://packaging.python.org/en/latest/specifications/binary-distribution-format.
"""

import base64
import hashlib
import io
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from trainctl import protocol
from trainctl.protocol.errors import InvalidInputError
from trainctl.tui.setup import docs_pages

ROOMS = ("protocol", "trainer", "node_agent", "tui")
_STAMP = (1980, 1, 1, 0, 0, 0)
"""The same files give the same bytes."""
_LEFT_OUT = ("__pycache__", ".pyc")
_WHEEL = "Wheel-Version: 1.0\nGenerator: trainctl\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


class Wheel(NamedTuple):
    """One that can be given to pip."""

    name: str  # trainctl-0.2.0-py3-none-any.whl
    body: bytes

    @property
    def digest(self) -> str:
        """By which another machine tells whether it has it already."""
        return hashlib.sha256(self.body).hexdigest()


def build() -> Wheel:
    """Return the program's wheel. Raises InvalidInputError where the program isn't installed; an editable installation
    will do."""
    remedy = "in the checkout, run make, or pip install '.[tui]'"
    try:
        own = distribution("trainctl")
    except PackageNotFoundError:
        raise InvalidInputError("trainctl", f"its metadata is missing on this machine: {remedy}") from None
    metadata = own.read_text("METADATA")
    if metadata is None or own.version != protocol.__version__:
        other = "incomplete" if metadata is None else f"of another package, version {own.version}"
        raise InvalidInputError("trainctl", f"its metadata is {other}: {remedy}")
    label = f"trainctl-{own.version}"
    info = f"{label}.dist-info"
    files = dict(_sources()) | {f"{info}/METADATA": metadata.encode(), f"{info}/WHEEL": _WHEEL.encode()}
    scripts = own.read_text("entry_points.txt")
    if scripts is not None:
        files[f"{info}/entry_points.txt"] = scripts.encode()
    return Wheel(f"{label}-py3-none-any.whl", _packed(files, f"{info}/RECORD"))


def _sources() -> Iterator[tuple[str, bytes]]:
    for room in ROOMS:
        spec = find_spec(f"trainctl.{room}")
        if spec is None or not spec.submodule_search_locations:
            raise InvalidInputError("trainctl", f"its part {room} isn't installed here")
        folder = Path(spec.submodule_search_locations[0])
        for file in sorted(folder.rglob("*")):
            if file.is_file() and not _is_left_out(file.relative_to(folder)):
                yield f"trainctl/{room}/{file.relative_to(folder).as_posix()}", file.read_bytes()
        if room == "tui":
            for page in docs_pages.files():
                yield f"trainctl/tui/{docs_pages.INSTALLED}/{page.name}", page.read_bytes()


def _is_left_out(file: Path) -> bool:
    return file.parts[0] == docs_pages.INSTALLED or any(part.endswith(_LEFT_OUT) for part in file.parts)


def _packed(files: dict[str, bytes], record: str) -> bytes:
    lines = [f"{name},sha256={_digest(body)},{len(body)}" for name, body in files.items()]
    files = files | {record: ("\n".join([*lines, f"{record},,"]) + "\n").encode()}
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, body in files.items():
            entry = zipfile.ZipInfo(name, _STAMP)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, body, zipfile.ZIP_DEFLATED)
    return packed.getvalue()


def _digest(body: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(body).digest()).decode().rstrip("=")
