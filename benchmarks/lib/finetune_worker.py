"""One trainer of `finetune_speed.py`: loads a model, then trains as many steps as each line of standard input says.

Contenders: `torch` and `mlx` (this program's loop), `trainer` (transformers), `trl` (SFTTrainer), `mlx_lm`. All
read the same tokenised rows in the same order, and pad each micro-batch to its longest row. Answers with a JSON line
each: seconds and peak bytes, the latter as VmHWM less what was resident once the libraries were imported.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from trainctl.protocol.config import run_file
from trainctl.protocol.messages import Form, Generation, Range, RankWork, StepPlan
from trainctl.protocol.record.status_page import StatusWriter
from trainctl.trainer.backends.load import load
from trainctl.trainer.data.dataset import Dataset, open_dataset
from trainctl.trainer.data.permutation import samples_at
from trainctl.trainer.loop import train
from trainctl.trainer.step.progress import Progress
from trainctl.trainer.step.rank import Identity, Rank

RATE = 1e-4
GENERATION = Generation(1, 1)
WARM_UP_STEPS = 2


class Turns:
    """Hands the steps that were asked for to a training loop, and answers when they are done."""

    def __init__(self) -> None:
        self._base = resident()["VmRSS"]
        self._left, self._begun = WARM_UP_STEPS, time.perf_counter()

    def step_done(self) -> None:
        """Call after each step; returns when the next is wanted, and ends the process when none is."""
        self._left -= 1
        if self._left:
            return
        answer = {"seconds": time.perf_counter() - self._begun, "peak_bytes": resident()["VmHWM"] - self._base}
        print(json.dumps(answer), flush=True)
        line = sys.stdin.readline()
        if not line:
            os._exit(0)  # a trainer of a library has no other way out of its loop
        self._left, self._begun = int(line), time.perf_counter()


def resident() -> dict[str, int]:
    """Bytes resident now (VmRSS) and at most so far (VmHWM)."""
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return {
        name: int(rest.split()[0]) * 1024
        for name, _, rest in (line.partition(":") for line in lines)
        if name in ("VmRSS", "VmHWM")
    }


def main() -> None:
    """Train until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("contender", choices=["torch", "mlx", "trainer", "trl", "mlx_lm"])
    parser.add_argument("config", type=Path, help="run file")
    options = parser.parse_args()
    config = run_file.read(options.config)
    dataset = open_dataset(config, options.config.parent, str(options.config))
    if options.contender in ("torch", "mlx"):
        ours(config, dataset, options.config.parent / f"status-{os.getpid()}")
    elif options.contender == "mlx_lm":
        mlx_lm(config, dataset)
    else:
        transformers_trainer(config, dataset, trl=options.contender == "trl")


def ours(config: Any, dataset: Dataset, status: Path) -> None:
    """The training loop, as a rank on its own runs it."""
    (node,) = config.nodes.values()
    if node.backend == "torch":
        import torch
        import transformers

        _ = transformers.AutoModelForCausalLM, torch.optim.AdamW
    else:
        import mlx_lm.models.llama  # noqa: F401
    if config.adapter.kind != "full":
        import peft  # noqa: F401
    if config.model.base == "nf4":
        import bitsandbytes  # noqa: F401
    turns = Turns()
    progress = Progress()
    progress.load(0, 0)
    who = Identity("speed", "here", 0)
    progress.form(Form(run=who.run, generation=GENERATION, engine="none", ranks=(0,)))
    backend = load(config, node, "speed")
    rank = Rank(who, config, backend, dataset, progress, StatusWriter(status, os.getpid()), send=lambda message: None)
    batch = config.batch.global_
    for step in range(1, config.run.steps + 1):
        cursor = (step - 1) * batch
        plan = StepPlan(
            run=who.run,
            generation=GENERATION,
            seq=step,
            kind="train",
            step=step,
            plan_version=1,
            cursor=cursor,
            global_batch=batch,
            divisor=batch * dataset.mean_weight,
            learning_rate=RATE,
            work=(RankWork(0, (Range(cursor, batch),), config.batch.micro),),
        )
        train(rank, plan, time.perf_counter())
        turns.step_done()


def ordered(config: Any, dataset: Dataset) -> Iterator[tuple[list[int], list[bool]]]:
    """Tokens, and which of the targets count, of each row in the order of training."""
    for number in samples_at(np.arange(config.run.steps * config.batch.global_), dataset.samples, config.run.seed):
        ((tokens, flags),) = dataset.sample(int(dataset.training[number]))
        yield tokens.tolist(), flags.tolist()


