"""Answers of a model on torch, by transformers' `generate`."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from trainctl.trainer.backends.base import Decoding


class _OnToken:
    """A streamer of transformers: it is given the prompt, then each token."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def put(self, _: torch.Tensor) -> None:
        self._call()

    def end(self) -> None:
        """All tokens have come."""


def _decoder_start(model: Any) -> int | None:
    found = (getattr(how, "decoder_start_token_id", None) for how in (model.config, model.generation_config))
    return next((token for token in found if token is not None), None)


def generate(
    model: Any, prompt: Sequence[int], how: Decoding, ends: Collection[int], on_token: Callable[[], None]
) -> list[int]:
    """The tokens that follow `prompt`, or that answer it if `model` has an encoder, by torch's own random numbers;
    `model` is in evaluation mode."""
    from transformers import GenerationConfig

    inputs = torch.tensor([[*prompt]], device=next(model.parameters()).device)
    encodes = bool(model.config.is_encoder_decoder)
    start = {"decoder_start_token_id": _decoder_start(model)} if encodes else {}
    drawn = {"temperature": how.temperature, "top_p": how.top_p, "top_k": 0} if how.temperature else {}
    settings: Any = GenerationConfig
    config = settings(
        max_new_tokens=how.max_tokens, do_sample=bool(drawn), num_beams=1, repetition_penalty=1.0,
        eos_token_id=sorted(ends) or None, pad_token_id=min(ends, default=0), **drawn, **start,
    )  # fmt: skip
    made = model.generate(
        inputs, attention_mask=torch.ones_like(inputs), generation_config=config, streamer=_OnToken(on_token)
    )
    return [int(token) for token in made[0, 1 if encodes else len(prompt) :]]
