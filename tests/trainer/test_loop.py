"""Tests of what one step does when it is fenced half-way, finished by another generation, skipped, or short of
memory."""

import math
import time
from dataclasses import replace
from typing import Any

import pytest

from trainctl.protocol import messages as m
from trainctl.protocol.errors import ProtocolError, TrainctlError
from trainctl.trainer.backends.backend import Device
from trainctl.trainer.collective.group import Solo
from trainctl.trainer.common.errors import AbandonedError, DeviceMemoryError, OutdatedError
from trainctl.trainer.loop import train
from trainctl.trainer.objectives.objective import Sums
from trainctl.trainer.step import side_plans
from trainctl.trainer.step.progress import FenceAnswer

G = 12
FIRST, SECOND, THIRD, FOURTH = (m.Generation(1, n) for n in (1, 2, 3, 4))


class Eventful:
    """A real backend in whose passes something happens: `event(batch, how many passes came before)`."""

    def __init__(self, inner, event):
        self._inner, self._event, self._forwards = inner, event, 0

    def loss_and_gradient(self, batch, scales, **how):
        self._event(batch, self._forwards)
        self._forwards += 1
        self._inner.loss_and_gradient(batch, scales, **how)

    def __getattr__(self, name):
        return getattr(self._inner, name)


class Poisoned(Eventful):
    """The hardware's gift of a bad number: the loss of the marked forwards, or only their gradient."""

    def __init__(self, inner, marked, loss, scale):
        super().__init__(inner, lambda batch, before: None)
        self._marked, self._loss, self._scale = marked, loss, scale
        self._is_poisoned = False

    def loss_and_gradient(self, batch, scales, **how):
        is_marked = self._forwards in self._marked
        self._is_poisoned |= is_marked
        scale = scales["tokens"] * self._scale if is_marked else scales["tokens"]
        super().loss_and_gradient(batch, {"tokens": scale}, **how)

    def sums(self):
        loss, poison = self._inner.sums().losses["tokens"], self._loss if self._is_poisoned else 0.0
        self._is_poisoned = False
        return Sums({"tokens": loss + poison}, {})


def fence(progress, generation):
    answer = progress.try_fence(generation, 1.0)
    assert answer is not None
    return answer


def fenced_rig(new_rig, at, backend="torch"):
    """A rank that is fenced while its forwards numbered in `at` are under way."""
    answers: list[FenceAnswer] = []

    def event(batch, before):
        if before in at:
            answers.append(fence(rig.progress, at[before]))

    rig = new_rig(backend, wrap=lambda inner: Eventful(inner, event))
    return rig, answers


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_a_batch_fenced_half_way_is_finished_as_if_nothing_had_happened(new_rig, same_bits, backend):
    rig, answers = fenced_rig(new_rig, {6: SECOND}, backend)
    rig.train(1, 3)
    with pytest.raises(AbandonedError):
        rig.train(2, 3)
    (answer,) = answers
    assert (answer.last_step, answer.held_from, answer.held) == (1, FIRST, (m.Range(G, 6),))
    assert [report.step for report in answer.reports] == [1]
    rig.form(THIRD)
    rest = (m.RankWork(0, (m.Range(G + 6, 6),), 3),)
    finished = rig.train(2, 3, generation=THIRD, finishes=FIRST, work=rest)

    straight = new_rig(backend)
    expected = [straight.train(step, 3) for step in (1, 2)][-1]
    assert (finished.loss_sum, finished.weight, finished.own_samples) == (expected.loss_sum, expected.weight, G)
    assert finished.grad_norm == expected.grad_norm
    assert not {"sum_bytes", "sum_bytes_per_second"} & expected.values.keys(), "a rank alone sums nothing"
    assert same_bits(rig.backend.export_state().weights, straight.backend.export_state().weights)


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_clearing_caches_between_steps_changes_no_bit(new_rig, same_bits, backend):
    rig, straight = new_rig(backend), new_rig(backend)
    for step in (1, 2):
        rig.train(step, 3)
        straight.train(step, 3)
        done = side_plans.defragment(rig.rank, rig.plan(step, 3, kind="defragment"), 0.0)
        assert (done.kind, done.step, done.own_samples) == ("defragment", step, 0)
        assert m.FREED not in done.values, "of a CPU's cache nothing is known"
    assert same_bits(rig.backend.export_state().weights, straight.backend.export_state().weights)


class Hoarding(Device):
    """A device whose allocator has kept 5 MB and gives back 3 of them."""

    def __init__(self, memory):
        super().__init__("hoarding", self)
        self._own, self._kept_bytes = memory, 5_000_000

    def reset(self):
        self._own.reset()

    def read(self):
        return replace(self._own.read(), cache_bytes=self._kept_bytes)

    def free_cache(self):
        self._kept_bytes = 2_000_000


