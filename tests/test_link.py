"""The link that "shm" emulates, against the α-β model: what it predicts is what a clock shows.

Emulated times are so long that the machine's own do not count beside them. What is shorter than
predicted is wrong; what is longer by more than 15 % is tried again, for the machine is shared.
"""

import json
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

import minidist as md
from minidist.backend.link import VARIABLE, Egress, Link
from minidist.collectives import cost

pytestmark = pytest.mark.timeout(60)

LINK = Link(gbps=0.04, latency_us=2000)  # 5 MB a second, and 2 ms a message
SECONDS_A_BYTE = 8 / 0.04e9
N = 125_000  # elements of four bytes: 100 ms
NBYTES = 4 * N
TRIES = 4


@pytest.fixture(scope="module")
def ranks():
    with md.ranks(4, backend="shm", link=LINK) as pool:
        yield pool


def takes(ranks, function, *args, seconds, tolerance=0.15):
    """Every rank's `function` returns how long something took: the longest is as predicted."""
    for _ in range(TRIES):
        longest = max(ranks(function, *args))
        assert longest > seconds * 0.999
        if longest < seconds * (1 + tolerance):
            return
    raise AssertionError(f"{longest:.4f} s, not {seconds:.4f} s")


# ---- the model ----------------------------------------------------------------------------


def test_a_link_is_latency_and_bytes():
    assert Link(8, 5).seconds(1e9) == pytest.approx(1 + 5e-6)
    assert Link(8, 5).seconds(1e9, messages=3) == pytest.approx(1 + 15e-6)
    assert Link(8).seconds(0) == 0
    assert LINK.seconds(NBYTES) == pytest.approx(0.002 + NBYTES * SECONDS_A_BYTE)


@pytest.mark.parametrize("numbers", [(0,), (-1,), (float("nan"),), (1, -1), (1, float("nan"))])
def test_a_link_that_makes_no_sense_is_refused(numbers):
    with pytest.raises(
        ValueError, match="a link has more than 0 Gb/s, and 0 µs or more of latency"
    ):
        Link(*numbers)


def test_a_link_between_nodes_has_no_other():
    with pytest.raises(ValueError, match="has no other link between nodes"):
        Link(1, inter=Link(1, inter=Link(1)))


@pytest.mark.parametrize("link", [None, Link(10, 20), Link(100, 5, inter=Link(10, 20.5))])
def test_ranks_are_told_the_link_by_their_environment(link, monkeypatch):
    (told,) = Link.environ(link).items()
    monkeypatch.setenv(*told)
    assert Link.here() == link
    monkeypatch.delenv(VARIABLE)
    assert Link.here() is None
    assert json.loads(told[1]) is None or link is not None


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_only_shm_emulates_a_link(backend):
    with pytest.raises(ValueError, match='only backend "shm" emulates a link'):
        md.ranks(2, backend=backend, link=LINK)


