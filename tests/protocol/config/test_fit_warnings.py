"""Warnings before a run, by the model's sizes."""

from typing import Any

from tests.protocol.support.run_files import good

from trainctl.protocol.config import run_file
from trainctl.protocol.config.fit_warnings import fit_warnings
from trainctl.protocol.config.model_facts import ModelFacts

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