def test_what_clearing_caches_freed_is_reported(new_rig):
    rig = new_rig("mlx")
    rig.backend.device = Hoarding(rig.backend.device.memory)
    freed = [side_plans.defragment(rig.rank, rig.plan(1, 3, kind="defragment"), 0.0).values[m.FREED] for _ in range(2)]
    assert freed == [3_000_000.0, 0.0]


def test_a_batch_fenced_twice_is_still_finished(new_rig, same_bits):
    rig, answers = fenced_rig(new_rig, {2: SECOND, 3: THIRD}, "mlx")
    with pytest.raises(AbandonedError):
        rig.train(1, 3)
    rig.form(SECOND)
    work = (m.RankWork(0, (m.Range(6, 6),), 3),)
    with pytest.raises(AbandonedError):
        rig.train(1, 3, generation=SECOND, finishes=FIRST, work=work)
    assert [(answer.held_from, answer.held) for answer in answers] == [(FIRST, (m.Range(0, 6),))] * 2
    rig.form(FOURTH)
    rig.train(1, 3, generation=FOURTH, finishes=FIRST, work=work)
    assert same_bits(weights(rig), straight(new_rig))


def weights(rig):
    found: dict[str, Any] = rig.backend.export_state().weights
    return found


def straight(new_rig):
    """Return the weights after an undisturbed step."""
    rig = new_rig("mlx")
    rig.train(1, 3)
    return weights(rig)


def test_a_batch_fenced_half_way_can_be_begun_again(new_rig, same_bits):
    rig, answers = fenced_rig(new_rig, {3: SECOND}, "mlx")
    with pytest.raises(AbandonedError):
        rig.train(1, 3)
    assert answers[0].held == (m.Range(0, 9),)
    rig.form(SECOND)
    rig.train(1, 3, generation=SECOND)
    assert same_bits(weights(rig), straight(new_rig))


def test_a_batch_wholly_held_is_finished_by_a_plan_without_samples(new_rig, same_bits):
    rig = new_rig("mlx")
    held: list[FenceAnswer] = []

    class FencedGroup(Solo):
        def all_reduce(self, backend, tail):
            held.append(fence(rig.progress, SECOND))
            return tail

    rig.rank.group = FencedGroup()
    with pytest.raises(AbandonedError):
        rig.train(1, 5)
    assert held[0].held == (m.Range(0, G),)
    assert rig.progress.last_step == 0
    rig.rank.group = Solo()
    rig.form(SECOND)
    report = rig.train(1, 5, generation=SECOND, finishes=FIRST, work=(m.RankWork(0, (), 5),))
    assert (report.step, report.own_samples) == (1, G)
    plain = new_rig("mlx")
    assert plain.train(1, 5).loss_sum == report.loss_sum
    assert same_bits(weights(rig), weights(plain))


def test_a_finish_begins_with_nothing_if_others_hold_the_batch_and_is_refused_if_nobody_does(new_rig):
    rig, own = new_rig("mlx"), m.RankWork(0, (m.Range(4, 5),), 3)
    with pytest.raises(ProtocolError, match=r"finishes step 1 of g0\.9; this rank has no part of that batch"):
        rig.train(1, 3, finishes=m.Generation(0, 9), work=(own,))
    assert rig.train(1, 3, finishes=m.Generation(0, 9), work=(own, m.RankWork(1, (), 3))).own_samples == 5


@pytest.mark.parametrize("changes", [{"finishes": THIRD}, {"finishes": FIRST, "divisor": 512.0}])
def test_a_finish_of_another_batch_than_is_held_is_refused(new_rig, changes):
    rig, answers = fenced_rig(new_rig, {2: SECOND}, "mlx")
    with pytest.raises(AbandonedError):
        rig.train(1, 3)
    rig.form(SECOND)
    work = (m.RankWork(0, (m.Range(6, 6),), 3), m.RankWork(1, (), 3))
    with pytest.raises(ProtocolError, match=r"this rank's batch is for step 1 in g1\.1"):
        rig.train(1, 3, generation=SECOND, work=work, **changes)
    assert fence(rig.progress, THIRD).held == answers[0].held, "what was held still is"


