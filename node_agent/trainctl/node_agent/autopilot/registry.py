"""The policies by name, as a scan of their package finds them."""

import importlib
import pkgutil
from typing import Final

from trainctl.node_agent.autopilot import policies
from trainctl.node_agent.autopilot.policy import Policy
from trainctl.protocol.config.policies import POLICIES, PolicyName


def _found() -> dict[PolicyName, Policy]:
    """Those that are declared, in that order. Raises KeyError for one without a module."""
    names = [found.name for found in pkgutil.iter_modules(policies.__path__)]
    made: list[Policy] = [importlib.import_module(f"{policies.__name__}.{name}").POLICY for name in names]
    by_name = {policy.name: policy for policy in made}
    return {name: by_name[name] for name in POLICIES}


REGISTRY: Final = _found()
