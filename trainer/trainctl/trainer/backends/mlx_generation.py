"""Answers of a model on MLX, by mlx-lm's `generate_step`."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import mlx.core as mx

from trainctl.trainer.backends.base import Decoding


def generate(
    model: Any, prompt: Sequence[int], how: Decoding, ends: Collection[int], on_token: Callable[[], None]
) -> list[int]:
    """The tokens that follow `prompt`, by MLX's own random numbers; `model` is in evaluation mode."""
    from mlx_lm.generate import generate_step
    from mlx_lm.sample_utils import make_sampler

    sampler = make_sampler(temp=how.temperature, top_p=how.top_p if how.top_p < 1 else 0.0)
    made: list[int] = []
    for token, _ in generate_step(
        mx.array([*prompt]), model, max_tokens=how.max_tokens, sampler=sampler,
        prompt_progress_callback=lambda done, whole: on_token(),
    ):  # fmt: skip
        made.append(int(token))
        on_token()
        if made[-1] in ends:
            break
    return made
