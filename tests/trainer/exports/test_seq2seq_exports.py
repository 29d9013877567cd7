"""Exports of encoder-decoder models open in peft and transformers; MLX's forms are refused."""

import json

import pytest
from tests.trainer.support.seq2seq_model import make_seq2seq_model
from tests.trainer.support.trained_run import TrainedRun

from trainctl.trainer.exports import export_model

LORA = {"kind": "lora", "rank": 4, "alpha": 16.0}


@pytest.mark.parametrize(
    ("name", "adapter", "forms"), [("t5", LORA, ("peft", "fused")), ("bart", {}, ("fused",))], ids=["t5", "bart"]
)
def test_each_form_is_the_trained_model(tmp_path, capsys, name, adapter, forms):
    model = make_seq2seq_model(tmp_path / "model", name)
    run = TrainedRun(tmp_path / "run-1", model, "torch", adapter, objective="seq2seq")
    capsys.readouterr()

    def export(form):
        words = [f"--run-directory={run.paths.directory}", f"--to={form}", f"--output={tmp_path / form}"]
        status = export_model.main(words)
        return {**json.loads(capsys.readouterr().out), "status": status}

    for form in forms:
        made = export(form)
        assert (made["status"], made["difference"] <= 1e-5) == (0, True), made
        assert "ForSeq2SeqLM" in made["load"][0]
        assert "pipeline_tag: text2text-generation" in (tmp_path / form / "README.md").read_text("utf-8")
    if "peft" in forms:
        assert json.loads((tmp_path / "peft" / "adapter_config.json").read_text())["task_type"] == "SEQ_2_SEQ_LM"
    refused = export("mlx")
    assert refused["problem"].startswith("mlx-lm has no encoder-decoder models, so there is no mlx: use --to fused")
    assert not (tmp_path / "mlx").exists()
