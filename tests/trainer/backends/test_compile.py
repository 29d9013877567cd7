"""Compiled layers: the losses and gradients of others, few compilations, what they need, and whose time they are.

`make test-all` compiles the first of CASES, `make soak` each, and traces each combination of TRACED. `make test` traces
one.
"""

import contextlib
import dataclasses
import importlib.util
import itertools
import os
import time
from typing import Any

import numpy as np
import pytest
from tests.trainer.support.compiled_losses import CASES, LORA, batch, check, compare
from tests.trainer.support.passes import blocks, loss_and_gradient
from tests.waiting import HANG_SECONDS

from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.machine.facts import compiler_of, lacking, lacks_of
from trainctl.protocol.record.status_page import StatusWriter
from trainctl.trainer.backends.backend import CompileMeter
from trainctl.trainer.step.observer import Stopwatch

HEADERS = "( and no header files of Python)?"
"""At the end of what is missing, on a machine that has none."""
TRACED: tuple[dict[str, dict[str, Any]], tuple[str, ...], dict[str, dict[str, Any]]] = (
    {"full": {}, "lora": LORA},
    ("none", "alternate", "all"),
    {"text": {}, "rows": {"data__kind": "rows"}, "packs": {"data__kind": "rows", "data__packing": "best-fit"}},
)
"""Adapters, gradient checkpointing, and data."""
ALL, SOAK = pytest.mark.tier("all"), pytest.mark.tier("soak")
COMPILED = {"model__compile": "default"}


@pytest.fixture(autouse=True, scope="module")
def libraries():
    global torch, torch_backend, torch_compile, torch_lora
    import torch

    from trainctl.trainer.adapters import torch_lora
    from trainctl.trainer.backends import torch_backend, torch_compile


@pytest.mark.needs("compiler")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", [pytest.param(case, marks=ALL if case == "full" else SOAK) for case in CASES])
def test_losses_and_gradients_are_those_without(run_file, tmp_path, case):
    changes, sizes, tolerance = CASES[case]
    run_file(**COMPILED | changes)
    quick = {"TORCHINDUCTOR_VEC_ISA_OK": "0"} if case == "full" else {}  # vector instructions take half of the time
    found = compare(tmp_path / "run.toml", sizes, tmp_path / "cache", **quick)
    print(case, found)
    check(found, tolerance / 10, tolerance)
    assert found["mode"] == changes.get("model__compile", "default")
    assert found["recorded"] == 0, "a CPU has no CUDA graphs"
    assert found["lengths"] == sorted({int(size.partition("x")[2]) for size in sizes}), "nothing is padded"
    assert any((tmp_path / "cache" / "trainctl" / "torchinductor").iterdir()), "in the user's own folder"


@pytest.fixture
def counters(tmp_path, monkeypatch):
    """Dynamo's counters, from zero."""
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    torch._dynamo.reset()
    counters.clear()
    return counters


@pytest.fixture
def trace(load_backend, counters):
    """Two passes of a model with compiled layers, whose graphs run as they are; returns its meter."""

    def trace(**changes):
        backend, given = load_backend(**COMPILED | changes), batch(3, 20)
        if changes.get("data__packing"):
            given = dataclasses.replace(given, positions=np.tile(np.r_[:9, :11].astype(np.int32), (3, 1)))
        with torch.compiler.set_stance("default", force_backend="eager"):
            losses = [loss_and_gradient(backend, given)[0] for _ in range(2)]
        assert losses[0] == losses[1]
        return backend.compile_meter  # type: ignore[no-any-return]

    return trace


@pytest.mark.needs("compiler")
@pytest.mark.timeout(HANG_SECONDS)
@pytest.mark.parametrize(
    ("adapter", "checkpointing", "data"),
    [("lora", "all", "text"), *(pytest.param(*case, marks=SOAK) for case in itertools.product(*TRACED))],
)
def test_a_layer_is_one_graph_whatever_it_computes(trace, counters, adapter, checkpointing, data):
    changes = TRACED[0][adapter] | TRACED[2][data]
    meter = trace(model__gradient_checkpointing=checkpointing, model__chunked_loss="on", **changes)
    kinds = (2 if adapter == "lora" else 1) * (2 if checkpointing == "alternate" else 1)
    assert 1 <= meter.graphs <= kinds, "the first layer's input needs no gradient with an adapter"
    assert not counters["graph_break"] and not counters["unimplemented"]


