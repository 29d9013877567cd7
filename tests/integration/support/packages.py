"""Wheels of this checkout's projects, and virtual environments in which pip installs them without a network."""

import os
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import distribution
from pathlib import Path

from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder
from tests.waiting import HANG_SECONDS

_NOT_LINKED = ("trainctl", "_trainctl", "pip")


def build_wheel(project: Path, into: Path) -> Path:
    """As `python -m build --wheel --no-isolation` does, in this process."""
    (made,) = WheelBuilder(str(project)).build(directory=str(into), versions=["standard"])
    return Path(made)


def build_sdist(project: Path, into: Path) -> Path:
    """As `python -m build --sdist --no-isolation` does, in this process."""
    (made,) = SdistBuilder(str(project)).build(directory=str(into), versions=["standard"])
    return Path(made)


class Venv:
    """A new environment of this interpreter; this one's pip installs there."""

    def __init__(self, folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=HANG_SECONDS)
        self.programs, self.python = folder / "bin", folder / "bin" / "python"
        (self.packages,) = folder.glob("lib/python*/site-packages")

    def link(self, *projects: str) -> None:
        """Have some libraries of this interpreter's environment, or without any named, all but ours."""
        for project in projects:
            for top in {file.parts[0] for file in distribution(project).files or ()} - {"..", "__pycache__"}:
                self._link(Path(str(distribution(project).locate_file(top))))
        if not projects:
            for top in Path(str(distribution("pytest").locate_file(""))).iterdir():
                if top.suffix != ".pth" and not top.name.startswith(_NOT_LINKED):
                    self._link(top)

    def _link(self, place: Path) -> None:
        (self.packages / place.name).symlink_to(place)

    def pip(self, *words: str | Path) -> None:
        """Run one pip command there, without an index or this machine's settings."""
        pip = [sys.executable, "-m", "pip", "--isolated", "--python", self.python, "--disable-pip-version-check"]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        environment = {**kept, "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INPUT": "1"}
        done = subprocess.run(
            [*pip, *words], env=environment, capture_output=True, text=True, timeout=HANG_SECONDS, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def install(self, *words: str | Path) -> None:
        """Install without compiling, which takes longer than the rest."""
        self.pip("install", "--no-compile", *words)

    def unpack(self, *wheels: Path) -> None:
        """Have the files of pure wheels, without the programs that pip would make."""
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(self.packages)

    def run(self, *words: str | Path) -> str:
        """Return what one command prints that sees only this environment's packages."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        done = subprocess.run(words, env=kept, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def unpack_archive(archive: Path, folder: Path) -> Path:
    """Unpack one of our own archives into a folder, and return the folder; Python before 3.11.4 has no filters."""
    with tarfile.open(archive) as tar:
        tar.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return folder
