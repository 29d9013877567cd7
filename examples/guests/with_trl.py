"""A trainer of TRL that reports to trainctl: python with_trl.py --steps 300"""

import argparse
import random

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

from trainctl import guest

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--output", default="with_trl")
options = parser.parse_args()
guest.register()

words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(61))]
vocabulary = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
vocabulary.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="<pad>", eos_token="<eos>")
set_seed(1)
chance = random.Random(1)
texts = [" ".join(chance.choices(words[3:], k=12)) for _ in range(256)]
trainer = SFTTrainer(
    model=GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1)),
    args=SFTConfig(
        options.output,
        max_steps=options.steps,
        save_strategy="no",
        disable_tqdm=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="trainctl",
    ),
    train_dataset=Dataset.from_list([{"text": text} for text in texts]),
    processing_class=tokenizer,
)
print(f"loss {trainer.train().training_loss:.6f}")
