"""The tokenizer of a model folder, as tokenizer.json stores it: one for texts and for rows.

transformers' AutoTokenizer rebuilds parts of some tokenizers by the class that tokenizer_config.json names. Where that
gives other tokens, programs would read other tokens than were trained, so such a folder is refused.

Byte tokens need no file: 0-255 are the bytes of a text as they are, 256 begins a text, 257 ends one, 258 pads.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainctl.protocol.errors import InvalidInputError, installing
from trainctl.trainer.common.errors import first_line

BYTES_BEGIN, BYTES_END, BYTES_PAD = 256, 257, 258
BYTES_VOCABULARY = 259
_BYTE_NAMES = {BYTES_BEGIN: "<begin>", BYTES_END: "<end>", BYTES_PAD: "<pad>"}

PROBES = (
    "In 2023, it's 12.5 %.",
    "  two  spaces",
    "\n\n\tdef f(x):\r\n",
    "don't WON'T",
    "naïve Ångström 東京 привет",
    "emoji 🙂👩‍🚀",
    "a_b-c/d\\e",
    " leading",
    "trailing ",
    "x" * 40,
)
"""Texts in which pre-tokenizers differ: digits, spaces, line ends, contractions, scripts, emoji."""


def read_tokenizer(model: Path, where: str) -> Any:
    """Return a model folder's tokenizer as transformers' fast class. It cuts and pads nothing, whatever tokenizer.json
    stores. Raises InvalidInputError, blaming a field of `where`, without transformers or a usable tokenizer.json, and
    if AutoTokenizer reads other tokens."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast
    except ImportError:
        problem = f"tokenizers need transformers; {installing('torch', 'mlx')}"
        raise InvalidInputError(f"{where}: data.tokenizer", problem) from None
    if not (model / "tokenizer.json").is_file():
        raise InvalidInputError(f"{where}: data.tokenizer", f"{model} has no tokenizer.json")
    try:
        stored: Any = PreTrainedTokenizerFast.from_pretrained(model, local_files_only=True)
        by_class: Any = AutoTokenizer.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        problem = f"cannot read the tokenizer in {model}: {first_line(error)}"
        raise InvalidInputError(f"{where}: data.tokenizer", problem) from None
    except Exception as error:
        # The tokenizers library raises Exception itself for a damaged file.
        if type(error) is not Exception:
            raise
        problem = f"{model / 'tokenizer.json'} is not a readable tokenizer: {first_line(error)}"
        raise InvalidInputError(f"{where}: data.tokenizer", problem) from None
    for tokenizer in (stored, by_class):
        if tokenizer.is_fast:
            tokenizer.backend_tokenizer.no_truncation()
            tokenizer.backend_tokenizer.no_padding()
    if type(by_class) is type(stored):
        return stored
    translates = has_target_mode(by_class)
    for text in PROBES:
        here, there = (
            [*tokenizer(text, add_special_tokens=not translates)["input_ids"]] for tokenizer in (stored, by_class)
        )
        if here != there:
            problem = (
                f"{model}: tokenizer.json splits {text!r} into {_pieces(stored, here)}, but transformers' "
                f"{type(by_class).__name__}, which tokenizer_config.json names, into {_pieces(by_class, there)}; to "
                'have every program read tokenizer.json, set "tokenizer_class": "PreTrainedTokenizerFast" there'
            )
            raise InvalidInputError(f"{where}: data.tokenizer", problem)
    return by_class if translates else stored


def has_target_mode(tokenizer: Any) -> bool:
    """Return whether a tokenizer writes other special tokens around a text to translate than around its translation, as
    those of NLLB and mBART do. Only a model's own class knows them."""
    return hasattr(tokenizer, "_switch_to_target_mode")  # transformers has no public name for it


def with_exact_offsets(tokenizer: Any) -> Any:
    """Return the `tokenizers.Tokenizer` behind a fast tokenizer of transformers, changed so that the offsets of its
    tokens cover the spaces that belong to them. Its tokens are the same."""
    backend = tokenizer.backend_tokenizer
    parts = json.loads(backend.to_str())
    if not _untrim(parts["pre_tokenizer"]) | _untrim(parts["post_processor"]):
        return backend
    from tokenizers import Tokenizer

    exact: Any = Tokenizer.from_str(json.dumps(parts))
    exact.encode_special_tokens = backend.encode_special_tokens
    return exact


def _untrim(part: Any) -> bool:
    """Switch off `trim_offsets` in a part of a tokenizer and in those within it. Return whether any was on."""
    changed = False
    if isinstance(part, dict):
        if part.get("trim_offsets"):
            part["trim_offsets"], changed = False, True
        part = [*part.values()]
    for inner in part if isinstance(part, list) else ():
        changed |= _untrim(inner)
    return changed


def _pieces(tokenizer: Any, tokens: list[int]) -> str:
    return " ".join(tokenizer.convert_ids_to_tokens(tokens[:12])) + (" ..." if len(tokens) > 12 else "")


class ByteTokenizer:
    """The part of a tokenizer of transformers that `row_tokens` uses; no chat template."""

    eos_token_id = BYTES_END
    chat_template = None

    def __call__(self, texts: str | Sequence[str], *, add_special_tokens: bool = True) -> dict[str, list[Any]]:
        return {"input_ids": [*texts.encode()] if isinstance(texts, str) else [[*text.encode()] for text in texts]}

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of bytes, or the name of a token that isn't one."""
        if len(tokens) == 1 and tokens[0] in _BYTE_NAMES:
            return "" if skip_special_tokens else _BYTE_NAMES[tokens[0]]
        return bytes(token for token in tokens if token < BYTES_BEGIN).decode("utf-8", "replace")

    def get_vocab(self) -> dict[str, int]:
        """Return the highest id, the only one that is asked for."""
        return {"": BYTES_VOCABULARY - 1}
