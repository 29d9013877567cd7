"""Fine-tuning on one rank against the trainers people use: tokens per second and peak memory.

    python -m benchmarks finetune_speed [--rounds N] [--steps N] [--batch N] [--micro N] [--backends LIST]
        [--adapters LIST]

One Llama of 56 M parameters in float32 and rows of unlike lengths, prompts masked. The torch backend is compared with
transformers' Trainer and TRL's SFTTrainer, the MLX backend with mlx_lm's trainer. With `--adapters qlora` the base has
4 bits. On torch it is in MLX's format or in bitsandbytes' nf4, and the peer is transformers' Trainer on nf4; on MLX it
is mlx_lm's trainer on the same model. There is no bar for QLoRA. All contenders of a backend are alive at once and
train in turns, so that whatever else the machine does weighs on all. Prints a table and one JSON object; exits 1 if a
bar is missed.
"""

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from trainctl.protocol.config import run_file
from trainctl.trainer import demo_assets
from trainctl.trainer.data.dataset import open_dataset
from trainctl.trainer.data.permutation import samples_at
from trainctl.trainer.exports.quantize_model import quantize

PEERS = {"torch": ("trainer", "trl"), "mlx": ("mlx_lm",)}
QLORA_PEERS = {"torch": ("torch nf4", "trainer nf4"), "mlx": ("mlx_lm",)}
RATE_BAR, LOWER_RATE_BAR = 1.0, 0.97
"""Tokens per second over those of the best peer: the median of the rounds, and its lower 95 % bound."""
MEMORY_BAR = 1.02
"""Peak memory over that of the leanest peer, with one micro-batch a step."""
BYTES_PER_PARAMETER_BAR = 4
"""Bytes per trained parameter above the leanest peer, with more than one micro-batch a step."""
VOCABULARY, LENGTH = 8192, 256
SHAPE: dict[str, Any] = {"hidden": 768, "layers": 7, "heads": 12, "intermediate": 2048}
_LORA = {"kind": "lora", "rank": 16, "alpha": 32.0}
ADAPTERS: dict[str, dict[str, Any]] = {"full": {"kind": "full"}, "lora": _LORA, "qlora": _LORA}
PACKED = "model-mlx-4bit"
WORKER = Path(__file__).parent / "lib" / "finetune_worker.py"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=2, help="steps of each contender in a round")
    parser.add_argument("--batch", type=int, default=8, help="samples a step; fewer on a slow machine")
    parser.add_argument("--micro", type=int, help="samples a forward pass; all of a step by default")
    parser.add_argument("--backends", default="torch,mlx")
    parser.add_argument("--adapters", default="full,lora")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    options.micro = options.micro or options.batch
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parameters = make_model(folder / "model")
        make_rows(folder / "rows.jsonl", 3 * options.rounds * options.steps * options.batch)
        for backend in options.backends.split(","):
            for adapter in options.adapters.split(","):
                if adapter == "qlora" and not (folder / PACKED).exists():
                    quantize(str(folder / "model"), "mlx-4bit", None, folder / PACKED)
                results.append(measure(folder, backend, adapter, options))
                print(table(results[-1]), flush=True)
    print(json.dumps({"parameters": parameters, "results": results}))
    return 0 if all(row["passed"] for row in results) else 1


def make_model(folder: Path) -> int:
    """A Llama and a BPE tokenizer of the standard library's source text; returns the number of parameters."""
    made: Any = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    sources = [path.read_text("utf-8") for path in sorted(Path(os.__file__).parent.glob("*.py"))]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        sources,
        trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<pad>", "<eos>"], initial_alphabet=alphabet),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<pad>")
    config = demo_assets.llama_config(**SHAPE, vocabulary=VOCABULARY) | {
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    parameters = demo_assets.make_model(folder, config, seed=1)
    tokenizer.save_pretrained(folder)
    return parameters


def make_rows(path: Path, count: int) -> None:
    """Pieces of the standard library's source: a prompt of a few lines, and the 1 to 24 lines that follow it."""
    lines = [
        line
        for source in sorted(Path(os.__file__).parent.glob("*.py"))
        for line in source.read_text("utf-8").splitlines()
        if line.strip()
    ]
    chance = random.Random(1)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            start, length = chance.randrange(len(lines) - 32), chance.randrange(1, 25)
            prompt, completion = lines[start : start + 3], lines[start + 3 : start + 3 + length]
            file.write(json.dumps({"prompt": "\n".join(prompt) + "\n", "completion": "\n".join(completion)}) + "\n")


class Contender:
    """A worker process that trains when it is asked to. Its name is the trainer's and, if any, the base's."""

    def __init__(self, name: str, config: Path, threads: int) -> None:
        self.name, self.peak_bytes = name, 0
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER), name.split()[0], str(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        )

    def answer(self) -> float:
        """Seconds of what was last asked for. Raises SystemExit with the worker's error if it has ended."""
        assert self._process.stdout and self._process.stderr
        while line := self._process.stdout.readline():
            if line.startswith("{"):
                told = json.loads(line)
                self.peak_bytes = told["peak_bytes"]
                return float(told["seconds"])
        raise SystemExit(f"{self.name} failed: {self._process.stderr.read()[-2000:]}")

    def train(self, steps: int) -> float:
        """Seconds of so many steps."""
        assert self._process.stdin
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        return self.answer()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


@contextlib.contextmanager
def contenders(configs: dict[str, Path], threads: int) -> Iterator[list[Contender]]:
    """Yield the contenders of run files by name, each warmed up before the next is started."""
    alive: list[Contender] = []
    try:
        for name, config in configs.items():
            alive.append(Contender(name, config, threads))
            alive[-1].answer()
        yield alive
    finally:
        for contender in alive:
            contender.end()