def test_a_fence_of_the_formed_generation_or_later_leaves_it_and_an_older_one_changes_nothing(new_rig):
    rig = new_rig("mlx")
    rig.form(SECOND)
    fence(rig.progress, SECOND)
    assert rig.progress.formed is None
    with pytest.raises(AbandonedError):
        rig.train(1, 3, generation=SECOND)
    assert not rig.progress.form(m.Form(run="r", generation=FIRST, engine="none", ranks=(0,)))
    assert rig.progress.formed is None
    rig.form(THIRD)
    with pytest.raises(OutdatedError, match=r"g1\.2 is older than g1\.3"):
        rig.progress.try_fence(SECOND, 1.0)
    assert (rig.progress.formed, rig.progress.highest) == (THIRD, THIRD)
    assert rig.train(1, 3, generation=THIRD).step == 1


def test_a_rank_begins_where_its_checkpoint_stands(new_rig):
    rig = new_rig("mlx")
    rig.progress.load(2, 2 * G)
    assert rig.progress.cursor == 2 * G
    with pytest.raises(ProtocolError, match="step 2 after step 2"):
        rig.train(2, 3)
    assert rig.train(3, 3).step == 3
    assert (fence(rig.progress, SECOND).last_step, rig.progress.cursor) == (3, 3 * G)


def test_only_the_newest_reports_are_kept_for_a_fence(new_rig):
    rig = new_rig("mlx")
    for step in range(1, 12):
        rig.train(step, G)
    assert [report.step for report in fence(rig.progress, SECOND).reports] == list(range(4, 12))


def test_soon_is_said_before_the_update_and_a_plan_that_skips_a_step_is_refused(new_rig):
    rig = new_rig("mlx")
    plan = rig.plan(1, 3)
    train(rig.rank, plan, 0.0)
    assert rig.sent == [m.Soon(run="r", rank=0, generation=FIRST, seq=plan.seq)]
    with pytest.raises(ProtocolError, match="step 3 after step 1"):
        rig.train(3, 3)


@pytest.mark.parametrize("backend", ["torch", "mlx"])
@pytest.mark.parametrize(("loss", "scale", "reason"), [(math.nan, 1.0, "nan"), (0.0, math.inf, "overflow")])
def test_a_bad_number_costs_the_step_and_nothing_else(new_rig, same_bits, backend, loss, scale, reason):
    rig = new_rig(backend, wrap=lambda inner: Poisoned(inner, {5}, loss, scale))
    rig.train(1, 4)
    before = rig.backend.export_state()
    report = rig.train(2, 4)
    after = rig.backend.export_state()
    assert report.skipped == reason
    assert (rig.progress.last_step, rig.progress.cursor) == (2, 2 * G)
    assert after.updates == before.updates == 1
    assert same_bits(before.weights, after.weights)
    assert all(same_bits(before.slots[slot], after.slots[slot]) for slot in rig.backend.slots)
    good = rig.train(3, 4)
    assert good.skipped is None, "the bad number is not in the accumulators any more"
    assert rig.backend.export_state().updates == 2


def test_a_step_in_which_no_token_counts_updates_nothing(new_rig, same_bits):
    class WeightlessGroup(Solo):
        def all_reduce(self, backend, tail):
            return replace(tail, weights=dict.fromkeys(tail.weights, 0.0))

    rig = new_rig("mlx")
    rig.train(1, 4)
    before, rig.rank.group = weights(rig), WeightlessGroup()
    report = rig.train(2, 4)
    assert (report.skipped, report.weight, rig.progress.last_step) == ("empty", 0.0, 2)
    assert same_bits(before, weights(rig))


def test_float16_overflow_halves_the_loss_scale(new_rig):
    rig = new_rig("torch", model__dtype="float16", wrap=lambda inner: Poisoned(inner, {0}, 0.0, 1e9))
    first = rig.rank.loss_scale.value
    assert rig.train(1, G).skipped == "overflow"
    assert rig.rank.loss_scale.value == first / 2
    assert rig.train(2, G).skipped is None


class Cramped(Eventful):
    """A device with room for so many samples at a time; it notices after backward."""

    def __init__(self, inner, room):
        super().__init__(inner, self._note)
        self.room, self.sizes = room, []

    def _note(self, batch, before):
        self.sizes.append(len(batch))

    def loss_and_gradient(self, batch, scales, **how):
        is_cramped = len(batch) > self.room
        super().loss_and_gradient(batch, scales, **(how | {"adding": None} if is_cramped else how))
        if is_cramped:
            raise DeviceMemoryError("no room")


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_out_of_memory_halves_the_micro_batch_and_replays_only_that(new_rig, backend):
    rig = new_rig(backend, samples=True, wrap=lambda inner: Cramped(inner, 3))
    report = rig.train(1, 7)
    assert rig.backend.sizes == [7, 3, 3, 3, 3]
    assert (report.micro_batch, report.replays, report.own_samples) == (3, 1, G)
    straight = new_rig(backend, samples=True).train(1, 7)
    assert report.loss_sum == pytest.approx(straight.loss_sum, rel=1e-6)
    assert report.grad_norm == pytest.approx(straight.grad_norm, rel=1e-5)
    again = rig.train(2, 7)
    assert (again.micro_batch, again.replays) == (3, 0), "what didn't fit is not tried at every step"
    rig.backend.room = 100
    assert rig.train(3, 6).micro_batch == 6, "another size is"


