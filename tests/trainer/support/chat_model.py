"""A small Llama with a real BPE tokenizer and a chat template, and questions about the standard library to answer."""

import functools
import json
import random
from pathlib import Path
from typing import Any

from trainctl.trainer import demo_assets

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIALS = (
    "<pad>", "<|im_start|>", "<|im_end|>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<|begin_of_text|>",
    "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|user|>", "<|assistant|>", "<|end|>",
)  # fmt: skip
VOCABULARY = 512


@functools.cache
def _learned() -> str:
    """Return byte-level BPE as JSON, learned from Python's own source text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made: Any = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[*SPECIALS], initial_alphabet=alphabet)
    made.train_from_iterator([Path(random.__file__).read_text("utf-8")], trainer)
    return str(made.to_str())


def tokenizer(template: str | None = CHATML) -> Any:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    made: Any = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_learned()), bos_token="<bos>", eos_token="<|im_end|>", pad_token="<pad>"
    )
    made.chat_template = template
    return made


def make_chat_model(folder: Path, template: str | None = CHATML, **shape: int) -> Path:
    """A Hugging Face directory at `folder`."""
    wanted: dict[str, Any] = {"hidden": 32, "layers": 2, "heads": 2, "intermediate": 64, **shape}
    config = demo_assets.llama_config(**wanted, vocabulary=VOCABULARY, tied=False)
    made = tokenizer(template)
    config |= {"bos_token_id": made.bos_token_id, "eos_token_id": made.eos_token_id, "pad_token_id": made.pad_token_id}
    demo_assets.make_model(folder, config, seed=5)
    made.save_pretrained(folder)
    return folder


def questions(count: int, seed: int = 1) -> list[dict[str, str]]:
    """Prompts and completions of unlike lengths: a line of the standard library, and what follows it."""
    lines = [line for line in Path(random.__file__).read_text("utf-8").splitlines() if len(line.strip()) > 8]
    chance = random.Random(seed)
    rows = []
    for _ in range(count):
        start, length = chance.randrange(len(lines) - 8), chance.randrange(1, 6)
        after = "\n".join(line.strip() for line in lines[start + 1 : start + 1 + length])
        rows.append({"prompt": f"{lines[start].strip()}\n", "completion": after})
    return rows


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path
