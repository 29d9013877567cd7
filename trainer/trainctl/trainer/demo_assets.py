"""`python -m trainctl.trainer.demo_assets FOLDER`: a small Llama and real text, made from what every machine has.

FOLDER/model is a Hugging Face directory (about 0.8 M parameters, for byte tokens), the same bits everywhere;
FOLDER/data holds the Python standard library's source text, one file per top-level module or package; with
`--objective sft`, FOLDER/rows holds the library's functions and what their docstrings say; with `--objective dpo`,
FOLDER/pairs holds its functions as they are written, preferred to the same with a line broken; with
`--objective qlora`, FOLDER/quantized is a model of 4 bits, and there are rows. Each appears under its name only when
whole, and is left alone when it is there. One JSON line says what there is.
"""

import argparse
import ast
import json
import sys
import sysconfig
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from trainctl.protocol.errors import TrainctlError
from trainctl.trainer.common.atomic_folder import make_folder
from trainctl.trainer.common.errors import first_line
from trainctl.trainer.data.permutation import uniform
from trainctl.trainer.data.tokenizer_file import BYTES_BEGIN, BYTES_END, BYTES_PAD
from trainctl.trainer.model.rope_config import both_layouts

_SEED = 0x7472616E  # "tran"
_SPREAD = 0.02
_BOUND = _SPREAD * 3**0.5
"""Bound of a uniform distribution whose standard deviation is `_SPREAD`."""
_MAX_PAIR_CHARACTERS = 180
"""Characters of a function in a pair: most are then no longer than the demo's samples."""
_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3", "ensurepip"}


def llama_config(
    *,
    hidden: int = 128,
    layers: int = 4,
    heads: int = 4,
    intermediate: int = 344,
    vocabulary: int = 264,
    tied: bool = True,
) -> dict[str, Any]:
    """Return config.json of a Llama for byte tokens; the defaults give 0.83 M parameters."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": hidden // heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": tied,
        "bos_token_id": BYTES_BEGIN,
        "eos_token_id": BYTES_END,
        "pad_token_id": BYTES_PAD,
        "initializer_range": _SPREAD,
        "dtype": "float32",
    }


def llama_weights(config: dict[str, Any], seed: int = _SEED) -> dict[str, NDArray[np.float32]]:
    """Return weights under Hugging Face names: matrices uniform with standard deviation 0.02, norms one.

    Each matrix is drawn from `mix` over a counter keyed by its place, so the bits depend on no library's generator.
    """
    weights: dict[str, NDArray[np.float32]] = {}
    for place, (name, shape) in enumerate(sorted(_shapes(config).items())):
        matrix = len(shape) > 1
        weights[name] = uniform(shape, (seed << 16) + place, _BOUND) if matrix else np.ones(shape, np.float32)
    return weights


def make_model(folder: Path, config: dict[str, Any] | None = None, seed: int = _SEED) -> int:
    """Make a Hugging Face directory at `folder`, if it isn't there yet; return its number of parameters."""
    config = config or llama_config()
    written = both_layouts(config, str(folder))

    def write(work: Path) -> None:
        from safetensors.numpy import save_file

        (work / "config.json").write_text(json.dumps(written, indent=2), encoding="utf-8")
        save_file(llama_weights(config, seed), work / "model.safetensors", metadata={"format": "pt"})

    make_folder(folder, write)
    return sum(int(np.prod(shape)) for shape in _shapes(config).values())


def make_text(folder: Path) -> int:
    """Make the standard library's source text at `folder`, if it isn't there yet; return its bytes."""

    def write(work: Path) -> None:
        for name, sources in sorted(_standard_library().items()):
            (work / f"{name}.txt").write_bytes(b"".join(source.read_bytes() for source in sorted(sources)))

    make_folder(folder, write)
    return sum(path.stat().st_size for path in folder.glob("*.txt"))


def make_functions(folder: Path, rows_of: Callable[[Path], Iterator[dict[str, str]]]) -> int:
    """Make a file of JSON lines at `folder`, if it isn't there yet, of the rows of each source file of the standard
    library; return their number."""

    def write(work: Path) -> None:
        with (work / "functions.jsonl").open("w", encoding="utf-8") as file:
            for sources in _standard_library().values():
                for source in sorted(sources):
                    file.writelines(json.dumps(row) + "\n" for row in rows_of(source))

    make_folder(folder, write)
    with (folder / "functions.jsonl").open("rb") as lines:
        return sum(1 for _ in lines)


