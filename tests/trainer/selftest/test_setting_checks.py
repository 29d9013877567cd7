"""The checks of compiled layers, packs and optimizers, with the self-test's own model; and what each makes of faults.

`make soak` takes each of bitsandbytes' settings, `make test` one. Compiled layers are compiled in
tests/integration/test_selftest.py by `make soak`.
"""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiers import is_soak
from tests.trainer.support.varlen_kernel import Kernel, by_document
from torch.nn.attention import varlen

from trainctl.protocol.errors import InvalidInputError
from trainctl.trainer.attention import torch_varlen
from trainctl.trainer.selftest import compile_check, optimizer_check
from trainctl.trainer.selftest.compile_check import check_compile
from trainctl.trainer.selftest.optimizer_check import TRIALS, check_optimizers
from trainctl.trainer.selftest.short_training import STEPS, Learned
from trainctl.trainer.selftest.small_assets import make_assets
from trainctl.trainer.selftest.varlen_check import check_varlen
from trainctl.tui.selftest.local_cluster import write_tables
from trainctl.tui.selftest.machine_checks import training_tables

ALL = is_soak()
CURVE = [5.0, 4.0, 3.0]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A run file of the checks, for the CPU."""
    make_assets(tmp_path)
    write_tables(tmp_path / "run.toml", training_tables(tmp_path, {"backend": "torch", "device": "cpu"}))
    return tmp_path / "run.toml"


def learned(losses: list[float], compile_seconds: float = 0.0, graphs: int = 0) -> Learned:
    return Learned(losses, "torch cpu", [1.0] * len(losses), compile_seconds, graphs)


@pytest.mark.timeout(600)
def test_bitsandbytes_learns_as_adamw_does(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = dict(TRIALS) if ALL else {name: TRIALS[name] for name in ("adamw-8bit", "offload")}
    monkeypatch.setattr(optimizer_check, "TRIALS", trials)
    outcome = check_optimizers(file, "a")
    has_library = importlib.util.find_spec("bitsandbytes") is not None
    assert outcome.status == ("ok" if has_library else "not here"), outcome.evidence
    missing = [line for line in outcome.evidence if "moments leave the memory of an NVIDIA GPU" in line]
    assert len(outcome.evidence) == len(trials) and len(missing) == 1
    assert set(outcome.figures) == (set(trials) - {"offload"} if has_library else set())
    assert all(len(one["losses"]) == STEPS + 1 for one in outcome.figures.values())


@pytest.mark.parametrize(
    ("name", "losses", "status", "says"),
    [
        ("nf4", [5.0, 4.0, 3.001], "ok", "differ by 3.3e-04"),
        ("nf4", [5.0, 4.0, 3.1], "failed", "a loss differs by 3.3e-02 from that without; at most 0.01 is expected"),
        ("nf4", [5.0, 4.0, float("nan")], "failed", "a loss differs by inf"),
        ("nf4", CURVE, "failed", "the same bits as without: it has no effect"),
        ("paged-adamw", CURVE, "ok", "differ by 0.0e+00"),
        ("offload", CURVE, "not here", "this rank's device is cpu"),
    ],
)
def test_each_setting_is_compared_with_the_run_without_it(
    name: str, losses: list[float], status: str, says: str
) -> None:
    trial = TRIALS[name]
    curves = {repr(trial.tables): learned(losses), repr(trial.against): learned(CURVE)}
    outcome = optimizer_check._tried(name, trial, torch.device("cpu"), lambda tables: curves[repr(tables)])
    assert (outcome.status, says in outcome.evidence[0]) == (status, True), outcome.evidence


@pytest.mark.parametrize(
    ("error", "status"), [(InvalidInputError("run", "it needs x"), "not here"), (RuntimeError("no kernel"), "failed")]
)
def test_a_setting_that_cannot_be_used_ends_only_its_own_trial(error: Exception, status: str) -> None:
    def refuse(tables: Any) -> Learned:
        raise error

    outcome = optimizer_check._tried("nf4", TRIALS["nf4"], torch.device("cpu"), refuse)
    assert outcome.status == status and str(error) in outcome.evidence[0]


def test_packs_learn_by_the_kernel_as_with_a_mask(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch documents of the kernel takes its place."""
    refused = check_varlen(file, "a")
    assert (refused.status, "needs an NVIDIA GPU" in refused.evidence[0]) == ("not here", True)
    kernel = Kernel("cpu", by_document)
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    monkeypatch.setattr(torch_varlen, "device_fault", lambda device, dtype: None)
    outcome = check_varlen(file, "a")
    assert outcome.status == "ok", outcome.evidence
    assert kernel.calls >= STEPS and len(outcome.figures["losses"]) == STEPS + 1
    monkeypatch.setattr(varlen, "varlen_attn", Kernel("cpu", lambda *given, **how: by_document(*given, **how) * 0.5))
    wrong = check_varlen(file, "a")
    assert (wrong.status, "from that with a mask; at most 0.002 is expected" in wrong.evidence[0]) == ("failed", True)


def test_a_machine_without_a_compiler_compiles_nothing(
    file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    outcome = check_compile(file, "a")
    assert (outcome.status, "this machine has no C++ compiler" in outcome.evidence[0]) == ("not here", True)


def test_other_losses_of_compiled_layers_are_a_fault() -> None:
    right = compile_check._compared(learned(CURVE), learned([5.0, 4.0, 3.0001], 9.0, 1), 1e-4)
    assert compile_check._faults("default", right) == []
    assert right["compile_seconds"] == 9.0
    wrong = compile_check._compared(learned(CURVE), learned([5.0, 4.0, 3.1], 9.0), 1e-4)
    assert compile_check._faults("default", wrong) == [
        "default: a loss differs by 3.3e-02 from that uncompiled; at most 0.0001 is expected",
        "default: nothing was compiled",
    ]
