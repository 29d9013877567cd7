"""Tokenizers as folders store them: limits and classes that are stored beside the tokens change no token."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.trainer.support.chat_model import make_chat_model

from trainctl.protocol.config import run_file
from trainctl.protocol.errors import InvalidInputError
from trainctl.trainer.data.row_tokens import row_tokenizer
from trainctl.trainer.data.rows import row_of
from trainctl.trainer.data.token_cache import cache_name
from trainctl.trainer.data.tokenizing import open_cache

TEXT = "In 2023, it's 12.5 %.\n" * 400


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_chat_model(tmp_path / "model")


def change_json(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    stored = json.loads(file.read_text("utf-8"))
    change(stored)
    file.write_text(json.dumps(stored), "utf-8")


def text_run(model: Path, **data: Any) -> Any:
    folder = model.parent / "text"
    folder.mkdir(exist_ok=True)
    (folder / "a.txt").write_text(TEXT, "utf-8")
    return run_file.parse(
        {
            "run": {"name": "r", "steps": 2},
            "model": {"path": str(model)},
            "optimizer": {"learning_rate": 1e-3},
            "data": {"path": str(folder), "kind": "text", "sequence_length": 32, **data},
            "batch": {"global": 8},
        }
    )


def store_limits(stored: dict[str, Any]) -> None:
    stored["truncation"] = {"direction": "Right", "max_length": 16, "strategy": "LongestFirst", "stride": 0}
    stored["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Left",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<pad>",
    }


def test_stored_truncation_and_padding_are_off(model: Path, tmp_path: Path) -> None:
    config = text_run(model)
    before = open_cache(config, tmp_path / "before", "run.toml").tokens
    change_json(model / "tokenizer.json", store_limits)
    after = open_cache(config, tmp_path / "after", "run.toml").tokens
    assert len(before) > 3000 and np.array_equal(before, after)
    row = row_of({"text": TEXT}, "row")
    ((tokens, _),) = row_tokenizer(model, "model", "run.toml").encode([row])
    assert np.array_equal(tokens, before)


def test_texts_and_rows_have_the_tokens_of_the_file_and_a_class_that_changes_them_is_refused(model: Path) -> None:
    """transformers rebuilds GPT-2's pre-tokenizer, whatever tokenizer.json has."""
    from tokenizers import Tokenizer, pre_tokenizers

    stored: Any = Tokenizer.from_file(str(model / "tokenizer.json"))
    parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    stored.pre_tokenizer = pre_tokenizers.Sequence(parts)
    stored.save(str(model / "tokenizer.json"))
    expected = stored.encode(TEXT, add_special_tokens=False).ids
    ((tokens, _),) = row_tokenizer(model, "model", "run.toml").encode([row_of({"text": TEXT}, "row")])
    assert tokens[: len(expected)] == expected
    change_json(model / "tokenizer_config.json", lambda config: config.update(tokenizer_class="GPT2Tokenizer"))
    with pytest.raises(InvalidInputError, match=r"GPT2Tokenizer.*PreTrainedTokenizerFast"):
        row_tokenizer(model, "model", "run.toml")


def begin_token(model: Path) -> None:
    from tokenizers import Tokenizer, processors

    stored: Any = Tokenizer.from_file(str(model / "tokenizer.json"))
    number = stored.token_to_id("<bos>")
    stored.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", number)])
    stored.save(str(model / "tokenizer.json"))


@pytest.mark.parametrize("row", [{"text": "<bos>ab"}, {"prompt": "<bos>ab", "completion": "c"}])
def test_a_text_that_begins_with_the_begin_token_keeps_one_and_is_counted(model: Path, row: dict[str, str]) -> None:
    begin_token(model)
    tokenizer = row_tokenizer(model, "model", "run.toml")
    plain = {name: value.removeprefix("<bos>") for name, value in row.items()}
    with_it, without = (next(tokenizer.encode([row_of(fields, "row")])) for fields in (row, plain))
    assert with_it == without
    assert sum(tokenizer.take_remarks().values()) >= 1


def test_completions_of_a_translator_are_in_the_target_language(tmp_path: Path) -> None:
    """NLLB begins each text with its language. The tokens are those of transformers' own `text_target`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import NllbTokenizer

    words = ["<s>", "<pad>", "</s>", "<unk>", "▁a", "▁b", "▁c"]
    languages = ["eng_Latn", "fra_Latn"]
    base: Any = Tokenizer(models.BPE({word: at for at, word in enumerate(words)}, [], unk_token="<unk>"))
    base.pre_tokenizer = pre_tokenizers.Metaspace()
    made: Any = NllbTokenizer(
        vocab={word: at for at, word in enumerate(words)},
        merges=[],
        src_lang="eng_Latn",
        tgt_lang="fra_Latn",
        extra_special_tokens=languages,
    )
    made.save_pretrained(tmp_path)
    config = {"is_encoder_decoder": True, "decoder_start_token_id": 2, "vocab_size": len(made), "model_type": "m2m_100"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = row_tokenizer(tmp_path, "model", "run.toml")
    prompt, completion = tokenizer.encode([row_of({"prompt": "a b", "completion": "c"}, "row")])
    assert prompt[0][:-1] == made("a b")["input_ids"]
    assert completion[0][1:] == made(text_target="c")["input_ids"]
    change_json(tmp_path / "tokenizer_config.json", lambda stored: stored.pop("tgt_lang"))
    with pytest.raises(InvalidInputError, match="tgt_lang"):
        row_tokenizer(tmp_path, "model", "run.toml")


def test_the_cache_depends_on_everything_that_decides_tokens(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainctl.trainer.data import token_cache

    config = text_run(model)
    names = {cache_name(config)}
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("{{ messages }}")
    names.add(cache_name(config))
    for library in ("tokenizers", "transformers", "jinja2"):
        token_cache._code_versions.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(token_cache, "installed_version", lambda name, newer=library: "9" if name == newer else "1")
            names.add(cache_name(config))
    token_cache._code_versions.cache_clear()
    assert len(names) == 5
