"""Tokens, blocks, masks and weights: what a sample is, what is held out, and what is refused."""

import json
import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.node_agent.support.processes import python
from tests.waiting import HANG_SECONDS, until

from trainctl.protocol.errors import InvalidInputError
from trainctl.trainer.data.batch import collate, gathered
from trainctl.trainer.data.dataset import open_dataset
from trainctl.trainer.data.tokenizer_file import BYTES_END
from trainctl.trainer.demo_assets import llama_config, make_model


@pytest.fixture
def open_text(run_file, tmp_path):
    """A data set of texts given by file name, in blocks of `length`."""

    def make(texts, length, **changes):
        folder = tmp_path / "texts"
        for name, content in texts.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        config = run_file(data__path=str(folder), data__sequence_length=length, **({"data__held_out": 0.0} | changes))
        return open_dataset(config, tmp_path / "caches", "run.toml")

    return make


@pytest.fixture
def open_samples(run_file, tmp_path):
    """A data set of the lines of a samples file."""

    def make(lines, length=8, held_out=0.0):
        path = tmp_path / "samples.jsonl"
        path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines), encoding="utf-8")
        config = run_file(
            data__path=str(path), data__kind="samples", data__sequence_length=length, data__held_out=held_out
        )
        return open_dataset(config, tmp_path / "caches", "run.toml")

    return make


def test_every_token_but_the_first_is_a_target_once(open_text):
    dataset = open_text({"b/z.txt": b"lmnop", "a.txt": b"abcdefghijk", "ignored.md": b"no"}, 4)
    stream = [*b"abcdefghijk", BYTES_END, *b"lmnop", BYTES_END]
    batch = dataset.batch(np.arange(dataset.samples))
    assert batch.inputs.ravel().tolist() == stream[:16]
    assert batch.targets.ravel().tolist() == stream[1:17]
    assert (dataset.samples, dataset.mean_weight, batch.weight) == (4, 4.0, 16.0)


