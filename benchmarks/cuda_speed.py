"""Training in bfloat16 on an NVIDIA GPU: one rank's steps against a plain torch loop, the same compiled, and
transformers' Trainer.

    python benchmarks/cuda_speed.py [--sizes 0.1B,1B] [--rounds N] [--steps N]

Llamas of 0.1 and 1 billion parameters on random tokens, 2,048 per sample, two micro-batches a step. Ours is measured
with and without `compile = "default"`. Both loops keep float32 weights beside bfloat16 ones, clip, and update by
torch's fused AdamW; Trainer has `bf16 = True` and its other defaults. Contenders train in turns; of the larger model
one after another, as memory allows. `hosted` is a run under an agent, measured from its record. A copy for a checkpoint
is compared with a memcpy of the same arrays. Prints a line for each figure, then one JSON object; there is no bar.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import transformers

from trainctl.protocol import messages as m
from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.config import run_file
from trainctl.protocol.record.status_page import StatusWriter
from trainctl.trainer import demo_assets
from trainctl.trainer.backends.load import load
from trainctl.trainer.checkpoints.host_copy import HostCopy
from trainctl.trainer.data.dataset import open_dataset
from trainctl.trainer.step.executor import Executor, Identity, Settings
from trainctl.trainer.step.progress import Progress

LENGTH, VOCABULARY, RATE, PASSES, SAMPLES = 2048, 32_000, 1e-4, 2, 64
SIZES: dict[str, tuple[dict[str, Any], int]] = {
    "0.1B": ({"hidden": 768, "layers": 12, "heads": 12, "intermediate": 2048}, 8),
    "1B": ({"hidden": 2048, "layers": 16, "heads": 16, "intermediate": 8192}, 4),
}
"""Of each size: its shape, and the samples of a micro-batch."""
GENERATION = m.Generation(1, 1)


class Work:
    """The files of one size, and its batches."""

    def __init__(self, folder: Path, size: str) -> None:
        shape, self.micro = SIZES[size]
        self.folder, self.size, self.batch = folder, size, PASSES * self.micro
        config = transformers.LlamaConfig(**demo_assets.llama_config(**shape, vocabulary=VOCABULARY))
        torch.manual_seed(1)
        with torch.device("cuda"):
            model = transformers.LlamaForCausalLM(config)
        self.parameters = sum(p.numel() for p in model.parameters())
        model.save_pretrained(folder / "model")
        self.tokens = np.random.default_rng(0).integers(0, VOCABULARY, (SAMPLES, LENGTH + 1))
        lines = (json.dumps({"tokens": row.tolist()}) + "\n" for row in self.tokens)
        (folder / "samples.jsonl").write_text("".join(lines), "utf-8")

    def raw(self, compile_mode: str = "off") -> dict[str, Any]:
        """The run file."""
        return {
            "run": {"name": "speed", "steps": 100_000},
            "model": {"path": str(self.folder / "model"), "dtype": "bfloat16", "compile": compile_mode},
            "data": {
                "path": str(self.folder / "samples.jsonl"), "kind": "samples", "sequence_length": LENGTH,
                "held_out": 0.0,
            },
            "batch": {"global": self.batch, "micro": self.micro}, "optimizer": {"learning_rate": RATE},
            "checkpoint": {"at_end": False}, "calibration": {"at_start": "never"},
            "nodes": {"here": {"backend": "torch", "device": "cuda"}},
        }  # fmt: skip

    def model(self, dtype: torch.dtype) -> Any:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(self.folder / "model", dtype=dtype)
        return loaded.cuda().train()

    def micro_batch(self, number: int) -> torch.Tensor:
        rows = np.arange(number * self.micro, (number + 1) * self.micro) % SAMPLES
        return torch.from_numpy(self.tokens[rows]).to("cuda", non_blocking=True)


class Ours:
    """The executor, as a rank on its own runs it."""

    def __init__(self, work: Work, *, compiled: bool) -> None:
        config = run_file.parse(work.raw("default" if compiled else "off"))
        data, self.backend = open_dataset(config, work.folder, "speed"), load(config, config.nodes["here"], "speed")
        progress = Progress()
        progress.load(0, 0)
        progress.form(m.Form(run="speed", generation=GENERATION, engine="none", ranks=(0,)))
        self._work, self._count, self.values = work, 0, dict[str, float]()
        status = StatusWriter(work.folder / "status", os.getpid())
        self._executor = Executor(
            Identity("speed", "here", 0),
            Settings.of(config, "here"),
            self.backend,
            data,
            progress,
            status,
            lambda _: None,
        )

    def step(self) -> None:
        work, cursor = self._work, self._count * self._work.batch
        self._count += 1
        plan = m.StepPlan(
            run="speed", generation=GENERATION, seq=self._count, kind="train", step=self._count, plan_version=1,
            cursor=cursor, global_batch=work.batch, divisor=float(work.batch * LENGTH), learning_rate=RATE,
            work=(m.RankWork(0, (m.Range(cursor, work.batch),), work.micro),),
        )  # fmt: skip
        report = self._executor.train(plan, time.perf_counter())
        self.values = report.values | {
            f"{name}_seconds": seconds for name, seconds in msgspec.structs.asdict(report.phases).items()
        }


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


class Trainer:
    """transformers' Trainer in a thread that takes a step when it is asked to."""

    def __init__(self, work: Work) -> None:
        self._ask, self._done, self._error = threading.Semaphore(0), threading.Semaphore(0), [""]
        turns = self

        class Callback(transformers.TrainerCallback):
            def on_step_begin(self, *arguments: Any, **options: Any) -> None:
                turns._ask.acquire()

            def on_step_end(self, *arguments: Any, **options: Any) -> None:
                turns._done.release()

        rows = [{"input_ids": row[:LENGTH], "labels": row[:LENGTH]} for row in torch.from_numpy(work.tokens)]
        options = transformers.TrainingArguments(
            output_dir=str(work.folder / "out"), report_to=[], bf16=True, max_steps=100_000, save_strategy="no",
            per_device_train_batch_size=work.micro, gradient_accumulation_steps=PASSES, learning_rate=RATE,
            logging_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = transformers.Trainer(
            model=work.model(torch.float32), args=options, train_dataset=rows * 50, callbacks=[Callback()]
        )
        threading.Thread(target=self._train, args=(trainer,), daemon=True).start()

    def _train(self, trainer: Any) -> None:
        try:
            trainer.train()
        except Exception as error:  # noqa: BLE001  whatever it is, the other thread has to hear of it
            self._error[0] = str(error) or "ended"
            self._done.release()

    def step(self) -> None:
        self._ask.release()
        self._done.acquire()
        if self._error[0]:
            raise SystemExit(f"Trainer failed: {self._error[0]}")


MAKERS: dict[str, Callable[[Work], Any]] = {
    "ours": lambda work: Ours(work, compiled=False), "compiled ours": lambda work: Ours(work, compiled=True),
    "loop": lambda work: Loop(work, compiled=False),
    "compiled loop": lambda work: Loop(work, compiled=True), "Trainer": Trainer,
}  # fmt: skip


def seconds_of(contender: Any, steps: int) -> float:
    """Of one step."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(steps):
        contender.step()
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) / steps


def compare(work: Work, names: list[str], options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Tokens per second of some contenders in turns, with the peak while each of them warmed up."""
    alive, found, seconds = dict[str, Any](), dict[str, dict[str, float]](), dict[str, list[float]]()
    for name in names:
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        alive[name] = MAKERS[name](work)
        seconds_of(alive[name], 4)
        found[name] = {"peak_bytes_per_parameter": (torch.cuda.max_memory_allocated() - held) / work.parameters}
    for number in range(options.rounds):
        for name in names if number % 2 else names[::-1]:
            seconds.setdefault(name, []).append(seconds_of(alive[name], options.steps))
    for name in names:
        spent = statistics.median(seconds[name])
        found[name] |= {"seconds": spent, "tokens_per_second": work.batch * LENGTH / spent}
        found[name] |= {"least": min(seconds[name]), "most": max(seconds[name])}
        print(f"{work.size} {name}: {work.batch * LENGTH / spent:,.0f} tokens/s, {found[name]}", flush=True)
    for name in {"ours", "compiled ours"} & alive.keys():
        found[name] |= alive[name].values | checkpoint_copy(alive[name].backend)
        print(found[name], flush=True)
    alive.clear()
    gc.collect()
    torch.cuda.empty_cache()
    return found


def checkpoint_copy(backend: Any) -> dict[str, float]:
    """Seconds of the copy that the loop pays for, and of a memcpy of its arrays."""
    copy, spent, plain = HostCopy(backend), list[float](), list[float]()
    state = copy.take()
    arrays = [array for part in (state.weights, *state.slots.values()) for array in part.values()]
    into = [array.copy() for array in arrays]
    for _ in range(5):
        begun = time.perf_counter()
        copy.take()
        spent.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        for array, other in zip(arrays, into, strict=True):
            np.copyto(other, array)
        plain.append(time.perf_counter() - begun)
    return {"copy_seconds": statistics.median(spent), "memcpy_seconds": statistics.median(plain)}


def hosted(work: Work, steps: int) -> float:
    """Tokens per second of a run under an agent, from its record."""
    command = [sys.executable, "-m", "trainctl.node_agent.cli", "run", "--name", "here", "--listen"]
    command += ["tcp://127.0.0.1:0", "--state", str(work.folder / "state")]
    agent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None
    try:
        with BlockingClient(json.loads(agent.stdout.readline())["listen"]) as client:
            client.send("start-run", {"config": work.raw()}, timeout_seconds=120)
            while client.snapshot(0).run.step < steps + 6:  # type: ignore[union-attr]
                time.sleep(0.1)
            rows = client.steps(after_step=5, limit=steps + 1).steps
            client.send("stop", {"checkpoint": False})
            while client.snapshot(0).run.state in m.ACTIVE_RUN_STATES:  # type: ignore[union-attr]
                time.sleep(0.05)
    finally:
        agent.terminate()
        agent.wait(20)
    return steps * work.batch * LENGTH / (rows[-1].committed_at - rows[0].committed_at)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--sizes", default="0.1B,1B")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5, help="steps of each contender in a round")
    options = parser.parse_args()
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for size in options.sizes.split(","):
        with tempfile.TemporaryDirectory(prefix="cuda-speed-") as folder:
            work = Work(Path(folder), size)
            groups = [[*MAKERS]] if size == "0.1B" else [[name] for name in MAKERS]
            found: dict[str, Any] = {}
            for names in groups:
                found |= compare(work, names, options)
            found["hosted"] = {"tokens_per_second": hosted(work, 40 if size == "0.1B" else 15)}
            print(f"{size} hosted: {found['hosted']['tokens_per_second']:,.0f} tokens/s", flush=True)
            results[size] = found | {"parameters": work.parameters}
    print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
