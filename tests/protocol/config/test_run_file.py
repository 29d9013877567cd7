"""Run files: what a good one means, and the line that each bad one gets, which names the file and the field."""

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomli_w
from tests.protocol.support.run_files import good, with_value

from trainctl.protocol.config import data_files, run_file, run_tables
from trainctl.protocol.config.policies import PolicyTables
from trainctl.protocol.errors import InvalidInputError, SeveralInvalidError
from trainctl.protocol.machine.file_digests import data_digests


def test_shares_that_the_file_leaves_open_are_measured() -> None:
    assert run_file.parse(good()).group.first_shares == "timed"


def write(folder: Path, raw: dict[str, Any]) -> Path:
    path = folder / "run.toml"
    path.write_bytes(tomli_w.dumps(raw).encode())
    return path


def problem_of(path: Path, overrides: dict[str, str] | None = None) -> str:
    with pytest.raises(InvalidInputError) as caught:
        run_file.read(path, overrides)
    text = str(caught.value)
    assert "\n" not in text
    assert text.count("Traceback") == 0
    return text


def test_the_least_there_can_be(tmp_path: Path) -> None:
    config = run_file.read(write(tmp_path, good()))
    assert config.batch.global_ == 24
    assert config.batch.micro == 8
    assert config.model.path == str(tmp_path / "model")
    assert config.optimizer.schedule == "cosine"
    assert config.nodes == {}


def test_what_it_is_made_of_survives_being_written(tmp_path: Path) -> None:
    raw = with_value(good(), "nodes.studio", {"share": 24, "backend": "mlx", "memory_limit_gb": 1.5})
    config = run_file.read(write(tmp_path, raw))
    assert run_file.parse(run_file.to_dict(config)) == config
    assert tomli_w.dumps(run_file.to_dict(config))


def test_an_agent_is_sent_what_differs_from_the_defaults() -> None:
    assert run_file.to_message(run_file.parse(good())) == good()
    raw = good() | {
        "nodes": {"studio": {}, "mbp": {"share": 8, "env": {"OMP_NUM_THREADS": "1"}, "attention": "auto"}},
        "policy": {"micro-batch": {"mode": "on"}}, "data": {"path": "data", "kind": "rows", "held_out": 0.0},
        "samples": {"prompts": ("Once", ({"role": "user", "content": "Why?"},))},
        "adapter": {"kind": "lora", "rank": 16},
    }  # fmt: skip
    config = run_file.parse(raw)
    sent = run_file.to_message(config)
    assert run_file.parse(sent) == config
    assert sent == raw | {"adapter": {"kind": "lora"}}


def test_what_an_earlier_version_lacks_is_refused_with_what_to_do() -> None:
    said = run_file.with_remedy("unknown field (and 1 more)", "config: nodes.mbp.attention", "mbp")
    assert said == "unknown to mbp's version of trainctl: upgrade mbp, or leave out nodes.mbp.attention (and 1 more)"
    said = run_file.with_remedy("'varlen' is not one of auto", "config: model.attention", "mbp")
    assert said == ("mbp's version of trainctl has no 'varlen', only auto: upgrade mbp, or leave out model.attention")
    assert run_file.with_remedy(said, "model.attention", "the agent") == said, "a lead has said it of its follower"
    assert run_file.with_remedy("no such folder: /m", "config: model.path", "mbp") == "no such folder: /m"


