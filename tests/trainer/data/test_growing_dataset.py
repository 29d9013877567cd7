"""A growing file as training data: sealed chunk by chunk while it is written, and the same however that happens. Every
sample comes once in a pass, and at a position never another one than before."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.waiting import until

from trainctl.protocol.errors import InvalidInputError, TrainctlError
from trainctl.trainer.data.dataset import Seen, open_dataset
from trainctl.trainer.data.growing_dataset import GrowingDataset, GrowingOrder, open_growing
from trainctl.trainer.data.permutation import permute, samples_at
from trainctl.trainer.data.tokenizing import ChunkCutter

CHUNK = 4


def lines(start, stop):
    """Samples of unlike lengths; a blank line after every fifth."""
    rows = [json.dumps({"tokens": [97 + number % 26] * (3 + number % 5)}) for number in range(start, stop)]
    return "".join(f"{row}\n" + "\n" * (number % 5 == 4) for number, row in enumerate(rows, start)).encode()


@pytest.fixture
def path(tmp_path):
    made = tmp_path / "grows.jsonl"
    made.write_bytes(b"")
    return made


@pytest.fixture
def grow(path, run_file, tmp_path):
    opened: list[GrowingDataset] = []

    def make(**changes):
        config = run_file(
            data__path=str(path),
            data__kind="samples",
            data__held_out=0.0,
            data__growing=True,
            data__chunk_samples=CHUNK,
            **changes,
        )
        errors: list[TrainctlError] = []
        opened.append(open_growing(config, tmp_path / "caches", "run.toml", on_failed=errors.append))
        opened[-1].errors = errors  # type: ignore[attr-defined]
        return opened[-1]

    yield make
    for dataset in opened:
        dataset.close()


def append(path, content):
    with path.open("ab") as file:
        file.write(content)


def end(path):
    path.with_name(f"{path.name}.end").touch()


def all_samples(dataset):
    return [dataset.batch(np.array([index])).targets.tolist() for index in range(dataset.samples)]


def test_a_file_written_in_pieces_is_sealed_as_the_whole_file_is(path, grow, run_file, tmp_path):
    whole = lines(0, 10)
    append(path, whole[:70])
    append(path, whole[70:200])  # half a line at its end
    dataset = grow()
    until(lambda: dataset.now.caught_up)
    sealed = dataset.samples
    assert 0 < sealed < 10 and sealed % CHUNK == 0
    early = dataset.samples_at(np.arange(sealed), 3).tolist()
    first = dataset.seen(sealed)
    append(path, whole[200:].rstrip(b"\n"))  # its last line counts once its end is marked
    end(path)
    dataset.wait_for(30, lambda: None)
    assert (dataset.samples, dataset.now.order.chunks, dataset.now.order.ended) == (10, 3, True)
    assert dataset.samples_at(np.arange(sealed), 3).tolist() == early
    assert dataset.seen(sealed) == first
    at_once = grow()
    at_once.wait_for(30, lambda: None)
    assert at_once.now.chain == dataset.now.chain and at_once.digest == dataset.digest
    config = run_file(data__path=str(path), data__kind="samples", data__held_out=0.0, data__growing=False)
    plain = open_dataset(config, tmp_path / "plain", "run.toml")
    assert all_samples(dataset) == [plain.batch(np.array([index])).targets.tolist() for index in range(10)]
    mixed = np.array([9, 0, 5, 4])
    ours, theirs = dataset.batch(mixed), plain.batch(mixed)  # of three chunks
    assert np.array_equal(ours.inputs, theirs.inputs) and np.array_equal(ours.counted, theirs.counted)
    assert np.array_equal(dataset.targets(mixed), plain.targets(mixed))


def test_two_trainers_share_the_chunks(path, grow, tmp_path):
    append(path, lines(0, 40))
    end(path)
    one, other = grow(), grow()
    for dataset in (one, other):
        dataset.wait_for(40, lambda: None)
    assert one.now.chain == other.now.chain
    found = [*(tmp_path / "caches").glob("chunks-*/*")]
    assert len(found) == 10 and all(folder.name.startswith("tokens-") for folder in found)


def test_a_bad_line_is_named_once_its_chunk_is_whole(path, grow):
    append(path, lines(0, 9))
    dataset = grow()
    append(path, b'{"tokens": []}\n' + lines(9, 12))
    with pytest.raises(InvalidInputError, match=r"grows\.jsonl: line 11: tokens: a sample needs at least two tokens"):
        dataset.wait_for(12, lambda: None)
    assert dataset.samples == 8
    until(lambda: dataset.errors)


def test_a_file_that_becomes_shorter_or_has_a_row_that_does_not_fit_is_refused(path, grow):
    append(path, lines(0, 6))
    dataset = grow()
    until(lambda: dataset.now.caught_up)
    path.write_bytes(lines(0, 1))
    with pytest.raises(InvalidInputError, match="has become shorter than"):
        dataset.wait_for(8, lambda: None)
    path.write_bytes(lines(0, 4) + json.dumps({"tokens": [97] * 40}).encode() + b"\n" + lines(5, 9))
    with pytest.raises(InvalidInputError, match="sample 5 is 40 tokens long"):
        grow(data__overlong="refuse").wait_for(8, lambda: None)


def test_a_file_that_ends_without_a_sample_is_refused(path, grow):
    append(path, b"\n\n")
    end(path)
    with pytest.raises(InvalidInputError, match="has ended without a sample"):
        grow()


def test_a_wait_ends_with_what_its_look_raises(path, grow):
    def look():
        raise SystemExit(0)

    append(path, lines(0, 4))
    dataset = grow()
    with pytest.raises(SystemExit):
        dataset.wait_for(5, look)


def test_a_checkpoint_fits_a_file_that_begins_as_it_did(path, grow):
    whole = lines(0, 10)
    append(path, whole)
    dataset = grow()
    until(lambda: dataset.now.caught_up)
    seen = dataset.seen(7)
    assert (seen.samples, len(seen.chunks)) == (8, 2)
    append(path, lines(10, 20))
    again = grow()
    again.check_seen(seen, 7, lambda: None)
    assert again.seen(7) == seen

    path.write_bytes(lines(0, 4) + lines(5, 10))
    with pytest.raises(InvalidInputError, match=r"grows\.jsonl: chunk 2 \(samples 5 to 8\) isn't the one"):
        grow().check_seen(seen, 7, lambda: None)
    path.write_bytes(lines(0, 5))
    with pytest.raises(InvalidInputError, match="has 1 chunks, but the run was trained on 2"):
        grow().check_seen(seen, 7, lambda: None)


def test_nothing_is_added_before_a_pass_that_has_begun_again(path, grow):
    append(path, lines(0, 8))
    end(path)
    dataset = grow()
    dataset.wait_for(9, lambda: None)
    seen: Seen = dataset.seen(9)
    dataset.check_seen(seen, 9, lambda: None)
    path.with_name(f"{path.name}.end").unlink()
    append(path, lines(8, 12))
    grow().check_seen(dataset.seen(8), 8, lambda: None)
    with pytest.raises(InvalidInputError, match="has trained on all 8 samples and begun again"):
        grow().check_seen(seen, 9, lambda: None)


COUNTS = st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(any)
SEEDS = st.integers(0, 2**40)


def order_of(counts, seed, *, ended=False):
    return GrowingOrder(seed, tuple(np.cumsum([0, *counts]).tolist()), ended)


@given(COUNTS, SEEDS, st.integers(2, 3))
@settings(max_examples=60, deadline=None)
def test_every_sample_once_in_each_pass_and_in_its_chunk(counts, seed, passes):
    order = order_of(counts, seed, ended=True)
    found = order.at(np.arange(passes * order.samples, dtype=np.int64)).reshape(passes, order.samples)
    for one in found:
        for chunk in range(order.chunks):
            start, stop = order.starts[chunk : chunk + 2]
            assert sorted(one[start:stop]) == list(range(start, stop))


@given(COUNTS, COUNTS, SEEDS)
@settings(max_examples=60, deadline=None)
def test_what_is_sealed_later_changes_no_position(counts, later, seed):
    before, after = order_of(counts, seed), order_of([*counts, *later], seed, ended=True)
    positions = np.arange(before.samples, dtype=np.int64)
    assert np.array_equal(before.at(positions), after.at(positions))


@given(COUNTS, SEEDS, st.integers(0, 2**20))
@settings(max_examples=60, deadline=None)
def test_is_what_the_specification_says(counts, seed, position):
    order = order_of(counts, seed, ended=True)
    turn, within = divmod(position, order.samples)
    chunk = next(c for c in range(order.chunks) if order.starts[c] <= within < order.starts[c + 1])
    start, key = order.starts[chunk], turn * 2**32 + chunk
    image = permute(np.array([within - start]), counts[chunk], seed, key)
    assert order.at(np.array([position])).tolist() == (start + image).tolist()


def test_the_first_pass_of_one_chunk_is_that_of_a_file_that_does_not_grow():
    positions = np.arange(30, dtype=np.int64)
    assert np.array_equal(order_of([30], 5).at(positions), samples_at(positions, 30, 5))


def test_a_position_beyond_the_sealed_ones_is_refused_until_the_end():
    order = order_of([4], 0)
    assert order.covers(4) and not order.covers(5)
    with pytest.raises(IndexError, match="position 4 is not in the 4 sealed samples"):
        order.at(np.array([4]))
    assert order_of([4], 0, ended=True).covers(5)
    assert not GrowingOrder(0, ended=True).covers(1)


def test_a_cursor_needs_the_chunks_before_it():
    order = order_of([4, 4, 2], 0, ended=True)
    assert [order.needed(cursor) for cursor in (0, 1, 4, 5, 8, 9, 10, 11)] == [0, 1, 1, 2, 2, 3, 3, 3]


@given(st.binary(max_size=80).map(lambda raw: raw.replace(b"\x00", b"\n")), st.integers(1, 4), st.data())
def test_chunks_depend_on_the_content_and_not_on_how_it_is_read(raw, size, data):
    def cut(pieces):
        cutter = ChunkCutter(Path("x"), size)
        whole = [chunk for piece in pieces for chunk in cutter.feed(piece)]
        return [*whole, *cutter.end()]

    places = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    pieces = [raw[a:b] for a, b in zip([0, *places], [*places, len(raw)], strict=True)]
    chunks = cut([raw])
    assert cut(pieces) == chunks
    lines = [line for line in raw.split(b"\n") if line.strip()]
    assert [line.rstrip(b"\n") for chunk in chunks for line in chunk.content if line.strip()] == lines
    counts = [sum(bool(line.strip()) for line in chunk.content) for chunk in chunks]
    assert all(count == size for count in counts[:-1]) and all(0 < count <= size for count in counts)
    everything = raw.split(b"\n")
    assert all(everything[chunk.first - 1] + b"\n" == chunk.content[0] for chunk in chunks)
