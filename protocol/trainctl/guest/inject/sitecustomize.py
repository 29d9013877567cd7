"""Start of each Python below `trainctl exec`: waits for training libraries, and runs the user's own sitecustomize.

`trainctl exec` puts this folder on PYTHONPATH, for the command's processes only. The folder above is the package
`trainctl.guest`, which is found here without being on any path, and is loaded once a library needs it.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

ADAPTERS = {
    "torch.optim.optimizer": "torch_loop",
    "transformers.trainer": "hf",
    "accelerate.tracking": "accelerate",
    "mlx_lm.lora": "mlx_lm",
    "torch.utils.tensorboard.writer": "scalars",
    "tensorboardX.writer": "scalars",
    "trackio.run": "scalars",
    "wandb.sdk.wandb_run": "scalars",
}
"""Modules that are waited for, and the module of `trainctl.guest` whose `enter` gets each once it is loaded."""
PACKAGE = "trainctl.guest"
_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120  pathlib takes longer to load than the rest


class Watch:
    """A finder that finds nothing but our package, and has adapters enter the modules that they wait for."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == PACKAGE:
            return _package()
        if name not in ADAPTERS and name != "trainctl":
            return None
        others = (each.find_spec(name, path, target) for each in sys.meta_path if each is not self)
        spec = next((each for each in others if each is not None), None)
        if name == "trainctl":
            return spec or ModuleSpec(name, None, is_package=True)  # an environment that has nothing of ours
        if spec is not None and hasattr(spec.loader, "exec_module"):
            _enter_after(spec.loader, ADAPTERS[name])
        return spec


def _package() -> ModuleSpec | None:
    from importlib.util import spec_from_file_location

    folder = os.path.dirname(_HERE)  # noqa: PTH120
    return spec_from_file_location(
        PACKAGE,
        os.path.join(folder, "__init__.py"),  # noqa: PTH118
        submodule_search_locations=[folder],
    )


def _enter_after(loader: Any, adapter: str) -> None:
    load = loader.exec_module

    def load_and_enter(module: ModuleType) -> None:
        del loader.exec_module  # some loaders load several modules
        load(module)
        try:
            importlib.import_module(f"{PACKAGE}.{adapter}").enter(module)
        except Exception as error:  # noqa: BLE001  whatever is wrong with us, the program runs as without us
            print(f"trainctl: {module.__name__} can't be watched: {error!r}", file=sys.stderr)

    loader.exec_module = load_and_enter


def _run_own() -> None:
    """Run the sitecustomize that Python would have run; its errors are Python's to report, as always."""
    sys.path[:] = [each for each in sys.path if os.path.abspath(each) != _HERE]  # noqa: PTH100
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    sys.path.append(_HERE)  # Lightning finds our entry point there
    if spec is not None and spec.loader is not None:
        from importlib.util import module_from_spec

        own = sys.modules["sitecustomize"] = module_from_spec(spec)
        spec.loader.exec_module(own)


if __name__ == "sitecustomize":
    if sys.version_info >= (3, 10):  # noqa: UP036  the command's Python may be any
        sys.meta_path.insert(0, Watch())
    _run_own()
