"""Profiles survive their files; damaged files are refused in one line, and cost no other profile."""

import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from tests.protocol.support import strategies
from tests.protocol.support.profiles import KEY, profile_of

from trainctl.protocol.calibration import profile_file
from trainctl.protocol.calibration.profile import DeviceProfile, MatmulRate, summary
from trainctl.protocol.errors import InvalidInputError


@given(strategies.of(DeviceProfile, finite=True))
def test_a_written_profile_is_read_unchanged(profile):
    profile = msgspec.structs.replace(profile, created_at=profile.created_at % 4e9)
    with tempfile.TemporaryDirectory() as name:
        path = profile_file.write(Path(name) / "profiles", profile)
        assert profile_file.read(path) == profile
        assert profile_file.stored(path.parent, profile.key) == [profile]
        assert not [*path.parent.glob("*.tmp")]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("schema = ", "not a readable TOML file"),
        ("[profile]\n", "no schema number"),
        ("schema = 99\n", "schema 99"),
        ("schema = 1\n[profile]\ncreated_at = 1.0\n", "key"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path, text, problem):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(InvalidInputError) as caught:
        profile_file.read(path)
    assert problem in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_damaged_file_costs_no_other_profile(tmp_path):
    profile = profile_of()
    path = profile_file.write(tmp_path, profile)
    path.with_name(path.name.replace("-2", "-1", 1)).write_text("{")
    assert profile_file.stored(tmp_path, KEY) == [profile]
    assert profile_file.all_stored(tmp_path) == [profile]


def test_only_the_newest_of_a_key_are_kept(tmp_path):
    made = [profile_of(created_at=1_770_000_000.0 + 60 * number) for number in range(profile_file.KEPT + 3)]
    other = profile_of(key=msgspec.structs.replace(KEY, dtype="bfloat16"), created_at=1.0)
    for profile in [other, *made]:
        profile_file.write(tmp_path, profile)
    assert profile_file.stored(tmp_path, KEY) == made[3:]
    assert profile_file.all_stored(tmp_path) == [other, *made[3:]]


def test_the_summary_has_what_plans_need():
    profile = profile_of(matmul=(MatmulRate("float32", 120.0, 60.0),), out_of_memory_micro=16, optimizer_seconds=0.01)
    found = summary(profile)
    assert found.passes == profile.passes
    assert (found.out_of_memory_micro, found.optimizer_seconds, found.gflops) == (16, 0.01, {"float32": 120.0})
