"""The checklist's points, each fine and each with its command, and what is said of environment variables."""

from typing import Any

import msgspec
from tests.protocol.support.advised import facts_of, node_of
from tests.protocol.support.profiles import profile_of
from tests.protocol.support.run_files import good, with_value

from trainctl.protocol.advice.advice_facts import AdviceFacts, NodeFacts
from trainctl.protocol.advice.checklist import Check, checklist
from trainctl.protocol.batch.data_statistics import DataStatistics
from trainctl.protocol.calibration.profile import MatmulRate, Pass
from trainctl.protocol.config import env_policy, run_file
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.config.variables import VARIABLES, platform_of, variables_for

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
    """Return one point of the checklist, whose command sets what a run file may have."""
    asked = config(**tables)
    found = next(one for one in checklist(asked, facts, "llama", read, "/caches") if one.name == name)
    names = ",".join(node.name for node in facts.nodes)
    for setting in found.command.split(" --set ")[1:]:
        key, _, value = setting.partition("=")
        if key == "nodes":
            assert value == names
        else:
            run_file.parse(with_value(run_file.to_dict(asked), key, int(value) if value.isdigit() else value))
    return found


def with_nodes(*nodes: NodeFacts) -> AdviceFacts:
    return msgspec.structs.replace(FACTS, nodes=nodes)


def test_a_narrow_type_is_advised_where_its_products_are_faster() -> None:
    for bfloat16, state in ((400.0, "change"), (110.0, "ok")):
        rates = (MatmulRate("float32", 100.0), MatmulRate("bfloat16", bfloat16))
        found = point("precision", with_nodes(node_of("studio", 2.0, profiles=(profile_of(matmul=rates),))))
        assert found.state == state
        assert ("model.dtype=bfloat16" in found.command) == (state == "change")
    assert point("precision").state == "unknown"
    assert point("precision", model={"dtype": "bfloat16"}).state == "ok"


def test_layers_are_computed_again_only_where_memory_is_short() -> None:
    short = with_nodes(node_of("studio", 2.0, cap_bytes=15_000))
    assert point("checkpointing").state == "ok"
    for mode in ("none", "alternate"):
        now = {"gradient_checkpointing": mode}
        assert "gradient_checkpointing=all" in point("checkpointing", short, model=now).command
    assert "gradient_checkpointing=none" in point("checkpointing", model={"gradient_checkpointing": "all"}).command


H200 = "cuda:0 NVIDIA H200"


def test_a_compiled_model_is_advised_on_each_nvidia_device_that_can_compile() -> None:
    nvidia = with_nodes(node_of("studio", 2.0, device=H200))
    assert "model.compile=default" in point("compile", nvidia).command
    packs = {"data": {"kind": "rows", "packing": "best-fit"}}
    for model in ({"compile": "default"}, {"attention": "varlen", "dtype": "bfloat16"}):
        assert point("compile", nvidia, model=model, **packs).state == "ok"
    assert point("compile").state == "ok"
    ready = node_of("ready", 2.0, device=H200, compile_lacks=())
    bare = node_of("bare", 2.0, device=H200, compile_lacks=("triton", "C compiler"))
    apple = node_of("mini", 1.0, device="gpu Apple M2 Ultra", backend="mlx")
    found = point("compile", with_nodes(ready, apple))
    assert (found.state, found.command) == (
        "change",
        "trainctl run run.toml --set nodes=ready,mini --set nodes.ready.compile=default",
    )
    assert point("compile", with_nodes(ready)).command.endswith("--set model.compile=default")
    both = point("compile", with_nodes(ready, bare))
    assert both.command.endswith("--set nodes.ready.compile=default")
    assert "bare has no triton and no C compiler to compile" in both.text
    found = point("compile", with_nodes(bare))
    assert (found.state, found.command) == ("ok", "") and "bare has no triton" in found.text


def test_a_nodes_own_mode_counts_and_unknown_nodes_are_named() -> None:
    nodes = with_nodes(node_of("a", 2.0, device=H200, compile_lacks=()), node_of("b", 2.0, device=H200))
    tables = {name: {} for name in "ab"}
    found = point("compile", nodes, nodes=tables | {"a": {"compile": "default"}})
    assert found.text.startswith("default on a, off on b; ") and "whether b can compile isn't known" in found.text
    assert found.command.endswith("--set nodes.b.compile=default") and "nodes.a" not in found.command
    found = point("compile", nodes, nodes=tables | {"b": {"compile": "off"}}, model={"compile": "default"})
    assert found.state == "change" and found.command.endswith("--set nodes.b.compile=default")
    found = point("compile", nodes, nodes=tables | {name: {"compile": "max-autotune"} for name in "ab"})
    assert (found.state, found.text) == ("ok", "max-autotune")
    assert point("compile", nodes, nodes=tables | {name: {"backend": "mlx"} for name in "ab"}).state == "ok"


