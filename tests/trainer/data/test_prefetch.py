"""Batches that are assembled ahead, and pages of the cache that are dropped."""

import mmap
import os
import subprocess
import threading

import numpy as np
import pytest
from tests.trainer.support.passes import whole_rows
from tests.waiting import until

from trainctl.protocol.errors import TrainctlError
from trainctl.trainer.data.batch import Prefetch
from trainctl.trainer.data.token_cache import _is_cached, drop_pages
from trainctl.trainer.loop import train


def made(positions):
    return whole_rows(np.repeat(positions[:, None], 5, axis=1))


def pieces(*starts):
    return iter([np.arange(start, start + 2) for start in starts])


@pytest.fixture
def prefetch():
    opened: list[Prefetch] = []

    def make(build, ahead=2, workers=1):
        opened.append(Prefetch(build, ahead, workers))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def test_at_most_so_many_are_assembled_ahead_and_on_other_threads(prefetch):
    seen: list[tuple[int, int]] = []

    def build(positions):
        seen.append((int(positions[0]), threading.get_ident()))
        return made(positions)

    ahead = prefetch(build)
    assert ahead.get(np.arange(2), pieces(2, 4, 6)).inputs[0, 0] == 0
    until(lambda: len(seen) == 3, what="two batches ahead")
    assert [start for start, _ in sorted(seen)] == [0, 2, 4]
    here = threading.get_ident()
    assert [thread == here for _, thread in sorted(seen)] == [True, False, False]
    assert ahead.get(np.arange(2, 4), pieces(4, 6)).inputs[0, 0] == 2
    until(lambda: len(seen) == 4, what="a third")
    assert ahead.get(np.arange(8, 10), pieces()).inputs[0, 0] == 8, "what nobody expected is assembled at once"


def test_what_is_no_longer_wanted_is_forgotten(prefetch):
    ahead = prefetch(made)
    ahead.expect(pieces(0, 2))
    ahead.expect(pieces(20))
    assert list(ahead._begun) == [np.arange(20, 22).tobytes()]


def test_a_failure_on_a_thread_is_raised_where_the_batch_is_wanted(prefetch):
    def build(positions):
        if positions[0] == 2:
            raise TrainctlError("rows.jsonl:7: broken")
        return made(positions)

    ahead = prefetch(build)
    ahead.get(np.arange(2), pieces(2))
    with pytest.raises(TrainctlError, match=r"rows\.jsonl:7"):
        ahead.get(np.arange(2, 4), pieces())


@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_curve_is_the_same_bit_for_bit(new_rig, count):
    def curve(ahead):
        rig = new_rig("torch", samples=True, data__prefetch=ahead, data__workers=2)
        return [train(rig.rank, rig.plan(step, 1 + step % 5), 0.0).loss_sum for step in range(1, 8)]

    assert curve(count) == curve(2)


def test_a_sample_that_the_cache_lacks_is_named(new_rig):
    rig = new_rig("torch", samples=True)
    cache = rig.dataset._cache
    object.__setattr__(cache, "tokens", cache.tokens[: len(cache.tokens) // 2])
    with pytest.raises(TrainctlError, match=r"sample \d+: its tokens are missing from the token cache"):
        for step in range(1, 40):
            train(rig.rank, rig.plan(step, 3), 0.0)


def is_cached(path):
    file = os.open(path, os.O_RDONLY)
    try:
        return _is_cached(file)
    finally:
        os.close(file)


def filesystem(path):
    return subprocess.run(
        ["stat", "-f", "-c", "%T", str(path)], capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.needs("linux")  # only Linux reports which parts of a file are cached
def test_dropped_pages_are_gone_and_mapped_ones_are_not(tmp_path):
    if filesystem(tmp_path) == "tmpfs":
        assert not drop_pages([_written(tmp_path / "a")])
        return
    first, second = _written(tmp_path / "a"), _written(tmp_path / "b")
    assert is_cached(first)
    assert drop_pages([first, second])
    first.read_bytes()
    assert is_cached(first)
    with first.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[::4096]) >= 0
        assert not drop_pages([first])
    assert drop_pages([])


def _written(path):
    path.write_bytes(os.urandom(1 << 20))
    return path
