"""The files of a model's weights, in folders as other programs leave them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from trainctl.protocol.config.model_facts import context_limit, has_own_head, stored_tensors, weight_files
from trainctl.protocol.errors import InvalidInputError

ONE = np.arange(6, dtype=np.float32).reshape(2, 3)


def save(folder: Path, file: str, **tensors: np.ndarray) -> None:
    save_file({name.replace("__", "."): array for name, array in tensors.items()}, folder / file)


def index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_the_index_names_the_weights_and_what_else_lies_there_is_not_read(tmp_path: Path) -> None:
    save(tmp_path, "model-00001-of-00002.safetensors", a=ONE)
    save(tmp_path, "model-00002-of-00002.safetensors", b=ONE)
    save(tmp_path, "model-00001-of-00004.safetensors", a=ONE[:1])
    save(tmp_path, "consolidated.safetensors", a=ONE)
    assert weight_files(tmp_path) == []
    index(tmp_path, {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"})
    assert {name: tensor.shape for name, tensor in stored_tensors(tmp_path).items()} == {"a": (2, 3), "b": (2, 3)}


def test_a_single_file_is_read_without_an_index(tmp_path: Path) -> None:
    save(tmp_path, "model.safetensors", a=ONE)
    save(tmp_path, "adapter_model.safetensors", b=ONE)
    assert [*stored_tensors(tmp_path)] == ["a"]


@pytest.mark.parametrize(
    ("weight_map", "says"),
    [
        ({"a": "../other/model.safetensors"}, "not the name of a file beside it"),
        ({"a": "model-3.safetensors"}, "which is missing"),
        ({"a": "model-1.safetensors", "b": "model-2.safetensors"}, "is in both"),
        ({}, "has no weight_map"),
        ({"a": 1}, "has no weight_map"),
    ],
)
def test_an_index_that_misleads_is_refused(weight_map: dict[str, Any], says: str, tmp_path: Path) -> None:
    for number in (1, 2):
        save(tmp_path, f"model-{number}.safetensors", a=ONE)
    index(tmp_path, weight_map)
    with pytest.raises(InvalidInputError, match=says):
        stored_tensors(tmp_path)


def test_two_sets_of_weights_that_libraries_read_differently_are_refused(tmp_path: Path) -> None:
    save(tmp_path, "model.safetensors", a=ONE)
    save(tmp_path, "model-1.safetensors", a=ONE)
    index(tmp_path, {"a": "model-1.safetensors"})
    with pytest.raises(InvalidInputError, match="remove those that aren't the model"):
        weight_files(tmp_path)


@pytest.mark.parametrize(("head", "is_own"), [(ONE, False), (ONE + 1, True), (ONE.astype(np.float16), True)])
def test_a_head_that_equals_the_embeddings_is_no_head_of_its_own(
    head: np.ndarray, is_own: bool, tmp_path: Path
) -> None:
    save(tmp_path, "model.safetensors", model__embed_tokens__weight=ONE, lm_head__weight=head)
    assert has_own_head(stored_tensors(tmp_path)) == is_own


@pytest.mark.parametrize(
    ("config", "shapes", "limit"),
    [
        ({"max_position_embeddings": 64, "n_positions": 32}, {}, 32),
        ({"text_config": {"max_position_embeddings": 16}}, {}, 16),
        ({"max_position_embeddings": 64}, {"transformer.wpe.weight": (48, 8)}, 48),
        ({"model_type": "mpt", "max_seq_len": 32}, {}, 32),
        ({"model_type": "kimi_linear", "model_max_length": 32}, {}, 32),
        ({"n_positions": 512, "relative_attention_num_buckets": 32}, {}, None),
        ({}, {}, None),
    ],
)
def test_context_limits(config: dict[str, Any], shapes: dict[str, tuple[int, ...]], limit: int | None) -> None:
    assert context_limit(config, shapes) == limit
