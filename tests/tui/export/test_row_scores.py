"""What `trainctl score` checks before it asks an agent: the options of answers, and every row of the file."""

from pathlib import Path

import pytest
from tests.trainer.support.chat_model import write_rows

from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import AnswerOptions
from trainctl.tui.export.row_scores import answer_options, read_file


def test_options_of_answers() -> None:
    assert answer_options({"seed": None}, answers=False) is None
    assert answer_options({"seed": None}, answers=True) == AnswerOptions()
    given = {"max_tokens": 5, "temperature": 0.5, "top_p": None, "seed": 3, "use_generation_config": True}
    assert answer_options(given, answers=True) == AnswerOptions(5, 0.5, 1.0, 3, use_generation_config=True)
    for name, value, says in (("max_tokens", 5000, "--max-tokens: must be .* at most 1024"), ("top_p", 0, "--top-p: ")):
        with pytest.raises(InvalidInputError, match=says):
            answer_options({name: value}, answers=True)
    with pytest.raises(InvalidInputError, match="--seed: needs --answers"):
        answer_options({"seed": 0}, answers=False)


def test_rows_are_checked_for_their_use(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b"}, {"prompt": "a"}])
    assert read_file(Path(rows), prompts=True).rows == 2
    with pytest.raises(InvalidInputError, match="line 2"):
        read_file(Path(rows))
    texts = write_rows(tmp_path / "texts.jsonl", [{"text": "a"}])
    with pytest.raises(InvalidInputError, match=r"line 1.*needs"):
        read_file(Path(texts), prompts=True)
    asked = write_rows(tmp_path / "asked.jsonl", [{"messages": [{"role": "user", "content": "a"}]}])
    with pytest.raises(InvalidInputError, match="line 1: no assistant turn to score; use --answers"):
        read_file(Path(asked))
    with pytest.raises(InvalidInputError, match="no such file"):
        read_file(tmp_path / "none.jsonl")


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n\n{"text": "\ufeffb"}', "utf-8-sig")
    assert [*read_file(tmp_path / "rows.jsonl").lines()] == [b'{"text": "a"}\n', '{"text": "\ufeffb"}\n'.encode()]
