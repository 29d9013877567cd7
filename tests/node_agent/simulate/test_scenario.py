"""Tests of what is simulated, read from files, and the pure parts of a simulated rank."""

import dataclasses
import json
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.node_agent.support.scenarios import PARAMETERS, files

from trainctl.node_agent.simulate import scenario
from trainctl.node_agent.simulate.models import DeviceModel, DeviceSpec, SimulatedLinks
from trainctl.node_agent.simulate.simulated_reports import done_by, first_positions
from trainctl.protocol.batch.memory_estimate import MemoryModel
from trainctl.protocol.batch.pass_curve import PassCurve
from trainctl.protocol.calibration.profile import DeviceProfile, GridPoint, LinkRate, Pass, ProfileKey, write_profile
from trainctl.protocol.config import cluster_file
from trainctl.protocol.config.cluster_file import SimulatedNode
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import Range

ONE = {"a": {"samples_per_second": 8.0}}
MODEL = {
    "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16,
    "vocab_size": 32000, "intermediate_size": 4096, "num_key_value_heads": 16,
}  # fmt: skip


def read(folder, nodes, parameters=PARAMETERS, **tables):
    return scenario.read(*files(folder, nodes, 10, 8, **tables), seed=0, steps=None, parameters=parameters)


@pytest.mark.parametrize(
    ("nodes", "where", "problem"),
    [
        ({"a": {}}, "nodes.a.simulated", "gives no speed; give exactly one of"),
        ({"a": {"samples_per_second": 2.0, "device": "a100"}}, "nodes.a.simulated", "device and samples_per_second"),
        ({"a": {"samples_per_second": -2.0}}, "nodes.a.simulated.samples_per_second", "must be"),
        ({"a": {"device": "abacus"}}, "nodes.a.simulated.device", "no device 'abacus'; known are a100"),
        ({"a": {"passes": [[4, 1.0], [2, 0.5]]}}, "nodes.a.simulated.passes", "ascending"),
        ({"a": {**ONE["a"], "colour": "red"}}, "nodes.a.simulated", "colour"),
    ],
)
def test_what_is_wrong_with_a_node_is_one_line(tmp_path, nodes, where, problem):
    with pytest.raises(InvalidInputError) as caught:
        read(tmp_path, nodes)
    assert where in str(caught.value)
    assert problem in str(caught.value)


def test_agents_leave_nodes_out_that_are_only_simulated(tmp_path):
    cluster, run = files(tmp_path, ONE, 10, 8)
    cluster.write_text(cluster.read_text() + '\n[nodes.b]\naddress = "tcp://10.0.0.1:7474"\n')
    assert [*cluster_file.read(cluster).nodes] == ["b"]
    assert [*cluster_file.read(cluster, simulated=True).nodes] == ["a", "b"]
    with pytest.raises(InvalidInputError, match=r"nodes\.b\.simulated: missing"):
        scenario.read(cluster, run, seed=0, steps=None, parameters=1000)


def test_what_cannot_be_simulated_is_refused(tmp_path):
    with pytest.raises(InvalidInputError, match=r"data\.growing"):
        read(tmp_path, ONE, data={"path": "/data.jsonl", "kind": "rows", "growing": True})
    with pytest.raises(InvalidInputError, match=r"model\.path: no config\.json .* give --parameters"):
        read(tmp_path, ONE, parameters=None)


