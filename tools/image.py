"""`python -m tools.image TARGET [ARGUMENT ...]`: builds an image of this checkout by buildah, on a Debian made here.

TARGET is one of the Dockerfile's, and each ARGUMENT goes to buildah. The base is made by mmdebstrap once, so that no
registry is needed. What this machine's pip is set to (index, folder of wheels, certificates) holds in the build too.
Run it as root in a checkout, on Linux.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from tools import debian_root

FOLDER: Final = debian_root.ROOT / "examples" / "deploy"
SUITE, PYTHON_TAG = "bookworm", "cp311"
"""A suite of Debian, and the tag of wheels for its Python."""
BASE: Final = f"localhost/trainctl-base:{SUITE}"
TARGETS: Final = ("watch", "torch", "cuda")
_PACKAGES: Final = "python3,python3-venv,ca-certificates,usr-is-merged"
_NOT_IN_BASE: Final = ("doc", "info", "locale", "man")
"""Folders of /usr/share that no container reads: 45 MB."""
_CERTIFICATES: Final = "/etc/ssl/certs/ca-certificates.crt"


def main(arguments: Sequence[str]) -> int:
    """Return the exit status; 2 where something is missing."""
    target = arguments[0] if arguments else ""
    problem = "" if target in TARGETS else f"no target {target!r}; choose {', '.join(TARGETS)}"
    if problem := problem or debian_root.lacking("buildah", "mmdebstrap"):
        sys.stderr.write(f"image: {problem}\n")
        return 2
    try:
        ensure_base()
        build(target, *arguments[1:])
    except subprocess.CalledProcessError as error:
        said = (error.stderr or "its output is above").strip()
        sys.stderr.write(f"image: {error.cmd[0]} failed with status {error.returncode}: {said}\n")
        return 1
    return 0


def ensure_base() -> None:
    """Make the base, the smallest Debian with Python, unless it is there."""
    listed = subprocess.run(["buildah", "images", "--quiet", BASE], capture_output=True, check=False)
    if listed.returncode == 0 and listed.stdout.strip():
        return
    options = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in _NOT_IN_BASE]
    options.append("--dpkgopt=path-include=/usr/share/doc/*/copyright")
    options.append("--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr")
    with tempfile.TemporaryDirectory(prefix="trainctl-base-") as folder:
        debian_root.bootstrap(SUITE, Path(folder) / "base.tar", _PACKAGES, *options)
        (Path(folder) / "Dockerfile").write_text('FROM scratch\nADD base.tar /\nCMD ["python3"]\n', "ascii")
        subprocess.run(["buildah", "bud", "--isolation", "chroot", "--tag", BASE, folder], check=True)


def build(target: str, *arguments: str) -> None:
    """Build the image `localhost/trainctl:TARGET`. Raises CalledProcessError."""
    files = ["--file", str(FOLDER / "Dockerfile"), "--ignorefile", str(FOLDER / "Dockerfile.dockerignore")]
    kind = ["--isolation", "chroot", "--layers", "--build-arg", f"BASE={BASE}", "--target", target]
    with tempfile.TemporaryDirectory(prefix="trainctl-image-") as folder:
        options = [*machine_options(target, debian_root.pip_settings(), Path(folder)), *arguments]
        command = ["buildah", "bud", *kind, *files, "--tag", f"localhost/trainctl:{target}", *options]
        subprocess.run([*command, str(debian_root.ROOT)], check=True)


def machine_options(target: str, settings: Mapping[str, str], folder: Path) -> Iterator[str]:
    """Yield buildah's options that have pip's settings hold in the build, for pip and for uv; write their files to
    `folder`.

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
    pip, uv = folder / "pip.conf", folder / "uv.toml"
    pip_lines = ["[global]", f"cert = {_CERTIFICATES}"]
    uv_lines = ["system-certs = true", 'index-strategy = "unsafe-best-match"']  # of all indexes, as pip does
    for name, several in values.items():
        if several:
            pip_lines.append(f"{name} = {' '.join(several)}")
            uv_lines.append(f"{name} = {json.dumps(several[0] if name == 'index-url' else several)}")
    pip.write_text("\n".join(pip_lines) + "\n", "utf-8")
    uv.write_text("\n".join(uv_lines) + "\n", "utf-8")
    mounts = {pip: "/etc/pip.conf", uv: "/etc/uv/uv.toml"} | {place: str(place) for place in places}
    if "cert" in settings:
        mounts[Path(settings["cert"])] = _CERTIFICATES
    for source, mounted in mounts.items():
        yield from ("--volume", f"{source}:{mounted}:ro")
    if target == "torch" and torches:
        yield from ("--build-arg", "TORCH_BACKEND=")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
