"""The checklist's points, each fine and each with its command, and what is said of environment variables."""

import importlib.util
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.protocol.config.test_run_file import good
from tests.protocol.support.advised import facts_of, node_of
from tests.protocol.support.profiles import profile_of

from trainctl.protocol.advice.advice_facts import AdviceFacts, NodeFacts
from trainctl.protocol.advice.checklist import Check, checklist
from trainctl.protocol.advice.environment import VARIABLES, platform_of, variables_for
from trainctl.protocol.batch.data_statistics import DataStatistics
from trainctl.protocol.calibration.profile import MatmulRate, Pass
from trainctl.protocol.config import env_policy, run_file
from trainctl.protocol.config.run_tables import RunFile

FACTS = facts_of({"studio": 2.0}, 1e9)
ROWS = DataStatistics(
    samples=1000, held_out=10, tokens=60_000, counted=50_000, lengths={"p50": 60, "p99": 240, "p100": 900},
    sequence_length=256, truncated=2, skipped=0, duplicates=0, padding=0.4, micro_batch=8, packs=260,
    pack_efficiency=0.99,
)  # fmt: skip


def config(**tables: dict[str, Any]) -> RunFile:
    raw = good()
    for name, table in tables.items():
        raw[name] = raw.get(name, {}) | table
    return run_file.parse(raw)


def point(name: str, facts: AdviceFacts = FACTS, read: DataStatistics | None = None, **tables: dict[str, Any]) -> Check:
    return next(one for one in checklist(config(**tables), facts, "llama", read, "/caches") if one.name == name)


def with_node(node: NodeFacts) -> AdviceFacts:
    return msgspec.structs.replace(FACTS, nodes=(node,))


@pytest.mark.parametrize(("bfloat16", "state"), [(400.0, "change"), (110.0, "ok")])
def test_a_narrow_type_is_advised_where_its_products_are_faster(bfloat16: float, state: str) -> None:
    rates = (MatmulRate("float32", 100.0), MatmulRate("bfloat16", bfloat16))
    found = point("precision", with_node(node_of("studio", 2.0, profiles=(profile_of(matmul=rates),))))
    assert found.state == state
    assert ("model.dtype=bfloat16" in found.command) == (state == "change")
    assert point("precision").state == "unknown"
    assert point("precision", model={"dtype": "bfloat16"}).state == "ok"


def test_layers_are_computed_again_only_where_memory_is_short() -> None:
    short = with_node(node_of("studio", 2.0, cap_bytes=15_000))
    assert point("checkpointing").state == "ok"
    for mode in ("none", "alternate"):
        now = {"gradient_checkpointing": mode}
        assert "gradient_checkpointing=all" in point("checkpointing", short, model=now).command
    assert "gradient_checkpointing=none" in point("checkpointing", model={"gradient_checkpointing": "all"}).command


def test_a_compiled_model_is_advised_on_nvidia_devices() -> None:
    nvidia = with_node(node_of("studio", 2.0, device="cuda:0 NVIDIA H200"))
    assert "model.compile=default" in point("compile", nvidia).command
    assert point("compile", nvidia, model={"compile": "default"}).state == "ok"
    packs = {"data": {"kind": "rows", "packing": "best-fit"}}
    varlen = {"attention": "varlen", "dtype": "bfloat16"}
    assert point("compile", nvidia, model=varlen, **packs).state == "ok"
    assert point("compile").state == "ok"


def test_short_rows_are_packed() -> None:
    rows = {"data": {"kind": "rows"}}
    assert "data.packing=best-fit" in point("packing", read=ROWS, **rows).command
    assert point("packing", read=msgspec.structs.replace(ROWS, padding=0.02), **rows).state == "ok"
    assert point("packing", **rows).state == "unknown"
    assert point("packing").state == "ok"


def test_lengths_are_compared_with_the_sequence_length() -> None:
    rows = {"data": {"kind": "rows"}}
    assert point("lengths", read=ROWS, **rows).state == "ok"
    cut = msgspec.structs.replace(ROWS, truncated=200)
    assert "data.sequence_length=900" in point("lengths", read=cut, **rows).command