BAD_FIELDS: list[tuple[str, Any, str]] = [
    ("run.name", "Bad Name", "must match '^"),
    ("run.name", "", "must match '^"),
    ("run.name", 7, "must be text"),
    ("run.steps", 0, " of at least 1"),
    ("run.steps", 1.5, "must be a whole number"),
    ("run.steps", "many", "must be a whole number"),
    ("run.seed", -1, " of at least 0"),
    ("run.orphan_seconds", 0, " of at least 1"),
    ("run.load_seconds", 0, " of at least 1"),
    ("model.path", "", "must be text of at least 1 character"),
    ("model.path", 3, "must be text"),
    ("model.dtype", "float8", "'float8'"),
    ("model.gradient_checkpointing", "some", "'some'"),
    ("model.chunked_loss", "never", "'never'"),
    ("model.tf32", "on", "must be true or false"),
    ("model.compile", "on", "'on'"),
    ("nodes.studio.compile", "always", "'always'"),
    ("model.attention", "flash", "'flash'"),
    ("nodes.studio.attention", "sdpa", "'sdpa'"),
    ("optimizer.offload", 1, "must be true or false"),
    ("nodes.studio.cudnn_benchmark", "on", "must be true or false"),
    ("nodes.studio.deterministic", 1, "must be true or false"),
    ("model.init", "zeros", "'zeros'"),
    ("model.base", "int3", "'int3'"),
    ("model.double_quantization", "yes", "must be true or false"),
    ("model.compute_dtype", "bfloat16", 'acts only on model.base = "nf4"'),
    ("model.compute_dtype", "float8", "'float8'"),
    ("optimizer.kind", "sgd", "'sgd'"),
    ("data.path", "", "must be text of at least 1 character"),
    ("data.kind", "pictures", "'pictures'"),
    ("data.tokenizer", "words", "'words'"),
    ("data.sequence_length", 1, " of at least 2"),
    ("data.held_out", 0.6, " of at most 0.5"),
    ("data.held_out", -0.1, " of at least 0"),
    ("batch.global", 0, " of at least 1"),
    ("batch.global", "24", "must be a whole number"),
    ("batch.micro", 0, " of at least 1"),
    ("batch.micro", 25, "above batch.global = 24"),
    ("batch.micro_tokens", -1, " of at least 0"),
    ("optimizer.learning_rate", 0, "must be a number above 0"),
    ("optimizer.learning_rate", float("nan"), "number"),
    ("optimizer.learning_rate", float("inf"), " of at most 100"),
    ("optimizer.beta1", 1, "must be a number below 1"),
    ("optimizer.beta2", -0.1, " of at least 0"),
    ("optimizer.epsilon", 0, "must be a number above 0"),
    ("optimizer.weight_decay", 11, " of at most 10"),
    ("optimizer.clip_norm", -1, " of at least 0"),
    ("optimizer.update_ratio_every", -1, " of at least 0"),
    ("optimizer.schedule", "square", "'square'"),
    ("optimizer.warmup_steps", -1, " of at least 0"),
    ("optimizer.warmup_steps", 100, "below run.steps = 100"),
    ("optimizer.final_fraction", 1.1, " of at most 1"),
    ("optimizer.warmup_ratio", 1, "must be a number below 1"),
    ("optimizer.warmup_ratio", -0.1, " of at least 0"),
    ("data.overlong", "wrap", "'wrap'"),
    ("data.prefetch", -1, " of at least 0"),
    ("data.workers", 0, " of at least 1"),
    ("data.packing", "first-fit", "'first-fit'"),
    ("adapter.kind", "dora", "'dora'"),
    ("adapter.rank", 0, " of at least 1"),
    ("adapter.alpha", 0, "must be a number above 0"),
    (
        "adapter.targets", "q_proj",
        'adapter.targets: must be "linear" or a list of layer names, such as ["q_proj", "v_proj"]',
    ),
    ("adapter.targets", [], " of at least 1"),
    ("adapter.layers", -1, " of at least 0"),
    ("adapter.dropout", 1, " below 1"),
    ("objective.kind", "kto", "'kto' is not supported: it compares each answer with the mean KL over"),
    ("objective.kind", "ppo", "'ppo' is not one of auto, pretrain, sft, dpo, orpo"),
    ("objective.loss", "aot", "'aot' is not supported: it sorts the log-ratios"),
    ("objective.loss", "nca_pair", "'nca_pair' is not one of sigmoid, ipo, robust, hinge"),
    ("objective.beta", 0, "must be a number above 0"),
    ("objective.label_smoothing", 0.5, " below 0.5"),
    ("objective.reference", "frozen", "is not one of auto, adapter-off, cached"),
    ("objective.kind", "sft", 'needs data.kind = "rows" or "samples"'),
    ("checkpoint.every_steps", -1, " of at least 0"),
    ("checkpoint.keep_last", 0, " of at least 1"),
    ("checkpoint.keep_best", 1, "must be true or false"),
    ("checkpoint.at_end", "yes", "must be true or false"),
    ("checkpoint.keep_every", -1, " of at least 0"),
    ("checkpoint.compression", "gzip", "'gzip'"),
    ("checkpoint.background", 1, "must be true or false"),
    ("checkpoint.copy_to", "copies", "'copies' must be an absolute path, an rsync target such as backup@host:"),
    ("checkpoint.copy_to", "--rsh=sh:x", "must be an absolute path, an rsync target"),
    ("checkpoint.copy_to", "x@-oProxyCommand=sh:y", "must be an absolute path, an rsync target"),
    ("evaluate.every_steps", -1, " of at least 0"),
    ("samples.prompts", [""], "at least 1"),
    ("samples.prompts", [[{"role": "user"}]], "content"),
    ("samples.every_steps", -1, " of at least 0"),
    ("samples.max_tokens", 1025, " of at most 1024"),
    ("samples.temperature", -0.1, "0"),
    ("samples.top_p", 0, "above 0"),
    ("samples.seed", -1, " of at least 0"),
    ("samples.node", "A b", "must match"),
    ("nodes.studio.share", 0, " of at least 1"),
    ("nodes.studio.micro", 0, " of at least 1"),
    ("nodes.studio.backend", "jax", "'jax'"),
    ("nodes.studio.device", "tpu", "must match '^"),
    ("nodes.studio.threads", -1, " of at least 0"),
    ("nodes.studio.memory_limit_gb", 0, "must be a number above 0"),
    ("nodes.studio.model_path", "model", "must be an absolute path"),
    ("nodes.studio.data_path", "data", "must be an absolute path"),
    ("nodes.studio.interface", "e" * 65, "at most 64"),
    ("nodes.studio.gradient_checkpointing", "some", "'some'"),
    ("group.engine", "nccl", "'nccl' is not supported: it has not been tried with two NVIDIA GPUs"),
    ("group.engine", "jaccl", "'jaccl' is not supported: it needs Macs joined by Thunderbolt 5"),
    ("group.engine", "mpi", "'mpi' is not one of auto, gloo, ring"),
    ("model.dtype", "bf16", "'bf16' is not supported: write \"bfloat16\""),
    ("model.dtype", "tf32", "'tf32' is not supported: set model.tf32 = true"),
    ("group.links_per_peer", 9, " of at most 8"),
    ("group.chunk_mb", 0, " of at least 1"),
    ("group.first_shares", "fair", "'fair'"),
    ("group.sync_weights_every", -1, " of at least 0"),
    ("group.hung_seconds", 0.5, " of at least 1"),
    ("group.unreachable_seconds", 0, " of at least 1"),
    ("alerts.off", ["noise"], "'noise'"),
    ("alerts.clear_seconds", -1, " of at least 0"),
    ("alerts.skipped_steps", 0, " of at least 1"),
    ("alerts.loss_spike_mads", 0.5, " of at least 1"),
    ("alerts.loss_spike_percent", 101, " of at most 100"),
    ("alerts.loss_spike_steps", 0, " of at least 1"),
    ("alerts.diverged_mads", 0, " of at least 1"),
    ("alerts.clip_scale", 1, "must be a number"),
    ("alerts.own_loss_deviations", 0.5, " of at least 1"),
    ("alerts.own_loss_percent", 101, " of at most 100"),
    ("alerts.kl_nats", 0, "must be a number above 0"),
    ("alerts.kl_clear_nats", 0.6, "0.6 must be at most alerts.kl_nats = 0.5"),
    ("alerts.stall_seconds", 0.5, " of at least 1"),
    ("alerts.stall_times", 0, " of at least 1"),
    ("alerts.throughput_drop_percent", 101, " of at most 100"),
    ("alerts.throughput_clear_percent", 8, "must be at most alerts.throughput_drop_percent = 7"),
    ("alerts.data_wait_percent", 101, " of at most 100"),
    ("alerts.calibrated_slower_percent", -1, " of at least 0"),
    ("alerts.link_percent", -1, " of at least 0"),
    ("alerts.device_busy_percent", -1, " of at least 0"),
    ("alerts.clock_drop_percent", -1, " of at least 0"),
    ("alerts.clock_clear_percent", 11, "must be at most alerts.clock_drop_percent = 10"),
    ("alerts.memory_percent", "full", "must be a number"),
    ("alerts.memory_clear_percent", 93, "must be at most alerts.memory_percent = 92"),
    ("alerts.disk_free_gb", 7, "must be at most alerts.disk_clear_gb = 6"),
    ("alerts.disk_clear_gb", -1, " of at least 0"),
    ("alerts.disk_free_percent", 7, "must be at most alerts.disk_clear_percent = 3"),
    ("alerts.disk_clear_percent", 101, " of at most 100"),
    ("alerts.silent_seconds", 1, " of at least 3"),
    ("policy.first-shares.mode", "maybe", "'maybe' is not one of off, advise, on"),
    ("policy.first-shares.moode", "on", "unknown field"),
    ("policy.rebalnce", {"mode": "on"}, "'rebalnce' is not one of out-of-memory, replays, first-shares"),
    ("policy.rebalance.gain", 0, "above 0"),
    ("policy.rebalance.windows", 0, " of at least 1"),
    ("policy.rebalance.at_once", -0.1, "above 0"),
    ("policy.rebalance.quiet_steps", 0, " of at least 1"),
    ("policy.non-finite.steps", 0, " of at least 1"),
    ("policy.micro-batch.target", 1.1, " of at most 1"),
    ("policy.micro-batch.low", 0.95, "0.95 must be below policy.micro-batch.target = 0.9"),
    ("policy.micro-batch.shrink", 1, "below 1"),
    ("policy.micro-batch.grow", 1, "above 1"),
    ("policy.micro-batch.least", 0, " of at least 1"),
    ("policy.micro-batch.most", -1, " of at least 0"),
    ("policy.micro-batch.window", 0, " of at least 1"),
    ("policy.micro-batch.barred_steps", -1, " of at least 0"),
    ("policy.micro-batch.up", "maybe", "'maybe' is not one of off, advise, on"),
    ("policy.clip-bound.steps", 0, " of at least 1"),
    ("policy.clip-bound.scale", 0, "above 0"),
    ("policy.caches.fraction", 1.5, " of at most 1"),
    ("policy.caches.every_steps", -1, " of at least 0"),
    ("policy.caches.quiet_steps", 0, " of at least 1"),
    ("policy.plateau.patience", 0, " of at least 1"),
    ("policy.plateau.improvement", 1, "below 1"),
    ("policy.plateau.factor", 1, "below 1"),
    ("policy.plateau.cooldown", -1, " of at least 0"),
    ("policy.plateau.least_rate", -1, " of at least 0"),
    ("policy.early-stop.patience", 0, " of at least 1"),
    ("policy.early-stop.improvement", -1, " of at least 0"),
    ("policy.spike.mads", 0.5, " of at least 1"),
    ("policy.spike.steps", 0, " of at least 1"),
    ("policy.spike.recover_steps", 0, " of at least 1"),
    ("policy.spike.least_back", -1, " of at least 0"),
    ("policy.spike.skip_batches", -1, " of at least 0"),
    ("policy.spike.most_times", 0, " of at least 1"),
    ("policy.divergence.mads", 0, " of at least 1"),
    ("policy.divergence.steps", 1, " of at least 2"),
    ("policy.divergence.past_steps", 0, " of at least 1"),
    ("policy.divergence.factor", 1, "below 1"),
    ("policy.divergence.quiet_steps", 0, " of at least 1"),
    ("policy.drain.steps", 0, " of at least 1"),
    ("policy.drain.gain", -1, " of at least 0"),
    ("policy.drain.move_seconds", -1, " of at least 0"),
    ("policy.plateau.mode", "on", "'on' needs evaluations: set evaluate.every_steps"),
    ("policy.early-stop.mode", "advise", "'advise' needs evaluations: set evaluate.every_steps"),
    ("nodes.studio.priority", 20, " of at most 19"),
    ("nodes.studio.priority", -21, " of at least -20"),
    ("nodes.studio.priority", "low", "must be a whole number"),
    ("nodes.studio.env", ["A=b"], "must be a table"),
    ("nodes.studio.micro_tokens", 1.5, "must be a whole number"),
    ("data.held_out_path", 1, "must be text"),
    ("calibration.at_start", "always", "'always' is not one of missing, never"),
    ("calibration.seconds", 4, " of at least 5"),
    ("data.growing", "yes", "must be true or false"),
    ("data.chunk_samples", 0, " of at least 1"),
    ("nodes.studio.cache_path", "caches", "must be an absolute path"),
    ("nodes.studio.held_out_path", "/more", "needs data.held_out_path"),
]  # fmt: skip


