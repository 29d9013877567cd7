"""What an export is made of: one checkpoint of a run, its adapters, and the base model they belong to."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from trainctl.protocol.config import run_file
from trainctl.protocol.config.hub_models import model_folder
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.record.best import best_step
from trainctl.protocol.record.checkpoints import Manifest, digest_of, listed, verify
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.rollups import Evaluation
from trainctl.trainer.adapters.lora import Lora, read_lora
from trainctl.trainer.backends.backend import BackendName
from trainctl.trainer.checkpoints.files import ADAPTER, WEIGHTS, LoopState, is_base, read_loop
from trainctl.trainer.common.model_files import read_object
from trainctl.trainer.exports.result_files import copy_carried, copy_templates


@dataclass(frozen=True)
class TrainedModel:
    """One checkpoint, whose files are as they were written."""

    config: RunFile  # its model.path is `base`, where that was found
    checkpoint: Path
    loop: LoopState
    lora: Lora | None  # None: all weights were trained
    base: Path | None  # model that training began with; None: gone, which only adapters need
    backend: BackendName  # that wrote the checkpoint

    @property
    def model(self) -> Path:
        """The Hugging Face directory that has the model's configuration: the base of adapters, or the checkpoint."""
        return self.base if self.lora is not None and self.base is not None else self.checkpoint

    @property
    def weights(self) -> Path:
        """The file of the trained values, in float32."""
        return self.checkpoint / (WEIGHTS if self.lora is None else ADAPTER)


def open_trained(paths: RunPaths, step: int | None, best: bool, evaluations: Sequence[Evaluation]) -> TrainedModel:
    """The checkpoint of `step`, or that with the lowest held-out loss (`best`), or the newest. Raises InvalidInputError
    if there is none, its files were altered, or the base of its adapters isn't here any more."""
    folder = _checkpoint(paths, step, best, evaluations)
    loop = read_loop(folder)
    config = run_file.read(paths.run_file)
    base, lora = _base(config, loop, folder, str(paths.run_file))
    if base is not None:
        config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=str(base)))
    manifest = verify(folder, hashes=False)
    found = TrainedModel(config, folder, loop, lora, base, _backend(manifest, config))
    if digest_of(found.weights) != manifest.files[found.weights.name].sha256:
        raise InvalidInputError(str(found.weights), "altered: it does not match its SHA-256; use another --step")
    return found


def _backend(manifest: Manifest, config: RunFile) -> BackendName:
    """Before version 0.2.0, a manifest didn't say it; then the run file's nodes do, or torch is the likely one."""
    stated = manifest.metadata.environment.library if manifest.metadata is not None else ""
    by_nodes = {node.backend for node in config.nodes.values()}
    return "mlx" if stated.startswith("mlx") or (not stated and by_nodes == {"mlx"}) else "torch"


def copy_tokenizer(trained: TrainedModel, folder: Path) -> None:
    """The checkpoint's files of the tokenizer, and the base's further chat templates. Raises OSError."""
    copy_carried(trained.checkpoint, folder)
    if trained.base is not None:
        copy_templates(trained.base, folder)


def _checkpoint(paths: RunPaths, step: int | None, best: bool, evaluations: Sequence[Evaluation]) -> Path:
    complete = dict(_complete(paths.checkpoints))
    if not complete:
        raise InvalidInputError(
            str(paths.checkpoints), "no complete checkpoint on this machine: export on the node that wrote it"
        )
    known = ", ".join(map(str, complete))
    if best:
        step = best_step(complete, evaluations)
        if step is None:
            raise InvalidInputError(
                "--best",
                f"there is no best checkpoint: none was evaluated ({known}); choose one with --step N",
            )
    if step is not None and step not in complete:
        raise InvalidInputError("--step", f"no complete checkpoint of step {step}; there is one of {known}")
    return complete[step] if step is not None else next(iter(complete.values()))


def _complete(checkpoints: Path) -> Iterator[tuple[int, Path]]:
    """Step and folder of the checkpoints with all files, newest first."""
    for folder in listed(checkpoints):
        try:
            yield verify(folder, hashes=False).step, folder
        except InvalidInputError:
            continue


def _base(config: RunFile, loop: LoopState, checkpoint: Path, where: str) -> tuple[Path | None, Lora | None]:
    """The base that the adapters were trained on, which may be at another path here than on the node that wrote the
    checkpoint; and the adapters."""
    here = [path for path in _base_paths(config, checkpoint) if (path / "config.json").is_file()]
    if config.adapter.kind == "full":
        return next(iter(here), None), None
    for path in here:
        there = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=str(path)))
        lora = read_lora(there, where)
        if is_base(path, lora, loop.base_digest):
            return path, lora
    if here:
        raise InvalidInputError(str(here[0]), "not the model that the adapters were trained on: its files differ")
    raise InvalidInputError(config.model.path, "the base model of the adapters is gone: put it back there")


def _base_paths(config: RunFile, checkpoint: Path) -> list[Path]:
    """Where the base may be, likely places first."""
    stated: dict[str, Any] = {}
    if config.adapter.kind != "full":
        stated = read_object(checkpoint / "adapter_config.json", "adapter configuration")
    named = [(stated.get("base_model_name_or_path"), stated.get("revision")), (config.model.path, None)]
    named += [(node.model_path, None) for node in config.nodes.values()]
    return [*dict.fromkeys(model_folder(path, revision) for path, revision in named if path)]
