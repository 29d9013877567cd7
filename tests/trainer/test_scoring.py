"""Rows scored one at a time or many at once have the same results, and bad rows don't cost the others theirs."""

import json
from typing import Any

import pytest
import torch
import transformers
from tests.trainer.support.chat_model import VOCABULARY, make_chat_model, questions, tokenizer
from tests.trainer.support.seq2seq_model import BART, encoder_tokenizer

from trainctl.protocol.config.objectives import ObjectiveTable
from trainctl.protocol.config.run_tables import BatchTable, DataTable, ModelTable, NodeTable, OptimizerTable, RunTable
from trainctl.protocol.config.run_tables import RunFile as Config
from trainctl.trainer.backends.load import load
from trainctl.trainer.common.errors import DeviceMemoryError
from trainctl.trainer.common.model_files import longest_context
from trainctl.trainer.data.row_tokens import row_tokenizer
from trainctl.trainer.worker import ERROR_CHARACTERS, Scorer

ROWS = [json.dumps(row) for row in questions(40)]
LIMIT = 48  # tokens of a small model's context


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_chat_model(tmp_path_factory.mktemp("scoring") / "model")


def load_model(model, name, objective):
    node, kind = NodeTable(backend=name, device="cpu", threads=1), "rows" if objective.kind == "seq2seq" else "text"
    config = Config(
        run=RunTable(name="a", steps=1), model=ModelTable(path=str(model)),
        data=DataTable(path="unused", kind=kind, sequence_length=LIMIT), batch=BatchTable(global_=1, micro=1),
        optimizer=OptimizerTable(learning_rate=1e-3), objective=objective, nodes={"box": node},
    )  # fmt: skip
    return load(config, node, "run.toml")


@pytest.fixture(scope="module", params=["torch", "mlx"])
def backend(model, request):
    return load_model(model, request.param, ObjectiveTable())


def scorer(backend, model, batch_tokens, longest=None):
    return Scorer(backend, row_tokenizer(model, "model", "run.toml"), longest, batch_tokens)


def test_batches_of_any_size_give_the_same(backend, model):
    alone = scorer(backend, model, 1).process(0, ROWS)
    together = scorer(backend, model, 4096).process(0, ROWS)
    for one, other in zip(alone, together, strict=True):
        assert one["tokens"] == other["tokens"]
        assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-4)
        assert one["mean"] * one["tokens"] == pytest.approx(one["logprob"])


def test_bad_rows_have_an_error_in_their_place(backend, model):
    bad = ["{", '{"text": ""}', '{"other": 1}', json.dumps({"text": "a b c " * 400})]
    found = scorer(backend, model, 512, longest=256).process(0, [ROWS[0], *bad, ROWS[1]])
    good = scorer(backend, model, 512).process(0, ROWS[:2])
    assert [found[0], found[-1]] == [pytest.approx(row, abs=1e-4) for row in good]
    for line, says in zip(found[1:-1], ("not a JSON object", "is empty", "needs", "the model allows 256"), strict=True):
        assert says in line["error"]
        assert len(line["error"]) <= ERROR_CHARACTERS


SHAPES = {
    "gpt2": {"n_embd": 32, "n_head": 2, "n_layer": 2, "n_positions": LIMIT},
    "gpt_bigcode": {"n_embd": 32, "n_head": 2, "n_layer": 2, "n_positions": LIMIT, "n_inner": 64},
    "bloom": {"hidden_size": 32, "n_head": 2, "n_layer": 2, "seq_length": LIMIT},
    "mpt": {"d_model": 32, "n_heads": 2, "n_layers": 2, "max_seq_len": LIMIT},
    "bart": BART | {"max_position_embeddings": LIMIT},
}


@pytest.mark.parametrize(("family", "name"), [*((one, "torch") for one in SHAPES), ("gpt_bigcode", "mlx")])
def test_a_row_above_the_model_s_own_limit_has_an_error_in_its_place(family, name, tmp_path):
    """Up to the limit, scores are those of transformers' loss."""
    encodes = family == "bart"
    made = encoder_tokenizer("bart") if encodes else tokenizer()
    ids = {"eos_token_id": made.eos_token_id, "pad_token_id": made.pad_token_id, "bos_token_id": made.bos_token_id}
    shape = SHAPES[family] | ids | ({"decoder_start_token_id": made.eos_token_id} if encodes else {})
    config = transformers.AutoConfig.for_model(family, vocab_size=VOCABULARY, **shape)
    loader: Any = transformers.AutoModelForSeq2SeqLM if encodes else transformers.AutoModelForCausalLM
    loader.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    made.save_pretrained(tmp_path)
    added = 2 if encodes else 1  # special tokens of a text
    longest, longer = " b" * (LIMIT - added), " b" * (LIMIT - added + 1)
    rows = [{"text": text} for text in (" b", longest, longer)]
    if encodes:
        pairs = ((" b", " b"), (" b", longest), (" b", longer), (longest, " b"), (longer, " b"))
        rows = [{"prompt": prompt, "completion": completion} for prompt, completion in pairs]
    loaded = load_model(tmp_path, name, ObjectiveTable(kind="seq2seq" if encodes else "auto"))
    lines = [json.dumps(row) for row in rows]
    found = scorer(loaded, tmp_path, 4096, longest_context(tmp_path)).process(0, lines)
    assert ["error" in line for line in found] == [False, False, True, False, True][: len(rows)]
    model = loader.from_pretrained(tmp_path).eval()
    for row, line in zip(rows, found, strict=True):
        if "error" in line:
            assert line["error"] == f"is {LIMIT + 1} tokens long; the model allows {LIMIT}"
            continue
        given = made(row.get("prompt", row.get("text", "") + made.eos_token), return_tensors="pt")["input_ids"]
        labels = made(row["completion"], return_tensors="pt")["input_ids"] if encodes else given
        with torch.no_grad():
            assert line["mean"] == pytest.approx(-model(input_ids=given, labels=labels).loss.item(), rel=1e-5)


def test_a_lack_of_memory_halves_the_batch(backend, model, monkeypatch):
    expected, whole = scorer(backend, model, 4096).process(0, ROWS), type(backend).token_log_probabilities

    def limited(self, batch):
        if len(batch) > 3:
            raise DeviceMemoryError("out of memory")
        return whole(self, batch)

    monkeypatch.setattr(type(backend), "token_log_probabilities", limited)
    assert scorer(backend, model, 4096).process(0, ROWS) == [pytest.approx(row, abs=1e-4) for row in expected]