def test_a_machine_without_a_compiler_is_refused(load_backend, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    assert compiler_of("C++") is compiler_of("C") is None
    with pytest.raises(InvalidInputError, match=rf"^run\.toml: model\.compile: .* has no C\+\+ compiler{HEADERS}: "):
        load_backend(**COMPILED)
    load_backend(**COMPILED, trains=False)  # nothing to compile
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert lacking("cuda")[:2] == ("triton", "C compiler")
    assert lacking("cpu")[0] == "C++ compiler" and "triton" not in lacking("cpu")
    with pytest.raises(InvalidInputError, match=rf"this machine has no triton and no C compiler{HEADERS}: "):
        torch_compile.check_compiler(torch.device("cuda"), "run.toml")
    found = {"cuda": ("triton",), "cpu": ()}
    assert [lacks_of(found, device) for device in ("auto", "cuda:1", "cpu")] == [("triton",), ("triton",), ()]
    assert lacks_of(found, "mps") is lacks_of({}, "auto") is lacks_of(None, "cpu") is None
    mine = tmp_path / "mine"
    mine.touch(0o755)
    monkeypatch.setenv("CXX", f"{mine} -x")
    assert compiler_of("C++") == str(mine)


@pytest.mark.needs("compiler")
@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("TORCHINDUCTOR_COMPILE_THREADS", "0", "TORCHINDUCTOR_COMPILE_THREADS is '0' in the environment; "),
        ("XDG_CACHE_HOME", "/dev/null/here", "/dev/null/here/trainctl, where compiled code is kept, can't be made: "),
    ],
)
def test_an_environment_that_can_not_compile_is_refused_at_the_start(load_backend, monkeypatch, name, value, says):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    monkeypatch.setenv(name, value)
    with pytest.raises(InvalidInputError, match=f"^run.toml: model.compile: {says}"):
        load_backend(**COMPILED)


