"""Which engine sums the ranks' gradients: a pure choice from what the run file asks for and the ranks can load."""

from collections.abc import Mapping

from trainctl.protocol.config.run_file import GroupTable
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import Engine, Ready

FIELD = "group.engine"
_LIBRARIES: dict[Engine, str] = {"gloo": "torch", "ring": "mlx"}


def choose(group: GroupTable, ready: Mapping[str, Ready]) -> Engine:
    """The engine for the ranks that said `ready`, by their names.

    `auto`: gloo if all are on Linux with torch, else ring if all have mlx. Raises InvalidInputError naming the node and
    what it lacks.
    """
    if group.engine != "auto":
        lack = _lack(group.engine, ready)
        if lack:
            raise InvalidInputError(FIELD, f"{group.engine}: {lack}")
        return group.engine
    gloo_lack = _lack("gloo", ready) or _not_linux(ready)
    if not gloo_lack:
        return "gloo"
    ring_lack = _lack("ring", ready)
    if ring_lack:
        raise InvalidInputError(FIELD, f"no engine fits all nodes; gloo: {gloo_lack}; ring: {ring_lack}")
    return "ring"


def _lack(engine: Engine, ready: Mapping[str, Ready]) -> str:
    for node, answer in ready.items():
        if engine not in answer.engines:
            return f"{node} has no {_LIBRARIES[engine]} to load it from"
    first_node, first = next(iter(ready.items()))
    for node, answer in ready.items():
        if engine == "gloo" and answer.system != first.system:
            return f"{node} is on {answer.system} and {first_node} on {first.system}, whose builds don't join one group"
    return ""


def _not_linux(ready: Mapping[str, Ready]) -> str:
    return next((f"{node} is not on Linux" for node, answer in ready.items() if answer.system != "Linux"), "")