def test_a_size_that_did_not_fit_is_tried_again_when_the_plan_is_changed_and_one_sample_ends_the_rank(new_rig):
    rig = new_rig("mlx", wrap=lambda inner: Cramped(inner, 3))
    assert rig.train(1, 7).micro_batch == 3
    assert rig.train(2, 7).replays == 0
    rig.backend.room = 100
    assert rig.train(3, 7).micro_batch == 3, "the same plan"
    assert rig.train(4, 7, plan_version=2).micro_batch == 7, "somebody asked for it again"
    rig.backend.room = 0
    with pytest.raises(TrainctlError, match="out of memory with a micro-batch of one sample: no room"):
        rig.train(5, 2)


def test_evaluation_short_of_memory_leaves_the_training_micro_batch(new_rig):
    rig = new_rig("mlx", wrap=lambda inner: Cramped(inner, 3), data__held_out=0.2)
    work = (m.RankWork(0, (m.Range(0, 12),), 7),)
    refused: list[int] = []
    evaluate = rig.backend.evaluate

    def cramped(batch):
        if len(batch) > 3:
            refused.append(len(batch))
            raise DeviceMemoryError("no room")
        found: Sums = evaluate(batch)
        return found

    rig.backend.evaluate = cramped
    rig.backend.room = 100
    for _ in range(2):
        report = side_plans.evaluate(rig.rank, rig.plan(0, 7, kind="evaluate", cursor=0, work=work), 0.0)
        assert (report.micro_batch, report.own_samples) == (3, 12)
    assert refused == [7], "the second evaluation knows"
    report = rig.train(1, 7)
    assert (report.micro_batch, report.replays) == (7, 0)
    assert rig.backend.sizes == [7, 5]


def test_the_reported_micro_batch_is_the_one_used(new_rig):
    rig = new_rig("mlx")
    assert rig.train(1, 500).micro_batch == G, "there are no more samples"
    assert (
        side_plans.acknowledge(
            rig.rank, rig.plan(1, 5, kind="checkpoint"), rig.rank.observer.begin(0.0), None
        ).micro_batch
        == 0
    )
    nothing = rig.plan(1, 5, kind="evaluate", work=(m.RankWork(0, (), 5),))
    assert side_plans.evaluate(rig.rank, nothing, 0.0).micro_batch == 0


@pytest.mark.tier("all")
@pytest.mark.needs("linux")  # only it limits a process's private memory
def test_torch_running_out_of_real_memory_is_replayed(run_python):
    """With 60 MB to go, 64 sequences of 256 tokens don't fit and smaller ones do; the gradient is that of no limit."""
    out = run_python("""
        import contextlib, gc
        gc.disable()
        import numpy as np, os, torch, sys
        from pathlib import Path
        from trainctl.trainer.common.errors import DeviceMemoryError
        from trainctl.trainer.data.batch import collate
        from trainctl.trainer.backends.memory import limit_process
        from trainctl.trainer.backends.backend import TrainingRecipe
        from trainctl.trainer.backends.torch_backend import TorchBackend
        from trainctl.trainer.model.torch_model import read_model
        from trainctl.trainer.objectives.losses import NextToken
        from trainctl.protocol.config.run_tables import OptimizerTable

        torch.set_num_threads(1)
        parts = TrainingRecipe(NextToken("pretrain"), OptimizerTable(learning_rate=1e-3))
        backend = TorchBackend(read_model(Path(sys.argv[1]) / "model", "run.toml"), parts)
        gc.freeze()  # as a trainer does
        gc.enable()
        def work(size):
            blocks = collate([(np.full(257, 65, np.int32), np.ones(256, np.bool_))] * size)
            backend.loss_and_gradient(blocks, {"tokens": 1.0}, adding=contextlib.nullcontext())
        work(1)
        data = next(line for line in open("/proc/self/status") if line.startswith("VmData"))
        limit_process(int(data.split()[1]) * 1024 + 60_000_000)
        before = backend.copy_out("accumulators")
        try:
            work(64)
        except DeviceMemoryError as error:
            print("refused", error)
        assert all((before[name] == found).all() for name, found in backend.copy_out("accumulators").items())
        work(2)
        print("fitted")
    """)
    assert out.startswith("refused")
    assert out.endswith("fitted\n")


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_a_rank_is_timed_after_its_first_micro_batch_and_its_next_step_is_the_same(
    new_rig, same_bits, monkeypatch, backend
):
    """The clock goes on in forward only: 100 s in the first, then 2 s in each."""
    clock = [0.0]

    def event(batch, before):
        clock[0] += 100.0 if before == 0 else 2.0

    rig, straight = new_rig(backend, wrap=lambda inner: Eventful(inner, event)), new_rig(backend)
    with monkeypatch.context() as patched:
        patched.setattr(time, "perf_counter", lambda: clock[0])
        timed = side_plans.measure(rig.rank, rig.plan(1, 4, kind="measure"), 0.0)
        one = side_plans.measure(rig.rank, rig.plan(1, G, kind="measure"), 0.0)
    assert (timed.kind, timed.samples_per_second, timed.own_samples) == ("measure", 2.0, 0)
    assert one.samples_per_second == G / 2.0, "the only one counts"
    nothing = rig.plan(1, 4, kind="measure", work=(m.RankWork(1, (m.Range(0, G),), 4),))
    assert side_plans.measure(rig.rank, nothing, 0.0).samples_per_second is None
    assert (rig.progress.last_step, rig.progress.batch) == (0, None)
    assert rig.train(1, 4).loss_sum == straight.train(1, 4).loss_sum
    assert same_bits(weights(rig), weights(straight))


