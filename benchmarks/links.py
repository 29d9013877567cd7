"""Forming a ring and summing over it with 1, 2 and 4 links to a neighbour, on several kinds of network.

    sudo python -m benchmarks links [--links 1,2,4] [--sums N] [--networks clean,loss,...] [--congestion cubic]

Two ranks in network namespaces of their own (Linux, root), 8 MiB a sum. `clean` is a virtual cable; the others let
50 or (`wide`) 200 Mbit/s through each way (tbf), with a short queue where packets are to be lost. Where there is a
delay, packets go by a relay in this program that holds each back, so that TCP itself meets the round trip;
`wide-window` has small receive buffers too. Prints a table and one JSON object; exits 1 if forming took longer than
0.5 s and four round trips.
"""

import argparse
import collections
import contextlib
import fcntl
import json
import multiprocessing
import os
import select
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

from trainctl.protocol.config.run_tables import GroupTable
from trainctl.protocol.messages import Form, Generation, Offer
from trainctl.trainer.collective.group import ReducerGroup
from trainctl.trainer.collective.membership import Membership
from trainctl.trainer.collective.shared_buffer import WORD_BYTES, Layout

WORDS = 1 << 21
FORMINGS, BAR_SECONDS, BAR_ROUND_TRIPS = 5, 0.5, 4
INTERFACE, LAN = "lan0", "10.78.43"
_SET_INTERFACE, _PACKETS_ONLY = 0x400454CA, 0x1001  # TUNSETIFF; IFF_TUN | IFF_NO_PI


class Network(NamedTuple):
    mbit: int = 0  # each way; 0: as fast as it goes
    queue_kb: int = 0  # before packets are dropped
    round_trip: float = 0.0  # seconds, by the relay
    window_kb: int = 0  # of TCP's largest receive buffer; 0: the machine's own


