"""LoRA on torch, by peft."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trainctl.protocol.errors import InvalidInputError, installing
from trainctl.trainer.adapters.lora import Lora, channel_keys, kept, threshold
from trainctl.trainer.common.errors import first_line

_NAME = "default"
"""peft's name for the only adapter of a model."""


def attach(model: torch.nn.Module, lora: Lora) -> torch.nn.Module:
    """Return the model with its weights frozen and adapters on the layers of `lora`. Raises InvalidInputError without
    peft."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise InvalidInputError("adapter.kind", f"{lora.table.kind!r} needs peft; {installing('torch')}") from None
    table = lora.table
    config = LoraConfig(
        r=table.rank,
        lora_alpha=table.alpha,  # type: ignore[arg-type]
        use_rslora=table.kind == "rslora",
        lora_dropout=0.0,
        target_modules=[*lora.layers],
    )
    try:
        with warnings.catch_warnings(), _without_family(model):
            warnings.simplefilter("ignore")
            adapted: torch.nn.Module = get_peft_model(model, config, adapter_name=_NAME)
    except ValueError as error:
        problem = f"peft can't attach adapters to all of these layers: {first_line(error)}; name others"
        raise InvalidInputError("adapter.targets", problem) from None
    names = {stored_name(name) for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    if wrong := sorted(names - lora.names):
        problem = (
            f"{wrong[0]!r} has another name in the model's files: save the model with transformers, and set "
            "model.path to that folder"
        )
        raise InvalidInputError("adapter.targets", problem)
    if missing := sorted(lora.names - names):
        problem = f"the files have {missing[0]!r}'s layer, but transformers has none of that name; leave it out"
        raise InvalidInputError("adapter.targets", problem)
    if table.dropout:
        for place, (layer, (_, width)) in enumerate(sorted(lora.layers.items())):
            drops: Any = adapted.get_submodule(f"base_model.model.{layer}").lora_dropout
            drops[_NAME] = _Dropout(lora, place, width)
    return adapted


@contextmanager
def _without_family(model: Any) -> Iterator[None]:
    """Keep peft from taking layers beside experts for theirs, as it does for names of its mixtures' old layouts."""
    model.config.model_type = ""  # of the instance, before the class's own
    try:
        yield
    finally:
        del model.config.model_type


class _Dropout(torch.nn.Module):
    """Drops inputs of one adapter while training."""

    def __init__(self, lora: Lora, place: int, width: int) -> None:
        super().__init__()
        self._tokens, self._rate = lora.token_keys, lora.table.dropout
        # A buffer moves with the model. If `forward` moved it, torch.compile couldn't compile a checkpointed layer.
        self.register_buffer("_channels", torch.from_numpy(channel_keys(place, width)), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self._tokens.value is None:
            return x
        stays = kept(self._tokens.value, self._channels, threshold(self._rate))
        return torch.where(stays, x * (1 / (1 - self._rate)), 0)


def stored_name(name: str) -> str:
    """Return a parameter's name as peft stores it; those of a model without adapters stay."""
    return name.replace(f".lora_A.{_NAME}.", ".lora_A.").replace(f".lora_B.{_NAME}.", ".lora_B.")