class Queue(Device):
    """A device that works for 1 s on what is between two marks."""

    def __init__(self, memory):
        super().__init__("queue", memory)
        self._marks, self.waits = 0, 0

    def mark(self):
        self._marks += 1
        return Mark(self._marks)

    def wait(self):
        self.waits += 1


class Mark(int):
    def elapsed_time(self, ended):
        return 1000.0 * (ended - self)


def test_a_measurement_s_phases_are_the_device_s_own(new_rig):
    rig = new_rig("torch")
    rig.backend.device = Queue(rig.backend.device.memory)
    phases = side_plans.measure(rig.rank, rig.plan(1, 4, kind="measure"), time.perf_counter()).phases
    assert (phases.forward, phases.backward) == (3.0, 3.0)
    assert rig.backend.device.waits == 3, "once a micro-batch"


def test_what_others_do_for_a_plan_is_no_wait_for_it(new_rig):
    rig = new_rig("mlx")
    watch = rig.rank.observer.begin(time.perf_counter() - 1.0)
    time.sleep(0.2)
    report = side_plans.acknowledge(rig.rank, rig.plan(1, 4, kind="checkpoint"), watch, None)
    assert 1.0 <= report.phases.wait < 1.2 <= report.step_seconds


@pytest.mark.parametrize("kind", ["measure", "evaluate"])
def test_what_a_fence_comes_into_ends_before_the_next_micro_batch(new_rig, kind):
    rig, answers = fenced_rig(new_rig, {0: SECOND}, "mlx")
    evaluate, evaluated = rig.backend.evaluate, []

    def fenced(batch):
        answers.append(fence(rig.progress, SECOND))
        evaluated.append(len(batch))
        return evaluate(batch)

    rig.backend.evaluate = fenced
    work = (m.RankWork(0, (m.Range(0, 6),), 3),)
    with pytest.raises(AbandonedError):
        getattr(side_plans, kind)(rig.rank, rig.plan(1, 3, kind=kind, cursor=0, work=work), 0.0)
    assert len(answers) == 1
    assert evaluated == ([3] if kind == "evaluate" else [])
    assert answers[0].held == ()


def test_evaluation_leaves_a_half_done_batch_alone(new_rig):
    rig, _ = fenced_rig(new_rig, {2: SECOND}, "mlx")
    with pytest.raises(AbandonedError):
        rig.train(1, 3)
    held = rig.backend.copy_out("accumulators")
    rig.form(SECOND)
    work = (m.RankWork(0, (m.Range(0, rig.dataset.held_out),), 5),)
    plan = rig.plan(0, 3, kind="evaluate", cursor=0, generation=SECOND, work=work)
    report = side_plans.evaluate(rig.rank, plan, 0.0)
    assert report.own_samples == rig.dataset.held_out
    assert report.weight == rig.dataset.held_out * 20
    assert 4 < report.loss_sum / report.weight < 7
    assert all((held[name] == found).all() for name, found in rig.backend.copy_out("accumulators").items())
    assert fence(rig.progress, THIRD).held == (m.Range(0, 6),)
