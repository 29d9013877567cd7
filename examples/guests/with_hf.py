"""The Trainer of transformers with a callback: python with_hf.py --steps 300"""

import argparse
import random

from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from trainctl import guest

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--output", default="with_hf")
options = parser.parse_args()

set_seed(1)
chance = random.Random(1)
texts = [[chance.randrange(64) for _ in range(16)] for _ in range(256)]
rows = [{"input_ids": ids, "labels": ids} for ids in texts]
trainer = Trainer(
    model=GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)),
    args=TrainingArguments(options.output, max_steps=options.steps, save_strategy="no", disable_tqdm=True),
    train_dataset=rows[:240],
    eval_dataset=rows[240:],
    callbacks=[guest.hf.Callback()],
)
print(f"loss {trainer.train().training_loss:.6f}")
