"""What a resumed group has that its checkpoint's did not, in words."""

import pytest

from trainctl.node_agent.planning.compatibility import RankSetup, differences
from trainctl.protocol.messages import Compute

CPU = RankSetup("a", "torch", "cpu", Compute("float32", weights="float32"))
OTHER = RankSetup("b", "torch", "cpu", Compute("float32", weights="float32"))
HALF = RankSetup("a", "mlx", "gpu", Compute("bfloat16", weights="float32"))


def with_versions(**versions: str) -> RankSetup:
    return RankSetup("a", "torch", "cpu", Compute("float32", weights="float32", versions=tuple(versions.items())))


def updated_by(library: str) -> RankSetup:
    return RankSetup("a", "torch", "cuda:0 NVIDIA H200", Compute("bfloat16", weights="float32", update=library))


@pytest.mark.parametrize(("before", "now", "found"), [
    ({0: CPU, 1: OTHER}, {0: CPU, 1: OTHER}, ()),
    ({0: CPU}, {0: RankSetup("a", "torch", "cpu")}, ()),  # a version that doesn't say
    ({0: CPU, 1: OTHER}, {0: CPU}, ("the ranks are those of a instead of a, b",)),
    ({0: CPU}, {0: HALF}, ("a: mlx instead of torch, device gpu instead of device cpu, passes in bfloat16 instead of "
                           "passes in float32",)),
    ({0: CPU, 1: OTHER},
     {0: RankSetup("a", "torch", "cpu", Compute("float32", tf32=True, weights="float32")),
      1: RankSetup("b", "torch", "cpu", Compute("float32", tf32=True, weights="float32"))},
     ("a, b: TF32 instead of no TF32",)),
    ({0: with_versions(torch="2.12.1", numpy="2.4.6")}, {0: with_versions(torch="2.13.0", numpy="2.4.6", peft="0.21")},
     ("a: torch 2.13.0 instead of torch 2.12.1",)),
    ({0: updated_by("torch")}, {0: updated_by("bitsandbytes")},
     ("a: updates by bitsandbytes instead of updates by torch",)),
    ({0: updated_by("")}, {0: updated_by("bitsandbytes")}, ()),
    ({0: CPU}, {0: OTHER}, ("the ranks are those of b instead of a",)),
])  # fmt: skip
def test_only_what_differs_is_named(before, now, found):
    assert differences(before, now) == found