def test_messages_leave_one_after_another_whatever_thread_they_come_from():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    egress, start = Egress(), time.monotonic()
    threads = [
        threading.Thread(target=lambda: [egress.leave(0.5) for _ in range(500)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert start + 1000.5 <= egress.leave(0.5) < start + 1000.5 + 30
    egress.busy(start + 3000)
    egress.busy(start)
    assert egress.leave(1) == start + 3001


# ---- messages -----------------------------------------------------------------------------


def since_the_barrier(function):
    """How long a function takes, from when all ranks are there."""
    dist.barrier()
    start = time.monotonic()
    function()
    return time.monotonic() - start


def messages(n, count, both_ways):
    """Rank 0 to rank 1, one after another."""

    def run():
        x, rank, works = torch.zeros(n), dist.get_rank(), []
        if rank < 2:
            for _ in range(count):
                works += [dist.isend(x, 1 - rank)] if rank == 0 or both_ways else []
                works += [dist.irecv(x.clone(), 1 - rank)] if rank == 1 or both_ways else []
        for work in works:
            work.wait()

    return since_the_barrier(run)


@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize(("n", "count"), [(N, 1), (N // 2 + 1, 2), (0, 50), (5 * N, 1)])
def test_messages_take_their_time_and_both_ways_go_at_once(ranks, n, count, both_ways):
    takes(ranks, messages, n, count, both_ways, seconds=count * LINK.seconds(4 * n))


def fan(others, inward):
    """Rank 0 to each of these, or each of these to rank 0."""
    rank, x = dist.get_rank(), torch.zeros(N)

    def run():
        if rank == 0:
            call = dist.irecv if inward else dist.isend
            for work in [call(x.clone(), other) for other in others]:
                work.wait()
        elif rank in others:
            dist.send(x, 0) if inward else dist.recv(x, 0)

    return since_the_barrier(run)


def test_two_messages_of_a_rank_queue_and_those_of_two_ranks_do_not(ranks):
    takes(ranks, fan, [1, 2], False, seconds=2 * LINK.seconds(NBYTES))
    takes(ranks, fan, [3, 1, 2], False, seconds=3 * LINK.seconds(NBYTES))
    takes(ranks, fan, [1, 2], True, seconds=LINK.seconds(NBYTES))
    first = ranks(fan, [3, 1, 2], False)
    assert first[3] > 0.99 * LINK.seconds(NBYTES)
    assert first[1] > 1.99 * LINK.seconds(NBYTES)


def on_a_fast_link():
    """64 MiB, in pieces: the sender has always one on its way."""
    x, rank = torch.zeros(2**24), dist.get_rank()
    return since_the_barrier(lambda: dist.recv(x, 0) if rank else dist.send(x, 1))


def test_a_large_message_keeps_a_fast_link_busy():
    link = Link(gbps=2.5, latency_us=10)
    with md.ranks(2, backend="shm", link=link) as ranks:
        takes(ranks, on_a_fast_link, seconds=link.seconds(2**26))


# ---- collectives --------------------------------------------------------------------------


def collective(name):
    size = dist.get_world_size()
    x, whole = torch.zeros(N), torch.zeros(size * (N // size))
    part = torch.zeros(N // size)
    parts = [part.clone() for _ in range(size)]
    root = dist.get_rank() == 0
    calls = {
        "all_reduce": lambda: dist.all_reduce(x),
        "broadcast": lambda: dist.broadcast(x, 0),
        "reduce": lambda: dist.reduce(x, 0),
        "all_gather": lambda: dist.all_gather(parts, part),
        "all_gather_single": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter(part, parts),
        "gather": lambda: dist.gather(part, parts if root else None, 0),
        "scatter": lambda: dist.scatter(part, parts if root else None, 0),
        "all_to_all": lambda: dist.all_to_all(parts, [part] * size),
        "all_to_all_single": lambda: dist.all_to_all_single(whole, whole.clone()),
        "barrier": lambda: [dist.barrier() for _ in range(15)],
    }
    return since_the_barrier(calls[name])


LIKE = {  # by which of lesson 2's algorithms
    "broadcast": "tree",
    "reduce": "tree",
    "all_reduce": "ring",
    "all_gather": "ring",
    "reduce_scatter": "ring",
    "gather": "flat",
    "scatter": "flat",
    "all_to_all": "pairwise",
}


@pytest.mark.parametrize("name", [*LIKE, "all_gather_single", "all_to_all_single", "barrier"])
def test_a_collective_takes_what_lesson_2_says(ranks, name):
    if name == "barrier":  # 4 ms each: beside them the machine's own time does count
        return takes(ranks, collective, name, seconds=15 * 2 * LINK.seconds(0), tolerance=1)
    operation = name.removesuffix("_single")
    expected = cost(operation, LIKE[operation], 4, NBYTES).seconds(0.002, SECONDS_A_BYTE)
    takes(ranks, collective, name, seconds=expected)


def by_hand(algorithm):
    x = torch.zeros(N)
    md.collectives.barrier()
    return since_the_barrier(lambda: md.collectives.all_reduce(x, algorithm=algorithm))


@pytest.mark.parametrize("algorithm", ["ring", "tree", "halving_doubling"])
def test_lesson_2s_own_messages_cost_what_it_says(ranks, algorithm):
    expected = cost("all_reduce", algorithm, 4, NBYTES).seconds(0.002, SECONDS_A_BYTE)
    # (and the agreement before it: a few messages more)
    takes(ranks, by_hand, algorithm, seconds=expected, tolerance=0.25)


def late():
    """From when the last one has come, on every rank."""
    x, rank = torch.zeros(N), dist.get_rank()
    dist.barrier()
    start = time.monotonic()
    if rank == 2:
        time.sleep(0.2)
    dist.all_reduce(x)
    return time.monotonic() - start


def test_a_collective_begins_when_the_last_rank_does(ranks):
    takes(ranks, late, seconds=0.2 + LINK.seconds(1.5 * NBYTES, 6))


def in_turn(groups):
    """An all_reduce of each group at once; or a message meanwhile."""
    x, rank = torch.zeros(N), dist.get_rank()
    made = [dist.new_group() for _ in range(groups)]

    def run():
        for work in [dist.all_reduce(x.clone(), group=g, async_op=True) for g in made]:
            work.wait()

    seconds = since_the_barrier(run)
    for group in made:
        dist.destroy_process_group(group)
    return seconds if rank >= 0 else 0.0


def test_groups_share_a_ranks_way_out(ranks):
    takes(ranks, in_turn, 3, seconds=3 * LINK.seconds(1.5 * NBYTES, 6))


def meanwhile(seconds, how):
    """An all_reduce while the main thread sleeps, or computes in C++."""
    x, y = torch.zeros(N), torch.randn(300, 300)

    def run():
        work = dist.all_reduce(x, async_op=True)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(seconds) if how == "sleeps" else y @ y
        work.wait()

    return since_the_barrier(run)


@pytest.mark.parametrize("how", ["sleeps", "computes"])
def test_computing_meanwhile_is_free(ranks, how):
    alone = LINK.seconds(1.5 * NBYTES, 6)
    takes(ranks, meanwhile, alone - 0.05, how, seconds=alone)
    takes(ranks, meanwhile, alone + 0.1, how, seconds=alone + 0.1)


def idle():
    """CPU seconds while a second's messages travel."""
    x, start = torch.zeros(10 * N), time.process_time()
    dist.all_reduce(x)
    other = dist.get_rank() ^ 1
    sending = dist.isend(x[: 5 * N], other)
    dist.recv(x[5 * N :], other)
    sending.wait()
    return time.process_time() - start


def test_waiting_for_a_link_costs_hardly_any_processor_time(ranks):
    assert max(ranks(idle)) < 0.5  # of the two seconds that it takes


def test_a_link_that_takes_longer_than_the_timeout_is_waited_for():
    """Nobody is missing."""
    with md.ranks(2, backend="shm", timeout=0.5, link=Link(gbps=0.004)) as ranks:
        takes(ranks, messages, N, 1, False, seconds=Link(gbps=0.004).seconds(NBYTES))
        takes(ranks, meanwhile, 0.0, "sleeps", seconds=Link(gbps=0.004).seconds(NBYTES))


# ---- nodes --------------------------------------------------------------------------------


def one_pair(sender, receiver):
    x, rank = torch.zeros(N), dist.get_rank()

    def run():
        if rank == sender:
            dist.send(x, receiver)
        elif rank == receiver:
            dist.recv(x, sender)

    return since_the_barrier(run)


def within(dim):
    """An all_reduce along one side of a mesh of nodes and their ranks."""
    x, group = torch.zeros(N), dist.init_device_mesh("cpu", (2, 2)).get_group(dim)
    return since_the_barrier(lambda: dist.all_reduce(x, group=group))


def test_between_nodes_the_other_link_is_taken():
    inner, outer = Link(gbps=0.08), Link(gbps=0.02)
    link = Link(gbps=0.08, inter=outer)
    with md.ranks(4, backend="shm", nodes=2, link=link) as ranks:
        takes(ranks, one_pair, 0, 1, seconds=inner.seconds(NBYTES))
        takes(ranks, one_pair, 3, 2, seconds=inner.seconds(NBYTES))
        takes(ranks, one_pair, 1, 2, seconds=outer.seconds(NBYTES))
        takes(ranks, collective, "all_reduce", seconds=outer.seconds(1.5 * NBYTES))
        takes(ranks, within, 1, seconds=inner.seconds(NBYTES))
        takes(ranks, within, 0, seconds=outer.seconds(NBYTES))