def test_each_bad_field_is_named_with_its_file(tmp_path: Path) -> None:
    for key, value, says in BAD_FIELDS:
        path = write(tmp_path, with_value(good(), key, value))
        text = problem_of(path)
        assert text.startswith(f"{path}: "), key
        # A table of names is reported as a map of them: nodes[...].share
        assert (key if not key.startswith("nodes") else key.rpartition(".")[2]) in text, key
        assert says in text, key


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("PYTHONPATH", "/x", "controls which code runs; set it on the node with: trainctl-agent install --env"),
        ("LD_PRELOAD", "/x.so", ".LD_PRELOAD: controls which code runs"),
        ("DYLD_INSERT_LIBRARIES", "/x", "controls which code runs"),
        ("CUDA_INJECTION64_PATH", "/x", "controls which code runs"),
        ("NCCL_NET_PLUGIN", "/x", "controls which code runs"),
        ("PATH", "/x", "controls which code runs"),
        ("TRAINCTL_STATE", "/x", ".TRAINCTL_STATE: is reserved because trainctl sets it"),
        ("GLOO_SOCKET_IFNAME", "en0", "is reserved because trainctl sets it"),
        ("MLX_HOSTFILE", "/x", "is reserved because trainctl sets it"),
        ("NCCL_SOCKET_IFNAME", "en0", "would have no effect: it is for an engine that trainctl doesn't offer"),
        ("MLX_IBV_DEVICES", "/x", "network interface with `interface` in [nodes.NAME]"),
        ("MLX_JACCL_COORDINATOR", "10.0.0.1:1", "would have no effect"),
        ("MASTER_ADDR", "10.0.0.1", "belongs to torchrun: trainctl numbers ranks itself"),
        ("NOTIFY_SOCKET", "/x", "belongs to the service manager of the node's agent"),
        ("WITH SPACE", "x", "'WITH SPACE' is not a variable name"),
        ("A=B", "x", "is not a variable name"),
        ("", "x", "'' is not a variable name"),
        ("ZERO", "a\0b", ".ZERO: must be text of at most 4000 bytes, without null bytes"),
        ("LONG", "ü" * 2001, "must be text of at most 4000 bytes"),
        ("NUMBER", 3, "must be text"),
    ],
)  # fmt: skip
def test_a_variable_that_a_run_file_may_not_give_is_named(tmp_path: Path, name: str, value: Any, says: str) -> None:
    path = write(tmp_path, with_value(good(), "nodes.studio.env", {"OMP_NUM_THREADS": "2", name: value}))
    text = problem_of(path)
    assert text.startswith(f"{path}: nodes") and ".env" in text
    assert says in text