def test_held_out_blocks_are_spread_and_never_trained_on(open_text):
    text = bytes(range(32, 127)) * 40
    dataset = open_text({"a.txt": text}, 10, data__held_out=0.1)
    whole = open_text({"a.txt": text}, 10)
    assert (dataset.samples + dataset.held_out, dataset.held_out) == (whole.samples, whole.samples // 10)
    held = {tuple(row) for row in dataset.held_out_batch(np.arange(dataset.held_out)).inputs.tolist()}
    trained = dataset.batch(np.arange(dataset.samples)).inputs.tolist()
    every = whole.batch(np.arange(whole.samples)).inputs.tolist()
    places = [place for place, row in enumerate(every) if tuple(row) in held]
    assert sorted([*map(tuple, trained), *held]) == sorted(map(tuple, every)) or len(held) < dataset.held_out
    assert min(places) < whole.samples / 3
    assert max(places) > whole.samples * 2 / 3


def test_files_of_their_own_are_held_out(open_text, tmp_path):
    (tmp_path / "more.txt").write_bytes(b"AAAABBBBCC")
    apart: dict[str, Any] = {"data__held_out": 0.0, "data__held_out_path": str(tmp_path / "more.txt")}
    text = {"a.txt": bytes(range(32, 127)) * 4}
    whole, dataset = open_text(text, 4), open_text(text, 4, **apart)
    assert (dataset.samples, dataset.held_out, dataset.repeated) == (whole.samples, 2, 0)
    assert dataset.held_out_batch(np.arange(2)).inputs.tolist() == [[*b"AAAA"], [*b"BBBB"]]
    assert dataset.held_out_targets(np.arange(2)).tolist() == [4, 4]
    assert [file.name for file in dataset.files] == ["a.txt", "held-out more.txt"]
    (tmp_path / "more.txt").write_bytes(b"AAAABBBBC!")
    assert len({whole.digest, dataset.digest, open_text(text, 4, **apart).digest}) == 3
    (tmp_path / "more.txt").write_bytes(text["a.txt"][:5])
    assert open_text(text, 4, **apart).repeated == 1
    (tmp_path / "more.txt").write_bytes(b"AB")
    with pytest.raises(InvalidInputError, match="held_out_path: the text has 3 tokens"):
        open_text(text, 4, **apart)


def test_masked_samples_weigh_what_counts(open_samples):
    dataset = open_samples(
        [
            {"tokens": [1, 2, 3], "mask": [1, 1, 0]},
            {"tokens": [4, 5, 6, 7, 8], "mask": [False, False, True, True, True]},
            {"tokens": [9, 10]},
        ]
    )
    batch = dataset.batch(np.arange(3))
    assert batch.counted.tolist() == [[1, 0, 0, 0], [0, 1, 1, 1], [1, 0, 0, 0]]
    assert batch.inputs.tolist() == [[1, 2, 0, 0], [4, 5, 6, 7], [9, 0, 0, 0]]
    assert batch.targets.tolist() == [[2, 3, 0, 0], [5, 6, 7, 8], [10, 0, 0, 0]]
    assert (batch.weight, batch.tokens, dataset.mean_weight) == (5.0, 7, 5 / 3)
    assert [batch.rows(np.array([row])).tokens for row in range(3)] == [2, 4, 1]  # padding is none


def test_samples_are_cut_to_the_sequence_length_and_left_out_if_nothing_counts(open_samples):
    dataset = open_samples(
        [{"tokens": [*range(1, 30)]}, {"tokens": [*range(1, 30)], "mask": [0] * 28 + [1]}, {"tokens": [7, 8]}], length=4
    )
    assert (dataset.samples, dataset.left_out) == (2, 1)
    assert dataset.batch(np.array([0])).inputs.tolist() == [[1, 2, 3, 4]]
    assert dataset.batch(np.array([1])).inputs.tolist() == [[7]]


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("{", "line 2: not a sample"),
        ({"tokens": [1, 2], "x": 1}, "line 2: not a sample"),
        ({"tokens": "ab"}, "line 2: not a sample"),
        ({"tokens": [1]}, "line 2: tokens: a sample needs at least two"),
        ({"tokens": [1, 264]}, "line 2: tokens: 264 must be an ID from 0 to 263"),
        ({"tokens": [1, -5]}, "line 2: tokens: -5 must be an ID"),
        ({"tokens": [1, 2], "mask": [1]}, "line 2: mask: 1 flags for 2 tokens"),
        ({"tokens": [1, 2], "mask": [1, 2]}, "line 2: mask: flags must be 0 or 1"),
    ],
)
def test_a_bad_sample_is_named_by_its_line(open_samples, line, names):
    with pytest.raises(InvalidInputError) as refusal:
        open_samples([{"tokens": [1, 2]}, line])
    assert names in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_data_that_leave_nothing_to_train_on_are_refused(open_text, open_samples):
    with pytest.raises(InvalidInputError, match=r"run\.toml: data\.path: the text has 4 tokens; one block needs 21"):
        open_text({"a.txt": b"abc"}, 20)
    with pytest.raises(InvalidInputError, match="none of 1 samples has a token to learn"):
        open_samples([{"tokens": [1, 2], "mask": [1, 0]}])


