"""Rows on their way: their JSON, and which wait for what."""

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainctl.guest import rows
from trainctl.guest.rows import MAX_METRICS, Outbox, RowEncoder, settle, steps_line
from trainctl.protocol.messages.guests import RunEvent, StepsLine


def raw(number: int, **metrics: Any) -> Any:
    return (number, 1.5, 0.25, metrics.pop("loss", 2.0), None, metrics.pop("tokens", None), None, metrics, None)


def read(text: bytes) -> StepsLine:
    return msgspec.json.decode(text, type=StepsLine, strict=False)


def drained(outbox: Outbox) -> list[tuple[str, int, int]]:
    """Kind, last number and count of each line that waits."""
    lines = []
    while (batch := outbox.take()) is not None:
        lines.append((batch[0], batch[1], len(batch[2])))
    return lines


def filled(count: int) -> tuple[Outbox, RowEncoder]:
    outbox, encoder = Outbox(), RowEncoder()
    for number in range(1, count + 1):
        outbox.add(raw(number), encoder)
    return outbox, encoder


def test_the_agent_reads_what_is_encoded() -> None:
    outbox, encoder = Outbox(), RowEncoder()
    outbox.add((7, 1.5, 0.25, math.nan, 8, 512, 1e-3, {"grad_norm": math.inf, "Train KL": 1}, {"data": 0.1}), encoder)
    batch = outbox.take()
    assert batch is not None
    (step,) = read(steps_line(batch[2], ())).steps
    assert math.isnan(step.loss or 0) and step.grad_norm == math.inf and step.values == {"user:train_kl": 1.0}
    assert (step.step, step.samples, step.tokens, step.learning_rate, step.parts[0].phases.data) == (
        7,
        8,
        512,
        1e-3,
        0.1,
    )


@pytest.mark.parametrize("count", [math.nan, math.inf, 12.5, -3.0, 10**30, 10**400])
def test_the_agent_reads_a_row_whatever_its_counts_are(count: float) -> None:
    encoder = RowEncoder()
    (step,) = read(steps_line([b'{"step":1,' + encoder.encode(raw(1, tokens=count, global_batch=count))], ())).steps
    assert step.tokens == step.global_batch == (12 if count == 12.5 else 0 if count < 0 else step.tokens)


def test_the_agent_reads_text_that_is_not_utf_8() -> None:
    text = rows.line("event", severity="info", text="model\udcff.pt über", number=1)
    assert msgspec.json.decode(text, type=RunEvent).text == "model?.pt über"


def test_what_is_no_number_is_said_once() -> None:
    encoder = RowEncoder()
    for _ in range(3):
        assert b'"values":{}' in encoder.encode(raw(1, kl="high", tokens=[1, 2]))
    assert len(encoder.complaints) == 2 and "str is no number" in encoder.complaints[1]
    encoder.complaints.clear()
    encoder.encode(raw(1, **{f"m{number}": 1.0 for number in range(MAX_METRICS + 5)}))
    assert len(encoder.complaints) == 1


def test_an_event_and_a_rewind_keep_their_place() -> None:
    outbox, encoder = filled(3)
    outbox.add({"severity": "info", "text": "hm", "step": 3}, encoder)
    outbox.add(1, encoder)
    outbox.add(raw(2), encoder)
    texts = next(batch for batch in outbox.unspooled() if batch[0] == "event")[2]
    assert msgspec.json.decode(texts[0], type=RunEvent).step == 3
    assert drained(outbox) == [("row", 3, 3), ("event", 0, 1), ("rewind", 1, 0), ("row", 2, 1)]
    outbox.confirm(3, 1)  # the rewind has not been carried out: row 2 is not that of the record
    outbox.send_again()
    assert drained(outbox) == [("rewind", 1, 0), ("row", 2, 1)]
    outbox.confirm(1, 1, rewound=True)
    outbox.send_again()
    assert drained(outbox) == [("row", 2, 1)]


