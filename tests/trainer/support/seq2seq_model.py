"""Small random encoder-decoder models with a real tokenizer, and sentences whose punctuation is to be restored."""

from pathlib import Path
from typing import Any

from tests.conftest import ROOT
from tests.trainer.support.chat_model import VOCABULARY, tokenizer

T5 = {
    "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2, "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16, "decoder_start_token_id": 0, "initializer_factor": 1.0,
}  # fmt: skip
BART = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 128, "init_std": 0.2,
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("t5", T5),
    "t5-gated": ("t5", T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "bart": ("bart", BART),
}
"""By a name of the test's: T5, T5 1.1 (as Flan-T5) and BART."""


def encoder_tokenizer(kind: str) -> Any:
    """One that ends what it is given with its end token, as T5's, and begins it with another one, as BART's."""
    from tokenizers.processors import TemplateProcessing

    made, end = tokenizer(None), "<|im_end|>"
    begin = "<bos> " if kind == "bart" else ""
    ids = [(token, made.convert_tokens_to_ids(token)) for token in ("<bos>", end)]
    made.backend_tokenizer.post_processor = TemplateProcessing(single=f"{begin}$A {end}", special_tokens=ids)
    return made


def make_seq2seq_model(folder: Path, name: str = "t5") -> Path:
    """A Hugging Face directory at `folder`."""
    import torch
    import transformers

    kind, shape = KINDS[name]
    made = encoder_tokenizer(kind)
    ids = {"eos_token_id": made.eos_token_id, "pad_token_id": made.pad_token_id, "bos_token_id": made.bos_token_id}
    start = {"decoder_start_token_id": made.eos_token_id, "forced_eos_token_id": None} if kind == "bart" else {}
    torch.manual_seed(5)
    config = transformers.AutoConfig.for_model(kind, vocab_size=VOCABULARY, **shape | ids | start)
    loader: Any = transformers.AutoModelForSeq2SeqLM
    loader.from_config(config, dtype=torch.float32).save_pretrained(folder)
    made.save_pretrained(folder)
    return folder


def sentences(count: int) -> list[dict[str, str]]:
    """Prompts without capitals and punctuation, and what they are in a speech."""
    text = (ROOT / "examples" / "speeches.txt").read_text("utf-8").replace("\n", " ")
    whole = [part.strip() for part in text.replace(";", ".").split(".") if len(part.split()) > 2]
    pieces = [" ".join(part.split()[start : start + 12]) for part in whole for start in range(0, len(part.split()), 7)]
    plain = ["".join(letter for letter in piece.lower() if letter.isalnum() or letter == " ") for piece in pieces]
    rows = [{"prompt": f"restore: {one}", "completion": other} for one, other in zip(plain, pieces, strict=True)]
    return [rows[at % len(rows)] for at in range(count)]
