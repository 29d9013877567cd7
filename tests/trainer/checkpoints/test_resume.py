"""A run that continues from a checkpoint is the run without a break, to the bit: of each objective, adapter and data
type, on either backend, and on torch also on an NVIDIA GPU where there is one.

`make test-all` takes a few of the combinations, in which each choice is met, `make soak` all of them.
"""

import functools
import itertools
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.tiers import is_soak
from tests.trainer.support.chat_model import make_chat_model, questions, write_rows
from tests.trainer.support.curves import losses, worst
from tests.trainer.support.families import FAMILIES, learnable_samples, save
from tests.trainer.support.preferences import preferences
from tests.trainer.support.quantized_model import quantized_copy
from tests.trainer.support.savers import BREAK, MICRO, STEPS, saver_of
from tests.trainer.support.seq2seq_model import make_seq2seq_model, sentences

from trainctl.protocol.config.families import TESTED
from trainctl.protocol.config.quantization import FORMATS
from trainctl.protocol.record.paths import RunPaths
from trainctl.trainer.step.progress import LossScale

LORA: dict[str, Any] = {"kind": "lora", "rank": 4, "alpha": 16.0}
TRAINED: dict[str, dict[str, Any]] = {
    "pretrain": {"kind": "pretrain"}, "sft": {"kind": "sft"}, "orpo": {"kind": "orpo"}, "seq2seq": {"kind": "seq2seq"},
    "dpo": {"kind": "dpo"}, "dpo cached": {"kind": "dpo", "reference": "cached", "loss": "ipo"},
}  # fmt: skip
ADAPTERS: dict[str, dict[str, Any]] = {
    "full": {"adapter": {"kind": "full"}}, "lora": {"adapter": LORA}, "rslora": {"adapter": LORA | {"kind": "rslora"}},
    "dropout": {"adapter": LORA | {"dropout": 0.2}},
    "nf4": {"adapter": LORA, "model__base": "nf4", "model__double_quantization": True},
    **{form: {"adapter": LORA, "model__base": form} for form in FORMATS},
}  # fmt: skip
PRECISIONS = ("float32", "bfloat16", "float16")
OPTIMIZERS = ("adamw", "adamw-8bit", "paged-adamw", "paged-adamw-8bit")


class Case(NamedTuple):
    """One combination."""

    objective: str
    adapter: str
    precision: str
    optimizer: str
    backend: str

    @property
    def is_possible(self):
        is_torch, packed = self.backend == "torch", self.adapter in ("nf4", *FORMATS)
        return (
            is_torch or (self.adapter != "nf4" and self.objective != "seq2seq" and self.optimizer == "adamw")
        ) and not (self.objective == "seq2seq" and (packed or self.adapter == "dropout"))


AXES = (TRAINED, ADAPTERS, PRECISIONS, OPTIMIZERS, ("torch", "mlx"))
ALL = [case for case in itertools.starmap(Case, itertools.product(*AXES)) if case.is_possible]


def choices(case):
    return {*enumerate(case), (case.precision, case.backend)}


def some():
    """A few with each choice of an axis, and each data type on each backend; a seed says which. This one leaves out
    16-bit passes over quantized weights on MLX, which take a minute on a CPU."""
    chance, missing = random.Random(21), set().union(*map(choices, ALL))
    while missing:
        best = max(chance.sample(ALL, len(ALL)), key=lambda case: len(missing & choices(case)))
        missing -= choices(best)
        yield best


SOME = [*some()]


def marks(case, device):
    """Return its tier, and its need of a GPU: `make test` has one case of each backend."""
    mine = (one for one in SOME if one.backend == case.backend and (one.backend == "mlx" or "8bit" in one.optimizer))
    first = case == next(mine)
    tier = pytest.mark.tier("test" if first else "all" if case in SOME else "soak")
    return [tier] if device == "cpu" else [tier, pytest.mark.needs("cuda")]


NODES: dict[str, dict[str, Any]] = {"cpu": {}, "cuda": {"device": "cuda", "deterministic": True}}
"""Settings of the node's table, by device."""


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    """Models and data of all combinations."""
    folder = tmp_path_factory.mktemp("resumed")
    make_chat_model(folder / "chat", hidden=64)
    make_seq2seq_model(folder / "seq2seq")
    write_rows(folder / "rows.jsonl", questions(60))
    write_rows(folder / "pairs.jsonl", preferences(60))
    write_rows(folder / "sentences.jsonl", sentences(60))
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text(Path(random.__file__).read_text("utf-8")[:20_000], "utf-8")
    return folder


def model_of(case, inputs):
    if case.objective == "seq2seq":
        return inputs / "seq2seq"
    if case.adapter not in FORMATS:
        return inputs / "chat"
    there = inputs / f"chat-{case.adapter}-default"
    return there if there.exists() else quantized_copy(inputs / "chat", case.adapter)


def data_of(case, inputs):
    if case.objective == "pretrain":
        return {"path": str(inputs / "text"), "kind": "text", "sequence_length": 48}
    name = {"sft": "rows", "seq2seq": "sentences"}.get(case.objective, "pairs")
    return {"path": str(inputs / f"{name}.jsonl"), "kind": "rows", "sequence_length": 96, "overlong": "drop"}


