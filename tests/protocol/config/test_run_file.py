"""Run files: what a good one means, and the line that each bad one gets, which names the file and the field."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomli_w
from tests.protocol.support.run_files import good, with_value

from trainctl.protocol.config import run_file, run_tables
from trainctl.protocol.config.policies import PolicyTables
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.config.validation_errors import NAMES_ELSEWHERE
from trainctl.protocol.errors import InvalidInputError, SeveralInvalidError

Problem = Callable[..., str]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.toml"


@pytest.fixture
def problem(path: Path) -> Problem:
    """Write a run file, read it, and return the line that says what is wrong."""

    def problem(raw: dict[str, Any] | bytes, overrides: dict[str, str] | None = None) -> str:
        path.write_bytes(raw if isinstance(raw, bytes) else tomli_w.dumps(raw).encode())
        with pytest.raises(InvalidInputError) as caught:
            run_file.read(path, overrides)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return problem


def test_the_least_there_can_be(path: Path) -> None:
    path.write_text(tomli_w.dumps(good()))
    config = run_file.read(path)
    assert (config.batch.global_, config.batch.micro, config.nodes) == (24, 8, {})
    assert config.model.path == str(path.parent / "model")
    overrides = {"run.steps": "7", "optimizer.learning_rate": "1e-4", "model.dtype": "bfloat16", "nodes.a.share": "24"}
    config = run_file.read(path, overrides)
    assert (config.run.steps, config.optimizer.learning_rate, config.model.dtype) == (7, 1e-4, "bfloat16")
    assert config.nodes["a"].share == 24


def test_a_run_ends_by_steps_or_by_epochs(path: Path, problem: Problem) -> None:
    raw = good()
    assert "run.epochs: can't be combined with run.steps" in problem(with_value(raw, "run.epochs", 2.5))
    del raw["run"]["steps"], raw["run"]["epochs"]
    assert "run.steps: missing: give the number of steps, or run.epochs" in problem(raw)
    raw = with_value(raw, "run.epochs", 2.5)
    growing = raw | {"data": raw["data"] | {"growing": True, "kind": "rows", "held_out": 0.0}}
    assert "data that grow have no epochs" in problem(growing)
    path.write_text(tomli_w.dumps(raw))
    config = run_file.read(path)
    assert run_file.parse(run_file.to_dict(config)) == config
    assert run_file.with_steps(config, 100).run.steps == 11, "2.5 x 100 samples in batches of 24"
    assert run_file.with_steps(config, 100).run.epochs == 0.0
    assert run_file.read(path, {"run.steps": "7"}).run.epochs == 0.0, "the last word counts"


def test_an_agent_is_sent_what_differs_from_the_defaults() -> None:
    assert run_file.to_message(run_file.parse(good())) == good()
    raw = good() | {
        "nodes": {
            "studio": {"backend": "mlx", "memory_limit_gb": 1.5},
            "mbp": {"share": 8, "env": {"OMP_NUM_THREADS": "1"}, "attention": "auto"},
        },
        "policy": {"micro-batch": {"mode": "on"}},
        "data": {"path": "data", "kind": "rows", "held_out": 0.0},
        "samples": {"prompts": ("Once", ({"role": "user", "content": "Why?"},))},
        "adapter": {"kind": "lora", "rank": 16},
    }
    config = run_file.parse(raw)
    sent = run_file.to_message(config)
    assert run_file.parse(sent) == run_file.parse(run_file.to_dict(config)) == config
    assert sent == raw | {"adapter": {"kind": "lora"}}


def test_what_an_earlier_version_lacks_is_refused_with_what_to_do() -> None:
    said = run_file.with_remedy("unknown field (and 1 more)", "config: nodes.mbp.attention", "mbp")
    assert said == "unknown to mbp's version of trainctl: upgrade mbp, or leave out nodes.mbp.attention (and 1 more)"
    said = run_file.with_remedy("'varlen' is not one of auto", "config: model.attention", "mbp")
    assert said == ("mbp's version of trainctl has no 'varlen', only auto: upgrade mbp, or leave out model.attention")
    assert run_file.with_remedy(said, "model.attention", "the agent") == said, "a lead has said it of its follower"
    assert run_file.with_remedy("no such folder: /m", "config: model.path", "mbp") == "no such folder: /m"


def fields() -> list[str]:
    """Return every setting of a run file by its key."""
    keys = []
    for table in msgspec.structs.fields(run_tables.RunFile):
        if table.type is PolicyTables:
            tables = [(f"policy.{policy.encode_name}", policy.type) for policy in msgspec.structs.fields(PolicyTables)]
        else:
            tables = [("nodes.studio", run_tables.NodeTable) if table.name == "nodes" else (table.name, table.type)]
        keys += [f"{name}.{field.encode_name}" for name, kind in tables for field in msgspec.structs.fields(kind)]
    return keys


def test_each_field_is_named_if_its_value_is_of_another_type_or_far_too_small(path: Path, problem: Problem) -> None:
    keys = fields()
    assert len(keys) > 150
    for key in keys:
        for value in ([[[0]]], -(10**9)):
            text = problem(with_value(good(), key, value))
            assert text.startswith(f"{path}: ")
            # A table of names is reported as a map of them: nodes[...].share
            assert (key if not key.startswith("nodes") else key.rpartition(".")[2]) in text, (key, value)


def test_a_value_that_is_out_of_bounds_or_no_choice_is_named(path: Path, problem: Problem) -> None:
    for key, value, says in (
        ("run.name", "Bad Name", "must match '^"),
        ("run.steps", 0, " of at least 1"),
        ("run.steps", 1.5, "must be a whole number"),
        ("model.dtype", "bf16", "'bf16' is not supported: write \"bfloat16\""),
        ("model.dtype", "tf32", "'tf32' is not supported: set model.tf32 = true"),
        ("model.compute_dtype", "bfloat16", 'acts only on model.base = "nf4"'),
        ("data.sequence_length", 1, " of at least 2"),
        ("data.held_out", 0.6, " of at most 0.5"),
        ("batch.micro", 25, "above batch.global = 24"),
        ("optimizer.learning_rate", 0, "must be a number above 0"),
        ("optimizer.learning_rate", float("nan"), "number"),
        ("optimizer.learning_rate", float("inf"), " of at most 100"),
        ("optimizer.beta1", 1, "must be a number below 1"),
        ("optimizer.warmup_steps", 100, "below run.steps = 100"),
        ("adapter.targets", "q_proj", 'must be "linear" or a list of layer names, such as ["q_proj", "v_proj"]'),
        ("objective.kind", "kto", "'kto' is not supported: it compares each answer with the mean KL over"),
        ("objective.kind", "ppo", "'ppo' is not one of auto, pretrain, sft, dpo, orpo, simpo"),
        ("objective.kind", "sft", 'needs data.kind = "rows" or "samples"'),
        ("objective.loss", "aot", "'aot' is not supported: it sorts the log-ratios"),
        ("objective.label_smoothing", 0.5, " below 0.5"),
        ("checkpoint.copy_to", "[-oProxyCommand=sh]:y", "must be an absolute path, an rsync target"),
        ("checkpoint.copy_to", "x@[-oProxyCommand=sh]:y", "must be an absolute path, an rsync target"),
        ("checkpoint.copy_to", "ftp://host/runs", "a URL that begins with s3://, gs://, az://"),
        ("checkpoint.copy_to", "--rsh=sh:x", "must be an absolute path, an rsync target"),
        ("checkpoint.copy_to", "x@-oProxyCommand=sh:y", "must be an absolute path, an rsync target"),
        ("samples.prompts", [[{"role": "user"}]], "content"),
        ("samples.max_tokens", 1025, " of at most 1024"),
        ("nodes.studio.device", "tpu", "must match '^"),
        ("nodes.studio.model_path", "model", "must be an absolute path"),
        ("nodes.studio.held_out_path", "/more", "needs data.held_out_path"),
        ("nodes.studio.priority", 20, " of at most 19"),
        ("group.engine", "nccl", "'nccl' is not supported: it has not been tried with two NVIDIA GPUs"),
        ("group.engine", "mpi", "'mpi' is not one of auto, gloo, ring"),
        ("alerts.off", ["noise"], "'noise'"),
        ("alerts.kl_clear_nats", 0.6, "0.6 must be at most alerts.kl_nats = 0.5"),
        ("alerts.memory_clear_percent", 93, "must be at most alerts.memory_percent = 92"),
        ("alerts.disk_free_gb", 7, "must be at most alerts.disk_clear_gb = 6"),
        ("policy.first-shares.mode", "maybe", "'maybe' is not one of off, advise, on"),
        ("policy.rebalnce", {"mode": "on"}, "'rebalnce' is not one of out-of-memory, replays, first-shares"),
        ("policy.micro-batch.low", 0.95, "0.95 must be below policy.micro-batch.target = 0.9"),
        ("policy.micro-batch.shrink", 1, "below 1"),
        ("policy.divergence.steps", 1, " of at least 2"),
        ("policy.plateau.mode", "on", "'on' needs evaluations: set evaluate.every_steps"),
        ("run.stepz", 1, "unknown field; did you mean steps?"),
        ("run.wholly_else", 1, "unknown field"),
        ("batch.per_device_train_batch_size", 1, "is batch.micro here: see docs/from-other-trainers.md"),
        ("adapter.lora-r", 8, "other trainers' lora_r is adapter.rank here"),
        ("nodes.Studio 1", {"share": 24}, "nodes"),
    ):
        text = problem(with_value(good(), key, value))
        assert text.startswith(f"{path}: ") and says in text
        assert key in text or key.startswith("nodes")


def test_a_variable_that_a_run_file_may_not_set_is_named(problem: Problem) -> None:
    for name, value, says in (
        ("TRAINCTL_STATE", "/x", ".TRAINCTL_STATE: is reserved because trainctl sets it"),
        ("MLX_HOSTFILE", "/x", "is reserved because trainctl sets it"),
        ("NCCL_SOCKET_IFNAME", "en0", "would have no effect: it is for an engine that trainctl doesn't offer"),
        ("MASTER_ADDR", "10.0.0.1", "belongs to torchrun: trainctl numbers ranks itself"),
        ("NOTIFY_SOCKET", "/x", "belongs to the service manager of the node's agent"),
        ("A=B", "x", "is not a variable name"),
        ("ZERO", "a\0b", ".ZERO: must be text of at most 4000 bytes, without null bytes"),
        ("LONG", "ü" * 2001, "must be text of at most 4000 bytes"),
        ("NUMBER", 3, "must be text"),
    ):
        text = problem(with_value(good(), "nodes.studio.env", {"OMP_NUM_THREADS": "2", name: value}))
        assert "nodes" in text and ".env" in text
        assert says in text
    wanted = {"OMP_NUM_THREADS": "2", "MLX_METAL_FAST_SYNCH": "1", "PYTORCH_CUDA_ALLOC_CONF": "a:b", "mine": "ü=$x"}
    assert run_file.parse(with_value(good(), "nodes.studio.env", wanted)).nodes["studio"].env == wanted
    many = with_value(good(), "nodes.studio.env", {f"V{number}": "" for number in range(65)})
    assert "nodes.studio.env: 65 variables are too many; the maximum is 64" in problem(many)


def test_what_is_missing_is_named(path: Path, problem: Problem) -> None:
    assert problem({name: table for name, table in good().items() if name != "run"}).endswith(
        "run: is required but missing"
    )
    for key in ("run.name", "data.path", "optimizer.learning_rate"):
        raw = good()
        table, _, name = key.partition(".")
        del raw[table][name]
        assert problem(raw) == f"{path}: {key}: is required but missing"


def test_shares_sum_to_the_batch_or_leave_a_rest_to_a_node_without_one(problem: Problem) -> None:
    for shares, says in (((20, 5), "sum to 25, more than"), ((10, 5), "sum to 15, but"), ((25,), "sum to 25, more")):
        nodes = {name: {"share": share} for name, share in zip("ab", shares, strict=False)}
        assert says in problem(good() | {"nodes": nodes})
    assert run_file.parse(good() | {"nodes": {"a": {"share": 20}, "b": {}}}).nodes["b"].share is None


def test_no_toml_at_all_no_file_and_a_folder(tmp_path: Path, path: Path, problem: Problem) -> None:
    for raw in (b"[run", b"run = ", b"\x00", b"[run]\nname = 'a'\nname = 'b'", b"\xff\xfe"):
        assert problem(raw).startswith(f"{path}: not a readable TOML file")
    with pytest.raises(InvalidInputError, match="no such run file"):
        run_file.read(tmp_path / "none.toml")
    with pytest.raises(InvalidInputError, match="not a readable TOML file: Is a directory"):
        run_file.read(tmp_path)


def test_bad_overrides_are_named(problem: Problem) -> None:
    assert "table.key=value" in problem(good(), {"steps": "7"})
    assert "table.key=value" in problem(good(), {"run.": "7"})
    assert "a value, not a table" in problem(good(), {"run.steps.more": "7"})
    assert "run.steps" in problem(good(), {"run.steps": "0"})


def test_a_warmup_ratio_is_rounded_up_and_leaves_a_step(problem: Problem) -> None:
    for ratio, steps, warmup in ((0.07, 100, 7), (0.03, 110, 4), (1e-9, 100, 1), (0.999, 100, 99), (0.5, 1, 0)):
        raw = with_value(with_value(good(), "optimizer.warmup_ratio", ratio), "run.steps", steps)
        assert run_file.parse(raw).optimizer.warmup(steps) == warmup
    both = with_value(with_value(good(), "optimizer.warmup_ratio", 0.1), "optimizer.warmup_steps", 5)
    assert "optimizer.warmup_ratio: can't be combined with optimizer.warmup_steps" in problem(both)


def test_everything_wrong_is_said_at_once_by_node_field_and_choice() -> None:
    raw = good()
    raw["run"]["steps"] = 0
    raw["optimizer"]["schedule"] = "square"
    raw["nodes"] = {"mbp": {"share": -1}, "studio": {"shares": 3}}
    with pytest.raises(SeveralInvalidError) as caught:
        run_file.parse(raw, "r.toml")
    assert [str(each) for each in caught.value.each] == [
        "r.toml: run.steps: must be a whole number of at least 1",
        "r.toml: optimizer.schedule: 'square' is not one of cosine, linear, constant",
        "r.toml: nodes.mbp.share: must be a whole number of at least 1",
        "r.toml: nodes.studio.shares: unknown field; did you mean share?",
    ]
    raw = with_value(good(), "optimizer.warmup_steps", 100)
    raw["nodes"] = {"mbp": {"model_path": "x", "env": {"MASTER_PORT": "x"}}}
    with pytest.raises(SeveralInvalidError) as caught:
        run_file.parse(raw, "r.toml")
    assert [each.where.removeprefix("r.toml: ") for each in caught.value.each] == [
        "optimizer.warmup_steps",
        "nodes.mbp.env.MASTER_PORT",
        "nodes.mbp.model_path",
    ]


def varlen(**changes: Any) -> dict[str, Any]:
    raw = with_value(with_value(good(), "data.kind", "rows"), "data.packing", "best-fit")
    raw = with_value(with_value(raw, "model.dtype", "bfloat16"), "model.attention", "varlen")
    for key, value in changes.items():
        raw = with_value(raw, key.replace("__", "."), value)
    return raw


def test_a_node_has_settings_of_its_own() -> None:
    for field, whole, own in (
        ("gradient_checkpointing", "all", "none"),
        ("compile", "default", "off"),
        ("attention", "varlen", "auto"),
        ("attention", "auto", "varlen"),
    ):
        raw = varlen(model__attention="auto") | {"nodes": {"studio": {field: own}}}
        config = run_file.parse(with_value(raw, f"model.{field}", whole))
        assert [getattr(run_file.on_node(config, name).model, field) for name in ("studio", "other")] == [own, whole]


def test_packed_layers_are_not_compiled() -> None:
    for key in ("model.compile", "nodes.studio.compile"):
        raw = with_value(with_value(good(), "model.base", "nf4"), "adapter.kind", "lora")
        run_file.parse(with_value(raw, key, "off"))
        with pytest.raises(InvalidInputError, match=r"model\.compile: bitsandbytes' layers can't be compiled"):
            run_file.parse(with_value(raw, key, "default"))


def test_varlen_attention_is_refused_where_it_cannot_work() -> None:
    own = {"attention": "varlen", "compile": "default"}
    for changes, problem in (
        ({"data__packing": "none"}, 'model.attention: "varlen" is for packed samples: set data.packing = "best-fit"'),
        ({"model__dtype": "float32"}, 'model.attention: "varlen" computes in 16 bits: set model.dtype = "bfloat16"'),
        (
            {"model__attention": "auto", "nodes__studio": own},
            'nodes.studio.attention: "varlen" can\'t be combined with compile: set compile = "off"',
        ),
        (
            {"nodes__studio": {"backend": "mlx"}},
            'model.attention: "varlen" needs torch on an NVIDIA GPU, and studio is on MLX: set another backend',
        ),
    ):
        with pytest.raises(InvalidInputError) as refusal:
            run_file.parse(varlen(**changes))
        assert str(refusal.value) == f'run file: {problem}, or attention = "auto"'
    run_file.parse(varlen(model__dtype="auto"))
    run_file.parse(varlen(nodes__studio={"backend": "mlx", "attention": "auto"}))


def test_a_run_must_not_end_before_its_learning_rate_is_lowered(path: Path, problem: Problem) -> None:
    def policies(plateau: str, patience: int, held_out: float = 0.1) -> dict[str, Any]:
        policy = {"plateau": {"mode": plateau}, "early-stop": {"mode": "on", "patience": patience}}
        raw = good() | {"evaluate": {"every_steps": 10}, "policy": policy}
        return with_value(raw, "data.held_out", held_out)

    assert problem(policies("on", 5)) == (
        f"{path}: policy.early-stop.patience: 5 must be above policy.plateau.patience = 5: "
        "the run would end before its rate is lowered"
    )
    run_file.parse(policies("off", 1))
    run_file.parse(policies("on", 6))
    assert "policy.plateau.mode: 'on' needs held-out samples: set data.held_out or" in problem(policies("on", 6, 0.0))


def test_an_override_of_nodes_names_all_that_take_part(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    raw = with_value(good(), "nodes", {"a": {"share": 4, "micro": 2}, "b": {}})
    file.write_bytes(tomli_w.dumps(raw).encode())

    def nodes(**overrides: str) -> dict[str, run_tables.NodeTable]:
        return run_file.read(file, {key.replace("_", "."): text for key, text in overrides.items()}).nodes

    table = run_tables.NodeTable
    assert nodes(nodes="a,b") == {"a": table(share=4, micro=2), "b": table()}
    assert nodes(nodes="a") == {"a": table(micro=2)}
    with pytest.raises(InvalidInputError, match="leaves out"):
        nodes(nodes_c_micro="4", nodes="a,b")
    assert nodes(nodes_c_micro="4", nodes="b, c") == {"b": table(), "c": table(micro=4)}
    file.write_bytes(tomli_w.dumps({**raw, "nodes": {}}).encode())
    assert nodes(nodes_a_micro="4", nodes="a,b") == {"a": table(micro=4), "b": table()}
    with pytest.raises(InvalidInputError, match="nodes"):
        nodes(nodes="a,,b")


def test_the_example_run_file_leaves_nothing_out() -> None:
    example = Path(__file__).parents[3] / "examples" / "run.toml"
    assert run_file.read(example).run.steps == 60_000
    raw = tomllib.loads(example.read_text())
    tables = {field.name: field.type for field in msgspec.structs.fields(run_tables.RunFile)}
    shown = ("run", "model", "data", "batch", "optimizer", "checkpoint", "evaluate", "group", "adapter")
    absent = {
        run_tables.RunTable: {"epochs"},
        run_tables.NodeTable: {"shared_threads"},
    }  # steps stand for them; by the lead
    for table, kind in [(raw[name], tables[name]) for name in shown] + [(raw["nodes"]["studio"], run_tables.NodeTable)]:
        left_out = absent.get(kind, set())
        assert set(table) | left_out == {field.encode_name for field in msgspec.structs.fields(kind)}


def test_names_of_other_trainers_are_explained_by_fields_that_exist() -> None:
    for name, meant in NAMES_ELSEWHERE.items():
        table, dot, field = meant.partition(".")
        if dot:
            kind = next(each.type for each in msgspec.structs.fields(RunFile) if each.name == table)
            assert field in {each.encode_name for each in msgspec.structs.fields(kind)}, name


def test_earlier_names_of_settings_are_read_with_a_hint_and_sent_to_agents(problem: Problem, tmp_path: Path) -> None:
    before, now = good(), good()
    for policy, old, new, value in (
        ("plateau", "least_rate", "min_rate", 1e-5),
        ("spike", "least_back", "min_back", 7),
        ("spike", "most_times", "max_times", 3),
    ):
        before = with_value(before, f"policy.{policy}.{old}", value)
        now = with_value(now, f"policy.{policy}.{new}", value)
    assert run_file.parse(before) == run_file.parse(now)
    assert run_file.to_message(run_file.parse(now))["policy"] == before["policy"]  # as agents of 0.2.0 read it
    assert "max_times" in problem(with_value(before, "policy.spike.max_times", 3))
    file = tmp_path / "run.toml"
    file.write_text(tomli_w.dumps(before))
    assert [hint.partition(" ")[0] for hint in run_file.old_names(file)] == [
        "policy.plateau.least_rate",
        "policy.spike.least_back",
        "policy.spike.most_times",
    ]
    file.write_text(tomli_w.dumps(now))
    assert run_file.old_names(file) == ()


def test_settings_that_are_gone_are_left_out_at_their_default_and_refused_otherwise(problem: Problem) -> None:
    kept = with_value(good(), "optimizer.offload", False)  # as version 0.2.0 kept each run file
    kept = with_value(kept, "policy.clip-bound", {"steps": 100, "scale": 0.01})
    assert run_file.parse(kept) == run_file.parse(good())
    assert "optimizer.offload" in (text := problem(with_value(good(), "optimizer.offload", True)))
    assert "paged-adamw" in text
    assert "model.dtype" in (text := problem(with_value(good(), "model.dtype", "bf16-sr"))) and "bfloat16" in text
