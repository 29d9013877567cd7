"""Speed at which a node trains the run: by its profile, else estimated from its device's matrix products. Pure."""

from collections.abc import Collection
from typing import Final, NamedTuple

from trainctl.protocol.advice.advice_facts import NodeFacts, PlannedRun, Source
from trainctl.protocol.advice.memory_fit import cap_of
from trainctl.protocol.batch.device_table import USED_PART, device_of
from trainctl.protocol.batch.pass_curve import PassCurve, curve_of, step_factor
from trainctl.protocol.batch.split import ShareCost
from trainctl.protocol.batch.step_model import StepModel
from trainctl.protocol.calibration.peak import first_micro
from trainctl.protocol.calibration.profile import DeviceProfile

ERRORS: Final[dict[Source, float]] = {"measured": 0.05, "estimated": 0.3, "unknown": 1.0}
"""Relative standard error of a predicted step."""
AGENT_SECONDS: Final = 0.005
"""CPU that an agent takes for each step, from a rank that has all cores otherwise: 4 to 6 ms were measured."""


class NodeSpeed(NamedTuple):
    """The speed of one node, beside none or some others of its machine."""

    model: StepModel  # its floor: the update
    micro: int  # of its passes
    source: Source
    how: str  # where the figures come from
    forward: PassCurve | None = None  # forward passes only
    company: str = ""  # how other nodes of its machine make the figures wrong; empty: they don't

    def seconds(self, share: int, added: float = 0.0) -> float:
        """A step of `share` samples, with `added` seconds that don't depend on the share."""
        return self.model.seconds(share, self.micro) + added

    def with_agent(self, seconds: float) -> "NodeSpeed":
        """Return the speed with what the agents take of each step."""
        floor = self.model.floor_seconds + seconds
        return self._replace(model=self.model._replace(floor_seconds=floor))

    def cost(self, added: float = 0.0) -> ShareCost:
        """Return the cost of shares, for the split."""
        floor = self.model.floor_seconds + added
        return ShareCost.at(self.model._replace(floor_seconds=floor), self.micro)


def speed_of(node: NodeFacts, run: PlannedRun, beside: Collection[str] = ()) -> NodeSpeed | None:
    """Return the speed of a node; None if nothing is known of it. `beside`: other nodes of its machine that work at the
    same time."""
    profile = node.profile_beside(beside)
    if profile is not None:
        return _calibrated(node, profile, run, beside)
    rate, how = _estimated_rate(node, run)
    if rate is None:
        return None
    return NodeSpeed(
        StepModel.linear(rate), micro_of(node, None, run), "estimated", how, company=_company(node, (), beside)
    )


def why_unknown(node: NodeFacts, run: PlannedRun) -> str:
    """Return why a node has no speed, not even an estimated one."""
    device = device_of(node.device)
    if not run.sample_flops and (device is not None or node.other_profile is not None):
        return "the model's sizes aren't known here, so its speed can't be estimated: run trainctl calibrate"
    return node.problem or f"no profile, and {device.known_for if device is not None else 'its device is in no table'}"


def agent_seconds(node: NodeFacts, sharing: Collection[NodeFacts]) -> float:
    """Return by how much the agents make each step of a node's rank longer: where ranks on CPUs leave no core of the
    machine, or of the node's quota, to them. `sharing`: the nodes whose ranks work on the machine."""
    if not node.device.startswith("cpu") or node.cores is None:
        return 0.0
    used = sum(one.threads or node.cores for one in sharing if one.device.startswith("cpu"))
    quota, own = node.cpu_quota or float(node.cores), node.threads or node.cores
    return AGENT_SECONDS / min(quota, 1.0) if used >= node.cores or own >= quota else 0.0


def _calibrated(node: NodeFacts, profile: DeviceProfile, run: PlannedRun, beside: Collection[str]) -> NodeSpeed:
    curve = curve_of(profile.passes)
    model = StepModel(curve, profile.optimizer_seconds or 0.0, step_factor(profile, curve))
    forward, company = curve_of(profile.forward) if profile.forward else None, _company(node, profile.beside, beside)
    source: Source = "estimated" if company or node.described else "measured"
    return NodeSpeed(
        model, micro_of(node, profile, run), source, company or node.described or "calibrated", forward, company
    )


def _company(node: NodeFacts, measured: Collection[str], beside: Collection[str]) -> str:
    """Return what to say where the node was measured beside others than those that work with it."""
    missing, more = sorted(set(beside) - set(measured)), sorted(set(measured) - set(beside))
    if missing:
        without = f"measured without {', '.join(missing)} on the same machine"
        return f"{without}, which will slow it down: run trainctl calibrate"
    if more:
        return (
            f"measured while {', '.join(more)} on the same machine trained too; alone it is faster: "
            "run trainctl calibrate --alone"
        )
    return ""


def micro_of(node: NodeFacts, profile: DeviceProfile | None, run: PlannedRun) -> int:
    """Return the micro-batch that the node's rank begins with. `profile`: of this run, None without one."""
    passes = profile.passes if profile is not None else ()
    return first_micro(node.micro, passes, run.global_batch, cap_bytes=cap_of(node), share=node.share)


def _estimated_rate(node: NodeFacts, run: PlannedRun) -> tuple[float | None, str]:
    """Samples per second at a usual part of the matmul peak; and what that is of."""
    flops, other = run.sample_flops, node.other_profile
    if not flops:
        return None, "the model's sizes aren't known"
    rates = {one.dtype: one.gflops for one in other.matmul} if other is not None else {}
    dtype = max(rates, key=rates.__getitem__) if run.auto_dtype and rates else run.dtype
    if dtype in rates:
        return USED_PART * rates[dtype] * 1e9 / flops, f"{USED_PART:.0%} of its measured {dtype} products"
    device = device_of(node.device)
    peak = device.peak("auto" if run.auto_dtype else run.dtype) if device is not None else None
    if device is None or peak is None:
        return None, "not calibrated"
    return USED_PART * peak / flops, f"{USED_PART:.0%} of the {device.name}'s datasheet"
