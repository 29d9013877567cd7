"""Images that tools/image.py builds of a copy of this checkout, in a storage of their own that nothing is left of."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.conftest import ROOT
from tests.deploy.support.containers import call

BUILD_SECONDS = 3600.0
"""For a build: after so long it hangs, however busy the machine is."""
_KEPT_BACK = shutil.ignore_patterns("__pycache__", "keys")


class Build(NamedTuple):
    """An image, and how it was built."""

    name: str
    seconds: float
    said: str


class Builds:
    """Images by target, built from cold at first."""

    def __init__(self, folder: Path) -> None:
        self.source, self._storage = folder / "source", folder / "storage"
        self._built: dict[str, Build] = {}
        for name in ("examples/deploy", "docs", "protocol", "trainer", "node_agent", "tui"):
            shutil.copytree(ROOT / name, self.source / name, ignore=_KEPT_BACK)
        (self.source / "tools").mkdir()
        files = ("pyproject.toml", "constraints.txt", "hatch_build.py", "README.md", "LICENSE")
        for file in (*files, *(f"tools/{name}.py" for name in ("__init__", "requirements", "image", "debian_root"))):
            shutil.copy(ROOT / file, self.source / file)
        self.env = self._environment(folder)

    def _environment(self, folder: Path) -> dict[str, str]:
        """Variables of buildah: where it has images and caches."""
        settings, temporary = folder / "storage.conf", folder / "tmp"
        temporary.mkdir()
        places = f'graphroot = "{self._storage}/root"\nrunroot = "{self._storage}/run"\n'
        settings.write_text(f'[storage]\ndriver = "overlay"\n{places}', "ascii")
        return {"CONTAINERS_STORAGE_CONF": str(settings), "TMPDIR": str(temporary)}

    def __getitem__(self, target: str) -> Build:
        """The image as it was first built."""
        if target not in self._built:
            self._built[target] = self.build(target)
        return self._built[target]

    def build(self, target: str) -> Build:
        """Build the image, or build it again."""
        command, begun = [sys.executable, "-m", "tools.image", target], time.monotonic()
        done = subprocess.run(
            command, cwd=self.source, env={**os.environ, **self.env}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, timeout=BUILD_SECONDS, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-5000:]
        return Build(f"localhost/trainctl:{target}", time.monotonic() - begun, done.stdout)

    def layers(self, name: str) -> list[str]:
        """The digests of an image's layers, the base's first."""
        described = json.loads(call("buildah", "inspect", "--type", "image", name, **self.env))
        found: list[str] = described["OCIv1"]["rootfs"]["diff_ids"]
        return found

    def compressed(self, name: str, folder: Path) -> list[int]:
        """The size of each layer in bytes as a registry has it, the base's first."""
        archive = folder / "image.tar"
        call("buildah", "push", "--format", "oci", name, f"oci-archive:{archive}", **self.env)
        with tarfile.open(archive) as files:

            def read(digest: str) -> dict[str, object]:
                file = files.extractfile(f"blobs/{digest.replace(':', '/')}")
                assert file is not None
                found: dict[str, object] = json.load(file)
                return found

            index = files.extractfile("index.json")
            assert index is not None
            manifest = read(json.load(index)["manifests"][0]["digest"])
        archive.unlink()
        return [layer["size"] for layer in manifest["layers"]]  # type: ignore[attr-defined]

    def close(self) -> None:
        """Remove images, caches and mounts."""
        call("buildah", "rm", "--all", **self.env)
        call("buildah", "rmi", "--all", "--force", **self.env)
        for place in mounts_under(self._storage):
            call("umount", str(place))
        shutil.rmtree(self._storage)
        shutil.rmtree(self.env["TMPDIR"])


def mounts_under(folder: Path) -> list[Path]:
    """Return what is mounted in a folder, the innermost first."""
    lines = Path("/proc/self/mountinfo").read_text("utf-8").splitlines()
    places = [Path(line.split()[4]) for line in lines]
    return sorted((place for place in places if place.is_relative_to(folder)), key=lambda place: -len(place.parts))