def test_short_rows_are_packed_and_lengths_are_compared_with_the_sequence_length() -> None:
    rows = {"data": {"kind": "rows"}}
    assert "data.packing=best-fit" in point("packing", read=ROWS, **rows).command
    assert point("packing", read=msgspec.structs.replace(ROWS, padding=0.02), **rows).state == "ok"
    assert point("packing", **rows).state == "unknown"
    assert point("packing").state == "ok"
    assert point("lengths", read=ROWS, **rows).state == "ok"
    cut = msgspec.structs.replace(ROWS, truncated=200)
    assert "data.sequence_length=900" in point("lengths", read=cut, **rows).command


def test_the_peak_micro_batch_has_its_command() -> None:
    passes = tuple(Pass(micro, seconds) for micro, seconds in ((1, 0.01), (4, 0.016), (16, 0.1)))
    node = node_of("studio", 1.0, profiles=(profile_of(passes=passes),), micro=16)
    assert "nodes.studio.micro=4" in point("micro-batch", with_nodes(node)).command
    assert point("micro-batch", with_nodes(msgspec.structs.replace(node, micro=4))).state == "ok"
    assert point("micro-batch", with_nodes(msgspec.structs.replace(node, micro="auto"))).state == "ok"
    bare = point("micro-batch", with_nodes(NodeFacts(name="box")))
    assert (bare.state, bare.command) == ("unknown", "trainctl calibrate run.toml --node box")


def test_variables_are_those_of_the_platform() -> None:
    machines = (("Darwin", "gpu Apple M2 Ultra"), ("Linux", H200), ("Linux", "cpu"))
    assert [platform_of(*machine) for machine in machines] == ["Apple GPU", "NVIDIA GPU", "CPU"]
    apple = {one.name for one in variables_for(["Apple GPU"])}
    assert "MLX_METAL_PREALLOCATE" in apple
    assert not {"PYTORCH_ALLOC_CONF", "NCCL_SOCKET_IFNAME"} & apple
    assert variables_for(["NVIDIA GPU"])[0].use == "set"
    wanted = {one.name: one.value for one in VARIABLES if one.use == "set"}
    assert wanted and all(wanted.values())
    env_policy.check(wanted, "run.toml: nodes.box.env")


def test_the_precision_is_one_that_the_device_has() -> None:
    for device, dtype, state in (
        ("cuda:0 NVIDIA T4", "bfloat16", "change"), ("cuda:0 Tesla T4", "float16", "ok"),
        ("NVIDIA GeForce GTX 1080", "bfloat16", "change"), ("NVIDIA GeForce GTX 1080", "float32", "ok"),
        ("NVIDIA H200", "float32", "change"), ("NVIDIA H200", "float16", "ok"), ("NVIDIA A100", "bfloat16", "ok"),
        ("gpu Apple M1 Pro", "bfloat16", "change"), ("gpu Apple M2 Ultra", "float32", "change"),
    ):  # fmt: skip
        found = point("precision", with_nodes(node_of("studio", 2.0, device=device)), model={"dtype": dtype})
        assert found.state == state
        assert found.command == ("trainctl run run.toml --set model.dtype=auto" if state == "change" else "")


def test_the_oldest_device_decides_the_precision_and_auto_is_fine() -> None:
    both = with_nodes(node_of("new", 2.0, device="NVIDIA H100 80GB HBM3"), node_of("old", 1.0, device="NVIDIA T4"))
    found = point("precision", both, model={"dtype": "bfloat16"})
    assert found.text == "bfloat16; NVIDIA T4 of old has no hardware for it: all would compute in float16"
    assert found.command.endswith("model.dtype=auto")
    assert point("precision", both, model={"dtype": "auto"}).state == "ok"
    beside_a_card = with_nodes(node_of("new", 2.0, device="NVIDIA A100"), node_of("box", 1.0, device="cpu"))
    assert point("precision", beside_a_card, model={"dtype": "float32"}).state == "unknown", "nothing is measured"


def test_adapters_on_a_card_that_is_not_calibrated_start_from_its_preset() -> None:
    adapter = {"kind": "lora"}
    new, old = NodeFacts(name="new", device="NVIDIA RTX A6000"), NodeFacts(name="old", device="Tesla T4", micro=8)
    found = point("preset", with_nodes(new, old), adapter=adapter)
    assert found.text == "Turing, as on old, starts with float16, a base in nf4, 2 x 4 samples"
    assert found.command == "trainctl run run.toml --set nodes=new,old --set nodes.old.micro=2"
    assert point("preset", with_nodes(new), adapter=adapter).state == "ok"
    gtx = with_nodes(NodeFacts(name="old", device="NVIDIA GeForce GTX 1660"))
    assert point("preset", gtx, adapter=adapter, data={"sequence_length": 1024}).command.endswith("length=512")
    calibrated = with_nodes(node_of("old", 2.0, device="Tesla T4"))
    for facts, tables in ((calibrated, {"adapter": adapter}), (with_nodes(new), {})):
        assert "preset" not in {one.name for one in checklist(config(**tables), facts, "llama", None, "/caches")}
