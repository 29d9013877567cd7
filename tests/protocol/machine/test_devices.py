"""The precision of a group: the best type that all ranks' devices have."""

import sys
from pathlib import Path
from typing import Any

import pytest

from trainctl.protocol.batch.device_table import types_of_capability
from trainctl.protocol.config import env_policy, run_file
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.machine import devices
from trainctl.protocol.machine.nvidia import Card
from trainctl.protocol.messages import DeviceTypes

BOTH = ("bfloat16", "float16")
CPU = DeviceTypes("torch", "cpu", ())
M1 = (DeviceTypes("mlx", "gpu", devices._of_apple_gpu("Apple M1 Max")), DeviceTypes("mlx", "cpu", ()))
MAC = (DeviceTypes("mlx", "gpu", ("bfloat16", "float16")), DeviceTypes("mlx", "cpu", ()))


def card(capability: tuple[int, int], index: int = 0) -> DeviceTypes:
    return DeviceTypes("torch", f"cuda:{index}", types_of_capability(capability))


AMPERE, TURING, PASCAL = ((card(capability), CPU) for capability in ((8, 6), (7, 5), (6, 1)))
NODES = {"studio": MAC, "ampere": AMPERE, "turing": TURING, "pascal": PASCAL, "box": (CPU,), "m1": M1}


def config(tables: dict[str, dict[str, Any]], **model: Any) -> run_file.RunFile:
    return run_file.parse({
        "run": {"name": "a", "steps": 5}, "model": {"path": "m", "dtype": "auto"} | model, "data": {"path": "d"},
        "batch": {"global": 32}, "optimizer": {"learning_rate": 1e-4}, "nodes": tables,
    })  # fmt: skip


def test_all_ranks_compute_in_the_best_type_that_all_have() -> None:
    for tables, dtype, says in (
        ({"studio": {}, "ampere": {}}, "bfloat16", "all ranks compute in bfloat16, which each of their devices has"),
        ({"studio": {}, "m1": {}}, "float16", "since m1 (gpu) has no bfloat16"),
        ({"ampere": {}, "turing": {}, "pascal": {}}, "float32", "since pascal (cuda:0) has no"),
        ({"ampere": {"device": "cpu"}, "studio": {}}, "float32", "since ampere (cpu) has no"),
        ({"studio": {"backend": "mlx", "device": "gpu"}}, "bfloat16", "bfloat16"),
    ):
        found, why = devices.resolve(config(tables), NODES, "config")
        assert found.model.dtype == dtype and says in why
        assert devices.resolve(found, {}, "config") == (found, "")
    alone = devices.resolve(config({}), {"cpu": (DeviceTypes("torch", "cpu", ()),)}, "config")[0]
    assert alone.model.dtype == "float32", "a run file without nodes is of those whose devices are known"


def test_a_node_that_has_said_nothing_is_named_and_a_backend_that_it_lacks_has_no_device() -> None:
    with pytest.raises(InvalidInputError, match=r'^config: model\.dtype: "auto" needs to know the device of far, '):
        devices.resolve(config({"far": {}}), NODES, "config")
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
    # A virtual machine's brand string is "Apple processor"; a machine without one has none.
    brands = ("Apple M1 Ultra", "Apple M10", "Apple processor", "")
    assert [devices._of_apple_gpu(brand) for brand in brands] == [("float16",), BOTH, BOTH, BOTH]


def test_bfloat16_that_a_card_lacks_is_warned_of() -> None:
    fixed = {"dtype": "bfloat16"}
    warned = devices.unsuited(config({"turing": {}, "ampere": {}, "box": {}}, **fixed), NODES)
    assert warned[0].startswith('model.dtype = "bfloat16": cuda:0 of turing computes it without hardware')
    assert [line.split()[5] for line in warned] == ["turing", "pascal", "m1"]
    for dtype in ("auto", "float16", "float32"):
        assert devices.unsuited(config({}, dtype=dtype), NODES) == ()
    assert devices.unsuited(config({"turing": {"device": "cpu"}}, **fixed), {"turing": TURING}) == ()


