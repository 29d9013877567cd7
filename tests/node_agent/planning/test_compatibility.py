"""Settings of a run: its learning rate, engine, first micro-batches, and what resumed groups and checkpoints have."""

from typing import Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.node_agent.support.machines import LINUX, LINUX_MLX, LINUX_TORCH, MAC, MAC_TORCH
from tests.node_agent.support.simulation import config, durable
from tests.protocol.support.profiles import profile_of
from tools.protocol_docs.examples import EXAMPLES

from trainctl.node_agent.planning import compatibility
from trainctl.node_agent.planning.compatibility import RankSetup, differences
from trainctl.node_agent.planning.plans import base_rate
from trainctl.node_agent.planning.share_edits import fastest_micro
from trainctl.protocol.calibration.profile import Pass, summary
from trainctl.protocol.config.run_tables import FIRST, GroupTable, OptimizerTable
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import Compute
from trainctl.trainer.checkpoints.files import spare


@pytest.mark.parametrize(
    ("wanted", "nodes", "engine"),
    [
        ("auto", (LINUX, LINUX_TORCH), "gloo"),
        ("auto", (LINUX, MAC), "ring"),
        ("auto", (MAC, MAC), "ring"),
        ("auto", (LINUX, LINUX_MLX), "ring"),
        ("ring", (LINUX, LINUX), "ring"),
        ("gloo", (LINUX, LINUX_TORCH), "gloo"),
        ("gloo", (MAC, MAC_TORCH), "gloo"),
    ],
)
def test_engine_chosen(wanted, nodes, engine):
    assert compatibility.choose(GroupTable(engine=wanted), dict(zip("ab", nodes, strict=True))) == engine


@pytest.mark.parametrize(
    ("wanted", "nodes", "words"),
    [
        ("gloo", (LINUX, LINUX_MLX), "gloo: b has no torch"),
        ("ring", (LINUX, LINUX_TORCH), "ring: b has no mlx"),
        ("gloo", (LINUX, MAC), "b is on Darwin and a on Linux"),
        ("auto", (LINUX_MLX, LINUX_TORCH), "gloo: a has no torch.*ring: b has no mlx"),
        ("auto", (MAC_TORCH, MAC), "gloo: a is not on Linux; ring: a has no mlx"),
    ],
)
def test_refusal_names_the_node_and_what_it_lacks(wanted, nodes, words):
    with pytest.raises(InvalidInputError, match=rf"group\.engine: .*{words}"):
        compatibility.choose(GroupTable(engine=wanted), dict(zip("ab", nodes, strict=True)))


NEW = durable(("a",), 4)


def test_the_first_one_after_a_multiple_is_kept_for_sure() -> None:
    kept = msgspec.structs.replace(NEW, checkpoints=(600, 1100, 1350, 1600))
    assert kept.kept_for_sure(2, 1000) == (600, 1100, 1350, 1600)
    assert kept.kept_for_sure(2, 1000, planned=True) == (1100, 1600)
    assert kept.kept_for_sure(1, 0, planned=True) == ()


@given(steps=st.sets(st.integers(1, 99), min_size=1), keep_last=st.integers(1, 3), keep_every=st.integers(0, 30))
def test_what_is_kept_for_sure_outlives_the_next_one(steps: set[int], keep_last: int, keep_every: int) -> None:
    kept = msgspec.structs.replace(NEW, checkpoints=tuple(sorted(steps)))
    sure = kept.kept_for_sure(keep_last, keep_every, planned=True)
    assert list(sure) == sorted(sure)
    assert not {*sure} & {*spare([*steps, 100], keep_last, keep_every, [])}


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_a_warmup_ratio_is_the_warmup_of_as_many_steps(schedule: Literal["cosine", "linear", "constant"]) -> None:
    by_ratio = OptimizerTable(learning_rate=1.0, schedule=schedule, warmup_ratio=0.07)
    by_steps = OptimizerTable(learning_rate=1.0, schedule=schedule, warmup_steps=7)
    rates = [base_rate(by_ratio, 100, step) for step in range(1, 101)]
    assert rates == [base_rate(by_steps, 100, step) for step in range(1, 101)]
    assert rates[6] == max(rates) == 1.0


def test_the_rate_warms_up_in_a_line_and_decays_to_its_final_fraction_at_the_last_step() -> None:
    """The decay is from a peak of 1 to 0.1: with 3/4, 1/2 and 1/4 of it left, the rate is 0.775, 0.55 and 0.325."""
    table = {"learning_rate": 1.0, "warmup_steps": 10, "final_fraction": 0.1}
    cosine = OptimizerTable(schedule="cosine", **table)
    linear = OptimizerTable(schedule="linear", **table)
    constant = OptimizerTable(schedule="constant", **table)
    for schedule in (cosine, linear, constant):
        assert [base_rate(schedule, 110, step) for step in (1, 5, 10)] == pytest.approx([0.1, 0.5, 1.0])
    assert [base_rate(linear, 110, step) for step in (35, 60, 85, 110)] == pytest.approx([0.775, 0.55, 0.325, 0.1])
    # The cosine of a third and two thirds of a half turn is 1/2 and -1/2, so 3/4 and 1/4 are left there.
    steps = [10 + 300, 10 + 450, 10 + 600, 10 + 900]
    assert [base_rate(cosine, 910, step) for step in steps] == pytest.approx([0.775, 0.55, 0.325, 0.1])
    assert base_rate(constant, 110, 110) == 1.0


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


PASSES = (Pass(1, 0.1, 100), Pass(2, 0.15, 150), Pass(4, 0.2, 200), Pass(16, 0.6, 800))


def ready(**changes):
    profile = summary(profile_of(passes=PASSES))
    return msgspec.structs.replace(
        EXAMPLES["trainer to agent"]["ready"], **{"rank": 0, "profile": profile, "memory_cap_bytes": None, **changes}
    )


def kept(micro=FIRST, **changes):
    whole = durable(("a",), batch=32)
    setting = msgspec.structs.replace(whole.settings.ranks[0], micro_batch=micro, **changes)
    return msgspec.structs.replace(whole.settings, ranks={0: setting})


AUTO = config(batch=32, nodes={"a": {"micro": "auto"}})


@pytest.mark.parametrize(("cap", "micro"), [(None, 16), (900, 4), (10, 1)])
def test_the_peak_within_85_percent_of_the_cap_is_taken(cap, micro):
    edit = fastest_micro(kept(), AUTO, ready(memory_cap_bytes=cap))
    assert edit.settings.ranks[0].micro_batch == micro
    assert edit.settings.plan_version == kept().plan_version + 1
    assert edit.change.after == (("a", micro),)
    assert fastest_micro(kept(share=1), AUTO, ready(memory_cap_bytes=cap)).settings.ranks[0].micro_in_force == 1


def test_batch_micro_may_be_auto_too():
    assert fastest_micro(kept(), config(batch=32, nodes={"a": {}}, **{"group": {}}), ready()) is None
    whole = msgspec.structs.replace(AUTO, batch=msgspec.structs.replace(AUTO.batch, micro="auto"), nodes={})
    assert fastest_micro(kept(), whole, ready()).settings.ranks[0].micro_batch == 16


@pytest.mark.parametrize(
    ("settings", "message"),
    [(kept(), ready(profile=None)), (kept(3), ready()), (kept(halved_to=8), ready()), (kept(), ready(rank=7))],
)
def test_what_has_been_decided_otherwise_stays(settings, message):
    assert fastest_micro(settings, AUTO, message) is None
