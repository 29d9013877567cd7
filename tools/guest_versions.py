"""`python -m tools.guest_versions`: test adapters of `trainctl.guest` with the two newest minor versions of frameworks.

They are taken from the package index into build/guests, beside the environment, without what they need in turn.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PIP: Final = (sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check")
TESTS: Final = {
    ("transformers",): ("test_hf.py", "test_trl.py"),
    ("trl",): ("test_trl.py",),
    ("lightning", "pytorch-lightning"): ("test_lightning.py",),
    ("accelerate",): ("test_accelerate.py", "test_hf.py"),
    ("mlx-lm",): ("test_mlx_lm.py",),
}
"""Packages of one version, and the tests that are about them."""


def newest_minors(package: str) -> list[str]:
    """Return the newest version of each of a package's two newest minor versions; none if no index answers."""
    said = subprocess.run([*PIP, "index", "versions", package], capture_output=True, text=True, check=False).stdout
    found = re.search(r"Available versions: (.*)", said)
    versions = found[1].split(", ") if found else []
    minors: dict[str, str] = {}
    for version in versions:  # the newest first
        minors.setdefault(".".join(version.split(".")[:2]), version)
    return [*minors.values()][:2]


def main() -> int:
    """Test all; return the exit status."""
    failed: list[str] = []
    for packages, tests in TESTS.items():
        versions = newest_minors(packages[0])
        if not versions:
            failed.append(f"{packages[0]}: no package index answers")
        for version in versions:
            folder = ROOT / "build" / "guests" / f"{packages[0]}-{version}"
            pinned = [f"{package}=={version}" for package in packages]
            subprocess.run([*PIP, "install", "--quiet", "--no-deps", "--target", str(folder), *pinned], check=False)
            files = [f"tests/protocol/guest/{name}" for name in tests]
            command = [sys.executable, "-m", "pytest", "-q", "--tier", "all", *files]
            print(f"{packages[0]} {version}", flush=True)
            if subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(folder)}, check=False).returncode:
                failed.append(f"{packages[0]} {version}")
    print(f"guests: failed: {', '.join(failed)}" if failed else "guests: all passed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
