"""LoRA on MLX, by mlx-lm's layers, which hold the transposes of peft's matrices."""

from typing import Any, NamedTuple

from trainctl.trainer.adapters.lora import Lora, stored_name


class Place(NamedTuple):
    """Where an MLX model holds a parameter."""

    name: str
    transposed: bool


def attach(model: Any, lora: Lora) -> dict[str, Place]:
    """Freeze the model's weights and put adapters on the layers of `lora`. Returns the place of each adapter's matrix
    by peft's name."""
    from mlx.utils import tree_unflatten
    from mlx_lm.tuner.lora import LoRALinear

    model.freeze()
    linear = dict(model.named_modules())
    made: Any = LoRALinear
    layers = {
        layer: made.from_base(linear[layer], r=lora.table.rank, dropout=0.0, scale=lora.scale) for layer in lora.layers
    }
    model.update_modules(tree_unflatten([*layers.items()]))
    places: dict[str, Place] = {}
    for layer in lora.layers:
        places[stored_name(layer, "A")] = Place(f"{layer}.lora_a", transposed=True)
        places[stored_name(layer, "B")] = Place(f"{layer}.lora_b", transposed=True)
    return places
