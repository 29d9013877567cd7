"""The cost of a run: from a price that comes while it trains, over a pause, its end and its resume."""

import time

from tests.asking import run_of
from tests.cluster.in_process import blocking_cluster
from tests.cluster.run_files import FOREVER, on
from tests.cluster.waits import wait_for_end, wait_for_step
from tests.waiting import until

from trainctl.protocol import messages as m
from trainctl.protocol.batch.cost import spent_by
from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.config import cluster_file

PER_SECOND = 3600
"""A price by which a second costs 1."""


def cost_of(client: BlockingClient) -> m.RunCost:
    view = run_of(client)
    assert view is not None and view.cost is not None
    return view.cost


def test_a_price_that_comes_while_a_run_trains_counts_from_its_start_and_not_while_it_is_away(tmp_path, run_config):
    with blocking_cluster(tmp_path) as free:
        with free.client("alpha") as client:
            config = run_config(run__steps=FOREVER, nodes=on("alpha"))
            run = client.send("start-run", {"config": config}).run
            first = wait_for_step(client, 3)
            assert first.run.cost is None and "cost" not in first.last_step.values
        alpha = free["alpha"].inner
        priced = free.file.read_text().replace("[nodes.alpha]\n", f"[nodes.alpha]\nprice_per_hour = {PER_SECOND}\n")
        free.file.write_text("currency = 'EUR'\n" + priced)
        alpha.cluster = cluster_file.read(free.file)
        free["alpha"].kill()
        free["alpha"].start()
        with free.client("alpha") as client:
            step = wait_for_step(client, first.run.step + 5).last_step
            found, now = cost_of(client), time.time()
            assert (found.currency, found.per_hour, found.unpriced) == ("EUR", PER_SECOND, ())
            assert first.last_step.step_seconds < spent_by(found, now) <= now - first.run.started_at + 1
            assert 0 < step.values["cost"] <= spent_by(found, now)
            assert client.send("pause", {}).state == "applied"
            assert cost_of(client).per_hour == PER_SECOND
            client.send("stop", {"checkpoint": True})
            wait_for_end(client)
            ended = until(lambda: (cost := cost_of(client)).per_hour == 0 and cost, 30, "the end of the cost")
            began = time.time()
            assert client.send("start-run", {"resume": run}).state == "applied"
            wait_for_step(client, step.step + 2)
            again = spent_by(cost_of(client), time.time())
            assert ended.spent < again <= ended.spent + time.time() - began + 1
            (kept,) = [one for one in client.ask(m.RunsRequest).runs if one.run == run]
            assert kept.cost is not None and kept.cost.per_hour == PER_SECOND and kept.cursor