def test_the_peak_micro_batch_has_its_command() -> None:
    passes = tuple(Pass(micro, seconds) for micro, seconds in ((1, 0.01), (4, 0.016), (16, 0.1)))
    node = node_of("studio", 1.0, profiles=(profile_of(passes=passes),), micro=16)
    assert "nodes.studio.micro=4" in point("micro-batch", with_node(node)).command
    assert point("micro-batch", with_node(msgspec.structs.replace(node, micro=4))).state == "ok"
    assert point("micro-batch", with_node(msgspec.structs.replace(node, micro="auto"))).state == "ok"
    bare = point("micro-batch", with_node(NodeFacts(name="box")))
    assert (bare.state, bare.command) == ("unknown", "trainctl calibrate run.toml --node box")


def test_commands_set_what_a_run_file_has() -> None:
    """Each changes a run file that can be read."""
    settings = ("dtype=bfloat16", "gradient_checkpointing=all", "compile=default")
    for setting in (*(f"model.{one}" for one in settings), "data.packing=best-fit"):
        table, _, rest = setting.partition(".")
        name, _, value = rest.partition("=")
        rows = {"kind": "rows"} if name == "packing" else {}
        config(**{"data": rows, table: {**(rows if table == "data" else {}), name: value}})


def test_what_is_worth_setting_may_stand_in_a_run_file() -> None:
    wanted = {one.name: one.value for one in VARIABLES if one.use == "set"}
    assert wanted
    env_policy.check(wanted, "run.toml: nodes.box.env")
    assert all(one.value for one in VARIABLES if one.use == "set")
    assert not any(one.value for one in VARIABLES if one.use != "set")


def test_what_mlx_does_not_read_is_in_none_of_its_files() -> None:
    spec = importlib.util.find_spec("mlx")
    assert spec is not None and spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0])
    files = [*root.rglob("*.so"), *root.rglob("*.h"), *root.rglob("*.dylib"), *root.rglob("*.py")]
    whole = b"".join(file.read_bytes() for file in files)
    read = {one.name: one.name.encode() in whole for one in VARIABLES if one.name.startswith("MLX_")}
    unread = {"MLX_METAL_PREALLOCATE", "MLX_MAX_MEMORY_GB", "MLX_BUFFER_CACHE_LIMIT"}
    assert {name for name, is_read in read.items() if not is_read} == unread


def test_variables_are_those_of_the_platform() -> None:
    assert platform_of("Darwin", "gpu Apple M2 Ultra") == "Apple GPU"
    assert platform_of("Linux", "cuda:0 NVIDIA H200") == "NVIDIA GPU"
    assert platform_of("Linux", "cpu") == "CPU"
    apple = {one.name for one in variables_for(["Apple GPU"])}
    assert "MLX_METAL_PREALLOCATE" in apple
    assert not {"PYTORCH_ALLOC_CONF", "NCCL_SOCKET_IFNAME"} & apple
    assert variables_for(["NVIDIA GPU"])[0].use == "set"


@pytest.mark.parametrize(
    ("device", "dtype", "wanted"),
    [("cuda:0 NVIDIA T4", "bfloat16", "float16"), ("cuda:0 Tesla T4", "bfloat16", "float16"),
     ("NVIDIA GeForce GTX 1080", "bfloat16", "float32"),
     ("NVIDIA H200", "float32", "bfloat16"), ("NVIDIA GeForce RTX 3090", "bfloat16", None)],
)  # fmt: skip
def test_the_precision_is_that_of_the_devices_preset(device: str, dtype: str, wanted: str | None) -> None:
    found = point("precision", with_node(node_of("studio", 2.0, device=device)), model={"dtype": dtype})
    assert found.state == ("ok" if wanted is None else "change")
    assert wanted is None or found.command.endswith(f"model.dtype={wanted}")


def test_the_oldest_device_decides_the_precision_and_auto_is_fine() -> None:
    old, new = node_of("old", 1.0, device="NVIDIA T4"), node_of("new", 2.0, device="NVIDIA H100 80GB HBM3")
    both = msgspec.structs.replace(FACTS, nodes=(new, old))
    assert point("precision", both, model={"dtype": "bfloat16"}).command.endswith("float16")
    assert point("precision", both, model={"dtype": "auto"}).state == "ok"
