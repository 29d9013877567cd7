"""The report as lines and as one object."""

import json
from pathlib import Path

from trainctl.protocol.machine.check_outcome import CheckOutcome, absent, combined, failed, judged, passed
from trainctl.tui.selftest.redaction import redactor
from trainctl.tui.selftest.report import CheckResult, document, has_failed, line, summary
from trainctl.tui.selftest.run_selftest import default_file, write

RESULTS = (
    CheckResult("cpu", "products", passed("torch cpu: 3e-7", difference=3e-7), 1.25, 40),
    CheckResult("group", "losses", failed("anna lost /home/anna/x", path="/home/anna"), 61.0, 60),
    CheckResult("nvml", "devices", absent(), 0.0, 60),
)
FACTS = {"trainctl": "0.1.0", "started_at": "2026-11-26T18:45:00Z", "system": "Darwin"}


def test_a_line_says_the_result_the_time_and_the_first_evidence() -> None:
    assert line(RESULTS[0]) == "ok        cpu              1.2 s  torch cpu: 3e-7"
    assert line(RESULTS[2]) == "not here  nvml             0.0 s  devices"
    assert summary(RESULTS) == "1 ok, 1 failed, 1 not here"
    assert has_failed(RESULTS) and not has_failed(RESULTS[::2])


def test_the_object_has_each_check_and_nothing_that_identifies() -> None:
    made = document(RESULTS, FACTS, 62.34, redactor(["anna"]))
    assert (made["format"], made["ok"], made["seconds"]) == (1, False, 62.3)
    assert made["counts"] == {"ok": 1, "failed": 1, "not here": 1}
    assert [one["name"] for one in made["checks"]] == ["cpu", "group", "nvml"]
    assert made["checks"][0]["figures"] == {"difference": 3e-7}
    assert made["checks"][1]["evidence"] == ["<name> lost <path>"]
    assert "anna" not in json.dumps(made)


def test_a_machines_name_changes_no_word_of_the_report() -> None:
    names = ["cpu", "failed", "ok", "figures", "Darwin", "difference", "losses", "counts"]
    made, plain = (document(RESULTS[:1], FACTS, 1.0, redactor(some)) for some in (names, []))
    assert made == plain


def test_the_file_is_named_by_system_and_time(tmp_path: Path) -> None:
    made = document(RESULTS, FACTS, 1.0, str)
    name = default_file(made).name
    assert name.startswith("trainctl-selftest-") and name.endswith("-20261126184500.json")
    write(made, tmp_path / name)
    assert json.loads((tmp_path / name).read_text("utf-8")) == made
    assert [one.name for one in tmp_path.iterdir()] == [name]


def test_parts_are_one_result() -> None:
    both = combined([("torch", passed("good", a=1)), ("mlx", failed("bad", a=2))])
    assert (both.status, both.evidence) == ("failed", ("mlx: bad", "torch: good"))
    assert both.figures == {"torch": {"a": 1}, "mlx": {"a": 2}}
    assert combined([("torch", passed()), ("mlx", absent())]).status == "ok"
    assert combined([("mlx", absent("why")), ("torch", passed("good"))]).evidence == (
        "torch: good",
        "mlx: not here: why",
    )
    assert combined([("torch", absent("why"))]) == CheckOutcome("not here", ("torch: why",))
    assert judged([], "said").status == "ok"
    assert judged(["fault"], "said").evidence == ("fault", "said")