def test_variables_for_libraries_and_ones_own_are_given(tmp_path: Path) -> None:
    wanted = {"OMP_NUM_THREADS": "2", "MLX_METAL_FAST_SYNCH": "1", "PYTORCH_CUDA_ALLOC_CONF": "a:b", "mine": "ü=$x"}
    assert run_file.read(write(tmp_path, with_value(good(), "nodes.studio.env", wanted))).nodes["studio"].env == wanted
    many = with_value(good(), "nodes.studio.env", {f"V{number}": "" for number in range(65)})
    assert "nodes.studio.env: 65 variables are too many; the maximum is 64" in problem_of(write(tmp_path, many))


def test_every_field_of_the_run_file_is_tried_above() -> None:
    tried = {key for key, _, _ in BAD_FIELDS}
    for table in msgspec.structs.fields(run_tables.RunFile):
        of_names = {"nodes": ("nodes.studio", run_tables.NodeTable)}
        prefix, kind = of_names.get(table.name, (table.name, table.type))
        if kind is not PolicyTables:
            for field in msgspec.structs.fields(kind):
                assert f"{prefix}.{field.encode_name}" in tried
    for policy in msgspec.structs.fields(PolicyTables):
        for field in msgspec.structs.fields(policy.type):
            name = "first-shares" if field.name == "mode" else policy.encode_name  # all have a mode, of the same type
            assert f"policy.{name}.{field.encode_name}" in tried


@pytest.mark.parametrize("table", ["run", "model", "data", "batch", "optimizer"])
def test_a_missing_table_is_named(tmp_path: Path, table: str) -> None:
    raw = good()
    del raw[table]
    assert problem_of(write(tmp_path, raw)) == f"{tmp_path / 'run.toml'}: {table}: is required but missing"


@pytest.mark.parametrize("key", ["run.name", "run.steps", "model.path", "data.path", "optimizer.learning_rate"])
def test_a_missing_field_is_named(tmp_path: Path, key: str) -> None:
    raw = good()
    table, name = key.split(".")
    del raw[table][name]
    assert problem_of(write(tmp_path, raw)) == f"{tmp_path / 'run.toml'}: {key}: is required but missing"


