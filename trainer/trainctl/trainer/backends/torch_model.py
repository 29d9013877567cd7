"""Models of transformers, from a Hugging Face directory."""

import logging
import os
from pathlib import Path
from typing import Any

import torch

from trainctl.protocol.errors import InvalidInputError
from trainctl.trainer.backends import library_dropout, rope_config, torch_masks
from trainctl.trainer.common.errors import first_line

log = logging.getLogger(__name__)


def read_model(
    path: Path, where: str, dtype: torch.dtype = torch.float32, *, with_weights: bool = True
) -> torch.nn.Module:
    """The language model in a Hugging Face directory, in `dtype`, its own dropout off; nothing is fetched and no code
    in it is run. Without weights, it has transformers' first values. Raises InvalidInputError if a weight is missing,
    of the wrong shape, or the files cannot be read."""
    config = rope_config.read(path)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers
    from safetensors import SafetensorError

    torch_masks.install()
    notices: Any = transformers.utils.logging
    notices.set_verbosity_error()
    notices.disable_progress_bar()
    try:
        stated, _ = transformers.PreTrainedConfig.get_config_dict(path, local_files_only=True)
        whole = transformers.AutoConfig.for_model(**stated | rope_config.changed(config, path))
        loader: Any = (
            transformers.AutoModelForSeq2SeqLM if whole.is_encoder_decoder else transformers.AutoModelForCausalLM
        )
        if rates := library_dropout.turn_off(whole):
            log.warning("the model's own dropout is off (%s); [adapter] dropout is available", ", ".join(rates))
        if not with_weights:
            new: torch.nn.Module = loader.from_config(whole, dtype=dtype)
            return new
        model, notes = loader.from_pretrained(
            path, config=whole, dtype=dtype, local_files_only=True, use_safetensors=True,
            output_loading_info=True,
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
        raise InvalidInputError(f"{where}: model.path", f"cannot load {path}: {first_line(error)}") from None
    if notes["missing_keys"]:
        raise InvalidInputError(f"{where}: model.path", f"{path} has no weight {sorted(notes['missing_keys'])[0]!r}")
    loaded: torch.nn.Module = model
    return loaded