def measure(folder: Path, backend: str, adapter: str, options: argparse.Namespace) -> dict[str, Any]:
    steps = 8 + options.rounds * options.steps
    config = {
        "run": {"name": "speed", "steps": steps},
        "model": {"path": str(folder / "model")},
        "data": {"path": str(folder / "rows.jsonl"), "kind": "rows", "sequence_length": LENGTH, "held_out": 0.0},
        "batch": {"global": options.batch, "micro": options.micro},
        "optimizer": {"learning_rate": 1e-4},
        "adapter": ADAPTERS[adapter],
        "nodes": {"here": {"backend": backend, "threads": options.threads}},
    }
    peers = (QLORA_PEERS if adapter == "qlora" else PEERS)[backend]
    configs = {name: run_file_of(folder, name, adapter, config) for name in (backend, *peers)}
    tokens = tokens_of_steps(configs[backend])
    seconds: dict[str, list[float]] = {}
    with contenders(configs, options.threads) as alive:
        for number in range(options.rounds):
            for contender in alive if number % 2 else alive[::-1]:
                seconds.setdefault(contender.name, []).append(contender.train(options.steps))
        peaks = {contender.name: contender.peak_bytes for contender in alive}
        trained = trained_parameters(folder, adapter)
    first = 2  # steps that warm up
    per_round = [int(tokens[first + at * options.steps :][: options.steps].sum()) for at in range(options.rounds)]
    rates = {
        name: [count / spent for count, spent in zip(per_round, values, strict=True)]
        for name, values in seconds.items()
    }
    return judged(backend, adapter, peers, rates, peaks, trained, one_micro_batch=options.micro == options.batch)


def run_file_of(folder: Path, name: str, adapter: str, config: dict[str, Any]) -> Path:
    """One contender's, with the base that its name says or that all of `adapter` have."""
    model = config["model"]
    if name.endswith(" nf4"):
        model = model | {"base": "nf4"}
    elif adapter == "qlora":
        model = model | {"path": str(folder / PACKED)}
    path = folder / f"{name.replace(' ', '-')}.toml"
    path.write_text(tomli_w.dumps(config | {"model": model}), "utf-8")
    return path


def judged(
    backend: str,
    adapter: str,
    peers: Sequence[str],
    rates: dict[str, list[float]],
    peaks: dict[str, int],
    trained: int,
    *,
    one_micro_batch: bool,
) -> dict[str, Any]:
    """Figures of one backend and adapter, and whether they meet the bars."""
    best = max(peers, key=lambda name: statistics.median(rates[name]))
    ratios = [one / other for one, other in zip(rates[backend], rates[best], strict=True)]
    chance = np.random.default_rng(1)
    medians = np.median(chance.choice(ratios, (10_000, len(ratios))), axis=1)
    leanest = min(peaks[name] for name in peers)
    more = (peaks[backend] - leanest) / trained
    memory_passed = peaks[backend] <= MEMORY_BAR * leanest if one_micro_batch else more <= BYTES_PER_PARAMETER_BAR
    ratio, lower = statistics.median(ratios), float(np.percentile(medians, 5))
    return {
        "backend": backend,
        "adapter": adapter,
        "tokens_per_second": {name: statistics.median(found) for name, found in rates.items()},
        "peak_bytes": peaks,
        "best_peer": best,
        "rate_ratio": ratio,
        "rate_ratio_lower": lower,
        "memory_ratio": peaks[backend] / leanest,
        "bytes_per_parameter_more": more,
        "trained_parameters": trained,
        "passed": adapter == "qlora" or (ratio >= RATE_BAR and lower >= LOWER_RATE_BAR and memory_passed),
    }


def tokens_of_steps(path: Path) -> Any:
    """Tokens processed in each step, without padding."""
    config = run_file.read(path)
    dataset = open_dataset(config, path.parent, str(path))
    chosen = samples_at(np.arange(config.run.steps * config.batch.global_), dataset.samples, config.run.seed)
    lengths = np.minimum(dataset.lengths[dataset.training][chosen] - 1, LENGTH)
    return lengths.reshape(-1, config.batch.global_).sum(axis=1)


def trained_parameters(folder: Path, adapter: str) -> int:
    """Trained scalars of the adapter, or of the whole model."""
    hidden, inner, rank = SHAPE["hidden"], SHAPE["intermediate"], ADAPTERS["lora"]["rank"]
    if adapter != "full":
        return int(SHAPE["layers"] * rank * (4 * (hidden + hidden) + 3 * (hidden + inner)))
    index = json.loads((folder / "model" / "config.json").read_text("utf-8"))
    whole = index["vocab_size"] * hidden + SHAPE["layers"] * (4 * hidden**2 + 3 * hidden * inner + 2 * hidden) + hidden
    return int(whole)


def table(row: dict[str, Any]) -> str:
    lines = [f"{row['backend']}, {row['adapter']}"]
    for name, rate in row["tokens_per_second"].items():
        lines.append(f"  {name:<12} {rate:>8,.0f} tok/s {row['peak_bytes'][name] / 1e6:>9,.0f} MB peak")
    lines.append(
        f"  over {row['best_peer']}: {row['rate_ratio']:.3f} (at least {row['rate_ratio_lower']:.3f}); memory"
        f" {row['memory_ratio']:.3f}, {row['bytes_per_parameter_more']:+.1f} bytes per trained parameter"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
