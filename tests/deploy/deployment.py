"""The manifests' folder with keys for some pods, as docs/deploy.md says."""

import shutil
import subprocess
from pathlib import Path

from tests.deploy.rendering import FOLDER
from tests.integration.support.namespaces import LAN
from tests.waiting import HANG_SECONDS


def deployed(folder: Path, programs: dict[str, str], pods: int) -> Path:
    """A copy, in which make-keys.sh was run. `programs`: an environment with trainctl on its PATH."""
    copied = Path(shutil.copytree(FOLDER, folder / "kubernetes"))
    words = [str(copied / "make-keys.sh"), str(pods), f"{LAN}.0/24"]
    done = subprocess.run(words, env=programs, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert done.returncode == 0 and "kubectl create secret" in done.stdout, done.stderr
    return copied
