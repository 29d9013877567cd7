"""Weights in safetensors files, read and written by whichever array library is installed: numpy has no bfloat16."""

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainctl.protocol.config.model_facts import stored_tensors
from trainctl.protocol.config.quantization import Quantization
from trainctl.protocol.errors import InvalidInputError, installing
from trainctl.trainer.common.errors import first_line
from trainctl.trainer.exports.quantized import dequantized

_METADATA = {"format": "pt"}
"""Without it transformers refuses a file."""


class TensorFiles(ABC):
    """Files of one library's tensors; what is read is loaded as it is used."""

    @abstractmethod
    def read(self, path: Path) -> Mapping[str, Any]:
        """The tensors in a file by name. Raises InvalidInputError."""

    @abstractmethod
    def as_stored(self, tensors: Mapping[str, Any], model: Path) -> Mapping[str, Any]:
        """Return trained weights under the names and in the shapes that the files of their family have, for the
        configuration in the folder `model`. Raises InvalidInputError."""

    @abstractmethod
    def fused(self, tensor: Any, change: NDArray[np.float32]) -> Any:
        """`tensor` plus `change`, in float32."""

    @abstractmethod
    def unpacked(self, how: Quantization, parts: Mapping[str, Any]) -> Any:
        """The weight of a quantized layer in float32, from its `weight`, `scales` and `biases`."""

    @abstractmethod
    def cast(self, tensor: Any, dtype: str) -> Any:
        """To a float type by name; a tensor of integers stays."""

    @abstractmethod
    def write(self, path: Path, tensors: Mapping[str, Any]) -> int:
        """Write a file; returns the bytes of its tensors. Raises OSError."""


class TorchFiles(TensorFiles):
    """By torch."""

    def read(self, path: Path) -> Mapping[str, Any]:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            tensors: dict[str, Any] = load_file(path)
        except (OSError, SafetensorError) as error:
            raise InvalidInputError(str(path), f"not readable weights: {first_line(error)}") from None
        return tensors

    def as_stored(self, tensors: Mapping[str, Any], model: Path) -> Mapping[str, Any]:
        from trainctl.trainer.model.torch_model import as_stored

        return as_stored(tensors, model, "--to")

    def fused(self, tensor: Any, change: NDArray[np.float32]) -> Any:
        import torch

        return tensor.to(torch.float32) + torch.from_numpy(change)

    def unpacked(self, how: Quantization, parts: Mapping[str, Any]) -> Any:
        import torch

        from trainctl.trainer.model.torch_quantized import packed, unpack

        return unpack(packed(how, parts), torch.float32)

    def cast(self, tensor: Any, dtype: str) -> Any:
        import torch

        return tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor

    def write(self, path: Path, tensors: Mapping[str, Any]) -> int:
        from safetensors.torch import save_file

        save_file({name: _alone(tensor) for name, tensor in tensors.items()}, path, metadata=_METADATA)
        return sum(tensor.nbytes for tensor in tensors.values())


def _alone(tensor: Any) -> Any:
    """Return the tensor in memory of its own, which safetensors asks for: of stacked weights, each is a view."""
    tensor = tensor.contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


class MlxFiles(TensorFiles):
    """By MLX."""

    def read(self, path: Path) -> Mapping[str, Any]:
        import mlx.core as mx

        try:
            tensors: Any = mx.load(str(path))
        except (OSError, RuntimeError, ValueError) as error:
            raise InvalidInputError(str(path), f"not readable weights: {first_line(error)}") from None
        return dict(tensors)

    def as_stored(self, tensors: Mapping[str, Any], model: Path) -> Mapping[str, Any]:
        if stacked := sorted(name for name, tensor in tensors.items() if ".experts." in name and tensor.ndim > 2):
            problem = f"{stacked[0]!r} holds all experts of a layer, which only transformers can take apart"
            raise InvalidInputError("--to", f"{problem}; {installing('torch')}, or export where torch is installed")
        stored = stored_tensors(model)
        if stored and (renamed := sorted(tensors.keys() - stored.keys())):
            problem = f"{renamed[0]!r} isn't a weight's name in {model}, and only transformers knows what it is there"
            raise InvalidInputError("--to", f"{problem}; {installing('torch')}, or export where torch is installed")
        return tensors

    def fused(self, tensor: Any, change: NDArray[np.float32]) -> Any:
        import mlx.core as mx

        return tensor.astype(mx.float32) + mx.array(change)

    def unpacked(self, how: Quantization, parts: Mapping[str, Any]) -> Any:
        return dequantized(how, parts)

    def cast(self, tensor: Any, dtype: str) -> Any:
        import mlx.core as mx

        return tensor.astype(getattr(mx, dtype)) if mx.issubdtype(tensor.dtype, mx.floating) else tensor

    def write(self, path: Path, tensors: Mapping[str, Any]) -> int:
        import mlx.core as mx

        mx.save_safetensors(str(path), dict(tensors), metadata=_METADATA)
        return sum(tensor.nbytes for tensor in tensors.values())


LIBRARIES: tuple[tuple[str, type[TensorFiles]], ...] = (("torch", TorchFiles), ("mlx", MlxFiles))
"""Module, and what uses it; the first that is installed does."""


def tensor_files() -> TensorFiles:
    """By the library that is installed. Raises InvalidInputError without one."""
    for module, kind in LIBRARIES:
        if importlib.util.find_spec(module) is not None:
            return kind()
    raise InvalidInputError("--to", f"fused weights need torch or mlx; {installing('torch', 'mlx')}")
