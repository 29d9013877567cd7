"""Byte tokens: 0-255 are the bytes of a text as they are, 256 begins a text, 257 ends one, 258 pads."""

from collections.abc import Sequence

BYTES_BEGIN, BYTES_END, BYTES_PAD = 256, 257, 258
BYTES_VOCABULARY = 259


class ByteTokenizer:
    """What `row_tokens` asks of a tokenizer; no chat template."""

    eos_token_id = BYTES_END
    chat_template = None

    def __call__(self, texts: Sequence[str]) -> dict[str, list[list[int]]]:
        return {"input_ids": [[*text.encode()] for text in texts]}

    def get_vocab(self) -> dict[str, int]:
        """Only the highest id is asked for."""
        return {"": BYTES_VOCABULARY - 1}