def test_numbers_count_from_what_the_record_has() -> None:
    outbox, _ = filled(2)
    outbox.base = 40
    batch = outbox.take()
    assert batch is not None and [step.step for step in read(steps_line(batch[2], ())).steps] == [41, 42]
    outbox.confirm(41, 0)
    outbox.send_again()
    assert drained(outbox) == [("row", 2, 1)]


def test_the_oldest_rows_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MAX_ROWS", 10)
    outbox, encoder = filled(15)
    assert outbox.dropped == 5 and drained(outbox) == [("row", 15, 10)]
    outbox.mark(spooled=True)
    for number in range(16, 21):
        outbox.add(raw(number), encoder)
    assert outbox.dropped == 5 and outbox.unspooled_rows == 5 and [batch[1] for batch in outbox.unspooled()] == [20]


@given(st.lists(st.one_of(st.integers(1, 40), st.sampled_from(["take", "lost", "spool"])), max_size=60))
def test_each_row_arrives_in_order_whatever_is_lost(happenings: list[Any]) -> None:
    """An agent that records from its newest step on has each step once, in order."""
    outbox, encoder = Outbox(), RowEncoder()
    last = recorded = 0
    for happening in happenings:
        if isinstance(happening, int):
            for _ in range(happening):
                last += 1
                outbox.add(raw(last), encoder)
        elif happening == "take" and (batch := outbox.take()) is not None:
            numbers = [step.step for step in read(steps_line(batch[2], ())).steps]
            assert numbers[0] <= recorded + 1
            recorded = max(recorded, numbers[-1])
            outbox.confirm(recorded, 0)
        elif happening == "lost":
            outbox.take()
            outbox.send_again()
        elif happening == "spool":
            outbox.mark(spooled=True)
    outbox.send_again()
    while (batch := outbox.take()) is not None:
        recorded = max(recorded, batch[1])
    assert recorded == last


def test_tensors_are_read_later_unless_they_change() -> None:
    torch = pytest.importorskip("torch")
    loss = torch.ones((), requires_grad=True) * 3
    settled, version = settle(loss)
    assert not settled.requires_grad and version == loss._version
    total = torch.zeros(())
    metrics = {"total": settle(total), "array": settle(loss.detach().numpy())}
    total += 1
    encoder = RowEncoder()
    assert b'"values":{"user:array":3.0}' in encoder.encode(raw(1, loss=(settled, version), **metrics))
    assert "changed in place" in encoder.complaints[0]


def test_values_that_change_from_step_to_step_keep_their_names() -> None:
    encoder, outbox = RowEncoder(), Outbox()
    many = {f"m{number}": float(number) for number in range(MAX_METRICS - 1)}
    given = [{"b": 1.0}, {"a": 2.0, "b": 3.0}, {"bad": "x", "a": 4.0}, {**many, "a": 5.0, "grad_norm": 6.0}, {"a": 7.0}]
    for number, metrics in enumerate(given, 1):
        outbox.add((number, 1.5, 0.25, None, 2, 2**70, None, dict(metrics), {"data": 0.5, "io": 0.25}), encoder)
    texts = [text for kind, _, texts in outbox.unspooled() if kind == "row" for text in texts]
    steps = read(steps_line(texts, ())).steps
    own = [{name.removeprefix("user:"): value for name, value in step.values.items()} for step in steps]
    assert [one.pop("io_seconds") for one in own] == [0.25] * 5
    assert own[:3] == [{"b": 1.0}, {"a": 2.0, "b": 3.0}, {"a": 4.0}] and own[4] == {"a": 7.0}
    assert own[3]["a"] == 5.0 and len(own[3]) < MAX_METRICS and steps[3].grad_norm == 6.0
    assert steps[4].parts[0].phases.data == 0.5 and steps[4].parts[0].samples == 2 and steps[4].tokens == 2**63 - 1