def lora_config(config: Any) -> Any:
    """peft's, or None for full training."""
    if config.adapter.kind == "full":
        return None
    from peft import LoraConfig

    return LoraConfig(
        r=config.adapter.rank, lora_alpha=int(config.adapter.alpha), target_modules="all-linear", task_type="CAUSAL_LM"
    )


def nf4() -> dict[str, Any]:
    """Return the arguments by which transformers loads a model packed by bitsandbytes."""
    import bitsandbytes  # noqa: F401
    import torch
    from transformers import BitsAndBytesConfig

    make: Any = BitsAndBytesConfig
    how = make(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    return {"quantization_config": how, "device_map": {"": "cpu"}}


def transformers_trainer(config: Any, dataset: Dataset, trl: bool) -> None:
    """transformers' Trainer with peft, or TRL's SFTTrainer."""
    import datasets
    import torch
    import transformers
    from peft import get_peft_model

    if trl:
        from trl import SFTConfig, SFTTrainer

    (node,) = config.nodes.values()
    torch.set_num_threads(node.threads or os.cpu_count() or 1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(config.model.path)
    rows = [
        {"input_ids": tokens, "labels": [-100, *np.where(flags, tokens[1:], -100).tolist()]}
        for tokens, flags in ordered(config, dataset)
    ]
    data = datasets.Dataset.from_list(rows)
    packing = nf4() if config.model.base == "nf4" else {}
    turns = Turns()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32, **packing)
    options: dict[str, Any] = {
        "output_dir": str(Path(config.model.path).parent / f"out-{os.getpid()}"),
        "report_to": [],
        "use_cpu": True,
        "max_steps": config.run.steps,
        "per_device_train_batch_size": config.batch.micro,
        "bf16": False,
        "gradient_accumulation_steps": config.batch.global_ // config.batch.micro,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "gradient_checkpointing": False,
        "remove_unused_columns": False,
    }

    class Callback(transformers.TrainerCallback):
        def on_step_end(self, *arguments: Any, **options: Any) -> None:
            turns.step_done()

    common = {
        "train_dataset": data,
        "callbacks": [Callback()],
        "data_collator": transformers.DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=-100),
    }
    kind: Any = SFTTrainer if trl else transformers.Trainer

    class Ordered(kind):  # type: ignore[misc]
        def _get_train_sampler(self, *given: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    if trl:
        arguments = SFTConfig(**options, dataset_kwargs={"skip_prepare_dataset": True})
        trainer = Ordered(model, arguments, processing_class=tokenizer, peft_config=lora_config(config), **common)
    else:
        adapter = lora_config(config)
        trainer = Ordered(
            get_peft_model(model, adapter) if adapter else model, transformers.TrainingArguments(**options), **common
        )
    trainer.train()


def mlx_lm(config: Any, dataset: Dataset) -> None:
    """mlx_lm's tuner, its AdamW, gradients not clipped as it does not clip."""
    import mlx.core as mx
    import mlx.optimizers as optim
    from mlx_lm.tuner.trainer import TrainingArgs, train
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import load_model

    rows = list(ordered(config, dataset))
    turns = Turns()
    model: Any = load_model(Path(config.model.path))[0]
    if config.adapter.kind != "full":
        model.freeze()
        linear_to_lora_layers(
            model,
            len(model.layers),
            {"rank": config.adapter.rank, "scale": config.adapter.alpha / config.adapter.rank, "dropout": 0.0},
        )
    micro = config.batch.micro

    def batches(**options: Any) -> Iterator[Any]:
        done = 0
        while True:
            chosen = [rows[(done * micro + at) % len(rows)] for at in range(micro)]
            longest = max(len(tokens) for tokens, _ in chosen)
            whole = np.zeros((micro, longest), np.int32)
            spans = np.zeros((micro, 2), np.int32)
            for at, (tokens, flags) in enumerate(chosen):
                whole[at, : len(tokens)] = tokens
                spans[at] = flags.index(True), len(flags)
            yield mx.array(whole), mx.array(spans)
            done += 1
            if done * micro % config.batch.global_ == 0:
                turns.step_done()

    class Silent:
        def on_train_loss_report(self, report: dict[str, Any]) -> None: ...

        def on_val_loss_report(self, report: dict[str, Any]) -> None: ...

    mx.disable_compile()  # on a CPU a compiler would run for each new shape
    per_step = config.batch.global_ // micro
    train(
        model,
        optim.AdamW(RATE),
        train_dataset=[],
        iterate_batches=batches,
        training_callback=Silent(),
        args=TrainingArgs(
            batch_size=micro,
            iters=config.run.steps * per_step,
            steps_per_report=10**6,
            steps_per_save=10**6,
            grad_accumulation_steps=per_step,
            adapter_file=str(Path(config.model.path).parent / "adapters.safetensors"),
        ),
    )


if __name__ == "__main__":
    main()
