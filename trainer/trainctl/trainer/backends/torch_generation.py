"""Answers of a model on torch, by transformers' `generate`."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from trainctl.trainer.backends.base import Decoding


class _OnToken(StoppingCriteria):
    """Calls back after each token, and stops nothing. Unlike a streamer, it can be used with beams."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self._call()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def generate(
    model: Any, prompt: Sequence[int], how: Decoding, ends: Collection[int], on_token: Callable[[], None]
) -> list[int]:
    """The tokens that follow `prompt`, or that answer it if `model` has an encoder, by torch's own random numbers;
    `model` is in evaluation mode."""
    inputs = torch.tensor([[*prompt]], device=next(model.parameters()).device)
    library: Any = GenerationConfig
    config = library() if how.settings is None else library.from_model_config({**how.settings})
    config.update(
        max_new_tokens=how.max_tokens, max_length=None, do_sample=how.temperature > 0,
        temperature=how.temperature or None, top_p=how.top_p, top_k=config.top_k or 0,
        eos_token_id=sorted(ends) or None, pad_token_id=min(ends, default=0), decoder_start_token_id=how.decoder_start,
        num_return_sequences=1, return_dict_in_generate=False, output_attentions=False, output_hidden_states=False,
        output_scores=False, output_logits=False,
    )  # fmt: skip
    owner = getattr(model, "get_base_model", lambda: model)()
    own, owner.generation_config = owner.generation_config, library()  # which stands in for all that isn't set above
    try:
        made = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), generation_config=config,
            stopping_criteria=StoppingCriteriaList([_OnToken(on_token)]),
        )  # fmt: skip
    finally:
        owner.generation_config = own
    return [int(token) for token in made[0, 1 if model.config.is_encoder_decoder else len(prompt) :]]
