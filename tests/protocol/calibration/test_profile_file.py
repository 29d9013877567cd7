"""Profiles survive their files; damaged files are refused in one line, and cost no other profile."""

import re
import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from tests.protocol.support import strategies
from tests.protocol.support.profiles import KEY, profile_of

from trainctl.protocol.calibration.profile import (
    KEPT,
    DeviceProfile,
    MatmulRate,
    all_profiles,
    profiles_of_key,
    read_profile,
    write_profile,
)
from trainctl.protocol.errors import InvalidInputError


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
