"""The checks of compiled layers, packs and optimizers, with the self-test's own model; and what each makes of faults.

Compiled layers are compiled in tests/integration/test_selftest.py by `make soak`.
"""

import importlib.util

import pytest
from tests.trainer.support.varlen_kernel import Kernel, by_document

from trainctl.trainer.selftest.short_training import STEPS, Learned
from trainctl.trainer.selftest.small_assets import make_assets
from trainctl.tui.selftest.local_cluster import write_tables
from trainctl.tui.selftest.machine_checks import training_tables

CURVE = [5.0, 4.0, 3.0]


@pytest.fixture(autouse=True, scope="module")
def libraries():
    global compile_check, optimizer_check, torch, torch_varlen, varlen, varlen_check
    import torch
    from torch.nn.attention import varlen

    from trainctl.trainer.attention import torch_varlen
    from trainctl.trainer.selftest import compile_check, optimizer_check, varlen_check


@pytest.fixture
def file(tmp_path):
    """A run file of the checks, for the CPU."""
    make_assets(tmp_path)
    write_tables(tmp_path / "run.toml", training_tables(tmp_path, {"backend": "torch", "device": "cpu"}))
    return tmp_path / "run.toml"


def learned(losses, compile_seconds=0.0, graphs=0):
    return Learned(losses, "torch cpu", [1.0] * len(losses), compile_seconds, graphs)


@pytest.mark.timeout(600)
def test_bitsandbytes_learns_as_adamw_does(file, monkeypatch):
    trials = {name: optimizer_check.TRIALS[name] for name in ("adamw-8bit", "offload")}
    monkeypatch.setattr(optimizer_check, "TRIALS", trials)
    outcome = optimizer_check.check_optimizers(file, "a")
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
        ("nf4", CURVE, "failed", "the same bits as without: it has no effect"),
        ("offload", CURVE, "not here", "this rank's device is cpu"),
    ],
)
def test_each_setting_is_compared_with_the_run_without_it(name, losses, status, says):
    trial = optimizer_check.TRIALS[name]
    curves = {repr(trial.tables): learned(losses), repr(trial.against): learned(CURVE)}
    outcome = optimizer_check._tried(name, trial, torch.device("cpu"), lambda tables: curves[repr(tables)])
    assert (outcome.status, says in outcome.evidence[0]) == (status, True), outcome.evidence


def test_packs_learn_by_the_kernel_as_with_a_mask(file, monkeypatch):
    refused = varlen_check.check_varlen(file, "a")
    assert (refused.status, "needs an NVIDIA GPU" in refused.evidence[0]) == ("not here", True)
    kernel = Kernel("cpu", by_document)
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    monkeypatch.setattr(torch_varlen, "device_fault", lambda device, dtype: None)
    outcome = varlen_check.check_varlen(file, "a")
    assert outcome.status == "ok", outcome.evidence
    assert kernel.calls >= STEPS and len(outcome.figures["losses"]) == STEPS + 1
    monkeypatch.setattr(varlen, "varlen_attn", Kernel("cpu", lambda *given, **how: by_document(*given, **how) * 0.5))
    wrong = varlen_check.check_varlen(file, "a")
    assert (wrong.status, "from that with a mask; at most 0.002 is expected" in wrong.evidence[0]) == ("failed", True)
