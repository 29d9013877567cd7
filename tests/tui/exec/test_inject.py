"""Python processes under `trainctl exec`: they start as they do without it, whatever they are and have."""

import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT
from tests.waiting import HANG_SECONDS

INJECT = ROOT / "protocol" / "trainctl" / "guest" / "inject"
BARE = [sys.executable, "-S"]
"""Python without installed packages, ours among them."""


def python(*words: str, paths: tuple[Path, ...] = (INJECT,)) -> "subprocess.CompletedProcess[str]":
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    return subprocess.run([*words], env=env, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)


def test_the_users_own_sitecustomize_runs_and_stays_the_module(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; VALUE = 7; print('own', __file__)")
    code = "import sitecustomize, sys; print(sitecustomize.VALUE, sys.path.count(sys.argv[1]))"
    done = python(sys.executable, "-c", code, str(INJECT), paths=(INJECT, tmp_path))
    assert done.stdout == f"own {tmp_path / 'sitecustomize.py'}\n7 1\n"
    assert done.stderr == ""


def test_an_error_of_the_users_own_is_said_as_without(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("1 / 0")
    without = python(sys.executable, "-c", "print('runs')", paths=(tmp_path,))
    done = python(sys.executable, "-c", "print('runs')", paths=(INJECT, tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "runs\n", without.stderr)
    assert "ZeroDivisionError" in done.stderr


def test_an_isolated_python_has_nothing_of_ours() -> None:
    done = python(sys.executable, "-I", "-c", "import sys; print([*filter(None, sys.meta_path)])")
    assert "Watch" not in done.stdout
    assert "Watch" in python(sys.executable, "-c", "import sys; print(sys.meta_path)").stdout


def test_an_environment_without_our_packages_finds_the_guest_alone() -> None:
    code = "import sitecustomize; from trainctl import guest; print(guest.attach.__name__); import trainctl.protocol"
    done = python(*BARE, "-c", code)
    assert done.stdout == "attach\n"
    assert done.stderr.endswith("ModuleNotFoundError: No module named 'trainctl.protocol'\n")


def test_an_adapter_that_fails_leaves_the_library_as_it_is(tmp_path: Path) -> None:
    for name in ("torch", "torch/optim"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / "torch/optim/optimizer.py").write_text("VALUE = 3")
    code = "import torch.optim.optimizer as module; print(module.VALUE)"
    done = python(sys.executable, "-c", code, paths=(INJECT, tmp_path))
    assert (done.returncode, done.stdout) == (0, "3\n")
    assert done.stderr.startswith("trainctl: torch.optim.optimizer can't be watched: AttributeError")
    assert done.stderr.count("\n") == 1


def test_a_start_costs_little() -> None:
    def seconds(*paths: Path) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert python(sys.executable, "-c", "", paths=paths).returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    pairs = [(seconds(), seconds(INJECT)) for _ in range(5)]
    assert statistics.median(second - first for first, second in pairs) < 0.05