def run_settings(case, inputs):
    optimizer = {"learning_rate": 2e-3, "weight_decay": 0.1, "kind": case.optimizer}
    return {
        "model__path": str(model_of(case, inputs)), "model__dtype": case.precision, "data": data_of(case, inputs),
        "objective": TRAINED[case.objective], "optimizer": optimizer, **ADAPTERS[case.adapter],
    }  # fmt: skip


def train(rig, steps):
    reports = [rig.train(step, MICRO) for step in steps]
    return [(report.loss_sum, report.skipped) for report in reports]


def parts(rig):
    """Everything that later steps depend on, as arrays by name."""
    state, scale = rig.backend.export_state(), rig.rank.loss_scale
    counts = {"updates": state.updates, "scale": scale.value, "good steps": scale.good_steps}
    return {"weights": state.weights, **state.slots, "random": state.random, "counts": counts}


@pytest.mark.parametrize(
    ("case", "device"),
    [
        pytest.param(case, device, id="-".join((*case, device)).replace(" ", "-"), marks=marks(case, device))
        for case in (ALL if is_soak() else SOME)
        for device in ("cpu", "cuda")
        if device == "cpu" or case.backend == "torch"
    ],
)
@pytest.mark.usefixtures("gpu_as_found")
def test_a_resumed_run_is_the_run_to_the_bit(new_rig, inputs, tmp_path, same_bits, case, device):
    settings = {"node": NODES[device], **run_settings(case, inputs)}
    check_resumes(functools.partial(new_rig, case.backend, **settings), RunPaths(tmp_path), same_bits, device)


def test_a_run_is_resumed_from_a_compressed_checkpoint(new_rig, tmp_path, same_bits):
    make = functools.partial(new_rig, "mlx", checkpoint__compression="zstd")
    written = check_resumes(make, RunPaths(tmp_path), same_bits)
    assert sorted(path.name for path in written.glob("optimizer.*")) == ["optimizer.safetensors.zst"]


def check_resumes(make, paths, same_bits, device="cpu"):
    """A second rig of `make` goes on from the first one's checkpoint, to the bit. Returns that checkpoint."""
    straight = make()
    assert straight.backend.device.name.partition(":")[0] == device
    train(straight, range(1, BREAK + 1))
    written, weights = Path(saver_of(straight, paths).write().path), straight.backend.copy_out("weights")
    expected = train(straight, range(BREAK + 1, STEPS + 1))
    assert None in {skipped for _, skipped in expected}
    assert not same_bits(straight.backend.copy_out("weights"), weights), "it has to learn for this to mean anything"
    whole = parts(straight)
    resumed = make()
    saver_of(resumed, paths).resume(written)
    assert train(resumed, range(BREAK + 1, STEPS + 1)) == expected
    for name, part in parts(resumed).items():
        assert same_bits(part, whole[name]), name
    return written


def test_float16_from_another_type_begins_with_a_loss_scale_of_its_own(new_rig, tmp_path):
    """Other types have a factor of one, with which gradients in float16 would vanish."""
    paths, precisions = RunPaths(tmp_path), ("float32", "float16", "bfloat16")
    folder, scales = None, list[float]()
    for precision in precisions:
        rig = new_rig("torch", model__dtype=precision)
        saver = saver_of(rig, paths)
        saver.resume(folder)
        scales.append(rig.rank.loss_scale.value)
        train(rig, range(rig.progress.last_step + 1, rig.progress.last_step + 2))
        folder = Path(saver.write().path)
    assert scales == [1.0, LossScale.of("float16").value, 1.0]


@pytest.mark.parametrize("adapter", [LORA, pytest.param({"kind": "full"}, marks=pytest.mark.tier("all"))])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "llama" else [pytest.mark.tier("soak")]) for name in FAMILIES]
)
def test_a_run_goes_from_torch_to_mlx_and_back(new_rig, tmp_path, name, adapter):
    write_rows(tmp_path / "samples.jsonl", learnable_samples())
    data = {"path": str(tmp_path / "samples.jsonl"), "kind": "samples", "sequence_length": 20, "tokenizer": "bytes"}
    settings = {"model__path": str(save(name, tmp_path / "model")), "data": data, "adapter": adapter}
    straight = losses(new_rig("torch", **settings), False, 3 * BREAK)
    moved, folder = list[float](), None
    for backend in ("torch", "mlx", "torch"):
        rig = new_rig(backend, **settings)
        saver = saver_of(rig, RunPaths(tmp_path))
        saver.resume(folder)
        reports = [rig.train(len(moved) + at, MICRO) for at in range(1, BREAK + 1)]
        moved += [report.loss_sum / report.weight for report in reports]
        folder = Path(saver.write().path)
    assert 1 - straight[-1] / straight[0] > 10 * TESTED[FAMILIES[name].kind].gradient, "it has to learn"
    assert 0 < worst(moved, straight) < TESTED[FAMILIES[name].kind].gradient
