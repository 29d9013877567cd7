"""Byte tokens: 0-255 are the bytes of a text as they are, 256 begins a text, 257 ends one, 258 pads."""

from collections.abc import Sequence

BYTES_BEGIN, BYTES_END, BYTES_PAD = 256, 257, 258
BYTES_VOCABULARY = 259
_NAMES = {BYTES_BEGIN: "<begin>", BYTES_END: "<end>", BYTES_PAD: "<pad>"}


class ByteTokenizer:
    """What `row_tokens` asks of a tokenizer; no chat template."""

    eos_token_id = BYTES_END
    chat_template = None

    def __call__(self, texts: Sequence[str]) -> dict[str, list[list[int]]]:
        return {"input_ids": [[*text.encode()] for text in texts]}

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens: bytes, or one that isn't a byte by its name."""
        if len(tokens) == 1 and tokens[0] in _NAMES:
            return _NAMES[tokens[0]]
        return bytes(token for token in tokens if token < BYTES_BEGIN).decode("utf-8", "replace")

    def get_vocab(self) -> dict[str, int]:
        """Only the highest id is asked for."""
        return {"": BYTES_VOCABULARY - 1}
