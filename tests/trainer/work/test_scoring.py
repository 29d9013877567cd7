"""Rows scored one at a time or many at once have the same results, and bad rows don't cost the others theirs."""

import json

import pytest
from tests.trainer.support.chat_model import make_chat_model, questions

from trainctl.protocol.config.run_tables import BatchTable, DataTable, ModelTable, NodeTable, OptimizerTable, RunTable
from trainctl.protocol.config.run_tables import RunFile as Config
from trainctl.trainer.backends.load import load
from trainctl.trainer.common.errors import DeviceMemoryError
from trainctl.trainer.data.row_tokens import row_tokenizer
from trainctl.trainer.work.scoring import ERROR_CHARACTERS, Scorer

ROWS = [json.dumps(row) for row in questions(40)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_chat_model(tmp_path_factory.mktemp("scoring") / "model")


@pytest.fixture(scope="module", params=["torch", "mlx"])
def backend(model, request):
    node = NodeTable(backend=request.param, device="cpu", threads=1)
    config = Config(
        run=RunTable(name="a", steps=1), model=ModelTable(path=str(model)), data=DataTable(path="unused"),
        batch=BatchTable(global_=1, micro=1), optimizer=OptimizerTable(learning_rate=1e-3), nodes={"box": node},
    )  # fmt: skip
    return load(config, node, "run.toml")


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


def test_a_lack_of_memory_halves_the_batch(backend, model, monkeypatch):
    expected, whole = scorer(backend, model, 4096).process(0, ROWS), type(backend).token_log_probabilities

    def limited(self, batch):
        if len(batch) > 3:
            raise DeviceMemoryError("out of memory")
        return whole(self, batch)

    monkeypatch.setattr(type(backend), "token_log_probabilities", limited)
    assert scorer(backend, model, 4096).process(0, ROWS) == [pytest.approx(row, abs=1e-4) for row in expected]
