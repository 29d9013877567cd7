"""Profiles: the sweep's end and the chosen micro-batch, their files, and the runs that they fit."""

import re
import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.protocol.support import strategies
from tests.protocol.support.profiles import KEY, profile_of

from trainctl.protocol.calibration.peak import FALL, NEAR, between, has_fallen, next_micro, peak, slower
from trainctl.protocol.calibration.profile import (
    KEPT,
    UNKNOWN,
    DeviceProfile,
    DiskRate,
    LinkRate,
    MatmulRate,
    Pass,
    all_profiles,
    key_of,
    profiles_of_key,
    read_profile,
    write_profile,
)
from trainctl.protocol.config import run_file
from trainctl.protocol.errors import InvalidInputError


def passes_of(rates: dict[int, float]) -> list[Pass]:
    return [Pass(micro, micro / rate, micro * 1000) for micro, rate in rates.items()]


def swept(rates: dict[int, float], most: int = 64, out_of_memory: int | None = None) -> list[Pass]:
    found: list[Pass] = []
    while (micro := next_micro(found, most, out_of_memory)) is not None:
        found += passes_of({micro: rates[micro]})
    return found


EARLY = {1: 180.0, 2: 250.0, 4: 278.0, 8: 265.0, 16: 240.0, 32: 210.0, 64: 200.0}
LATE = {1: 200.0, 2: 320.0, 4: 450.0, 8: 530.0, 16: 620.0, 32: 776.0, 64: 750.0}


def test_published_curves_peak_where_their_guides_say():
    assert peak(swept(EARLY)).micro == 4
    assert peak(swept(LATE)).micro == 32
    assert peak(passes_of(LATE), max_bytes=16_000).micro == 16, "memory bounds it"


def test_a_sweep_ends_after_two_falls_and_not_after_one():
    assert [one.micro for one in swept(EARLY)] == [1, 2, 4, 8, 16]
    assert not has_fallen(passes_of({1: 100, 2: 90, 4: 110, 8: 90}))
    assert has_fallen(passes_of({1: 100, 2: 90, 4: 110, 8: 90, 16: 91}))
    assert not has_fallen(passes_of({1: 100, 2: 99, 4: 99}))
    assert not has_fallen(passes_of({1: 100, 2: 100 * (1 - FALL) + 1e-9, 4: 90})), "exactly the limit"


def test_sizes_end_below_one_that_ran_out_of_memory_or_at_the_largest_of_interest():
    assert [one.micro for one in swept(LATE, out_of_memory=16)] == [1, 2, 4, 8]
    assert next_micro([], 8, out_of_memory=1) is None
    rates = {micro: 100.0 + micro for micro in range(1, 65)}
    assert [one.micro for one in swept(rates, most=12)] == [1, 2, 4, 8, 12]


@given(st.integers(1, 64), st.floats(0.3, 0.95), st.floats(0.05, 0.9))
def test_doubling_and_half_way_finds_the_peak_of_any_curve_with_one(top, rise, fall):
    rates = {micro: 100 * (1 - rise * (1 - micro / top) ** 2) for micro in range(1, top + 1)}
    rates |= {micro: 100 * (1 - fall * (1 - top / micro)) for micro in range(top + 1, 129)}
    found = swept(rates, most=128)
    for _ in range(2):
        found += passes_of({micro: rates[micro] for micro in between(found)})
    assert peak(found).rate >= (1 - NEAR) * 0.95 * max(rates.values())


@given(st.dictionaries(st.integers(1, 200), st.floats(0.1, 1e6), min_size=1, max_size=12), st.integers(1, 200))
def test_the_peak_is_the_smallest_that_is_near_the_best_of_those_allowed(rates, most):
    passes = passes_of(rates)
    chosen = peak(passes, most)
    allowed = [one for one in passes if one.micro <= most]
    if not allowed:
        assert chosen.micro == min(rates)
        return
    near = [one.micro for one in allowed if one.rate >= (1 - NEAR) * max(two.rate for two in allowed)]
    assert chosen.micro == min(near)


