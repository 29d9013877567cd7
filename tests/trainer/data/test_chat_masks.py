"""The tokens of a conversation that count: those whose characters are the assistant's, by any tokenizer and template.

The expected mask comes from the tokens' own text: laid end to end, they say which characters each one holds.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.trainer.support.chat_model import CHATML

from trainctl.protocol.errors import InvalidInputError
from trainctl.trainer.data.row_tokens import RowTokenizer, row_tokenizer
from trainctl.trainer.data.rows import row_of

HEAD = "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
TAIL = "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"


def marked(begin: str, end: str) -> str:
    """A template that marks what `CHATML` leaves to be found."""
    content = "{{ message.content + '<|im_end|>\\n' }}"
    turn = f"{{% if message.role == 'assistant' %}}{begin}{content}{end}{{% else %}}{content}{{% endif %}}"
    return HEAD + turn + TAIL


TEMPLATES = {
    "found": CHATML,
    "marked": marked("{% generation %}", "{% endgeneration %}"),
    "tight": marked("{%generation%}", "{%endgeneration%}"),
    "trimmed": marked("{%-  generation -%}", "{%- endgeneration  -%}"),
}
ALPHABET = "ab cd.\n 12é🙂"
contents = st.text(ALPHABET, min_size=1, max_size=8)
turns = st.lists(st.tuples(contents, contents), min_size=1, max_size=3)


def tokenizer_of(kind: str) -> Any:
    """A small tokenizer whose words are learned from a text with every character of `ALPHABET`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    model: Any = Tokenizer(models.BPE())
    if kind == "metaspace":
        model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        model.decoder = decoders.Metaspace(prepend_scheme="never", split=False)
        alphabet = [*ALPHABET.replace(" ", "▁"), *"systemurait"]
    else:
        trims = kind == "trimmed offsets"
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=trims)
        model.post_processor = processors.ByteLevel(trim_offsets=trims)
        model.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<|im_start|>", "<|im_end|>"], initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator(["user\nab cd. assistant\n12 é🙂\n cd ab", "a b c d 12 12 ab ab cd"] * 20, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<|im_end|>")


KINDS = ("byte-level", "trimmed offsets", "metaspace")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], RowTokenizer]:
    read = {}
    for kind in KINDS:
        whole = tokenizer_of(kind)
        for name, template in TEMPLATES.items():
            folder = tmp_path_factory.mktemp("tokenizer")
            whole.chat_template = template
            whole.save_pretrained(folder)
            read[kind, name] = row_tokenizer(folder, "model", "run.toml")
    return read


def ends(pieces: Sequence[str], kind: str) -> Iterator[int]:
    """Yield the number of characters up to each token's end, one that it holds a part of among them."""
    raw = b""
    for piece in pieces:
        raw += bytes_of(piece, kind)
        yield len(raw.decode(errors="replace"))


def bytes_of(piece: str, kind: str) -> bytes:
    if piece.startswith("<|im_"):
        return piece.encode()
    if kind == "metaspace":
        return piece.replace("▁", " ").encode()
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    byte = {character: number for number, character in bytes_to_unicode().items()}
    return bytes(byte[character] for character in piece)


def expected(spans: Sequence[tuple[int, int]], pieces: Sequence[str], kind: str) -> list[bool]:
    return [any(start < stop <= end for start, end in spans) for stop in ends(pieces, kind)]


def conversation(pairs: Sequence[tuple[str, str]]) -> tuple[list[dict[str, str]], str, list[tuple[int, int]]]:
    """Return messages, their text, and the characters of the assistant's turns."""
    messages, text, spans = [], "", []
    for question, answer in pairs:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        text += f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        spans.append((len(text), len(text) + len(answer) + len("<|im_end|>\n")))
        text += f"{answer}<|im_end|>\n"
    return messages, text, spans


