"""Contenders of `cuda_speed.py` on the same tokens: one rank's steps, a plain torch loop, and transformers' Trainer."""

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import transformers

from trainctl.protocol.batch.flops import step_flops
from trainctl.protocol.config import run_file
from trainctl.protocol.config.model_facts import read_facts
from trainctl.protocol.config.run_tables import AdapterTable
from trainctl.protocol.messages import Form, Generation, Range, RankWork, StepPlan
from trainctl.protocol.record.status_page import StatusWriter
from trainctl.trainer import demo_assets
from trainctl.trainer.backends.load import load
from trainctl.trainer.data.dataset import open_dataset
from trainctl.trainer.loop import train
from trainctl.trainer.step.progress import Progress
from trainctl.trainer.step.rank import Identity, Rank

RATE, PASSES, SAMPLES = 1e-4, 2, 64


class Size(NamedTuple):
    """A model, and what a micro-batch of it is."""

    shape: dict[str, Any]
    micro: int  # samples
    length: int = 2048  # tokens of a sample
    vocabulary: int = 32_000


SIZES = {
    "0.1B": Size({"hidden": 768, "layers": 12, "heads": 12, "intermediate": 2048}, 8),
    "1B": Size({"hidden": 2048, "layers": 16, "heads": 16, "intermediate": 8192}, 4),
    "tiny": Size({"hidden": 32, "layers": 2, "heads": 2, "intermediate": 64}, 2, 32, 320),
}
"""`tiny` only shows that everything runs."""
GENERATION = Generation(1, 1)


class Work:
    """The files of one size, and its batches."""

    def __init__(self, folder: Path, size: str, device: str) -> None:
        shape, self.micro, self.length, vocabulary = SIZES[size]
        self.folder, self.size, self.device, self.batch = folder, size, device, PASSES * self.micro
        config = transformers.LlamaConfig(**demo_assets.llama_config(**shape, vocabulary=vocabulary))
        torch.manual_seed(1)
        with torch.device(device):
            model = transformers.LlamaForCausalLM(config)
        self.parameters = sum(p.numel() for p in model.parameters())
        model.save_pretrained(folder / "model")
        self.tokens = np.random.default_rng(0).integers(0, vocabulary, (SAMPLES, self.length + 1))
        lines = (json.dumps({"tokens": row.tolist()}) + "\n" for row in self.tokens)
        (folder / "samples.jsonl").write_text("".join(lines), "utf-8")

    @property
    def tokens_a_step(self) -> int:
        return self.batch * self.length

    @property
    def flops_per_token(self) -> float:
        """Operations that a token of a sample takes, as a run counts them."""
        found = step_flops(AdapterTable(), read_facts(self.folder / "model", "speed"), "speed")
        assert found is not None, "a Llama's sizes are known"
        return found.of(self.length, 1) / self.length

    def raw(self, compile_mode: str = "off") -> dict[str, Any]:
        """The run file."""
        return {
            "run": {"name": "speed", "steps": 100_000},
            "model": {"path": str(self.folder / "model"), "dtype": "bfloat16", "compile": compile_mode},
            "data": {
                "path": str(self.folder / "samples.jsonl"),
                "kind": "samples",
                "sequence_length": self.length,
                "held_out": 0.0,
            },
            "batch": {"global": self.batch, "micro": self.micro},
            "optimizer": {"learning_rate": RATE},
            "checkpoint": {"at_end": False},
            "nodes": {"here": {"backend": "torch", "device": self.device}},
        }

    def model(self, dtype: torch.dtype) -> Any:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(self.folder / "model", dtype=dtype)
        return loaded.to(self.device).train()

    def micro_batch(self, number: int) -> torch.Tensor:
        rows = np.arange(number * self.micro, (number + 1) * self.micro) % SAMPLES
        return torch.from_numpy(self.tokens[rows]).to(self.device, non_blocking=True)