def preferences(source: Path) -> Iterator[dict[str, str]]:
    """Yield the head of each short function of a source file, its body, and the same body with a line written
    backwards."""
    for node in ast.walk(ast.parse(source.read_bytes())):
        if isinstance(node, ast.FunctionDef) and len(node.body) > 1:
            head, *lines = ast.unparse(node).splitlines()[len(node.decorator_list) :]
            body = "\n".join(lines)
            if len(head) + len(body) <= _MAX_PAIR_CHARACTERS and (broken := _broken(lines)) != lines:
                yield {"prompt": f"{head}\n", "chosen": body, "rejected": "\n".join(broken)}


def _broken(lines: list[str]) -> list[str]:
    """Return the lines with one of them backwards behind its indentation; which one follows from the text."""
    at = zlib.crc32("\n".join(lines).encode("utf-8", "surrogatepass")) % len(lines)
    text = lines[at].lstrip()
    indent = lines[at][: len(lines[at]) - len(text)]
    return [*lines[:at], indent + text[::-1], *lines[at + 1 :]]


def documented(source: Path) -> Iterator[dict[str, str]]:
    """Yield the head of each function of a source file that has a docstring, and the docstring's first line."""
    for node in ast.walk(ast.parse(source.read_bytes())):
        if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
            head = f"def {node.name}({ast.unparse(node.args)}):\n"
            yield {"prompt": head, "completion": text.splitlines()[0]}


def make_quantized(folder: Path) -> int:
    """Make a model of 4 bits, if it isn't there yet; return its bytes. Its feed-forward layers are wider than the other
    model's, for the group size to divide them. Raises InvalidInputError without mlx-lm."""
    from trainctl.trainer.exports.quantize_model import quantize  # loads MLX

    whole = folder.with_name("whole")
    if not folder.is_dir():
        make_model(whole, llama_config(intermediate=384))
        quantize(str(whole), "mlx-4bit", None, folder)
    return sum(path.stat().st_size for path in folder.iterdir())


_OF_OBJECTIVE: Final[dict[str, dict[str, Callable[[Path], int]]]] = {
    "pretrain": {},
    "sft": {"rows": partial(make_functions, rows_of=documented)},
    "dpo": {"pairs": partial(make_functions, rows_of=preferences)},
    "qlora": {"rows": partial(make_functions, rows_of=documented), "quantized": make_quantized},
}
"""The folders that an objective needs beside model and text, and what makes them."""


def main() -> int:
    """Make them; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m trainctl.trainer.demo_assets", description="Create the demo's model and text."
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--objective", choices=_OF_OBJECTIVE, default="pretrain")
    arguments = parser.parse_args()
    folder: Path = arguments.folder.absolute()
    try:
        parameters = make_model(folder / "model")
        size = make_text(folder / "data")
        own = {name: make(folder / name) for name, make in _OF_OBJECTIVE[arguments.objective].items()}
    except (OSError, TrainctlError) as error:
        print(f"demo assets: {first_line(error)}", file=sys.stderr)
        return 1
    shared = {"model": str(folder / "model"), "data": str(folder / "data"), "parameters": parameters, "bytes": size}
    print(json.dumps(shared | own))
    return 0


def _standard_library() -> dict[str, list[Path]]:
    """Return source files by top-level module or package."""
    root = Path(sysconfig.get_paths()["stdlib"])
    modules: dict[str, list[Path]] = defaultdict(list)
    for path in _sources(root):
        modules[path.relative_to(root).parts[0].removesuffix(".py")].append(path)
    if not modules:
        raise TrainctlError(f"no Python source text in {root}")
    return modules


def _sources(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name not in _LEFT_OUT and not path.is_symlink():
            yield from _sources(path)
        elif path.suffix == ".py":
            yield path


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    queries = config["num_attention_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }
    for number in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{number}.{part}.weight": shape for part, shape in layer.items()}
    return shapes


if __name__ == "__main__":
    sys.exit(main())
