"""docs/run.schema.json and those of cluster.toml and config.toml, made from the types of the files by
`python -m tools.pages`, so that editors complete and check what people write.

A field's description is the comment beside it in the source; a table's is its docstring.
"""

import sys
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from tools.protocol_docs import docs
from tools.protocol_docs.schema import DIALECT, REFERENCE, for_any_language
from trainctl.protocol.config.cluster_file import Cluster
from trainctl.protocol.config.run_tables import RunFile
from trainctl.tui.app.config import Settings

FILES: Final[dict[str, type[msgspec.Struct]]] = {"run": RunFile, "cluster": Cluster, "config": Settings}
"""The root of each file's tables."""


def schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema of a file."""
    root = FILES[name]
    _, types = msgspec.json.schema_components([root], ref_template=REFERENCE)
    kinds = [*_structs()]
    comments = docs.field_comments(*{sys.modules[kind.__module__] for kind in kinds})
    for kind in kinds:
        if kind.__name__ in types:
            _describe(types[kind.__name__], kind, comments)
    for_any_language(types)
    if "NodeEntry" in types:  # a node that is only simulated needs no address
        types["NodeEntry"]["anyOf"] = [
            {"required": [types["NodeEntry"].pop("required")[0]]},
            {"required": ["simulated"]},
        ]
    tables = types.pop(root.__name__) | {"title": f"{name}.toml"}
    return {"$schema": DIALECT, **tables, "$defs": types}


def page(name: str) -> str:
    """Return the schema as it stands in docs."""
    return msgspec.json.format(msgspec.json.encode(schema(name)), indent=1).decode() + "\n"


def _structs() -> Iterator[type[msgspec.Struct]]:
    """Yield every type of a table, also those that tables in lists have."""
    waiting: list[type[msgspec.Struct]] = [*FILES.values()]
    seen = set(waiting)
    while waiting:
        kind = waiting.pop()
        yield kind
        for field in msgspec.structs.fields(kind):
            for part in _parts(field.type):
                if part not in seen:
                    seen.add(part)
                    waiting.append(part)


def _parts(kind: Any) -> Iterator[type[msgspec.Struct]]:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
    for part in getattr(kind, "__args__", ()):
        yield from _parts(part)


def _describe(table: dict[str, Any], kind: type[msgspec.Struct], comments: docs.Comments) -> None:
    table["description"] = docs.purpose(kind)
    for field in msgspec.structs.fields(kind):
        shown = table["properties"][field.encode_name]
        texts = [comments.get(base.__name__, {}).get(field.name, "") for base in kind.__mro__]
        if meaning := next(filter(None, texts), ""):
            shown["description"] = docs.plain(meaning)
        if "$ref" in shown:
            shown.pop("default", None)  # the table says it of each of its fields