@pytest.mark.parametrize("key", ["run.stepz", "models.path", "batch.global_", "nodes.studio.shares"])
def test_an_unknown_field_is_named(tmp_path: Path, key: str) -> None:
    text = problem_of(write(tmp_path, with_value(good(), key, 1)))
    assert text.endswith("unknown field")
    assert (key if key.startswith(("run", "batch")) else key.split(".")[0]) in text


def test_a_bad_node_name_is_refused(tmp_path: Path) -> None:
    assert "nodes" in problem_of(write(tmp_path, with_value(good(), "nodes.Studio 1", {"share": 24})))


@pytest.mark.parametrize(
    ("shares", "says"),
    [
        ({"a": 20, "b": 5}, "sum to 25, more than"),
        ({"a": 10, "b": 5}, "sum to 15, but"),
        ({"a": 25}, "sum to 25, more than"),
    ],
)
def test_shares_that_do_not_add_up(tmp_path: Path, shares: dict[str, int], says: str) -> None:
    raw = good() | {"nodes": {name: {"share": share} for name, share in shares.items()}}
    assert says in problem_of(write(tmp_path, raw))


def test_shares_may_leave_a_rest_to_a_node_without_one(tmp_path: Path) -> None:
    raw = good() | {"nodes": {"a": {"share": 20}, "b": {}}}
    assert run_file.read(write(tmp_path, raw)).nodes["b"].share is None


@pytest.mark.parametrize("text", ["[run", "run = ", "\x00", "[run]\nname = 'a'\nname = 'b'"])
def test_no_toml_at_all(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    assert problem_of(path).startswith(f"{path}: not a readable TOML file")


def test_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xff\xfe")
    assert "not a readable TOML file" in problem_of(path)


def test_no_file_and_a_folder(tmp_path: Path) -> None:
    assert "no such run file" in problem_of(tmp_path / "none.toml")
    assert "not a readable" in problem_of(tmp_path)


# ---------------------------------------------------------------- overrides


def test_overrides_are_toml_values_or_else_text(tmp_path: Path) -> None:
    overrides = {"run.steps": "7", "optimizer.learning_rate": "1e-4", "model.dtype": "bfloat16", "nodes.a.share": "24"}
    config = run_file.read(write(tmp_path, good()), overrides)
    assert (config.run.steps, config.optimizer.learning_rate, config.model.dtype) == (7, 1e-4, "bfloat16")
    assert config.nodes["a"].share == 24


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("steps", "7", "table.key=value"),
        ("run.", "7", "table.key=value"),
        ("run.steps.more", "7", "a value, not a table"),
        ("run.steps", "0", "run.steps"),
        ("run.stepz", "1", "stepz"),
    ],
)
def test_bad_overrides_are_named(tmp_path: Path, key: str, value: str, says: str) -> None:
    assert says in problem_of(write(tmp_path, good()), {key: value})


# ---------------------------------------------------------------- what it points at


def safetensors(
    header: bytes = b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}', data: int = 8
) -> bytes:
    return len(header).to_bytes(8, "little") + header + bytes(data)


def assets(folder: Path) -> run_tables.RunFile:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    (folder / "model" / "model.safetensors").write_bytes(safetensors())
    (folder / "data").mkdir()
    (folder / "data" / "a.txt").write_text("text " * 200)
    return run_file.read(write(folder, with_value(good(), "data.tokenizer", "bytes")))


def test_paths_that_are_in_order(tmp_path: Path) -> None:
    run_file.check_paths(assets(tmp_path))


def _remove_config(folder: Path) -> None:
    (folder / "model" / "config.json").unlink()


def _remove_weights(folder: Path) -> None:
    (folder / "model" / "model.safetensors").unlink()


def _remove_text(folder: Path) -> None:
    (folder / "data" / "a.txt").unlink()


def _empty_text(folder: Path) -> None:
    (folder / "data" / "a.txt").write_text("")


def _write(name: str, raw: bytes) -> Any:
    return lambda folder: (folder / name).write_bytes(raw)