class Ours:
    """The training loop, as a rank on its own runs it."""

    def __init__(self, work: Work, *, compiled: bool) -> None:
        config = run_file.parse(work.raw("default" if compiled else "off"))
        data, self.backend = open_dataset(config, work.folder, "speed"), load(config, config.nodes["here"], "speed")
        progress = Progress()
        progress.load(0, 0)
        progress.form(Form(run="speed", generation=GENERATION, engine="none", ranks=(0,)))
        self._work, self._count, self.values = work, 0, dict[str, float]()
        status = StatusWriter(work.folder / "status", os.getpid())
        self._rank = Rank(
            Identity("speed", "here", 0),
            config,
            self.backend,
            data,
            progress,
            status,
            send=lambda _: None,
        )

    def step(self) -> None:
        work, cursor = self._work, self._count * self._work.batch
        self._count += 1
        plan = StepPlan(
            run="speed",
            generation=GENERATION,
            seq=self._count,
            kind="train",
            step=self._count,
            plan_version=1,
            cursor=cursor,
            global_batch=work.batch,
            divisor=float(work.tokens_a_step),
            learning_rate=RATE,
            work=(RankWork(0, (Range(cursor, work.batch),), work.micro),),
        )
        report = train(self._rank, plan, time.perf_counter())
        self.values = report.values | {
            f"{name}_seconds": seconds for name, seconds in msgspec.structs.asdict(report.phases).items()
        }

    def close(self) -> None:
        """End the thread that reads ahead."""
        self._rank.close()


class Loop:
    """A plain loop, its model compiled or as it is."""

    def __init__(self, work: Work, *, compiled: bool) -> None:
        self._work, self._count, self._model = work, 0, work.model(torch.bfloat16)
        self._run = torch.compile(self._model) if compiled else self._model
        self._parameters = [*self._model.parameters()]
        self._masters = [torch.nn.Parameter(p.detach().float()) for p in self._parameters]
        self._optimizer = torch.optim.AdamW(self._masters, lr=RATE, fused=True)

    def step(self) -> None:
        for _ in range(PASSES):
            tokens = self._work.micro_batch(self._count)
            self._count += 1
            logits = self._run(input_ids=tokens[:, :-1], use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
            (loss / PASSES).backward()
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self._masters, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(self._parameters, self._masters)
        loss.item()

    def close(self) -> None:
        """Nothing of it runs."""


BEST: dict[str, Any] = {
    "torch_compile": True,
    "optim": "adamw_torch_fused",
    "dataloader_pin_memory": True,
    "dataloader_num_workers": 2,
    "dataloader_persistent_workers": True,
    "logging_nan_inf_filter": False,
}
"""Options that make Trainer fast, beside `bf16`: the last one spares a wait for the device in each micro-batch."""


class Trainer:
    """transformers' Trainer in a thread that takes a step when it is asked to."""

    def __init__(self, work: Work, **settings: Any) -> None:
        self._ask, self._done, self._error = threading.Semaphore(0), threading.Semaphore(0), ""
        self._is_last = False
        turns = self

        class Callback(transformers.TrainerCallback):
            def on_step_begin(self, *arguments: Any, **options: Any) -> None:
                turns._ask.acquire()

            def on_step_end(self, arguments: Any, state: Any, control: Any, **options: Any) -> None:
                control.should_training_stop = turns._is_last
                turns._done.release()

        rows = [{"input_ids": row[:-1], "labels": row[:-1]} for row in torch.from_numpy(work.tokens)]
        precision = torch.backends.fp32_precision
        options = transformers.TrainingArguments(
            output_dir=str(work.folder / "out"),
            report_to=[],
            bf16=True,
            max_steps=100_000,
            save_strategy="no",
            per_device_train_batch_size=work.micro,
            gradient_accumulation_steps=PASSES,
            learning_rate=RATE,
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=work.device == "cpu",
            **settings,
        )
        # With `torch_compile` it allows TF32 to the whole process, for which the others would be compiled once more.
        # Its own products are in bfloat16.
        torch.backends.fp32_precision = precision
        trainer = transformers.Trainer(
            model=work.model(torch.float32), args=options, train_dataset=rows * 50, callbacks=[Callback()]
        )
        self._thread = threading.Thread(target=self._train, args=(trainer,), daemon=True)
        self._thread.start()

    def _train(self, trainer: Any) -> None:
        try:
            trainer.train()
        except Exception as error:  # noqa: BLE001  whatever it is, the other thread has to know
            self._error = str(error) or "ended"
            self._done.release()

    def step(self) -> None:
        self._ask.release()
        self._done.acquire()
        if self._error:
            raise SystemExit(f"Trainer failed: {self._error}")

    def close(self) -> None:
        """After one more step. Its memory is free then."""
        self._is_last = True
        self.step()
        self._thread.join()


MAKERS: dict[str, Callable[[Work], Any]] = {
    "ours": lambda work: Ours(work, compiled=False),
    "compiled ours": lambda work: Ours(work, compiled=True),
    "loop": lambda work: Loop(work, compiled=False),
    "compiled loop": lambda work: Loop(work, compiled=True),
    "Trainer": Trainer,
    "best Trainer": lambda work: Trainer(work, **BEST),
}