def test_compiled_code_is_kept_where_only_its_user_can_write(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = os.umask(0o002)
    try:
        folder = torch_compile._own_cache("run.toml")
    finally:
        os.umask(before)
    assert folder == tmp_path / "cache" / "trainctl" / "torchinductor"
    assert [one.stat().st_mode & 0o777 for one in (folder, folder.parent)] == [0o700, 0o700]
    assert torch_compile._own_cache("run.toml") == folder, "it may be there already"
    for changed, mode in ((folder, 0o770), (folder.parent, 0o702)):
        changed.chmod(mode)
        with pytest.raises(InvalidInputError, match=f"{changed}, .* can be written to by other users"):
            torch_compile._own_cache("run.toml")
        changed.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(InvalidInputError, match=f"{folder.parent}, .* belongs to another user; set TORCHINDUCTOR_"):
        torch_compile._own_cache("run.toml")


def test_a_model_without_layers_is_refused_and_on_mlx_it_has_no_effect_and_says_so(load_backend, caplog):
    with pytest.raises(InvalidInputError, match=r"^run\.toml: model\.compile: this model has no layers"):
        torch_compile._layers(torch.nn.Linear(2, 2), "run.toml")
    assert load_backend("mlx", **COMPILED).compute.compile == "off"
    assert "no effect on MLX" in caplog.messages[0]


@pytest.mark.parametrize("longest", [1, 2, 64, 512, 2048])
def test_padded_lengths_are_few_and_near(longest):
    lengths = torch_compile.lengths_up_to(longest)
    assert lengths[-1] == longest and len(lengths) <= torch_compile.MOST_LENGTHS
    assert all(high <= 1.5 * low + 1 for low, high in itertools.pairwise(lengths))


def test_padding_changes_no_number(load_backend):
    backend, given = load_backend(), blocks(3, 13)
    wide = torch_compile.padded(given, 18)
    assert wide.inputs.shape == (3, 18) and wide.weight == given.weight and wide.tokens == given.tokens
    losses = [backend.evaluate(one).losses["tokens"] for one in (given, wide)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert backend.token_log_probabilities(wide)[:, 13:].any() is np.False_


def _losses(backend, given, reduction):
    outputs = backend.passes.outputs(given)
    return outputs.losses(summed=reduction == "sum")


@pytest.mark.needs("compiler")
@pytest.mark.timeout(HANG_SECONDS)
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_compiled_loss_is_that_uncompiled(load_backend, counters, monkeypatch, reduction):
    """As on CUDA, by a compiler that runs its graphs as they are: sums and losses of single tokens, of varying sizes;
    no others are compiled, and none are counted as layers'."""
    monkeypatch.setattr(torch_compile, "_LOSS_DEVICES", ("cpu",))
    compiled, plain = (load_backend(model__compile=mode, data__kind="rows") for mode in ("default", "off"))
    layers = compiled._compiled
    with torch.compiler.set_stance("default", force_backend="eager"):
        for rows, length in ((3, 20), (2, 17), (4, 9), (1, 9)):
            given = batch(rows, length)
            found, expected = (_losses(one, given, reduction) for one in (compiled, plain))
            assert found.requires_grad
            torch.testing.assert_close(found, expected)
        losses = layers._graphs_of_losses
        assert 1 <= losses <= 3, "sizes are symbolic"
        assert compiled.compile_meter.graphs == layers._graphs() > 0
        assert compiled.evaluate(batch(5, 11)).losses == plain.evaluate(batch(5, 11)).losses
        assert layers._graphs_of_losses == losses


def test_graphs_are_not_recorded_with_adapters():
    torch_compile.check_graphs("reduce-overhead", torch.device("cpu"), "run.toml")
    torch_compile.check_graphs("default", torch.device("cuda"), "run.toml")
    for mode in ("reduce-overhead", "max-autotune"):
        with pytest.raises(InvalidInputError, match=f'"{mode}" records CUDA graphs, and adapters crash with them'):
            torch_compile.check_graphs(mode, torch.device("cuda"), "run.toml")


@pytest.mark.parametrize("keeps_graphs", [True, False])
def test_gradients_that_a_later_pass_overwrites_are_copied(keeps_graphs):
    found = [torch.randn(3, 4), torch.randn(5)]
    expected = [gradient.clone() for gradient in found]
    totals = torch_backend.widened([*found], are_overwritten=keeps_graphs)
    for gradient in found:
        gradient.zero_()  # as the next replay of a CUDA graph would
    same = all(torch.equal(total, one) for total, one in zip(totals, expected, strict=True))
    assert same == keeps_graphs, "a copy costs memory, so there is none without graphs"


class Marks:
    """A device whose queue takes 30 s for what is between two marks."""

    def mark(self):
        return Marks()

    def elapsed_time(self, ended):
        assert self is not ended
        return 30_000.0


def test_on_a_device_the_compilers_time_is_in_no_phase_while_ranges_are_recorded(tmp_path):
    meter, names = CompileMeter(5.0), list[str]()

    @contextlib.contextmanager
    def ranges(name):
        names.append(f"begin {name}")
        yield
        names.append(f"end {name}")

    watch = Stopwatch(StatusWriter(tmp_path / "status", os.getpid()), time.perf_counter(), meter, ranges)
    device: Any = Marks()
    for name, seconds in (("forward", 10.0), ("backward", 40.0)):
        with watch.phase(name, device):
            meter.seconds += seconds
            names.append("work")
    watch.settle()
    assert (watch.phases().forward, watch.phases().backward) == (20.0, 0.0)
    assert watch.compile_seconds() == 50.0
    assert names == ["begin forward", "work", "end forward", "begin backward", "work", "end backward"]