@pytest.mark.parametrize(
    ("spoil", "field", "says"),
    [
        (_remove_config, "model.path", "no Hugging Face model"),
        (_remove_weights, "model.path", "no weights"),
        (_remove_text, "data.path", "contains no *.txt"),
        (_empty_text, "data.path", "contains no *.txt"),
        (_write("model/config.json", b"{"), "model.path", "config.json is not a JSON object"),
        (_write("model/config.json", b"[]"), "model.path", "config.json is not a JSON object"),
        (
            _write("model/config.json", b'{"quantization_config": {"bits": 4}}'),
            "model.path",
            "config.json: quantization_config: its format isn't MLX's; ",
        ),
        (
            _write("model/config.json", b'{"quantization": {"bits": 4, "group_size": 64}}'),
            "model.path",
            "is quantized, and only whole weights can be trained: set adapter.kind",
        ),
        (
            _write("model/model.safetensors", b""),
            "model.path",
            "model.safetensors is not a safetensors file: its first 8",
        ),
        (_write("model/model.safetensors", b"x" * 99), "model.path", "its first 8 bytes are not a valid header length"),
        (_write("model/model.safetensors", safetensors(b"{not")), "model.path", "is not a safetensors file: "),
        (_write("model/model.safetensors", safetensors(b"\xff\xff")), "model.path", "not UTF-8 text"),
        (_write("model/model.safetensors", safetensors(b"[1]")), "model.path", "its top level is not an object"),
        (_write("model/model.safetensors", safetensors(b'{"a": {"data_offsets": 7}}')), "model.path", "data_offsets"),
        (_write("model/model.safetensors", safetensors(data=7)), "model.path", "is truncated: it has 76 bytes"),
        (_write("data/a.txt", b"x" * 15), "data.path", "the text has 16 tokens; one block needs 513"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, spoil: Any, field: str, says: str) -> None:
    config = assets(tmp_path)
    spoil(tmp_path)
    with pytest.raises(InvalidInputError) as caught:
        run_file.check_paths(config, "run.toml")
    assert str(caught.value).startswith(f"run.toml: {field}: ")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "field", "says"),
    [
        ({"data.path": "nowhere"}, "data.path", "no such file or folder"),
        ({"data.kind": "samples"}, "data.path", "is a folder"),
        ({"data.kind": "samples", "data.path": "data/*"}, "data.path", "is a glob"),
        ({"data.path": "data/b*.txt"}, "data.path", "matches no *.txt file with text"),
        ({"data.path": "data/rows.jsonl"}, "data.path", 'not plain text: set data.kind = "rows" (or "samples")'),
        ({"data.path": "data/*.parquet"}, "data.path", 'not plain text: set data.kind = "rows" (or "samples")'),
        ({"data.path": "data/a*", "data.kind": "rows"}, "data.path", "matches no *.jsonl or *.ndjson or *.parquet"),
        ({"data.tokenizer": "model"}, "data.tokenizer", "tokenizer.json"),
        ({"model.path": "data"}, "model.path", "no Hugging Face model"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, overrides: dict[str, str], field: str, says: str) -> None:
    assets(tmp_path)
    (tmp_path / "data" / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 99)
    with pytest.raises(InvalidInputError) as caught:
        run_file.check_paths(run_file.read(tmp_path / "run.toml", overrides), "run.toml")
    assert str(caught.value).startswith(f"run.toml: {field}: ")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kind": "text"}, 'data.growing: a growing file has a row or sample per line: set data.kind = "rows"'),
        ({"packing": "best-fit"}, "data.growing: can't be combined with packing"),
        ({"held_out": 0.1}, "data.growing: samples of a growing file can't be held out: set data.held_out = 0"),
        ({"path": "rows.parquet"}, "data.growing: a growing file must be one JSON-lines file;"),
    ],
)
def test_what_does_not_go_with_a_growing_file_is_named(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    raw = good()
    raw["data"] = {"path": "rows.jsonl", "kind": "rows", "growing": True} | changes
    assert says in problem_of(write(tmp_path, raw))


def test_a_growing_file_is_checked_as_far_as_it_is_written(tmp_path: Path) -> None:
    assets(tmp_path)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("")
    changes = {"data.path": "rows.jsonl", "data.kind": "rows", "data.growing": "true"}

    def problem() -> str:
        try:
            run_file.check_paths(run_file.read(tmp_path / "run.toml", changes), "run.toml")
        except InvalidInputError as error:
            return str(error)
        return ""

    assert problem() == ""
    rows.write_text('{"text": "a"}\n{"te')
    assert problem() == ""
    run_file.end_mark(rows).touch()
    assert "line 2: not a JSON object" in problem()
    rows.write_text("")
    assert "rows.jsonl is empty" in problem()
    changes["data.path"] = "."
    assert "a growing file must be one JSON-lines file" in problem()
    changes["data.path"] = "-"
    assert problem().startswith('run.toml: data.path: "-" is standard input, which only trainctl run reads')


def test_held_out_files_take_the_place_of_a_fraction(tmp_path: Path) -> None:
    assets(tmp_path)
    (tmp_path / "more.txt").write_text("more " * 200)
    config = run_file.read(tmp_path / "run.toml", {"data.held_out_path": "more.txt"})
    run_file.check_paths(config, "run.toml")
    held_out = run_file.held_out_data(config)
    assert held_out is not None and held_out.data.path == str(tmp_path / "more.txt")
    assert (config.data.held_out_fraction, run_file.held_out_data(held_out)) == (0.0, None)
    assert run_file.read(tmp_path / "run.toml").data.held_out_fraction == 0.01
    assert run_file.parse(run_file.to_dict(config)) == config
    both = {"data.held_out_path": "more.txt", "data.held_out": "0.1"}
    assert "data.held_out_path: can't be combined with data.held_out" in problem_of(tmp_path / "run.toml", both)
    alone = {"nodes.a.held_out_path": "/more.txt"}
    assert "nodes.a.held_out_path: needs data.held_out_path" in problem_of(tmp_path / "run.toml", alone)
    own = run_file.read(tmp_path / "run.toml", {"data.held_out_path": "more.txt", "nodes.a.held_out_path": "/none"})
    with pytest.raises(InvalidInputError, match="held_out_path: no such file or folder: /none"):
        run_file.check_paths(own, "run.toml", "a")


def test_a_folder_for_token_caches_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assets(tmp_path)

    def problem(folder: Path) -> str:
        config = run_file.read(tmp_path / "run.toml", {"nodes.a.cache_path": str(folder)})
        assert run_file.cache_folder(config, "a", tmp_path) == folder
        assert run_file.cache_folder(config, "b", tmp_path) == tmp_path
        try:
            run_file.check_paths(config, "run.toml", "a")
        except InvalidInputError as error:
            return str(error)
        return ""

    assert problem(tmp_path) == problem(tmp_path / "new") == ""
    where = "run.toml: nodes.a.cache_path: "
    assert problem(tmp_path / "no" / "new") == f"{where}no such folder: {tmp_path / 'no'}; create it on that machine"
    if Path("/proc/self").exists():
        assert problem(Path("/proc/caches")).startswith(where)
    assert problem(tmp_path / "run.toml") == f"{where}{tmp_path / 'run.toml'} is not a folder"
    monkeypatch.setattr(os, "access", lambda *_: False)  # tests may run as root, who may write anywhere
    assert problem(tmp_path / "new") == f"{where}no permission to write in {tmp_path}; change its owner or mode"


def test_a_glob_takes_the_files_of_the_kind_in_order(tmp_path: Path) -> None:
    assets(tmp_path)
    for name in ("data/c.txt", "data/b/d.txt", "data/e.md", "data/f[1].txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text " * 200)

    def found(pattern: str) -> list[str]:
        config = run_file.read(tmp_path / "run.toml", {"data.path": pattern})
        run_file.check_paths(config)
        path = Path(config.data.path)
        names = [file.relative_to(tmp_path).as_posix() for file in data_files.data_files(path, "text")]
        assert [file.name for file in data_digests(path, "text").files] == [
            name.removeprefix("data/") for name in names
        ]
        return names

    assert found("data/*") == ["data/a.txt", "data/c.txt", "data/f[1].txt"]
    assert found("data/**/[a-d].txt") == ["data/a.txt", "data/b/d.txt", "data/c.txt"]
    assert found("data/f[1].txt") == ["data/f[1].txt"]
    assert found("data/**/**/d*") == ["data/b/d.txt"]


GOOD_LINE = '{"tokens": [1, 2, 3], "mask": [0, 1, true]}\n'


def sampled(folder: Path, text: str) -> run_tables.RunFile:
    assets(folder)
    (folder / "samples.jsonl").write_text(text)
    return run_file.read(folder / "run.toml", {"data.path": "samples.jsonl", "data.kind": "samples"})


@pytest.mark.parametrize(
    "text",
    [GOOD_LINE, '{"tokens": [1, 2]}\n\n' + GOOD_LINE, GOOD_LINE * 8 + "not looked at", '{"tokens": [1], "mask": null}'],
)
def test_samples_whose_first_lines_are_in_order(tmp_path: Path, text: str) -> None:
    run_file.check_paths(sampled(tmp_path, text))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "not a JSON object"),
        ("7", "not a JSON object"),
        ("[" * 99_999, "not a JSON object: nested too deeply"),
        ("{}", '"tokens" must be a list of whole numbers'),
        ('{"tokens": [1, 2.5], "mask": [1, 1]}', '"tokens" must be a list of whole numbers'),
        ('{"tokens": [1, 2], "mask": 1}', '"mask" must be a list'),
        ('{"tokens": [1, 2], "mask": [1]}', "2 tokens but 1 mask values; give one per token"),
    ],
    ids=lambda value: value[:30],
)
def test_a_sample_that_is_none_is_named_by_its_line(tmp_path: Path, line: str, says: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        run_file.check_paths(sampled(tmp_path, GOOD_LINE + line + "\n"), "run.toml")
    text = str(caught.value)
    assert text.startswith(f"run.toml: data.path: {tmp_path / 'samples.jsonl'}: line 2: ")
    assert says in text


def test_a_block_needs_its_last_byte(tmp_path: Path) -> None:
    config = assets(tmp_path)
    text = tmp_path / "data" / "a.txt"
    text.write_bytes(b"x" * config.data.sequence_length)  # and the end token
    run_file.check_paths(config)
    text.write_bytes(b"x" * (config.data.sequence_length - 1))
    with pytest.raises(InvalidInputError, match="one block needs"):
        run_file.check_paths(config)


@pytest.mark.parametrize(
    ("ratio", "steps", "warmup"), [(0.07, 100, 7), (0.03, 110, 4), (1e-9, 100, 1), (0.999, 100, 99), (0.5, 1, 0)]
)
def test_a_warmup_ratio_is_rounded_up_and_leaves_a_step(ratio: float, steps: int, warmup: int) -> None:
    raw = with_value(with_value(good(), "optimizer.warmup_ratio", ratio), "run.steps", steps)
    config = run_file.parse(raw)
    assert config.optimizer.warmup(config.run.steps) == warmup


def test_a_warmup_is_given_in_steps_or_as_a_ratio(tmp_path: Path) -> None:
    raw = with_value(with_value(good(), "optimizer.warmup_ratio", 0.1), "optimizer.warmup_steps", 5)
    assert "optimizer.warmup_ratio: can't be combined with optimizer.warmup_steps" in problem_of(write(tmp_path, raw))


def test_everything_wrong_is_told_at_once_by_node_field_and_choice() -> None:
    raw = good()
    raw["run"]["steps"] = 0
    raw["optimizer"]["schedule"] = "square"
    raw["nodes"] = {"mbp": {"share": -1}, "studio": {"shares": 3}}
    with pytest.raises(SeveralInvalidError) as caught:
        run_file.parse(raw, "r.toml")
    assert [str(one) for one in caught.value.each] == [
        "r.toml: run.steps: must be a whole number of at least 1",
        "r.toml: optimizer.schedule: 'square' is not one of cosine, linear, constant",
        "r.toml: nodes.mbp.share: must be a whole number of at least 1",
        "r.toml: nodes.studio.shares: unknown field",
    ]
    raw = good()
    raw["optimizer"]["warmup_steps"] = raw["run"]["steps"]
    raw["nodes"] = {"mbp": {"model_path": "x", "env": {"PYTHONPATH": "x"}}}
    with pytest.raises(SeveralInvalidError) as caught:
        run_file.parse(raw, "r.toml")
    assert [one.where for one in caught.value.each] == [
        "r.toml: optimizer.warmup_steps", "r.toml: nodes.mbp.env.PYTHONPATH", "r.toml: nodes.mbp.model_path",
    ]  # fmt: skip


def test_a_folder_in_the_place_of_the_file_is_named_without_the_librarys_words(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError) as caught:
        run_file.read(tmp_path)
    assert str(caught.value) == f"{tmp_path}: not a readable TOML file: Is a directory"


def test_a_node_has_its_own_gradient_checkpointing() -> None:
    raw = with_value(good(), "nodes.studio", {"gradient_checkpointing": "none"})
    config = run_file.parse(with_value(raw, "model.gradient_checkpointing", "all"))
    assert run_file.on_node(config, "studio").model.gradient_checkpointing == "none"
    assert run_file.on_node(config, "other").model.gradient_checkpointing == "all"


@pytest.mark.parametrize("key", ["model.compile", "nodes.studio.compile"])
def test_packed_layers_are_not_compiled(key: str) -> None:
    raw = with_value(with_value(good(), "model.base", "nf4"), "adapter.kind", "lora")
    run_file.parse(with_value(raw, key, "off"))
    with pytest.raises(InvalidInputError, match=r"model\.compile: bitsandbytes' layers can't be compiled"):
        run_file.parse(with_value(raw, key, "default"))


def test_a_node_has_its_own_compile_mode() -> None:
    raw = with_value(good(), "nodes.studio", {"compile": "off"})
    config = run_file.parse(with_value(raw, "model.compile", "default"))
    assert [run_file.on_node(config, name).model.compile for name in ("studio", "other")] == ["off", "default"]


def varlen(**changes: Any) -> dict[str, Any]:
    raw = with_value(with_value(good(), "data.kind", "rows"), "data.packing", "best-fit")
    raw = with_value(with_value(raw, "model.dtype", "bfloat16"), "model.attention", "varlen")
    for key, value in changes.items():
        raw = with_value(raw, key.replace("__", "."), value)
    return raw


def test_a_node_has_its_own_attention() -> None:
    config = run_file.parse(varlen(nodes__studio={"attention": "auto"}))
    assert [run_file.on_node(config, name).model.attention for name in ("studio", "other")] == ["auto", "varlen"]
    config = run_file.parse(varlen(model__attention="auto", nodes__studio={"attention": "varlen"}))
    assert [run_file.on_node(config, name).model.attention for name in ("studio", "other")] == ["varlen", "auto"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"data__packing": "none"}, 'model.attention: "varlen" is for packed samples: set data.packing = "best-fit"'),
        ({"model__dtype": "float32"}, 'model.attention: "varlen" computes in 16 bits: set model.dtype = "bfloat16"'),
        (
            {"model__compile": "default"},
            'model.attention: "varlen" can\'t be combined with compile: set compile = "off"',
        ),
        (
            {"model__attention": "auto", "nodes__studio": {"attention": "varlen", "compile": "default"}},
            'nodes.studio.attention: "varlen" can\'t be combined with compile: set compile = "off"',
        ),
        (
            {"nodes__studio": {"backend": "mlx"}},
            'model.attention: "varlen" needs torch on an NVIDIA GPU, and studio is on MLX: set another backend',
        ),
    ],
)
def test_varlen_attention_is_refused_where_it_cannot_work(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidInputError) as refusal:
        run_file.parse(varlen(**changes))
    assert str(refusal.value) == f'run file: {problem}, or attention = "auto"'


