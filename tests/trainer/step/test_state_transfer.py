"""One rank's state reaches others to the bit, whatever library and engine carry it, and never half-way."""

from queue import SimpleQueue

import numpy as np
import pytest
from tests.trainer.support.ranks import G

from trainctl.protocol import messages as m
from trainctl.trainer import demo_assets
from trainctl.trainer.backends.backend import State
from trainctl.trainer.common.errors import GroupError
from trainctl.trainer.control.orders import GroupOrders
from trainctl.trainer.loop import train
from trainctl.trainer.step import side_plans
from trainctl.trainer.step.rank import Identity


@pytest.fixture(scope="module")
def two_chunks(tmp_path_factory):
    """A model of 460 k parameters, which is two chunks of 1 MB."""
    folder = tmp_path_factory.mktemp("chunks") / "model"
    demo_assets.make_model(folder, demo_assets.llama_config(hidden=128, layers=2, heads=2, intermediate=384), seed=1)
    return str(folder)


@pytest.fixture
def same_state(same_bits):
    def compare(one, other):
        assert one.slots.keys() == other.slots.keys() == {"exp_avg", "exp_avg_sq"}
        same = all(same_bits(one.slots[slot], other.slots[slot]) for slot in one.slots)
        return same and same_bits(one.weights, other.weights) and one.updates == other.updates

    return compare


def state(rank):
    found: State = rank.call(rank.rig.backend.export_state)
    return found


def alone(rank, steps, rate=3e-3):
    """So many steps without the others, of two samples each."""
    rank.rig.progress.formed = m.Generation(1, 0)
    for step in range(1, steps + 1):
        changes = {"generation": m.Generation(1, 0), "learning_rate": rate}
        changes["work"] = (m.RankWork(rank.number, (m.Range((step - 1) * G, 2),), 2),)
        plan = rank.rig.plan(step, 4, **changes)
        rank.call(lambda plan=plan: train(rank.rig.rank, plan, 0.0))


@pytest.mark.parametrize(
    ("engine", "backends"),
    [
        ("ring", ("mlx", "torch", "mlx")),
        pytest.param("gloo", ("torch", "mlx", "torch"), marks=pytest.mark.tier("all")),
        pytest.param("gloo", ("mlx", "torch", "torch"), marks=pytest.mark.tier("all")),
    ],
)
def test_ranks_behind_are_given_the_state_of_one_ahead(new_ranks, same_state, two_chunks, engine, backends):
    ranks = new_ranks(engine, backends, model__path=two_chunks, group={"chunk_mb": 1})
    source, behind, level = ranks.ranks
    alone(source, 3)
    alone(behind, 1, rate=1e-3)
    alone(level, 3, rate=2e-3)
    source.rig.rank.loss_scale.value, source.rig.rank.loss_scale.good_steps = 512.0, 77
    before = [state(rank) for rank in ranks.ranks]
    assert not same_state(before[0], before[1])

    assert ranks.form(source=0, behind=(1,), step=3, cursor=3 * G) == []
    after = [state(rank) for rank in ranks.ranks]
    assert same_state(after[0], before[0])
    assert same_state(after[1], before[0])
    assert same_state(after[2], before[2]), "one that stands there already keeps its own"
    assert (behind.rig.progress.last_step, behind.rig.progress.cursor, behind.rig.progress.batch) == (3, 3 * G, None)
    scale = behind.rig.rank.loss_scale
    assert (scale.value, scale.good_steps) == (512.0, 77)

    for rank in ranks.ranks:
        rank.rig.rank.loss_scale.value = 1.0
    reports = ranks.train(ranks.plan(4, (2, 1, 2), (1, 1, 2)))
    assert [report.step for report in reports] == [4, 4, 4], reports

    plan = ranks.plan(4, (0, 0, 0), (1, 1, 1), kind="sync")
    expected = state(level).weights, state(source).weights
    versions = [rank.rig.progress.version for rank in ranks.ranks]
    reports = ranks.all(lambda rank: side_plans.synchronize(rank.rig.rank, plan, 0.0))
    synced = [state(rank) for rank in ranks.ranks]
    changed = [rank.rig.progress.version > version for rank, version in zip(ranks.ranks, versions, strict=True)]
    assert changed == [False, True, True], "a checkpoint of before has other weights"
    assert same_state(synced[1], synced[0])
    assert same_state(synced[2], synced[0])
    assert reports[0].drift == 0.0
    flat = [np.concatenate([array.ravel() for array in weights.values()]).astype(np.float64) for weights in expected]
    drift = np.abs(flat[0] - flat[1]).max() / np.sqrt(np.mean(flat[1] ** 2))
    assert reports[2].drift == pytest.approx(drift, rel=1e-5)
    assert 0 < reports[1].drift < reports[2].drift


def test_a_rank_left_with_parts_of_two_states_says_so_and_takes_part_only_to_be_given_one(new_ranks, same_state):
    ranks = new_ranks("ring", ("mlx", "mlx"))
    source, behind = ranks.ranks
    alone(source, 2)
    alone(behind, 1)
    form = ranks.offer(source=0, behind=(1,), step=2, cursor=2 * G)
    for rank in ranks.ranks:
        rank.begin(form)
    copy_in, taken = behind.rig.backend.copy_in, []

    def once(part, arrays):
        copy_in(part, arrays)
        taken.append(part)
        source.membership.abort()

    behind.rig.backend.copy_in = once
    outcomes = ranks.all(lambda rank: rank.complete(form))
    behind.rig.backend.copy_in = copy_in
    assert isinstance(outcomes[1], GroupError)
    assert taken == ["weights"]
    answers = ranks.fence()
    assert [answer.last_step for answer in answers] == [2, 0], "where it stood isn't where it stands"
    assert answers[1].held_from is None

    said: list[m.FromTrainer] = []
    orders = GroupOrders(Identity("r", "here", 1), behind.rig.progress, SimpleQueue(), said.append)
    orders.membership = behind.membership
    orders.form(ranks.offer())
    assert isinstance(said[0], m.GroupFailed)
    assert "this rank's state is incomplete" in said[0].reason

    assert ranks.form(source=0, behind=(1,), step=2, cursor=2 * G) == []
    assert same_state(state(behind), state(source))
    assert behind.rig.progress.last_step == 2
    assert behind.rig.progress.whole