def test_a_known_device_is_estimated_from_its_datasheet_and_the_model(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    model = {"path": str(tmp_path / "model"), "dtype": "bfloat16"}
    found = read(tmp_path, {"a": {"device": "A100"}, "b": {"device": "h100"}}, parameters=None, model=model)
    slow, fast = found.devices[0], found.devices[1]
    assert slow.name == "simulated NVIDIA A100"
    assert found.parameters > 100_000_000
    # 6 operations per parameter and token, without the embeddings, and the attention's, at 0.4 of the peak.
    flops = 6 * (found.parameters - 32000 * 1024) + 6 * 12 * 1024 * 512
    expected = flops * 512 / (0.4 * 312e12)
    assert slow.curve.seconds(101) - slow.curve.seconds(1) == pytest.approx(100 * expected, rel=0.01)
    assert slow.curve.seconds(1000) / fast.curve.seconds(1000) == pytest.approx(989 / 312, rel=0.02)
    assert slow.memory is not None and slow.memory.base_bytes > 12 * found.parameters
    assert slow.cap_bytes == 80e9
    auto = {"path": str(tmp_path / "model"), "dtype": "auto"}
    mixed = read(tmp_path, {"a": {"device": "a100"}, "b": {"device": "t4"}}, parameters=None, model=auto)
    assert mixed.config.model.dtype == "float16", "as agents of these devices would choose it for all"
    with pytest.raises(InvalidInputError, match=r'model\.dtype = "bfloat16"'):
        read(tmp_path, {"a": {"device": "a100"}}, parameters=None, model={"path": str(tmp_path / "model")})


def test_a_profile_gives_speed_memory_and_link(tmp_path):
    key = ProfileKey(
        device="cpu", model_digest="d", sequence_length=512, dtype="float32", backend="torch", backend_version="2",
        trainctl_version="1",
    )  # fmt: skip
    passes = (Pass(1, 0.1, 1_100_000_000), Pass(8, 0.5, 1_800_000_000))
    links = (LinkRate("b", 1e8, 5e7, 0.001),)
    profile = DeviceProfile(key=key, created_at=0.0, passes=passes, optimizer_seconds=0.05, links=links)
    path = write_profile(tmp_path / "profiles", profile)
    found = read(tmp_path, {"a": {"profile": f"profiles/{path.name}"}, "b": {"samples_per_second": 1.0}})
    device = found.devices[0]
    assert device.curve.seconds(8) == 0.5
    assert device.step_seconds == 0.05
    grid = (GridPoint(1, 8, 0.05 + 8 * 0.12), GridPoint(8, 1, 0.05 + 0.6), GridPoint(4, 2, 9.0))
    path = write_profile(tmp_path / "profiles", msgspec.structs.replace(profile, grid=grid, created_at=1.0))
    slower = read(tmp_path, {"a": {"profile": f"profiles/{path.name}"}})
    assert slower.devices[0].curve.seconds(8) == pytest.approx(1.2 * 0.5), "as long as in whole steps"
    assert device.memory == pytest.approx((1e9, 1e8))
    assert device.profile is not None and msgspec.to_builtins(device.profile)["passes"]
    assert (found.links.of[0].sent_bytes_per_second, found.links.of[0].latency_seconds) == (5e7, 0.001)
    assert found.links.of[1].sent_bytes_per_second == 125e6


def test_the_process_says_where_the_record_is_and_leaves_nothing_after_an_error(tmp_path):
    cluster, run = files(tmp_path, ONE, 10, 8)
    command = [sys.executable, "-m", "trainctl.node_agent.simulate", str(cluster), str(run)]
    done = subprocess.run([*command, "--output", str(tmp_path / "state")], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "give --parameters" in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "state").exists()
    command += ["--parameters=1000", "--output", str(tmp_path / "state")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    where, made = map(json.loads, done.stdout.splitlines())
    assert where["run_directory"] == made["run_directory"]
    assert (made["state"], made["steps"], made["simulated"]) == ("finished", 10, True)


def test_simulations_that_begin_at_once_get_records_of_their_own(tmp_path):
    cluster, run = files(tmp_path, ONE, 10, 8)
    command = [sys.executable, "-m", "trainctl.node_agent.simulate", str(cluster), str(run), "--parameters=1000"]
    both = [subprocess.Popen([*command, "--output", str(tmp_path / "state")], stdout=subprocess.PIPE) for _ in range(2)]
    made = [json.loads(process.communicate()[0].splitlines()[-1]) for process in both]
    assert sorted(one["run"] for one in made) == ["try-simulated-0", "try-simulated-0-2"]
    assert {one["state"] for one in made} == {"finished"}


sizes = st.integers(1, 64)
rates = st.floats(0.1, 1000)


def device(rate: float = 10.0, seed: int = 0, cap: float | None = None, **settings) -> DeviceModel:
    node = SimulatedNode(samples_per_second=rate, **settings)
    memory = MemoryModel(1e9, 1e8)
    spec = DeviceSpec("simulated device", PassCurve.line(0.0, 1 / rate), 0.01, memory, cap, None)
    return DeviceModel(spec, node, seed, "a")


@given(rates, sizes, sizes, sizes)
def test_without_noise_a_part_takes_what_its_samples_take(rate, samples, more, micro):
    quiet = device(rate, noise=0.0)
    part, larger = quiet.part(1, samples, micro, 0.0), quiet.part(2, samples + more, micro, 1.0)
    assert part.busy == pytest.approx(samples / rate)
    assert larger.busy > part.busy
    assert part.backward == pytest.approx(2 * part.forward)


@given(sizes, st.floats(1.1e9, 5e9))
def test_what_a_part_holds_fits_in_memory(micro, cap):
    part = device(cap=cap).part(1, 64, micro, 0.0)
    assert part.peak_bytes is not None and part.peak_bytes <= cap
    assert 1 <= part.micro <= micro
    assert (part.replays > 0) == (part.micro < micro)


def test_noise_and_failures_are_of_the_size_that_the_settings_say():
    noisy = device(noise=0.1, mtbf_hours=2.0)
    times = [noisy.part(step, 8, 4, 0.0).busy for step in range(4000)]
    mean = sum(times) / len(times)
    assert mean == pytest.approx(0.8, rel=0.02)
    spread = (sum((seconds - mean) ** 2 for seconds in times) / len(times)) ** 0.5
    assert spread / mean == pytest.approx(0.1, rel=0.1)
    lives = [noisy.seconds_to_failure() for _ in range(4000)]
    assert sum(lives) / len(lives) == pytest.approx(7200, rel=0.1)


def links(rate: float, latency: float, ranks: int, size: int) -> SimulatedLinks:
    return SimulatedLinks({rank: LinkRate("b", rate, rate, latency) for rank in range(ranks)}, size, 3 * size)


@given(st.floats(1e6, 1e10), st.floats(1e-6, 0.1), st.integers(2, 64), st.integers(1, 10**10))
def test_a_sum_takes_no_less_over_more_ranks_or_more_bytes(rate, latency, ranks, size):
    made = links(rate, latency, ranks, size)
    everyone = [*range(ranks)]
    assert made.sum_seconds(everyone[:1]) == 0
    assert 0 < made.sum_seconds(everyone[:2]) <= made.sum_seconds(everyone) * (1 + 1e-9)
    assert made.sum_seconds(everyone) < links(rate, latency, ranks, 2 * size).sum_seconds(everyone)
    assert made.sum_seconds(everyone) > 2 * (ranks - 1) / ranks * size / rate


def test_the_slowest_link_holds_up_the_sum():
    made = links(1e9, 1e-4, 3, 10**9)
    slow = dataclasses.replace(made, of={**made.of, 2: LinkRate("b", 1e8, 1e8, 1e-4)})
    assert slow.sum_seconds([0, 1, 2]) == pytest.approx(4 / 3 * 10, rel=0.01)
    assert slow.transfer_seconds([0, 1, 2]) == pytest.approx(30)


pieces = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 30)), min_size=1, max_size=5)


def laid_out(gaps: list[tuple[int, int]]) -> tuple[Range, ...]:
    at, found = 0, []
    for gap, count in gaps:
        found.append(Range(at + gap, count))
        at += gap + count
    return tuple(found)


def positions(ranges) -> list[int]:
    return [position for piece in ranges for position in range(piece.start, piece.start + piece.count)]


@given(pieces, st.integers(0, 200), sizes, st.floats(0, 1.5))
def test_what_is_done_by_a_moment_are_whole_passes_from_the_start(gaps, count, micro, fraction):
    left = laid_out(gaps)
    assert positions(first_positions(left, count)) == positions(left)[:count]
    part = device(noise=0.0).part(1, len(positions(left)), micro, 0.0)
    done = positions(done_by(left, part, fraction * part.busy))
    assert done == positions(left)[: len(done)]
    assert len(done) % part.micro == 0 or len(done) == len(positions(left))
    assert (len(done) == len(positions(left))) or fraction < 1
