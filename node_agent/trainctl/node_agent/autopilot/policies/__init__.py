"""Policies by name: a scan imports every module of this folder, and each policy is a class in one of them."""

import importlib
import pkgutil
from typing import Final

from trainctl.node_agent.autopilot.policy import Policy
from trainctl.protocol.config.policies import POLICIES, PolicyName

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
_CLASSES = {policy.name: policy for policy in Policy.__subclasses__()}
REGISTRY: Final[dict[PolicyName, Policy]] = {name: _CLASSES[name]() for name in POLICIES}
"""Every declared policy, in the order of declaration."""
