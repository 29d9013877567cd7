"""Part of the build of trainctl: its dependencies, with trainctl-client of the same version first."""

from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class Dependencies(MetadataHookInterface):
    """`[tool.hatch.metadata.hooks.custom] dependencies` and the client."""

    def update(self, metadata: dict[str, Any]) -> None:
        metadata["dependencies"] = [f"trainctl-client=={metadata['version']}", *self.config["dependencies"]]
