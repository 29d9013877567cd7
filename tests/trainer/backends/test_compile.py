"""Compiled layers: the losses and gradients of others, few compilations, what they need, and whose time they are.

`make soak` compiles each case in CASES, and traces each combination of TRACED; `make test` takes one of each.
"""

import contextlib
import dataclasses
import importlib.util
import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.trainer.support.compile_cases import ALL, CASES, LORA
from tests.trainer.support.compiled_losses import batch, check, compare, loss_and_gradient
from tests.waiting import HANG_SECONDS
from torch._dynamo.utils import counters

from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.machine.compilers import compiler_of, lacking, lacks_of
from trainctl.protocol.record.status_page import StatusWriter
from trainctl.trainer.adapters import torch_lora
from trainctl.trainer.backends import torch_compile
from trainctl.trainer.backends.compile_meter import CompileMeter
from trainctl.trainer.backends.load import load
from trainctl.trainer.data import batch as batches
from trainctl.trainer.step.stopwatch import Stopwatch

HEADERS = "( and no header files of Python)?"
"""At the end of what is missing, on a machine that has none."""
TRACED: tuple[dict[str, dict[str, Any]], tuple[str, ...], dict[str, dict[str, Any]]] = (
    {"full": {}, "lora": LORA},
    ("none", "alternate", "all"),
    {"text": {}, "rows": {"data__kind": "rows"}, "packs": {"data__kind": "rows", "data__packing": "best-fit"}},
)
"""Adapters, gradient checkpointing, and data."""


@pytest.mark.needs("compiler")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", CASES if ALL else ["full"])
def test_losses_and_gradients_are_those_without(run_file: Callable[..., Any], tmp_path: Path, case: str) -> None:
    changes, sizes, tolerance = CASES[case]
    here = {"backend": "torch", "device": "cpu", "threads": 1}
    run_file(**{"model__compile": "default", "nodes__here": here} | changes)
    quick = {} if ALL else {"TORCHINDUCTOR_VEC_ISA_OK": "0"}  # to try vector instructions takes half of the time
    found = compare(tmp_path / "run.toml", sizes, tmp_path / "cache", **quick)
    print(case, found)
    check(found, tolerance / 10, tolerance)
    assert found["mode"] == changes.get("model__compile", "default")
    assert found["recorded"] == 0, "a CPU has no CUDA graphs"
    assert found["lengths"] == sorted({int(size.partition("x")[2]) for size in sizes}), "nothing is padded"
    assert any((tmp_path / "cache" / "trainctl" / "torchinductor").iterdir()), "in the user's own folder"