def unequal(**env: str) -> tuple[tuple[str, tuple[str, ...]] | None, ...]:
    """Return what a rank gets by each setting of `device`, on a machine with a Pascal, an Ampere and a Turing card."""
    cards = (card((6, 1), 0), card((8, 6), 1), card((7, 5), 2), CPU)
    tables = (run_file.NodeTable(device=device, env=env) for device in ("auto", "cuda", "cuda:0", "cuda:1"))
    return tuple(devices.rank_types(cards, table) for table in tables)


def test_a_rank_gets_the_types_of_the_card_that_its_variables_show() -> None:
    pascal, ampere, turing = ("cuda:0", ()), ("cuda:1", BOTH), ("cuda:0", ("float16",))
    assert unequal() == unequal(CUDA_DEVICE_ORDER="PCI_BUS_ID") == (ampere, ampere, pascal, ampere)
    assert unequal(CUDA_DEVICE_ORDER="FASTEST_FIRST") == (pascal, pascal, pascal, ("cuda:1", ()))
    for visible, gets in (
        ("0", (pascal, pascal, pascal, None)),
        ("2,1", (ampere, ampere, turing, ampere)),
        ("2,7,1", (turing, turing, turing, None)),
        ("GPU-8932f937", (pascal, pascal, pascal, None)),
        ("", (("cpu", ()), None, None, None)),
    ):
        assert unequal(CUDA_VISIBLE_DEVICES=visible) == gets
    assert devices.rank_types(MAC, run_file.NodeTable(env={"CUDA_VISIBLE_DEVICES": "1"})) == ("gpu", MAC[0].types)


@pytest.mark.parametrize(
    ("agent", "wanted", "device"),
    [
        (None, None, ("cuda:0", BOTH)), ("1", None, ("cuda:0", ())), ("GPU-b", None, ("cuda:0", ())),
        ("1", "0", ("cuda:0", BOTH)), ("1", "1", ("cuda:0", ())), ("", "0", ("cuda:0", BOTH)),
        ("", None, ("cpu", ("bfloat16",))), ("MIG-c7d1", None, ("cuda:0", ())), ("MIG-c7d1", "0", ("cuda:0", BOTH)),
    ],
)  # fmt: skip
def test_the_run_files_variables_are_laid_over_the_agents(
    monkeypatch: pytest.MonkeyPatch, agent: str | None, wanted: str | None, device: tuple[str, tuple[str, ...]]
) -> None:
    monkeypatch.setattr(devices, "cards", lambda: (Card((8, 6), "GPU-a"), Card((6, 1), "GPU-b")))
    monkeypatch.setattr(devices, "installed_version", {"torch": "2.13.0"}.get)
    monkeypatch.setattr(devices, "_of_cpu", lambda: ("bfloat16",))
    monkeypatch.setattr(sys, "platform", "linux")
    if agent is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", agent)
    env = {} if wanted is None else {"CUDA_VISIBLE_DEVICES": wanted}
    assert devices.rank_types(devices.read_devices.__wrapped__(), run_file.NodeTable(env=env)) == device


def test_mlx_takes_the_first_card_that_it_sees_and_cuda_numbers_cards_as_its_driver_does() -> None:
    cards = (DeviceTypes("mlx", "gpu", ()), DeviceTypes("mlx", "gpu", BOTH), DeviceTypes("mlx", "cpu", ()))
    assert devices.rank_types(cards, run_file.NodeTable()) == ("gpu", ())
    assert devices.rank_types(cards, run_file.NodeTable(env={"CUDA_VISIBLE_DEVICES": "1"})) == ("gpu", BOTH)
    agents = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST", "HOME": "/h"}
    assert env_policy.of_trainers(agents, {})["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    wanted = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    assert env_policy.of_trainers(agents, wanted)["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"
