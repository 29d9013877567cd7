"""`python -m tools.image TARGET [ARGUMENT ...]`: builds an image of this checkout by buildah, on a Debian made here.

TARGET is one of the Dockerfile's, and each ARGUMENT goes to buildah. The base is made by mmdebstrap once, so that no
registry is needed. What this machine's pip is set to (index, folder of wheels, certificates) holds in the build too.
Run it as root in a checkout, on Linux.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from tools import pip_settings

ROOT: Final = Path(__file__).parents[1]
FOLDER: Final = ROOT / "examples" / "deploy"
SUITE: Final = "bookworm"
"""Of Debian; it has Python 3.11."""
PYTHON_TAG: Final = "cp311"
BASE: Final = f"localhost/trainctl-base:{SUITE}"
TARGETS: Final = ("watch", "torch", "cuda")
PROGRAMS: Final = ("buildah", "mmdebstrap")
PACKAGES: Final = ("python3", "python3-venv", "ca-certificates", "usr-is-merged")
_NOT_IN_BASE: Final = ("doc", "info", "locale", "man")
"""Folders of /usr/share that no container reads: 45 MB."""
_CERTIFICATES: Final = "/etc/ssl/certs/ca-certificates.crt"


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status; 2 where something is missing."""
    given = [*(sys.argv[1:] if arguments is None else arguments)]
    problem = lacking(given[0] if given else "")
    if problem:
        sys.stderr.write(f"image: {problem}\n")
        return 2
    try:
        ensure_base()
        build(given[0], *given[1:])
    except subprocess.CalledProcessError as error:
        said = (error.stderr or "its output is above").strip()
        sys.stderr.write(f"image: {error.cmd[0]} failed with status {error.returncode}: {said}\n")
        return 1
    return 0


def lacking(target: str) -> str:
    """What keeps an image from being built here, and what to do about it; empty if nothing does."""
    if target not in TARGETS:
        return f"no target {target!r}; choose {', '.join(TARGETS)}"
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"{missing[0]} not found; install it: apt-get install {' '.join(PROGRAMS)}"
    return "" if os.geteuid() == 0 else "building needs root; run it again with sudo"


def ensure_base() -> None:
    """Make the base unless it is there."""
    found = subprocess.run(["buildah", "images", "--quiet", BASE], capture_output=True, check=False)
    if found.returncode == 0 and found.stdout.strip():
        return
    with tempfile.TemporaryDirectory(prefix="trainctl-base-") as folder:
        _run(*base_command(Path(folder) / "base.tar"))
        (Path(folder) / "Dockerfile").write_text('FROM scratch\nADD base.tar /\nCMD ["python3"]\n', "ascii")
        _run("buildah", "bud", "--isolation", "chroot", "--tag", BASE, folder)


def base_command(tar: Path) -> list[str]:
    """Writes the smallest Debian with Python."""
    without = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in _NOT_IN_BASE]
    kept = "--dpkgopt=path-include=/usr/share/doc/*/copyright"
    merged = "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr"
    return [
        "mmdebstrap",
        "--variant=minbase",
        f"--include={','.join(PACKAGES)}",
        merged,
        *without,
        kept,
        SUITE,
        str(tar),
    ]


def build(target: str, *arguments: str) -> None:
    """Build the image `localhost/trainctl:TARGET`. Raises CalledProcessError."""
    settings = pip_settings.own()
    with tempfile.TemporaryDirectory(prefix="trainctl-image-") as folder:
        options = [*machine_options(target, settings, Path(folder)), *arguments]
        _run(*build_command(target, options))


def build_command(target: str, options: Sequence[str]) -> list[str]:
    """`options`: buildah's, beside the usual ones."""
    files = ["--file", str(FOLDER / "Dockerfile"), "--ignorefile", str(FOLDER / "Dockerfile.dockerignore")]
    kind = ["--isolation", "chroot", "--layers", "--build-arg", f"BASE={BASE}", "--target", target]
    return ["buildah", "bud", *kind, *files, "--tag", f"localhost/trainctl:{target}", *options, str(ROOT)]


def machine_options(target: str, settings: Mapping[str, str], folder: Path) -> Iterator[str]:
    """buildah's options that have pip's settings hold in the build, for pip and for uv. `folder`: for their files.

    An index on this machine's disk is left out: where its files are is unknown. If a folder of wheels has a torch for
    the base's Python, no other torch is looked for; `cuda` leaves such folders out, because that torch may be for CPUs.
    """
    links = settings.get("find-links", "").split()
    places = [Path(link.removeprefix("file://")).resolve() for link in links if not link.startswith("http")]
    torches = [place for place in places if any(place.glob(f"torch-*-{PYTHON_TAG}-*.whl"))]
    places = [place for place in places if place.is_dir() and not (target == "cuda" and place in torches)]
    indexes = {name: settings.get(name, "").split() for name in ("index-url", "extra-index-url")}
    values = {name: [url for url in urls if not url.startswith("file:")] for name, urls in indexes.items()}
    values["find-links"] = [*map(str, places), *(link for link in links if link.startswith("http"))]
    (folder / "pip.conf").write_text(pip_file(values), "utf-8")
    (folder / "uv.toml").write_text(uv_file(values), "utf-8")
    mounts = {folder / "pip.conf": "/etc/pip.conf", folder / "uv.toml": "/etc/uv/uv.toml"}
    mounts |= {place: str(place) for place in places}
    if "cert" in settings:
        mounts[Path(settings["cert"])] = _CERTIFICATES
    for source, mounted in mounts.items():
        yield from ("--volume", f"{source}:{mounted}:ro")
    if target == "torch" and torches:
        yield from ("--build-arg", "TORCH_BACKEND=")


def pip_file(values: Mapping[str, Sequence[str]]) -> str:
    """The settings as pip reads them."""
    lines = [f"{name} = {' '.join(several)}\n" for name, several in values.items() if several]
    return "".join(["[global]\n", f"cert = {_CERTIFICATES}\n", *lines])


def uv_file(values: Mapping[str, Sequence[str]]) -> str:
    """The same as uv reads them: the best version of all indexes, as pip takes it."""
    lines = ["system-certs = true\n", 'index-strategy = "unsafe-best-match"\n']
    for name, several in values.items():
        if several:
            lines.append(f"{name} = {json.dumps(several[0] if name == 'index-url' else several)}\n")
    return "".join(lines)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    sys.exit(main())
