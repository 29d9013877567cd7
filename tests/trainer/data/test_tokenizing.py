"""Tokenizing in chunks and in processes: the same tokens as of the whole, and nothing left behind."""

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.node_agent.support.processes import python
from tests.trainer.support.chat_model import make_chat_model, questions, write_rows
from tests.waiting import HANG_SECONDS, until

from trainctl.protocol.errors import InvalidInputError
from trainctl.trainer.data import token_cache, tokenizing
from trainctl.trainer.data.chunk_tokens import Recipe, TextTokens, joined, seam, text_chunks
from trainctl.trainer.data.row_tokens import row_tokenizer
from trainctl.trainer.data.rows import LINES_BYTES

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SOURCE = Path(random.__file__).read_text("utf-8").replace("=", "é=") + " \n\n\n \n" * 40 + "ü" * 50


def bpe(split):
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    made: Any = Tokenizer(models.BPE())
    plain, regex = pre_tokenizers.ByteLevel(False, use_regex=False), pre_tokenizers.Split(Regex(LLAMA3), "isolated")
    made.pre_tokenizer = {
        "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False),
        "llama3": pre_tokenizers.Sequence([regex, plain]),
        "metaspace": pre_tokenizers.Metaspace(),
    }[split]
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=800, special_tokens=["<end>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    made.train_from_iterator([SOURCE], trainer)
    return made


def model_of(folder, made, vocabulary=800):
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": vocabulary, "eos_token_id": 0}), "utf-8")
    return folder


@pytest.mark.parametrize(("split", "size"), [("gpt2", 2500), ("llama3", 7001), ("metaspace", 2500)])
def test_a_text_in_parts_has_the_tokens_of_the_whole(tmp_path, split, size):
    made: Any = bpe(split)
    path = tmp_path / "text.txt"
    path.write_text(SOURCE, "utf-8", newline="\r\n")
    encode = Recipe(model_of(tmp_path / "model", made), "text", "model", "run.toml").encoder()
    parts = [part for part in encode(text_chunks(path, size, 500)) if isinstance(part, TextTokens)]
    assert len(parts) > 4
    found = np.concatenate([*joined(iter(parts), np.array([], np.uint32), np.array([0], np.uint32))]).tolist()
    assert found == [*made.encode(SOURCE, add_special_tokens=False).ids, 0]


@pytest.mark.parametrize("begins", [True, False])
def test_each_text_begins_as_the_tokenizer_has_it(tmp_path, run_file, monkeypatch, begins):
    """As Gemma's and Llama 3's, whose tokenizers put a begin token before each text; a prompt begins likewise."""
    from tokenizers import processors

    made: Any = bpe("gpt2")
    made.add_special_tokens(["<begin>"])
    made.post_processor = processors.TemplateProcessing(
        single="<begin> $A" if begins else "$A", special_tokens=[("<begin>", 800)]
    )
    model = model_of(tmp_path / "model", made, vocabulary=801)
    texts = tmp_path / "texts"
    texts.mkdir()
    monkeypatch.setattr(token_cache, "text_chunks", lambda path: text_chunks(path, 2500, 500))
    for name, text in (("a", SOURCE), ("b", "import"), ("c", "<begin>import")):
        (texts / f"{name}.txt").write_text(text, "utf-8")
    config = run_file(model__path=str(model), data__path=str(texts), data__tokenizer="model")
    found = tokenizing.open_cache(config, tmp_path / "caches", "run.toml").tokens.tolist()
    first, second = (made.encode(text, add_special_tokens=False).ids for text in (SOURCE, "import"))
    begin = [800] * begins
    assert found == [*begin, *first, 0, *begin, *second, 0, 800, *second, 0]
    prompt = row_tokenizer(model, "model", "run.toml").prompt
    assert prompt("import", plain=True) == [*begin, *second]
    assert prompt("<begin>import", plain=True) == [800, *second]


@given(st.binary(max_size=60), st.integers(4, 12), st.integers(0, 6))
def test_parts_of_a_text_are_the_whole_file(raw, size, overlap):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text.txt"
        path.write_bytes(raw)
        chunks = [*text_chunks(path, size, overlap)]
    assert b"".join(chunk.content for chunk in chunks) == raw
    assert [chunk.first for chunk in chunks] == [sum(one.size for one in chunks[:at]) for at in range(len(chunks))]
    assert [chunk.is_end for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_parts_that_never_agree_are_joined_at_their_border():
    assert seam([(0, 1), (2, 3)], [(0, 1), (1, 2)]) == (0, 0)
    assert seam([], []) == (0, 0)


def long_rows(count):
    """With a field of 3 KB that isn't tokenized: chunks are cut by bytes."""
    return [{**row, "source": "x" * 3000} for row in questions(count)]


@pytest.fixture
def rows(tmp_path, run_file, monkeypatch):
    model = make_chat_model(tmp_path / "model")

    def make(rows, process, tokenizer="model"):
        monkeypatch.setattr(tokenizing, "PROCESS_BYTES", 0 if process else 10**12)
        path = write_rows(tmp_path / "rows.jsonl", rows)
        config = run_file(model__path=str(model), data__path=str(path), data__kind="rows", data__tokenizer=tokenizer)
        return tokenizing.open_cache(config, tmp_path / f"caches-{process}", "run.toml")

    return make


def test_processes_make_the_cache_that_one_makes(rows, tmp_path):
    made = long_rows(400)
    assert len(json.dumps(made)) > 2 * LINES_BYTES
    one, other = rows(made, process=True), rows(made, process=False)
    assert one.digest == other.digest
    assert np.array_equal(one.tokens, other.tokens) and np.array_equal(one.offsets, other.offsets)
    assert len(one.offsets) == 401
    assert [path.name[:7] for path in (tmp_path / "caches-True").iterdir()] == ["tokens-"]


def test_a_row_that_a_process_refuses_is_named_by_its_line(rows, tmp_path):
    with pytest.raises(InvalidInputError, match=r"rows\.jsonl: line 201: completion: is empty"):
        rows([*long_rows(200), {"prompt": "a", "completion": ""}], process=True, tokenizer="bytes")
    assert not [*(tmp_path / "caches-True").iterdir()]


@pytest.mark.parametrize("victim", ["trainer", pytest.param("tokenizer", marks=pytest.mark.tier("all"))])
def test_a_kill_leaves_no_process_and_no_half_cache(run_file, tmp_path, victim):
    path = tmp_path / "text.txt"
    path.write_text(SOURCE * 400, "utf-8")
    run_file(model__path=str(model_of(tmp_path / "model", bpe("gpt2"))), data__path=str(path), data__tokenizer="model")
    script = """
import sys
from pathlib import Path
from trainctl.protocol.config import run_file
from trainctl.protocol.errors import TrainctlError
from trainctl.trainer.data.tokenizing import open_cache
def show(done, whole):
    print(done, whole, flush=True)
try:
    open_cache(run_file.read(Path(sys.argv[1])), Path(sys.argv[2]), "run.toml", show)
except TrainctlError as error:
    print(error, flush=True)
"""
    folder = tmp_path / "caches"
    trainer = python(script, str(tmp_path / "run.toml"), str(folder))
    while int(trainer.stdout.readline().split()[0]) == 0:
        pass  # until something is tokenized
    family = psutil.Process(trainer.pid).children(recursive=True)
    assert len(family) == 1
    assert [part.name for part in folder.glob(".*.part")]
    (trainer if victim == "trainer" else family[0]).kill()
    said, _ = trainer.communicate(timeout=HANG_SECONDS)
    if victim == "tokenizer":
        assert "the process that tokenizes the data was ended by signal 9" in said
    until(lambda: not psutil.wait_procs(family, 0.1)[1])
    assert not [*folder.glob("tokens-*"), *folder.glob(".*.part")]
