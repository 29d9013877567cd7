"""The precision of a group: the best type that all ranks' devices have."""

from pathlib import Path
from typing import Any

import pytest

from trainctl.protocol.config import run_file
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.machine import devices
from trainctl.protocol.messages import DeviceTypes

CPU = DeviceTypes("torch", "cpu", ())
MAC = (DeviceTypes("mlx", "gpu", ("bfloat16", "float16")), DeviceTypes("mlx", "cpu", ()))


def card(capability: tuple[int, int], index: int = 0) -> DeviceTypes:
    return DeviceTypes("torch", f"cuda:{index}", devices.types_of_capability(capability))


AMPERE, TURING, PASCAL = ((card(capability), CPU) for capability in ((8, 6), (7, 5), (6, 1)))
NODES = {"studio": MAC, "ampere": AMPERE, "turing": TURING, "pascal": PASCAL, "box": (CPU,)}


def config(tables: dict[str, dict[str, Any]], **model: Any) -> run_file.RunFile:
    return run_file.parse({
        "run": {"name": "a", "steps": 5}, "model": {"path": "m", "dtype": "auto"} | model, "data": {"path": "d"},
        "batch": {"global": 32}, "optimizer": {"learning_rate": 1e-4}, "nodes": tables,
    })  # fmt: skip


@pytest.mark.parametrize(
    ("tables", "dtype", "says"),
    [
        ({"studio": {}, "ampere": {}}, "bfloat16", "all ranks compute in bfloat16, which each of their devices has"),
        ({"studio": {}, "turing": {}}, "float16", "since turing (cuda:0) has no bfloat16"),
        ({"ampere": {}, "turing": {}, "pascal": {}}, "float32", "since pascal (cuda:0) has no"),
        ({"ampere": {"device": "cpu"}, "studio": {}}, "float32", "since ampere (cpu) has no"),
        ({"ampere": {"device": "cuda"}}, "bfloat16", "bfloat16"),
        ({"studio": {"backend": "mlx", "device": "gpu"}}, "bfloat16", "bfloat16"),
        ({"box": {}, "studio": {}}, "float32", "since box (cpu) has no"),
    ],
)
def test_all_ranks_compute_in_the_best_type_that_all_have(tables: dict[str, Any], dtype: str, says: str) -> None:
    found, why = devices.resolve(config(tables), NODES, "config")
    assert found.model.dtype == dtype
    assert says in why
    assert devices.resolve(found, {}, "config") == (found, "")


def test_a_node_that_has_said_nothing_is_named() -> None:
    with pytest.raises(InvalidInputError, match=r'^config: model\.dtype: "auto" needs to know the device of far, '):
        devices.resolve(config({"far": {}}), NODES, "config")


def test_a_backend_that_a_node_lacks_has_no_device() -> None:
    assert devices.rank_types(MAC, run_file.NodeTable(backend="torch")) is None
    both = (*MAC, CPU)
    assert devices.rank_types(both, run_file.NodeTable(), torch_only=True) == ("cpu", ())


def test_this_machine_has_a_device_and_a_processor_says_what_it_has(tmp_path: Path) -> None:
    assert any(one.device == "cpu" for one in devices.read_devices())
    found = devices.resolve_alone(config({}), "here", "config").model.dtype
    assert found in ("float32", "float16", "bfloat16")
    (tmp_path / "cpuinfo").write_text("processor : 0\nflags\t\t: fpu avx512_bf16 sse\n")
    assert devices._of_cpu(tmp_path / "cpuinfo") == ("bfloat16",)
    assert devices._of_cpu(tmp_path / "none") == ()
