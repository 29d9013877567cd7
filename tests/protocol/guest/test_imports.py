"""A guest's process loads nothing for it but the standard library."""

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[3] / "protocol"
CODE = """
import sys
sys.path.insert(0, sys.argv[1])
from trainctl import guest
from trainctl.guest import learning_rate
print(*sorted({name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names - {"__main__"}))
print(*(name for name in sys.modules if name.startswith("trainctl.") and not name.startswith("trainctl.guest")))
"""


def test_nothing_but_the_standard_library() -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", CODE, str(FOLDER)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["trainctl", ""]