NETWORKS = {
    "clean": Network(),
    "loss": Network(50, 16),
    "20ms": Network(50, 250, 0.02),
    "20ms-loss": Network(50, 16, 0.02),
    "50ms": Network(50, 250, 0.05),
    "50ms-loss": Network(50, 16, 0.05),
    "wide": Network(200, 1000, 0.05),
    "wide-loss": Network(200, 64, 0.05),
    "wide-window": Network(200, 1000, 0.05, window_kb=256),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--links", default="1,2,4")
    parser.add_argument("--sums", type=int, default=7, help="with each number of links on each network")
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--congestion", default="cubic", help="TCP's congestion control in the namespaces")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        return be_rank(options.rank, int(options.links))
    found: list[dict[str, Any]] = []
    print(f"{'network':>10} {'links':>5} {'formed s':>8} {'worst':>5} {'MB/s':>6} {'least':>6} {'most':>6}")
    for name in options.networks.split(","):
        with two_hosts(NETWORKS[name], options.congestion) as hosts:
            for links in options.links.split(","):
                found.append({"network": name, **measure(hosts, int(links), options.sums)})
                print(row(found[-1]), flush=True)
    print(json.dumps({"congestion": options.congestion, "words": WORDS, "found": found}))
    return 0 if all(max(one["formed"]) <= bar(one["network"]) for one in found) else 1


def bar(network: str) -> float:
    """Seconds that forming may take."""
    return BAR_SECONDS + BAR_ROUND_TRIPS * NETWORKS[network].round_trip


def row(one: dict[str, Any]) -> str:
    formed, rates = one["formed"], one["megabytes_per_second"]
    return (
        f"{one['network']:>10} {one['links']:>5} {statistics.median(formed):>8.2f} {max(formed):>5.2f} "
        f"{statistics.median(rates):>6.1f} {min(rates):>6.1f} {max(rates):>6.1f}"
    )


# ------------------------------------------------------------ the ranks


def measure(hosts: Sequence[str], links: int, sums: int) -> dict[str, Any]:
    """Seconds of each forming but the first, for which engines are imported; MB/s of each sum but the first."""
    with contextlib.ExitStack() as ended:
        ranks = [ended.enter_context(rank_on(host, number, links)) for number, host in enumerate(hosts)]
        formed = []
        for n in range(1, FORMINGS + 2):
            endpoints = ask(ranks, {"offer": n})
            formed.append(max(ask(ranks, {"form": n, "endpoints": endpoints})))
        seconds = [max(ask(ranks, {"sum": n})) for n in range(sums + 1)]
    rates = [WORDS * WORD_BYTES / 1e6 / taken for taken in seconds[1:]]
    return {"links": links, "formed": formed[1:], "megabytes_per_second": rates}


@contextlib.contextmanager
def rank_on(host: str, number: int, links: int) -> "Iterator[subprocess.Popen[str]]":
    command = [sys.executable, __file__, "--rank", str(number), "--links", str(links)]
    process = subprocess.Popen(
        ["ip", "netns", "exec", host, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def ask(ranks: "Sequence[subprocess.Popen[str]]", order: dict[str, Any]) -> list[Any]:
    """Return the ranks' answers to an order that all are given at once."""
    for rank in ranks:
        assert rank.stdin is not None
        print(json.dumps(order), file=rank.stdin, flush=True)
    return [json.loads(rank.stdout.readline()) for rank in ranks if rank.stdout is not None]


def be_rank(number: int, links: int) -> int:
    """Carry out the orders on standard input; answers are what was offered, or the seconds that it took."""
    membership = Membership(number, Layout({"a": (WORDS,)}, "x"), GroupTable(links_per_peer=links), INTERFACE, "ring")
    group: ReducerGroup | None = None
    for line in sys.stdin:
        order, begun = json.loads(line), time.perf_counter()
        if "offer" in order:
            if group is not None:
                group.close()
            offer = Offer(run="r", generation=Generation(1, order["offer"]), engine="ring")
            print(json.dumps(membership.offer(offer)), flush=True)
            continue
        if "form" in order:
            group = formed(membership, order["form"], order["endpoints"])
        else:
            assert group is not None
            group.share(0, lambda arrays: None)
        print(time.perf_counter() - begun, flush=True)
    membership.close()
    if group is not None:
        group.close()
    return 0


def formed(membership: Membership, n: int, endpoints: list[list[str]]) -> ReducerGroup:
    ends = tuple(tuple(one) for one in endpoints)
    generation = Generation(1, n)
    order = Form(
        run="r",
        generation=generation,
        engine="ring",
        ranks=(0, 1),
        endpoints=ends,
        layout_digest="x",
        deadline_seconds=60.0,
    )
    group = membership.form(order)
    assert isinstance(group, ReducerGroup)
    group.complete()
    group.formed()
    return group


# ------------------------------------------------------------ the network


@contextlib.contextmanager
def two_hosts(network: Network, congestion: str) -> Iterator[list[str]]:
    """Names of two network namespaces that such a network joins; they are removed at the end."""
    hosts = [f"links{os.getpid()}{side}" for side in "ab"]
    with contextlib.ExitStack() as removed:
        for host in hosts:
            run("ip", "netns", "add", host)
            removed.callback(run, "ip", "netns", "del", host)
        if network.round_trip:
            removed.enter_context(relayed(hosts, network.round_trip / 2))
        else:
            ends = [["name", INTERFACE, "netns", host] for host in hosts]
            run("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for number, host in enumerate(hosts, start=1):
            run("ip", "-n", host, "addr", "add", f"{LAN}.{number}/24", "dev", INTERFACE)
            run("ip", "-n", host, "link", "set", INTERFACE, "up")
            run("ip", "-n", host, "route", "replace", f"{LAN}.0/24", "dev", INTERFACE, "congctl", congestion)
            if network.window_kb:
                window = f"net.ipv4.tcp_rmem=4096 131072 {network.window_kb * 1000}"
                run("ip", "netns", "exec", host, "sysctl", "-qw", window)
            if network.mbit:
                narrow(host, network)
        yield hosts


def narrow(host: str, network: Network) -> None:
    run("ip", "-n", host, "link", "set", INTERFACE, "gso_max_segs", "1")  # so that single packets are dropped
    limits = ["rate", f"{network.mbit}mbit", "burst", "16kb", "limit", f"{network.queue_kb}kb"]
    run("tc", "-n", host, "qdisc", "add", "dev", INTERFACE, "root", "tbf", *limits)


@contextlib.contextmanager
def relayed(hosts: Sequence[str], seconds: float) -> Iterator[None]:
    """Join the hosts by a relay that takes so long one way."""
    ends = []
    for host in hosts:
        ends.append(os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK))
        fcntl.ioctl(ends[-1], _SET_INTERFACE, struct.pack("16sH22x", host.encode(), _PACKETS_ONLY))
        run("ip", "link", "set", host, "netns", host, "name", INTERFACE)
    process = multiprocessing.get_context("fork").Process(target=relay, args=(ends, seconds), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()
        for end in ends:
            os.close(end)


def relay(ends: list[int], seconds: float) -> NoReturn:
    """Pass packets on from either end to the other, each after so many seconds."""
    os.nice(-20)
    held: dict[int, collections.deque[tuple[float, bytes]]] = {end: collections.deque() for end in ends}  # by target
    while True:
        first = min((queue[0][0] for queue in held.values() if queue), default=None)
        select.select(ends, [], [], None if first is None else max(0.0, first - time.monotonic()))
        for source, target in (ends, ends[::-1]):
            with contextlib.suppress(BlockingIOError):
                while True:
                    held[target].append((time.monotonic() + seconds, os.read(source, 1 << 16)))
        for target, queue in held.items():
            while queue and queue[0][0] <= time.monotonic():
                with contextlib.suppress(OSError):  # its interface is not up yet
                    os.write(target, queue.popleft()[1])


def run(*command: str) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    sys.exit(main())
