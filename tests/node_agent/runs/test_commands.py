"""Commands to a live run: applied at one named step or refused by field, once, and all of it in the record."""

import random

import pytest
from tests.asking import run_of
from tests.cluster.run_files import FOREVER
from tests.cluster.waits import wait_for_end, wait_for_step
from tests.tui.support.cli_calls import call
from tests.waiting import until

from trainctl.protocol import messages as m
from trainctl.protocol.errors import ExpiredError
from trainctl.protocol.record.schema import open_for_reading
from trainctl.protocol.wire.codec import decode_order

SAMPLES = 12
COMMANDS = 80


def random_command(chance: random.Random) -> tuple[str, dict, str | None]:
    """One that is mostly sensible: about a fifth are wrong in a way that only the agent, or anyone, can tell."""
    pick = chance.random()
    if pick < 0.35:
        return (
            "resize-batch",
            {"micro": chance.choice([0, 1, 2, 3, 4, 6, 12, 13, 99])},
            chance.choice([None, "box", "nowhere"]),
        )
    if pick < 0.55:
        value = chance.choice([1e-4, 1e-3, 3e-3, -1.0, 5e-3])
        return "set-lr", {"value": value, "schedule": chance.choice(["set", "scale"])}, None
    if pick < 0.7:
        return "set-global-batch", {"value": chance.choice([4, 12, 12, 24, 0])}, None
    if pick < 0.8:
        return "note", {"text": chance.choice(["a note", "another", ""])}, None
    if pick < 0.9:
        return "evaluate", {}, None
    if pick < 0.93:
        return "checkpoint", {}, None
    return chance.choice(
        [("unheard-of", {}, None), ("resize-batch", {"micro": 2, "extra": 1}, None), ("note", {}, None)]
    )


def test_commands_are_applied_at_one_named_step_or_refused_by_field(live):
    chance = random.Random(11)
    with live.client() as client:
        run = run_of(client).run
        replies = []
        for _ in range(COMMANDS):
            verb, args, node = random_command(chance)
            replies.append((verb, args, client.send(verb, args, node=node)))
        for verb, value in (("set-global-batch", SAMPLES), ("set-lr", 3e-3)):
            assert client.send(verb, {"value": value, "schedule": "set"}).state == "applied"
    applied = [(verb, args, reply) for verb, args, reply in replies if reply.state == "applied"]
    refused = [(verb, args, reply) for verb, args, reply in replies if reply.state != "applied"]
    assert len(applied) >= 0.6 * COMMANDS
    assert all(reply.step is not None for _, _, reply in applied)
    for verb, args, reply in refused:
        assert (reply.state, bool(reply.field), bool(reply.reason)) == ("rejected", True, True), (verb, args, reply)
    check_record(live.run_paths(run), applied)


def check_record(paths, applied) -> None:
    """Each edit stands in the plan of the step it names, and in the events with before and after; what was refused is
    of no step."""
    record = open_for_reading(paths.record)
    refused = record.execute("SELECT step FROM events WHERE outcome = 'rejected'").fetchall()
    assert {step for (step,) in refused} <= {None}
    events = {
        row[0]: row[1:]
        for row in record.execute("SELECT command, step, before, after FROM events WHERE command IS NOT NULL")
    }
    plans: dict[int, m.StepPlan] = {}
    for (body,) in record.execute("SELECT body FROM plans WHERE kind = 'train'"):
        plan = decode_order(body)
        plans[plan.step] = plan
    done = {
        row[0]: row[1:]
        for row in record.execute(
            "SELECT s.step, r.micro_batch, r.samples, s.learning_rate, s.global_batch"
            " FROM steps s JOIN rank_steps r USING (step, term, n) WHERE NOT s.retracted"
        )
    }
    record.close()
    for verb, args, reply in applied:
        if verb == "note":
            continue
        step, before, after = events[reply.id]
        assert step == reply.step
        if verb in ("evaluate", "checkpoint"):
            continue
        assert before and after
        assert reply.id in plans[step].commands
        if verb == "resize-batch":
            assert plans[step].work[0].micro_batch == done[step][0] == args["micro"]
        elif verb == "set-global-batch":
            assert plans[step].global_batch == done[step][1] == done[step][3] == args["value"]
        else:
            assert plans[step].learning_rate == done[step][2] == pytest.approx(args["value"], rel=1e-6)


def test_while_paused_commands_apply_at_once_and_name_the_step_to_come(live):
    with live.client() as client:
        paused = client.send("pause", {})
        stood = run_of(client)
        assert (stood.state, stood.step) == ("paused", paused.step)
        resized = client.send("resize-batch", {"micro": 1})
        assert (resized.state, resized.step) == ("applied", paused.step + 1)
        assert client.send("evaluate", {}).state == "applied"
        assert run_of(client).step == paused.step
        generation = run_of(client).generation
        resumed = client.send("resume", {})
        assert resumed.step == paused.step + 1
        assert run_of(client).generation > generation
        around = client.ask(m.StepsRequest, after_step=paused.step - 2, limit=3).steps
        assert [step.step for step in around] == [paused.step - 1, paused.step, paused.step + 1]


def test_a_command_not_applied_in_time_says_so(live):
    with live.client() as client, pytest.raises(ExpiredError):
        client.send("checkpoint", {}, timeout_seconds=0.0001)


def test_a_verb_that_the_run_does_not_take_is_refused_with_the_same_words_everywhere(agent, run_config):
    why = "there are no held-out samples: data.held_out is 0"
    with agent.client() as client:
        config = run_config(run__steps=FOREVER, data__held_out=0)
        client.send("start-run", {"config": config}, wait="accepted")
        run = wait_for_step(client, 1).run
        assert (run.kind, run.verbs) == ("hosted", (("evaluate", why),))
        assert client.ask(m.RunsRequest).runs[0].kind == "hosted"
        (live,) = client.ask(m.SnapshotRequest, 0).runs
        assert (live.run, live.state, live.kind, live.nodes) == (run.run, "running", "hosted", ("box",))
        reply = client.send("evaluate", {})
        assert (reply.state, reply.field, reply.reason) == ("rejected", "verb", why)
        for wait in ("applied", "none"):
            done = call("send", "evaluate", "--wait", wait, "--connect", agent.address)
            assert done.returncode == 3 and f"evaluate rejected: {why}" in done.stderr.replace("verb: ", ""), done
        assert client.send("stop", {"checkpoint": False}).state == "applied"
        wait_for_end(client)
        until(
            lambda: client.ask(m.SnapshotRequest, 0).runs == (), what="a list of live runs without one that has ended"
        )


def test_a_paused_run_is_still_paused_after_its_agent_came_back(live):
    agent = live
    with agent.client() as client:
        paused = client.send("pause", {})
        client.send("resize-batch", {"micro": 1})
        agent.kill()
        agent.start()
        until(lambda: run_of(client).ranks[0].state == "paused", what="the adopted rank")
        assert run_of(client).step == paused.step
        assert client.send("resume", {}).step == paused.step + 1
        assert run_of(client).ranks[0].micro_batch == 1
