"""Probable mistakes of a run file, and warnings by the model's sizes: each with what is usual and what ends it."""

from typing import Any

import pytest
from tests.protocol.support.run_files import good

from trainctl.protocol.batch.device_table import AMPERE, GTX_16, HOPPER, PASCAL, TURING, preset_of, preset_of_device
from trainctl.protocol.batch.settings_rules import DataSize, fit_warnings, unusual_settings
from trainctl.protocol.config import run_file
from trainctl.protocol.config.model_facts import ModelFacts
from trainctl.protocol.config.run_tables import RunFile

PLENTY = DataSize(100_000, 1_000)


def config(**tables: Any) -> RunFile:
    usual = {"run": {"name": "a", "steps": 1000}, "batch": {"global": 16, "micro": 1}, "evaluate": {"every_steps": 10}}
    optimizer = {"learning_rate": 1e-4, **tables.pop("optimizer", {})}
    return run_file.parse(good() | usual | {"optimizer": optimizer} | tables)


@pytest.mark.parametrize(
    ("tables", "data", "setting"),
    [
        ({"batch": {"global": 8192, "micro": 1}, "run": {"name": "a", "steps": 9}}, DataSize(9000, 90), "batch.global"),
        ({"optimizer": {"learning_rate": 5}}, PLENTY, "optimizer.learning_rate"),
        ({"optimizer": {"learning_rate": 5}, "adapter": {"kind": "lora"}}, None, "optimizer.learning_rate"),
        ({"optimizer": {"learning_rate": 1e-12}}, None, "optimizer.learning_rate"),
        ({}, DataSize(198, 20), "run.steps"),
        ({"run": {"name": "a", "steps": 100}}, DataSize(164, 1), "data.held_out"),
    ],
)
def test_a_probable_mistake_is_named_with_its_source_and_the_change_ends_it(
    tables: dict[str, Any], data: DataSize | None, setting: str
) -> None:
    (found,) = unusual_settings(config(**tables), data)
    assert found.setting == setting and found.text.startswith(setting)
    assert any(year in found.text for year in map(str, range(2009, 2026))), "a public source"
    key, value = found.change.split("=")
    table, name = key.split(".")
    raw = run_file.to_dict(config(**tables))
    raw[table] = {**raw.get(table, {}), name: float(value) if "." in value or "e" in value else int(value)}
    if key == "run.epochs":
        del raw["run"]["steps"]
    whole = data.epoch + (data.held_out or 0) if data is not None else 0
    after = DataSize(whole - whole // 10, whole // 10) if key == "data.held_out" else data
    assert setting not in [one.setting for one in unusual_settings(run_file.parse(raw), after)]


@pytest.mark.parametrize("data", [None, PLENTY])
def test_usual_settings_are_not_mentioned(data: DataSize | None) -> None:
    assert unusual_settings(config(), data) == ()


FACTS = ModelFacts(
    "llama", {"model.layers.0.self_attn.q_proj.weight": (64, 64), "model.layers.0.self_attn.k_proj.weight": (16, 64)},
    64, 128, 1, 4, 300, 128,
)  # fmt: skip


NO_KL = "evaluations of a dpo run that trains all weights don't measure eval/kl, so the alert kl can't open"


def test_what_rarely_does_what_is_meant() -> None:
    cases: tuple[tuple[int, str, dict[str, Any], list[str]], ...] = (
        (128, "sft", {}, []),
        (129, "sft", {}, ["data.sequence_length 129 is above the 128 positions"]),
        (64, "sft", {"kind": "lora", "rank": 15}, []),
        (64, "sft", {"kind": "lora", "rank": 16}, ["adapter.rank 16 is not below the smaller dimension of k_proj, 16"]),
        (64, "sft", {"kind": "lora", "rank": 16, "targets": ["q_proj"]}, []),
        (64, "sft", {"rank": 16}, []),
        (64, "dpo", {}, [NO_KL]),
        (64, "dpo", {"kind": "lora", "rank": 4}, []),
        (64, "orpo", {}, []),
    )
    for length, objective, adapter, says in cases:
        data = {"path": "d", "kind": "rows", "sequence_length": length}
        raw = good() | {"data": data, "objective": {"kind": objective}, "adapter": adapter}
        lines = fit_warnings(run_file.parse(raw), FACTS, "r.toml")
        assert [line[: len(said)] for line, said in zip(lines, says, strict=True)] == says


def test_settings_that_change_nothing_beside_the_others_are_named_once() -> None:
    idle: dict[str, Any] = {
        "group": {"engine": "gloo", "links_per_peer": 2},
        "data": {"path": "d", "sequence_length": 64, "prefetch": 0, "workers": 4},
        "model": {"path": "m", "tf32": True},
        "samples": {"every_steps": 5},
        "checkpoint": {"keep_every": 10},
        "nodes": {"a": {"device": "cpu"}, "b": {"device": "cpu"}},
    }
    shared = {"data": {"path": "d", "sequence_length": 64}, "nodes": {"b": {"shared_threads": 2}}}
    (line,) = fit_warnings(run_file.parse(good() | shared), FACTS, "r.toml")
    assert line.startswith("nodes.NAME.shared_threads has no effect: ")
    found = fit_warnings(run_file.parse(good() | idle), FACTS, "r.toml", {"cpu"})
    settings = ["group.links_per_peer", "data.workers", "model.tf32", "samples.every_steps", "checkpoint.keep_every"]
    assert [line.partition(" has no effect: ")[0] for line in found] == settings
    used = idle | {
        "group": {"engine": "ring", "links_per_peer": 2},
        "data": {"path": "d", "sequence_length": 64, "prefetch": 1, "workers": 4},
        "samples": {"every_steps": 5, "prompts": ["a"]},
        "checkpoint": {"keep_every": 10, "every_steps": 5},
    }
    assert fit_warnings(run_file.parse(good() | used), FACTS, "r.toml", {"cpu", "cuda:0"}) == ()


def test_a_capability_and_a_name_have_the_preset_of_their_architecture() -> None:
    by_capability = {
        (6, 1): PASCAL, (7, 0): TURING, (8, 9): AMPERE, (9, 0): HOPPER, (10, 3): HOPPER, (11, 0): HOPPER,
        (12, 0): AMPERE, (12, 1): AMPERE,
    }  # fmt: skip
    assert {capability: preset_of(capability) for capability in by_capability} == by_capability
    by_name = {
        "NVIDIA RTX A6000": AMPERE, "NVIDIA A800-SXM4-80GB": AMPERE, "NVIDIA RTX 2000E Ada Generation": AMPERE,
        "NVIDIA GeForce RTX 2050": AMPERE, "NVIDIA GeForce RTX 2080 Ti": TURING, "NVIDIA GB10": AMPERE,
        "NVIDIA RTX PRO 6000 Blackwell Server Edition": AMPERE, "NVIDIA GH200 480GB": HOPPER, "Quadro RTX 6000": TURING,
        "NVIDIA GeForce GTX 1650": GTX_16, "NVIDIA GeForce RTX 3090": AMPERE, "cuda:0 Tesla V100-SXM2-16GB": TURING,
        "NVIDIA of tomorrow": None, "cpu": None,
    }  # fmt: skip
    assert {name: preset_of_device(name) for name in by_name} == by_name
