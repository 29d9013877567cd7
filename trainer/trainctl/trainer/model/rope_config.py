"""A model configuration whose rotary position embeddings (RoPE) every library reads alike.

There are two layouts. transformers 5 writes `rope_parameters`: `rope_type`, `rope_theta`, `partial_rotary_factor` and
what the type's scaling needs, or one such table per layer type. transformers 4 wrote `rope_theta`,
`partial_rotary_factor` and `rope_scaling` at the top level; mlx-lm reads mostly these, and where they are missing it
silently takes its own defaults. A configuration with both layouts gives the same model everywhere.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainctl.protocol.config.model_facts import has_own_head, stored_tensors
from trainctl.protocol.errors import InvalidInputError
from trainctl.trainer.common.model_files import model_config

Config = dict[str, Any]

_TOP_LEVEL = {"rope_theta": "rope_theta", "partial_rotary_factor": "partial_rotary_factor"}
_GPT_NEOX = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
_NEED_ORIGINAL_LENGTH = ("llama3", "yarn", "longrope")
# Families that have had both layouts and a table per layer type, with the old name of the local layers' theta.
_LOCAL_THETA = {"gemma3_text": "rope_local_base_freq", "gemma3n_text": "rope_local_base_freq", "olmo3": "rope_theta"}


def read(model: Path) -> Config:
    """Return config.json of a model directory with both layouts; a theta that it does not state is transformers'
    default. Raises InvalidInputError naming the file if it cannot be read, or if its two layouts contradict each
    other."""
    config = model_config(model)
    config |= _full_attention_heads(config) | _own_head(config, model)
    if (
        config.get("model_type") == "qwen3_moe" and "num_local_experts" in config
    ):  # as transformers 4 and mlx-lm name it
        config.setdefault("num_experts", config["num_local_experts"])
    return both_layouts(config, str(model / "config.json"), _transformers_rope)


def both_layouts(config: Config, where: str, default: Callable[[Config], Config] = lambda config: {}) -> Config:
    """Return `config` with RoPE in both layouts, that of its `text_config` too; unchanged if it has no RoPE. `default`
    gives the `rope_parameters` of a configuration that states no theta; {} if they are unknown. Raises
    InvalidInputError naming `where` if the layouts contradict each other."""
    if isinstance(config.get("text_config"), dict):
        config = config | {"text_config": both_layouts(config["text_config"], where, default)}
    new = _table(config, "rope_parameters", where)
    old = {key: config.get(name) for key, name in _top_level(config).items()} | _table(config, "rope_scaling", where)
    if config.get("model_type") in _LOCAL_THETA:
        local = config.get(_LOCAL_THETA[config["model_type"]])
        tables = {
            "full_attention": _merged(_table(new, "full_attention", where), old, where),
            "sliding_attention": _merged(_table(new, "sliding_attention", where), {"rope_theta": local}, where),
        }
        if any("rope_theta" not in table for table in tables.values()):
            defaults = default(config)
            tables = {name: _table(defaults, name, where) | table for name, table in tables.items()}
        return config | _per_layer_type(config, tables)
    if any(isinstance(value, dict) for value in new.values()):
        return config  # a family younger than the old layout: mlx-lm reads rope_parameters
    table = _merged(new, old, where)
    return config | _flat(config, table if "rope_theta" in table else default(config) | table)


def mlx_reads(model: Path) -> bool:
    """Return whether config.json of `model` states its rotary embeddings where mlx-lm looks for them, in most families
    the old layout, which transformers 5 doesn't write; else mlx-lm takes its own defaults. Raises as `read`."""
    stated, whole = model_config(model), read(model)
    pairs = ((stated, whole), (stated.get("text_config", {}), whole.get("text_config", {})))
    return all(_old_keys(own) == _old_keys(other) for own, other in pairs)


def _old_keys(config: Config) -> Config:
    """Return what the configuration states but `rope_parameters`, the keys of the old layout in one form."""
    rest = {key: value for key, value in config.items() if key not in ("rope_parameters", "text_config")}
    scaling = _table(config, "rope_scaling", "")
    return {key: value for key, value in (rest | {"rope_scaling": scaling}).items() if value is not None}


def for_mlx(config: Config, longest: int) -> Config:
    """Return what mlx-lm is to read of `config`, which has both layouts, to train on sequences of up to `longest`
    tokens.

    Of `longrope` mlx-lm knows `long_factor` alone; transformers uses `short_factor` up to the original length."""
    scaling = config.get("rope_scaling") or {}
    original = config.get("original_max_position_embeddings", scaling.get("original_max_position_embeddings"))
    if (
        scaling.get("rope_type") != "longrope"
        or original is None
        or longest > original
        or "short_factor" not in scaling
    ):
        return config
    return config | {"rope_scaling": scaling | {"long_factor": scaling["short_factor"]}}