def test_varlen_attention_stands_with_auto_dtype_and_nodes_without_it_on_mlx() -> None:
    run_file.parse(varlen(model__dtype="auto"))
    run_file.parse(varlen(nodes__studio={"backend": "mlx", "attention": "auto"}))


def held_out_policies(tmp_path: Path, plateau: dict[str, Any], early_stop: dict[str, Any], held_out: float) -> Path:
    policy = {"plateau": plateau, "early-stop": early_stop}
    raw = good() | {"evaluate": {"every_steps": 10}, "policy": policy}
    return write(tmp_path, with_value(raw, "data.held_out", held_out))


def test_a_run_must_not_end_before_its_learning_rate_is_lowered(tmp_path: Path) -> None:
    path = held_out_policies(tmp_path, {"mode": "on"}, {"mode": "on", "patience": 5}, 0.1)
    assert problem_of(path) == (
        f"{path}: policy.early-stop.patience: 5 must be above policy.plateau.patience = 5: "
        "the run would end before its rate is lowered"
    )
    for plateau, patience in (("off", 1), ("on", 6)):
        run_file.read(held_out_policies(tmp_path, {"mode": plateau}, {"mode": "on", "patience": patience}, 0.1))


def test_policies_of_the_held_out_loss_need_held_out_samples(tmp_path: Path) -> None:
    path = held_out_policies(tmp_path, {"mode": "on"}, {}, 0.0)
    assert "policy.plateau.mode: 'on' needs held-out samples: set data.held_out or" in problem_of(path)
