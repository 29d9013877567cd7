"""The JSON Schemas of the TOML files take what trainctl takes, refuse what it refuses, and describe each field."""

import json
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from tests.protocol.support.run_files import good

from trainctl.protocol.config import validation_errors
from trainctl.protocol.config.cluster_file import Cluster
from trainctl.protocol.config.run_tables import RunFile
from trainctl.tui.app.config import Settings

ROOT = Path(__file__).parents[3]
SCHEMAS = {
    name: json.loads((ROOT / "docs" / f"{name}.schema.json").read_bytes()) for name in ("run", "cluster", "config")
}
VALIDATORS = {name: Draft202012Validator(schema) for name, schema in SCHEMAS.items()}
TABLES = {field.encode_name: field.type for field in msgspec.structs.fields(RunFile) if field.encode_name != "nodes"}
FIELDS = [
    (table, field.encode_name)
    for table, kind in TABLES.items()
    for field in msgspec.structs.fields(kind)
    if table != "policy"
]
VALUES = st.one_of(
    st.booleans(), st.integers(-2, 2**41), st.floats(-1.5, 200, width=16).filter(lambda value: not value.is_integer()),
    st.sampled_from(["", "auto", "off", "float32", "bf16", "cosine", "text", "lora", "nccl", "model", "UPPER"]),
    st.lists(st.sampled_from(["", "q_proj", 1]), max_size=2), st.just({}), st.just({"more": 1}),
)  # fmt: skip


def takes(name: str, value: Any) -> bool:
    return bool(VALIDATORS[name].is_valid(value))


@pytest.mark.parametrize("file", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.name)
def test_every_example_is_valid(file: Path) -> None:
    name = "cluster" if file.name == "cluster.toml" else "run"
    Draft202012Validator.check_schema(SCHEMAS[name])
    assert [error.message for error in VALIDATORS[name].iter_errors(tomllib.loads(file.read_text("utf-8")))] == []


@given(st.sampled_from(FIELDS), VALUES)
def test_a_run_file_is_taken_as_its_types_take_it(field: tuple[str, str], value: Any) -> None:
    table, name = field
    raw = good()
    raw[table] = {**raw.get(table, {}), name: value}
    assert takes("run", raw) == (not [*validation_errors.found(raw, RunFile)]), (table, name, value)


@given(st.sampled_from([*Settings.__struct_fields__, "colour"]), VALUES)
def test_settings_of_the_screen_are_taken_as_their_types_take_them(name: str, value: Any) -> None:
    assert takes("config", {name: value}) == (not [*validation_errors.found({name: value}, Settings)]), (name, value)


@pytest.mark.parametrize(
    ("entry", "is_valid"),
    [
        ({"address": "tcp://10.0.0.5:7474"}, True),
        ({"simulated": {"device": "a100"}}, True),
        ({}, False),
        ({"address": "tcp://10.0.0.5:7474", "key": "short"}, False),
        ({"address": "tcp://10.0.0.5:7474", "price": 2}, False),
    ],
)
def test_a_node_of_a_cluster_has_an_address_or_is_simulated(entry: dict[str, Any], is_valid: bool) -> None:
    assert takes("cluster", {"nodes": {"studio": entry}}) is is_valid
    if "address" in entry:
        assert (not [*validation_errors.found({"nodes": {"studio": entry}}, Cluster)]) is is_valid


def test_every_field_and_table_is_described() -> None:
    for name, schema in SCHEMAS.items():
        for table in (schema, *schema["$defs"].values()):
            assert table["description"], (name, table["title"])
            for field, shown in table["properties"].items():
                assert "description" in shown or "$ref" in shown, (name, table["title"], field)