def test_a_models_own_tokenizer(run_file, tmp_path, assets):
    tokenizers = pytest.importorskip("tokenizers")
    model = tmp_path / "model"
    model.mkdir()
    config = json.loads((assets / "model" / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps({**config, "eos_token_id": [3, 1]}), encoding="utf-8")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"one": 0, "two": 1, "?": 2, "end": 3}, "?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(model / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("one two three two", encoding="utf-8")
    config = run_file(
        model__path=str(model),
        data__path=str(tmp_path / "text.txt"),
        data__tokenizer="model",
        data__sequence_length=4,
        data__held_out=0.0,
    )
    batch = open_dataset(config, tmp_path / "caches", "run.toml").batch(np.arange(1))
    assert (batch.inputs.tolist(), batch.targets.tolist()) == ([[0, 1, 2, 1]], [[1, 2, 1, 3]])
    (tmp_path / "text.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidInputError, match=r"text\.txt: not UTF-8"):
        open_dataset(config, tmp_path / "caches", "run.toml")


def test_trainers_that_make_a_cache_at_once_share_it(run_file, tmp_path):
    (tmp_path / "text.txt").write_bytes(bytes(range(32, 127)) * 2000)
    run_file(data__path=str(tmp_path / "text.txt"))
    script = """
import os, sys, time
from pathlib import Path
from trainctl.protocol.config import run_file
from trainctl.trainer.data.dataset import open_dataset
Path(sys.argv[1]).with_name(f"loaded-{os.getpid()}").touch()
while not Path(sys.argv[1]).with_name("go").exists():
    time.sleep(0.01)
print(open_dataset(run_file.read(Path(sys.argv[1])), Path(sys.argv[2]), "run.toml").digest)
"""
    trainers = [python(script, str(tmp_path / "run.toml"), str(tmp_path / "caches")) for _ in range(4)]
    until(lambda: len([*tmp_path.glob("loaded-*")]) == 4)
    (tmp_path / "go").touch()
    digests = {trainer.communicate(timeout=HANG_SECONDS)[0] for trainer in trainers}
    assert [trainer.returncode for trainer in trainers] == [0] * 4
    assert len(digests) == 1
    assert [path.name[:7] for path in (tmp_path / "caches").iterdir()] == ["tokens-"]


@pytest.mark.parametrize("what", ["cache", "model"])
def test_what_a_dead_maker_left_is_removed(open_text, tmp_path, dead_pid, what):
    folder = tmp_path / "caches"
    left, living = folder / f".{what}.{dead_pid}.part", folder / f".{what}.{os.getppid()}.part"
    for path in (left, living):
        path.mkdir(parents=True)
        (path / "tokens.bin").write_bytes(b"x")
    if what == "cache":
        open_text({"a.txt": b"x" * 50}, 5)
    else:
        make_model(folder / "model", llama_config(hidden=16, layers=1, heads=2, intermediate=16))
    assert not left.exists()
    assert living.exists(), "another is at work on it"


def test_a_cache_is_made_once_and_again_when_the_text_changes(open_text, tmp_path):
    first = open_text({"a.txt": b"x" * 50}, 5)
    (cache,) = (tmp_path / "caches").iterdir()
    made_at = (cache / "tokens.bin").stat().st_mtime_ns
    assert open_text({}, 5).digest == first.digest
    assert (cache / "tokens.bin").stat().st_mtime_ns == made_at
    assert open_text({"a.txt": b"y" * 51}, 5).digest != first.digest
    assert len([*(tmp_path / "caches").iterdir()]) == 2


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 6), st.randoms())
def test_samples_gathered_at_once_are_those_collated_one_by_one(sizes, longest, chance):
    rows = [
        ([chance.randrange(1, 99) for _ in range(size + 1)], [chance.random() < 0.5 for _ in range(size + 1)])
        for size in sizes
    ]
    tokens = np.array([token for row, _ in rows for token in row], np.uint16)
    counted = np.array([flag for _, flags in rows for flag in flags], np.uint8)
    starts = np.cumsum([0, *(size + 1 for size in sizes[:-1])])
    lengths = np.minimum(np.array(sizes, np.int64), longest)
    one = gathered(tokens, counted, starts, lengths)
    cut = [(np.array(row[: longest + 1], np.int32), np.array(flags[1 : longest + 1])) for row, flags in rows]
    other = collate(cut)
    for name in ("inputs", "targets", "counted", "lengths"):
        mine, theirs = getattr(one, name), getattr(other, name)
        assert mine.dtype == theirs.dtype and np.array_equal(mine, theirs), name
    assert one.weight == other.weight