@pytest.fixture
def trace(run_file: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., CompileMeter]:
    """Two passes of a model with compiled layers, whose graphs run as they are; returns its meter."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")

    def trace(**changes: Any) -> CompileMeter:
        config = run_file(**{"model__compile": "default"} | changes)
        backend = load(config, config.nodes["here"], "run.toml")
        given = batch(3, 20)
        if config.data.packing != "none":
            given = dataclasses.replace(given, positions=np.tile(np.r_[:9, :11].astype(np.int32), (3, 1)))
        stance: Any = torch.compiler.set_stance
        with stance("default", force_backend="eager"):
            losses = [loss_and_gradient(backend, given)[0] for _ in range(2)]
        assert losses[0] == losses[1]
        return backend.compile_meter

    torch._dynamo.reset()
    counters.clear()
    return trace


@pytest.mark.needs("compiler")
@pytest.mark.timeout(HANG_SECONDS)
@pytest.mark.parametrize(
    "settings", list(itertools.product(*TRACED)) if ALL else [("lora", "all", "text")], ids=" ".join
)
def test_a_layer_is_one_graph_whatever_it_computes(
    trace: Callable[..., CompileMeter], settings: tuple[str, str, str]
) -> None:
    adapter, checkpointing, data = settings
    changes = TRACED[0][adapter] | TRACED[2][data]
    meter = trace(model__gradient_checkpointing=checkpointing, model__chunked_loss="on", **changes)
    kinds = (2 if adapter == "lora" else 1) * (2 if checkpointing == "alternate" else 1)
    assert 1 <= meter.graphs <= kinds, "the first layer's input needs no gradient with an adapter"
    assert not counters["graph_break"] and not counters["unimplemented"]


@pytest.mark.needs("compiler")
@pytest.mark.timeout(HANG_SECONDS)
@pytest.mark.parametrize(("is_off", "why"), [(False, "Unsafe side effect"), (True, "_DISABLE may be set")])
def test_that_nothing_was_compiled_is_said_once(
    trace: Callable[..., CompileMeter], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    is_off: bool, why: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch._dynamo.config, "disable", is_off)
    forward = torch_lora._Dropout.forward

    def noted(dropout: Any, x: torch.Tensor) -> torch.Tensor:
        dropout.seen = dropout._channels.to(x.device)  # what recomputation would do again
        return forward(dropout, x)

    monkeypatch.setattr(torch_lora._Dropout, "forward", noted)
    assert trace(model__gradient_checkpointing="all", **LORA).graphs == 0
    found = [one for one in caplog.messages if one.startswith("[model] compile has no effect: ")]
    assert len(found) == 1 and why in found[0]


def test_a_machine_without_a_compiler_is_refused(
    run_file: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert compiler_of("C++") is compiler_of("C") is None
    config = run_file(model__compile="default", nodes__here={"backend": "torch", "device": "cpu"})
    with pytest.raises(
        InvalidInputError, match=rf"^run\.toml: model\.compile: this machine has no C\+\+ compiler{HEADERS}: "
    ):
        load(config, config.nodes["here"], "run.toml")
    load(config, config.nodes["here"], "run.toml", trains=False)  # nothing to compile


def test_what_a_cuda_device_lacks_is_named_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert lacking("cuda")[:2] == ("triton", "C compiler")
    assert lacking("cpu")[0] == "C++ compiler" and "triton" not in lacking("cpu")
    with pytest.raises(InvalidInputError, match=rf"this machine has no triton and no C compiler{HEADERS}: "):
        torch_compile.check_compiler(torch.device("cuda"), "run.toml")
    found = {"cuda": ("triton",), "cpu": ()}
    assert [lacks_of(found, device) for device in ("auto", "cuda:1", "cpu", "mps")] == [
        ("triton",),
        ("triton",),
        (),
        None,
    ]
    assert lacks_of({}, "auto") is lacks_of(None, "cpu") is None


@pytest.mark.parametrize(
    ("lacks", "says"), [(("triton",), "no triton"), (("triton", "C compiler"), "no triton and no C compiler")]
)
def test_all_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, lacks: tuple[str, ...], says: str) -> None:
    monkeypatch.setattr(torch_compile, "lacking", lambda kind: lacks)
    with pytest.raises(InvalidInputError) as refused:
        torch_compile.check_compiler(torch.device("cuda"), "run.toml")
    assert str(refused.value) == (
        f"run.toml: model.compile: this machine has {says}: install what is missing, "
        'or set compile = "off" in [nodes.NAME] of this machine'
    )


@pytest.mark.needs("compiler")
@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("TORCHINDUCTOR_COMPILE_THREADS", "many", "TORCHINDUCTOR_COMPILE_THREADS is 'many' in the environment; "),
        ("TORCHINDUCTOR_COMPILE_THREADS", "0", "TORCHINDUCTOR_COMPILE_THREADS is '0' in the environment; "),
        ("XDG_CACHE_HOME", "/dev/null/here", "/dev/null/here/trainctl, where compiled code is kept, can't be made: "),
    ],
)
def test_an_environment_that_can_not_compile_is_refused_at_the_start(
    run_file: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, name: str, value: str, says: str
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    monkeypatch.setenv(name, value)
    config = run_file(model__compile="default", nodes__here={"backend": "torch", "device": "cpu"})
    with pytest.raises(InvalidInputError) as refused:
        load(config, config.nodes["here"], "run.toml")
    assert str(refused.value).startswith(f"run.toml: model.compile: {says}")


def test_compiled_code_is_kept_where_only_its_user_can_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_compiler_that_the_environment_names_is_the_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "mine"
    mine.write_text("")
    mine.chmod(0o755)
    monkeypatch.setenv("CXX", f"{mine} -x")
    assert compiler_of("C++") == str(mine)


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"^run\.toml: model\.compile: this model has no layers"):
        torch_compile._layers(torch.nn.Linear(2, 2), "run.toml")


def test_on_mlx_it_has_no_effect_and_says_so(run_file: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    config = run_file(model__compile="default", nodes__here={"backend": "mlx", "device": "cpu"})
    assert load(config, config.nodes["here"], "run.toml").compute.compile == "off"
    assert [one for one in caplog.messages if "no effect on MLX" in one] == caplog.messages[:1]


@pytest.mark.parametrize("longest", [1, 2, 64, 512, 2048])
def test_padded_lengths_are_few_and_near(longest: int) -> None:
    lengths = torch_compile.lengths_up_to(longest)
    assert lengths[-1] == longest and len(lengths) <= torch_compile.MOST_LENGTHS
    assert all(high <= 1.5 * low + 1 for low, high in itertools.pairwise(lengths))


def test_padding_changes_no_number(run_file: Callable[..., Any]) -> None:
    config = run_file(nodes__here={"backend": "torch", "device": "cpu", "threads": 1})
    backend = load(config, config.nodes["here"], "run.toml")
    blocks = np.random.default_rng(1).integers(0, 200, (3, 14), dtype=np.int32)
    given = batches.from_blocks(blocks)
    wide = torch_compile.padded(given, 18)
    assert wide.inputs.shape == (3, 18) and wide.weight == given.weight and wide.tokens == given.tokens
    losses = [backend.evaluate(one).losses["tokens"] for one in (given, wide)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert backend.token_log_probabilities(wide)[:, 13:].any() is np.False_


@pytest.mark.needs("compiler")
@pytest.mark.timeout(HANG_SECONDS)
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_compiled_loss_is_that_uncompiled(
    run_file: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reduction: str
) -> None:
    """As on CUDA, by a compiler that runs its graphs as they are: sums and losses of single tokens, of varying sizes;
    no others are compiled, and none are counted as layers'."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(torch_compile, "_LOSS_DEVICES", ("cpu",))
    torch._dynamo.reset()
    counters.clear()
    config = run_file(model__compile="default", data__kind="rows")
    compiled, plain = (
        load(one, one.nodes["here"], "run.toml")
        for one in (config, msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, compile="off")))
    )
    layers = compiled._compiled
    stance: Any = torch.compiler.set_stance
    with stance("default", force_backend="eager"):
        for rows, length in ((3, 20), (2, 17), (4, 9), (1, 9)):
            given = batch(rows, length)
            found, expected = (one._outputs.losses(given, None, reduction) for one in (compiled, plain))
            assert found.requires_grad
            torch.testing.assert_close(found, expected)
        losses = layers._graphs_of_losses
        assert 1 <= losses <= 3, "sizes are symbolic"
        assert compiled.compile_meter.graphs == layers._graphs() > 0
        assert compiled.evaluate(batch(5, 11)).losses == plain.evaluate(batch(5, 11)).losses
        assert layers._graphs_of_losses == losses


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_graphs_are_not_recorded_with_adapters(mode: Any, kind: str) -> None:
    device = torch.device(kind)
    if kind == "cpu" or mode == "default":
        torch_compile.check_graphs(mode, device, "run.toml")
        return
    with pytest.raises(InvalidInputError) as refusal:
        torch_compile.check_graphs(mode, device, "run.toml")
    assert str(refusal.value) == (
        f'run.toml: model.compile: "{mode}" records CUDA graphs, and adapters crash with them; set "default"'
    )