def _own_head(config: Config, model: Path) -> Config:
    """Return the statement of a model whose files hold a head of its own, and whose configuration says that it is tied
    to the embeddings or says nothing: transformers loads the head, other libraries would drop it."""
    if not config.get("tie_word_embeddings", True) or not has_own_head(stored_tensors(model)):
        return {}
    text = config.get("text_config")
    nested = {"text_config": text | {"tie_word_embeddings": False}} if isinstance(text, dict) else {}
    return {"tie_word_embeddings": False, **nested}


def _full_attention_heads(config: Config) -> Config:
    """Return the heads of Gemma 4's layers with full attention, as mlx-lm reads them; transformers writes what each
    layer has of its own."""
    types, layers = config.get("layer_types") or (), config.get("per_layer_config")
    if config.get("model_type") != "gemma4_text" or not isinstance(layers, dict) or "full_attention" not in types:
        return {}
    at = types.index("full_attention")
    own: Config = next((values for layer, values in layers.items() if int(layer) == at), {})
    heads = {
        "global_head_dim": own.get("head_dim", config.get("head_dim")),
        "num_global_key_value_heads": own.get("num_key_value_heads"),
    }
    return {key: value for key, value in heads.items() if value is not None}


def _flat(config: Config, table: Config) -> Config:
    """Return the keys of both layouts for one table."""
    if "rope_theta" not in table:
        return {}
    table = {"rope_type": "default", **table}
    original = config.get("original_max_position_embeddings", config.get("max_position_embeddings"))
    if table["rope_type"] in _NEED_ORIGINAL_LENGTH and original is not None:
        table.setdefault("original_max_position_embeddings", original)
    top = {old: table[key] for key, old in _top_level(config).items() if key in table}
    return {"rope_parameters": table, "rope_scaling": _scaling(table), **top}


def _per_layer_type(config: Config, tables: dict[str, Config]) -> Config:
    """Return the keys of both layouts for a table per layer type; mlx-lm scales the full attention alone."""
    if any("rope_theta" not in table for table in tables.values()):
        return {}
    tables = {name: {"rope_type": "default", **table} for name, table in tables.items()}
    full, local = tables["full_attention"], tables["sliding_attention"]
    old = {_LOCAL_THETA[config["model_type"]]: local["rope_theta"], "rope_theta": full["rope_theta"]}
    types = config.get("layer_types") or ()
    if "full_attention" in types:  # mlx-lm knows the layers by their period
        old["sliding_window_pattern"] = types.index("full_attention") + 1
    return {"rope_parameters": tables, "rope_scaling": _scaling(full), **old}


def _scaling(table: Config) -> Config | None:
    """Return `rope_scaling` of a table. mlx-lm looks for the type under `type`, and wants the key even if it is
    null."""
    scaling = {key: value for key, value in table.items() if key not in _TOP_LEVEL}
    if scaling == {"rope_type": "default"}:
        return None
    return {"type": scaling["rope_type"], **scaling}


def _top_level(config: Config) -> dict[str, str]:
    """Return the old names of what the old layout has beside `rope_scaling`."""
    return _GPT_NEOX if config.get("model_type") == "gpt_neox" else _TOP_LEVEL


def _table(config: Config, key: str, where: str) -> Config:
    """Return the table under `key`, its type as `rope_type` and by today's name; {} if there is none."""
    table = config.get(key) or {}
    if not isinstance(table, dict):
        raise InvalidInputError(where, f"{key} is {str(table)[:80]!r}, not a table")
    kind = table.get("rope_type") or table.get("type")
    rest = {name: value for name, value in table.items() if name not in ("type", "rope_type")}
    return rest | ({"rope_type": "longrope" if kind == "su" else kind} if kind else {})


def _merged(new: Config, old: Config, where: str) -> Config:
    """Return what either table states. Raises InvalidInputError if both state something and it differs."""
    new, old = ({key: value for key, value in table.items() if value is not None} for table in (new, old))
    for key in sorted(new.keys() & old.keys()):
        if new[key] != old[key]:
            raise InvalidInputError(
                where,
                f"rope_parameters has {key} = {new[key]}, but the older keys have {old[key]}; "
                "keep the value that the model was trained with and remove the other",
            )
    return old | new


def _transformers_rope(config: Config) -> Config:
    """Return `rope_parameters` as transformers completes them; {} if it does not know the model, or the model has no
    RoPE."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    try:
        read = CONFIG_MAPPING[config["model_type"]].from_dict(copy.deepcopy(config))
    except (KeyError, ValueError, TypeError, AttributeError, StrictDataclassError):
        return {}
    return getattr(read, "rope_parameters", None) or {}
