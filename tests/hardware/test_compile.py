"""Compiled layers on an NVIDIA GPU: losses and gradients of those uncompiled, also where CUDA graphs are recorded.

Left out where there is none. `make soak` takes each case that varies lengths.
"""

import pytest
from tests.trainer.support.compiled_losses import CASES, RAGGED, check, compare
from tests.trainer.support.curves import TOLERANCES

NODE = {"backend": "torch", "device": "cuda", "threads": 1}
QUICK = ("ragged", "ragged lora", "bfloat16")
TRIED = [
    pytest.param(mode, case, marks=[] if case in QUICK else [pytest.mark.tier("soak")])
    for mode in ("default", "reduce-overhead")
    for case, (_, sizes, _) in CASES.items()
    if sizes == RAGGED and (mode == "default" or "lora" not in case)
]
"""Graphs aren't recorded with adapters."""
PADDED = {"4x20": 20, "3x17": 20, "2x9": 10, "1x8": 10, "1x20": 20}
"""Of RAGGED: the lengths that rows get where CUDA graphs are recorded."""


@pytest.mark.needs("cuda", "cuda-compiler")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("mode", "case"), TRIED)
def test_losses_and_gradients_are_those_without(run_file, tmp_path, mode, case):
    changes, sizes, tolerance = CASES[case]
    run_file(**{"model__compile": mode, "nodes__here": NODE, "data__kind": "rows"} | changes)
    found = compare(tmp_path / "run.toml", sizes, tmp_path / "cache")
    print(mode, case, found)
    check(found, TOLERANCES[changes.get("model__dtype", "float32")], tolerance)
    assert found["mode"] == mode
    if mode == "default":
        assert found["recorded"] == 0
        assert found["lengths"] == sorted({int(size.partition("x")[2]) for size in sizes}), "nothing is padded"
    else:
        assert found["recorded"] > 0, "or what overwrites results was not tried"
        assert found["lengths"] == sorted({PADDED[size] for size in sizes})