@pytest.mark.parametrize("keeps_graphs", [True, False])
def test_gradients_that_a_later_pass_overwrites_are_copied(run_file: Callable[..., Any], keeps_graphs: bool) -> None:
    config = run_file(nodes__here={"backend": "torch", "device": "cpu", "threads": 1})
    backend: Any = load(config, config.nodes["here"], "run.toml")
    backend._compiled = SimpleNamespace(keeps_graphs=keeps_graphs, prepared=lambda given: given)
    backend.forward(batch(3, 20), 1.0)
    backend.backward()
    found = [*backend._scratch]
    expected = [gradient.clone() for gradient in found]
    backend.accumulate()
    for gradient in found:
        gradient.zero_()  # as the next replay of a CUDA graph would
    same = all(torch.equal(total, one) for total, one in zip(backend._totals, expected, strict=True))
    assert same == keeps_graphs, "a copy costs memory, so there is none without graphs"


class Marks:
    """A device whose queue takes 30 s for what is between two marks."""

    def mark(self) -> object:
        return object()

    def seconds_between(self, begun: object, ended: object) -> float:
        assert begun is not ended
        return 30.0


def test_on_a_device_the_compilers_time_is_in_no_phase_while_ranges_are_recorded(tmp_path: Path) -> None:
    meter, names = CompileMeter(5.0), list[str]()

    @contextlib.contextmanager
    def ranges(name: str) -> Iterator[None]:
        names.append(f"begin {name}")
        yield
        names.append(f"end {name}")

    watch = Stopwatch(StatusWriter(tmp_path / "status", os.getpid()), time.perf_counter(), meter, ranges)
    device: Any = Marks()
    for name, seconds in (("forward", 10.0), ("backward", 40.0)):
        with watch.on_device(name, device):
            meter.seconds += seconds
            names.append("work")
    watch.settle(device)
    assert (watch.phases().forward, watch.phases().backward) == (20.0, 0.0)
    assert watch.compile_seconds() == 50.0
    assert names == ["begin forward", "work", "end forward", "begin backward", "work", "end backward"]


def test_the_compilers_time_is_in_no_phase(tmp_path: Path) -> None:
    meter, begun = CompileMeter(5.0), time.perf_counter()
    watch = Stopwatch(StatusWriter(tmp_path / "status", os.getpid()), begun, meter)
    with watch.phase("forward"):
        meter.seconds += 1000.0
    took = time.perf_counter() - begun
    assert watch.compile_seconds() == 1000.0
    assert -1000.0 <= watch.phases().forward <= took - 1000.0 + 1e-6
    assert watch.seconds() <= time.perf_counter() - begun - 1000.0 + 1e-6
