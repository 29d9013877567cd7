"""A profile fits the run that it was measured for, and no run that trains another way."""

from trainctl.protocol.calibration.profile import UNKNOWN, key_of
from trainctl.protocol.config import run_file

RAW = {
    "run": {"name": "demo", "steps": 10},
    "model": {"path": "/models/small"},
    "data": {"path": "/data/a.txt", "sequence_length": 64},
    "batch": {"global": 16},
    "optimizer": {"learning_rate": 0.001},
    "nodes": {"a": {}, "b": {"threads": 1}},
}


def key(overrides=(), node="a", backend="torch"):
    raw = {name: dict(table) for name, table in RAW.items()}
    for table, field, value in overrides:
        raw.setdefault(table, {})[field] = value
    return key_of(run_file.parse(raw), node, backend=backend, device="cpu", model_digest="d1")


def test_only_a_setting_that_changes_a_pass_changes_the_key():
    for change in (
        ("model", "dtype", "bfloat16"), ("model", "gradient_checkpointing", "all"), ("adapter", "kind", "lora"),
        ("data", "sequence_length", 128), ("batch", "micro_tokens", 4096), ("optimizer", "kind", "adamw-8bit"),
    ):  # fmt: skip
        assert key([change]) != key(), change
    for change in (
        ("run", "steps", 99), ("batch", "global", 32), ("batch", "micro", 2), ("optimizer", "learning_rate", 0.1),
        ("data", "path", "/elsewhere/a.txt"), ("checkpoint", "every_steps", 5),
    ):  # fmt: skip
        assert key([change]) == key(), change


def test_the_file_of_rows_the_attention_of_packs_and_a_node_s_own_settings_count():
    rows = [("data", "kind", "rows"), ("data", "path", "/data/a.jsonl")]
    assert key(rows) != key([*rows, ("data", "path", "/data/b.jsonl")])
    packs = [("data", "kind", "rows"), ("data", "packing", "best-fit"), ("model", "dtype", "bfloat16")]
    assert key([*packs, ("model", "attention", "varlen")]) != key(packs)
    assert key(node="b") != key(node="a")
    # Versions are those installed here.
    assert key().trainctl_version != UNKNOWN
    assert key(backend="no-such-library").backend_version == UNKNOWN