@given(st.dictionaries(st.integers(1, 200), st.floats(0.1, 1e6), min_size=1, max_size=12))
def test_half_way_sizes_are_new_and_beside_the_best(rates):
    passes = passes_of(rates)
    best = max(passes, key=lambda one: one.rate).micro
    for micro in between(passes):
        assert micro not in rates
        assert not [size for size in rates if min(best, micro) < size < max(best, micro)]
    # Half-way to what ran out of memory is tried.
    assert between(passes_of({1: 100, 2: 150, 4: 200}), out_of_memory=8) == [3, 6]
    assert between(passes_of({1: 100}), out_of_memory=2) == []


def test_what_got_slower_is_named_with_its_size():
    before = profile_of(
        matmul=(MatmulRate("float32", 100.0), MatmulRate("bfloat16", 300.0)),
        disk=DiskRate(1e9, 2e9), links=(LinkRate("studio", 1e8, 1e8),),
    )  # fmt: skip
    after = msgspec.structs.replace(
        before, passes=tuple(Pass(one.micro, one.seconds * 1.25, one.peak_bytes) for one in before.passes),
        matmul=(MatmulRate("float32", 95.0), MatmulRate("bfloat16", 150.0)), links=(LinkRate("studio", 1e8, 5e7),),
    )  # fmt: skip
    found = {one.what: round(one.fraction, 6) for one in slower(before, after)}
    assert found == {"training, samples/s": 0.2, "bfloat16 matmul, GFLOPS": 0.5, "from studio, bytes/s": 0.5}
    assert not slower(before, before)
    assert not slower(after, before)
    for field in ("model_digest", "dtype", "settings"):  # another model's training rates are not compared
        key = msgspec.structs.replace(before.key, **{field: "other"})
        assert not slower(before, msgspec.structs.replace(before, key=key, passes=after.passes))


@given(strategies.of(DeviceProfile, finite=True))
def test_a_written_profile_is_read_unchanged(profile):
    profile = msgspec.structs.replace(profile, created_at=profile.created_at % 4e9)
    with tempfile.TemporaryDirectory() as name:
        path = write_profile(Path(name) / "profiles", profile)
        assert read_profile(path) == profile
        assert profiles_of_key(path.parent, profile.key) == [profile]
        assert not [*path.parent.glob("*.tmp")]


def test_a_profile_of_0_2_0_with_parts_that_are_no_longer_measured_opens(tmp_path):
    path = write_profile(tmp_path, profile := profile_of(matmul=(MatmulRate("float32", 5.0),)))
    text = path.read_text().replace("[profile]\n", "[profile]\nmemory_bytes_per_second = 1e10\n")
    text = text.replace("gflops = 5.0", "gflops = 5.0, gflops_per_core = 2.0")
    path.write_text(text + "\n[profile.data]\nwarm_samples_per_second = 4.0\n")
    assert "per_core" in text and "memory_bytes_per_second" in text
    assert all_profiles(tmp_path) == [profile]


def test_a_bad_file_is_refused_in_one_line(tmp_path):
    path = tmp_path / "bad.toml"
    for text, problem in (
        ("schema = ", "not a readable TOML file"),
        ("[profile]\n", "no schema number"),
        ("schema = 99\n", "schema 99"),
        ("schema = 1\n[profile]\ncreated_at = 1.0\n", "key"),
    ):
        path.write_text(text)
        with pytest.raises(InvalidInputError, match=f"^{re.escape(str(path))}.*{problem}.*$"):
            read_profile(path)


def test_only_the_newest_of_a_key_are_kept_and_a_damaged_file_costs_no_other_profile(tmp_path):
    made = [profile_of(created_at=1_770_000_000.0 + 60 * number) for number in range(KEPT + 3)]
    other = profile_of(key=msgspec.structs.replace(KEY, dtype="bfloat16"), created_at=1.0)
    for profile in [other, *made]:
        path = write_profile(tmp_path, profile)
    path.with_name(path.name.replace("-2", "-1", 1)).write_text("{")
    assert profiles_of_key(tmp_path, KEY) == made[3:]
    assert all_profiles(tmp_path) == [other, *made[3:]]


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