@pytest.mark.parametrize("template", [*TEMPLATES])
@pytest.mark.parametrize("kind", KINDS)
@given(pairs=turns)
def test_tokens_count_whose_characters_are_the_assistants(
    tokenizers: dict[tuple[str, str], RowTokenizer], kind: str, template: str, pairs: list[tuple[str, str]]
) -> None:
    messages, text, spans = conversation(pairs)
    tokenizer = tokenizers[kind, template]
    ((tokens, mask),) = tokenizer.encode([row_of({"messages": messages}, "row")])
    pieces = [tokenizer._tokenizer.convert_ids_to_tokens(token) for token in tokens]
    assert b"".join(bytes_of(piece, kind) for piece in pieces).decode() == text
    assert mask == expected(spans, pieces, kind)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer whose template for rows with tools marks turns; the one for other rows doesn't."""
    whole = tokenizer_of("byte-level")
    whole.chat_template = {
        "default": CHATML,
        "tool_use": "{% for tool in tools %}{{ tool.name }}{% endfor %}" + TEMPLATES["marked"],
    }
    whole.save_pretrained(tmp_path)
    return tmp_path


def test_each_row_is_read_by_the_template_that_it_uses(folder: Path) -> None:
    tokenizer = row_tokenizer(folder, "model", "run.toml")
    messages, _, _ = conversation([("ab", "cd")])
    plain, with_tools = {"messages": messages}, {"messages": messages, "tools": [{"name": "abcd"}]}
    for rows in ([plain, with_tools], [with_tools, plain]):
        encoded = [*tokenizer.encode([row_of(row, "row") for row in rows])]
        learned = [[token for token, counts in zip(*row, strict=True) if counts] for row in encoded]
        assert learned[0] == learned[1]


@pytest.mark.parametrize("template", ["found", "marked"])
@pytest.mark.parametrize("setting", [{"weight": 0}, {"train": False}, {"weight": 0.0}])
def test_a_turn_of_no_weight_is_not_learned(
    tokenizers: dict[tuple[str, str], RowTokenizer], template: str, setting: dict[str, Any]
) -> None:
    messages, _, spans = conversation([("ab", "cd"), ("a", "12"), ("b", "é")])
    messages[3] |= setting
    messages[5] |= {"weight": 1, "train": True}
    tokenizer = tokenizers["byte-level", template]
    ((tokens, mask),) = tokenizer.encode([row_of({"messages": messages}, "row")])
    pieces = [tokenizer._tokenizer.convert_ids_to_tokens(token) for token in tokens]
    assert mask == expected([spans[0], spans[2]], pieces, "byte-level")


@pytest.mark.parametrize("weight", [0.5, "0", 2])
def test_other_weights_are_refused(weight: Any) -> None:
    messages, _, _ = conversation([("a", "b")])
    messages[1]["weight"] = weight
    with pytest.raises(InvalidInputError, match="must be 0 or 1"):
        row_of({"messages": messages}, "row")


def test_a_row_of_turns_without_weight_has_nothing_to_learn() -> None:
    messages, _, _ = conversation([("a", "b")])
    with pytest.raises(InvalidInputError, match="nothing to learn"):
        row_of({"messages": [messages[0], {**messages[1], "train": False}]}, "row")


def test_settings_of_a_row_reach_the_template_and_unknown_fields_are_counted(tmp_path: Path) -> None:
    whole = tokenizer_of("byte-level")
    whole.chat_template = "{% if short %}ab{% else %}cd{% endif %}" + CHATML
    whole.save_pretrained(tmp_path)
    tokenizer = row_tokenizer(tmp_path, "model", "run.toml")
    messages, _, _ = conversation([("a", "b")])
    messages[0]["mood"] = "12"
    rows: list[dict[str, Any]] = [
        {"messages": messages},
        {"messages": messages, "chat_template_kwargs": {"short": True}},
    ]
    texts = [
        tokenizer._tokenizer.decode(tokens) for tokens, _ in tokenizer.encode([row_of(row, "row") for row in rows])
    ]
    assert [text[:2] for text in texts] == ["cd", "ab"]
    assert [count for name, count in tokenizer.take_remarks().items() if "'mood'" in name] == [2]
    assert not tokenizer.take_remarks()
