"""The link that "shm" emulates. What its lines carry, and when, is computed and compared with
formulas; and then it is what a clock shows, for messages and for collectives of both kinds.

Emulated times are so long that the machine's own do not count beside them. What is shorter than
predicted is wrong; what is longer by more than 5 % is tried again, for the machine is shared.
"""

import json
import os
import resource
import signal
import sys
import threading
import time
from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import minidist as md
from minidist import bench
from minidist.backend.segment import show
from minidist.bench import Row
from minidist.bench import link as table
from minidist.collectives import cost
from minidist.collectives.cost import sent
from minidist.link import steps
from minidist.link.lines import LIMIT, TIMES, Lines, SharedLines, occupy
from minidist.link.link import VARIABLE, Link, Network

pytestmark = pytest.mark.timeout(60)

LINK = Link(gbps=0.04, latency_us=20_000)  # 5 MB a second, and 20 ms until a byte arrives
SECONDS_A_BYTE = 8 / 0.04e9
ALPHA = 0.02
N = 125_000  # elements of four bytes: 100 ms
NBYTES = 4 * N
TRIES = 6


# ---- the link -----------------------------------------------------------------------------


def test_a_link_is_latency_and_bytes():
    assert Link(8, 5).seconds(1e9) == pytest.approx(1 + 5e-6)
    assert Link(8, 5).seconds(1e9, messages=3) == pytest.approx(1 + 15e-6)
    assert Link(8).seconds(0) == 0
    assert LINK.seconds(NBYTES) == pytest.approx(ALPHA + NBYTES * SECONDS_A_BYTE)


@pytest.mark.parametrize("numbers", [(0,), (-1,), (float("nan"),), (1, -1), (1, float("nan"))])
def test_a_link_that_makes_no_sense_is_refused(numbers):
    with pytest.raises(
        ValueError, match="a link has more than 0 Gb/s, and 0 µs or more of latency"
    ):
        Link(*numbers)


@pytest.mark.parametrize("options", [{"jitter_us": -1}, {"loss": 1}, {"loss": -0.1}])
def test_jitter_and_loss_that_make_no_sense_are_refused(options):
    with pytest.raises(ValueError, match="0 µs or more of jitter, and loses less than all"):
        Link(1, **options)


def test_a_rank_that_is_infinitely_fast_is_refused():
    with pytest.raises(ValueError, match="slower by a factor above 0, not 0"):
        Link(1, slow=(3, 0))


def test_a_link_between_nodes_has_no_other():
    with pytest.raises(ValueError, match="has no other link between nodes"):
        Link(1, inter=Link(1, inter=Link(1)))


@pytest.mark.parametrize(
    "link",
    [
        None,
        Link(10, 20),
        Link(100, 5, inter=Link(10, 20.5)),
        Link(1, jitter_us=2, loss=0.1, slow=(2, 3.5), seed=4, inter=Link(1, slow=(0, 2.0))),
    ],
)
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


# ---- lines --------------------------------------------------------------------------------


def test_a_message_takes_the_first_free_time_in_pieces_if_need_be():
    busy = []
    assert occupy(busy, 10, 2) == (10, 12) and busy == [10, 12]
    assert occupy(busy, 10, 1) == (12, 13) and busy == [10, 13]  # behind it
    assert occupy(busy, 20, 1) == (20, 21) and busy == [10, 13, 20, 21]
    assert occupy(busy, 5, 2) == (5, 7) and busy == [5, 7, 10, 13, 20, 21]  # before it
    assert occupy(busy, 6, 4) == (7, 14) and busy == [5, 14, 20, 21]  # 7 to 10, and 13 to 14
    assert occupy(busy, 6, 0) == (14, 14) and occupy(busy, 14, 0) == (14, 14)
    assert occupy(busy, 15, 0) == (15, 15) and busy == [5, 14, 20, 21]


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 8)), max_size=25))
def test_a_line_is_never_idle_while_a_message_waits(messages):
    busy, taken = [], set()
    for at, seconds in messages:
        free = (t for t in range(at, 1000) if t not in taken)
        slots = [next(free) for _ in range(seconds)]
        begin, end = occupy(busy, at, seconds)
        if seconds:
            assert (begin, end) == (slots[0], slots[-1] + 1)
        taken |= set(slots)
        assert busy == sorted(busy) and len(busy) % 2 == 0
        within = zip(busy[::2], busy[1::2], strict=True)
        assert {t for a, b in within for t in range(int(a), int(b))} == taken


def booked(count, threads):
    """Rank by rank and thread by thread, so many seconds on one line, from time 0 on."""
    from minidist.backend.members import LINES

    def book():
        for _ in range(count):
            with LINES.open() as busy:
                occupy(busy[7], 0.0, 1.0)
                time.sleep(1e-4)  # others come

    dist.barrier()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    several = [threading.Thread(target=book) for _ in range(threads)]
    for thread in several:
        thread.start()
    for thread in several:
        thread.join()
    sys.setswitchinterval(interval)
    dist.barrier()
    with LINES.open() as busy:
        return list(busy[7])


@pytest.mark.parametrize(("world_size", "threads"), [(4, 1), (1, 4), (3, 2)])
def test_ranks_and_threads_book_one_after_another(world_size, threads):
    with md.ranks(world_size, backend="shm", link=Link(1000)) as ranks:
        assert ranks(booked, 30, threads) == [[0, 30 * world_size * threads]] * world_size


def test_of_a_line_that_all_ranks_see_the_oldest_gaps_are_forgotten():
    lines = SharedLines()
    lines.join(0, lambda name, value: [value])()
    for t in range(TIMES):
        with lines.open() as busy:
            assert occupy(busy[5], 2.0 * t, 1) == (2 * t, 2 * t + 1)
    with lines.open() as busy:
        assert len(busy[5]) == TIMES and busy[5][0] == 0 and busy[5][-1] == 2 * TIMES - 1
        assert occupy(busy[5], 2 * TIMES - 3, 1) == (2 * TIMES - 3, 2 * TIMES - 2)  # a late gap
        assert busy[6] == []


def tokens():
    """What the lines of this rank are called, after each of several groups was made."""
    from minidist.backend.members import LINES

    rank, found = dist.get_rank(), [LINES._token]
    for groups in [[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1, 2, 3]], [[1, 2], [0, 3]]:
        made = [dist.new_group(group, backend="shm") for group in groups]
        x = torch.ones(2)
        dist.all_reduce(x, group=next(g for g, m in zip(made, groups, strict=True) if rank in m))
        assert x[0] == len(groups[0])
        found.append(LINES._token)
    return found


def test_lines_that_could_not_be_shared_leave_no_file_open():
    """Another rank dies meanwhile, or has, or this one may open no file more."""
    before, most = len(os.listdir("/proc/self/fd")), resource.getrlimit(resource.RLIMIT_NOFILE)

    def dies(name, value):
        if name == "lines":
            return [value, "others"]
        raise RuntimeError("Timed out")

    def shows(name, value):
        file = os.memfd_create("gone") if found == "died" else kept
        shown = show(file)
        if found == "died":
            os.close(file)
        return ["", "others"] if name == "lines" else [f"{shown}\ntoken", value]

    with pytest.raises(RuntimeError, match="Timed out"):
        SharedLines().join(0, dies)
    found = "died"
    gone = "^Connection closed by peer: rank 0 has died or given up$"
    with pytest.raises(RuntimeError, match=gone):
        SharedLines().join(1, shows)
    kept, found = os.memfd_create("kept"), "too many"
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, most[1]))
    try:
        with pytest.raises(RuntimeError, match="rank 0 cannot be opened: .*Too many open files"):
            SharedLines().join(1, shows)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, most)
        os.close(kept)
    assert len(os.listdir("/proc/self/fd")) == before


def test_groups_of_the_same_ranks_share_their_lines():
    with md.ranks(4, backend="shm", link=Link(1000)) as ranks:
        assert len({token for found in ranks(tokens) for token in found}) == 1
    with md.ranks(4, backend="gloo") as ranks:  # which begin in two halves
        ranks(emulate, Link(1000))
        first, halves, other, whole, last = zip(*ranks(tokens), strict=True)
    assert set(first) == {""} and halves[0] == halves[1] != halves[2] == halves[3]
    assert other[0] == other[2] and other[1] == other[3]
    assert len(set(whole)) == 1 and whole == last


def emulate(link):
    os.environ |= Link.environ(link)


# ---- messages, computed -------------------------------------------------------------------


def network(link, *nodes):
    """As if of ranks 0, 1, ... on these nodes."""
    return Network(link, range(len(nodes)), nodes, Lines())


def arrivals(on, *messages, nbytes=NBYTES):
    return [on.send(*message, nbytes, 0.0).due for message in messages]


ONE, TWO = LINK.seconds(NBYTES), LINK.seconds(2 * NBYTES)


@pytest.mark.parametrize("nodes", [(0, 0), (0, 1)])
def test_five_messages_at_once_share_their_latency(nodes):
    far = Link(gbps=1, latency_us=30_000)
    times = arrivals(network(far, *nodes), *[(0, 1)] * 5, nbytes=1000)
    assert times == pytest.approx([0.03 + k * 8e-6 for k in (1, 2, 3, 4, 5)])
    trip = network(far, *nodes).send(0, 1, 125_000_000, at=7.0)
    assert trip == pytest.approx((7.03, 8.0, 8.03))
    assert trip.part(0.25) == pytest.approx(7.28) and trip.part(1) == trip.due


def test_within_a_node_each_pair_has_a_line_each_way():
    pairs = [(0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1)]
    on = network(LINK, 0, 0, 0)
    assert arrivals(on, *pairs) == pytest.approx([ONE] * 6)
    assert arrivals(on, *pairs) == pytest.approx([TWO] * 6)


def test_ranks_of_a_node_share_its_cable_out_and_in():
    def two_nodes():
        return network(Link(8, inter=LINK), 0, 0, 1, 1)

    assert arrivals(two_nodes(), (0, 2), (1, 3)) == pytest.approx([ONE, TWO])  # out, and in
    assert arrivals(two_nodes(), (0, 2), (3, 1)) == pytest.approx([ONE, ONE])  # both ways
    assert arrivals(two_nodes(), (0, 1), (2, 3))[1] == Link(8).seconds(NBYTES)  # within
    assert arrivals(two_nodes(), (0, 2), (0, 1))[1] == Link(8).seconds(NBYTES)
    on = network(Link(8, inter=LINK), 0, 0, 1, 2)
    assert arrivals(on, (0, 2), (1, 3)) == pytest.approx([ONE, TWO])  # out alone
    machines = partial(network, LINK, 0, 1, 2)
    assert arrivals(machines(), (0, 2), (1, 2)) == pytest.approx([ONE, TWO])  # in
    assert arrivals(machines(), (0, 1), (0, 2)) == pytest.approx([ONE, TWO])  # out
    assert arrivals(machines(), (0, 1), (1, 2), (2, 0)) == pytest.approx([ONE] * 3)


def test_who_waits_for_a_cable_into_a_node_keeps_nobody_from_another():
    on = network(LINK, 0, 1, 2, 3)
    assert arrivals(on, (0, 2), (1, 2), (1, 3)) == pytest.approx([ONE, TWO, TWO])
    # What leaves late comes late, and does not keep away what could come before.
    on = network(LINK, 0, 1, 2, 3)
    found = arrivals(on, (0, 1), (0, 1), (0, 2), (3, 2))
    assert found == pytest.approx([ONE, TWO, LINK.seconds(3 * NBYTES), ONE])


def test_a_message_that_is_sent_late_leaves_late():
    on = network(LINK, 0, 0)
    assert on.send(0, 1, NBYTES, 5.0).due == pytest.approx(5 + ONE)
    assert on.send(0, 1, NBYTES, 1.0).due == pytest.approx(1 + ONE)  # asked later, sent before


def test_jitter_is_a_delay_and_the_same_each_time():
    link = Link(gbps=1, latency_us=100, jitter_us=50)
    one = [network(link, 0, 0).send(0, 1, 0, 0.0).due for _ in range(2)]
    many = [network(link, 0, 0).send(0, 1, 0, float(t)) for t in range(1)]
    assert one[0] == one[1] == many[0].due
    on = network(link, 0, 0)
    delays = [on.send(0, 1, 1000, float(t)).due - t - 8e-6 for t in range(500)]
    assert 100e-6 < min(delays) < 102e-6 and 148e-6 < max(delays) < 150e-6
    other = network(Link(gbps=1, latency_us=100, jitter_us=50, seed=1), 0, 0)
    assert other.send(0, 1, 0, 0.0).due != one[0]


def test_a_lost_message_is_sent_again_after_a_round_trip():
    on = network(Link(gbps=8e-3, latency_us=1000, loss=0.25), 0, 0)  # 1 ms for 1000 bytes
    took = [round(1e3 * (on.send(0, 1, 1000, float(t)).due - t)) for t in range(4000)]
    counts = Counter(took)
    assert set(counts) <= {2 + 3 * k for k in range(12)}  # 1 + 1, and 2 + 1 for each loss
    assert 0.72 < counts[2] / 4000 < 0.78 and 0.16 < counts[5] / 4000 < 0.215


def test_a_slow_rank():
    on = network(Link(gbps=0.04, slow=(1, 3)), 0, 0, 0)
    assert arrivals(on, (0, 1), (1, 2), (0, 2)) == pytest.approx([0.3, 0.3, 0.1])
    (end, *_) = set(on.travel(steps.ring(3, 3 * NBYTES), [10.0] * 3))
    assert end == pytest.approx(10.6)  # two steps


# ---- collectives, computed ----------------------------------------------------------------


def ends(link, nodes, made):
    return network(link, *nodes).travel(made, [0.0] * len(nodes))


MADE = {
    ("all_reduce", "ring"): lambda p, n: steps.ring(p, n, 2),
    ("all_gather", "ring"): steps.ring,
    ("reduce_scatter", "ring"): steps.ring,
    ("broadcast", "tree"): lambda p, n: steps.tree(p, n, 1 % p),
    ("reduce", "tree"): lambda p, n: steps.back(steps.tree(p, n, 1 % p)),
    ("scatter", "flat"): lambda p, n: steps.flat(p, n, 1 % p),
    ("gather", "flat"): lambda p, n: steps.back(steps.flat(p, n, 1 % p)),
    ("all_to_all", "pairwise"): lambda p, n: steps.pairwise([[n / p] * p] * p),
}


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("operation", MADE)
def test_ranks_send_in_steps_what_the_algorithms_send(operation, p):
    n = 840 * p
    found = {r: [0, 0] for r in range(p)}
    for step in MADE[operation](p, 4 * n):
        assert len({receiver for _, receiver, _ in step}) == len(step) or "gather" in operation
        for sender, _, nbytes in step:
            found[sender][0] += 1
            found[sender][1] += nbytes
    for rank in range(p):
        assert sent(*operation, p, rank, n, root=1 % p) == pytest.approx(tuple(found[rank]))


@pytest.mark.parametrize("p", [1, 2, 3, 4, 6, 8])
def test_after_a_collectives_steps_all_have_what_they_wait_for(p):
    def heard(made):
        """Of whom each rank has heard, directly or through others."""
        of = [{r} for r in range(p)]
        for step in made:
            before = [set(s) for s in of]
            for sender, receiver, _ in step:
                of[receiver] |= before[sender]
        return of

    everybody = [set(range(p))] * p
    for made in steps.ring(p, 8), steps.dissemination(p), steps.pairwise([[1] * p] * p):
        assert heard(made) == everybody
    for made in steps.tree(p, 8, p // 2), steps.flat(p, 8, p // 2):
        assert all(p // 2 in of for of in heard(made))
        assert heard(steps.back(made))[p // 2] == set(range(p))


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("apart", [False, True])
def test_collectives_take_what_their_formulas_say(p, apart):
    nodes = range(p) if apart else [0] * p
    for name in "all_reduce", "all_gather", "reduce_scatter":
        assert max(ends(LINK, nodes, MADE[name, "ring"](p, NBYTES))) == pytest.approx(
            cost(name, "ring", p, NBYTES).seconds(ALPHA, SECONDS_A_BYTE)
        )
    same = cost("all_to_all", "pairwise", p, NBYTES).seconds(ALPHA, SECONDS_A_BYTE)
    assert max(ends(LINK, nodes, MADE["all_to_all", "pairwise"](p, NBYTES))) == pytest.approx(same)
    rounds = cost("barrier", "dissemination", p, 0).messages
    assert ends(LINK, nodes, steps.dissemination(p)) == pytest.approx([rounds * ALPHA] * p)
    if p & (p - 1) == 0:  # a tree that is no full one has fewer latencies than rounds
        expected = cost("broadcast", "tree", p, NBYTES).seconds(ALPHA, SECONDS_A_BYTE)
        for name in "broadcast", "reduce":
            assert max(ends(LINK, nodes, MADE[name, "tree"](p, NBYTES))) == pytest.approx(expected)
    # The root sends all blocks at once, over one cable or as many lines.
    blocks = (p - 1 if apart else min(p - 1, 1)) / p
    for name in "scatter", "gather":
        expected = ALPHA * (p > 1) + blocks * NBYTES * SECONDS_A_BYTE
        assert max(ends(LINK, nodes, MADE[name, "flat"](p, NBYTES))) == pytest.approx(expected)


def test_a_tree_of_three():
    """The root has two children, to which it sends at once."""
    made = steps.tree(3, NBYTES, 0)
    assert ends(LINK, [0, 0, 0], made) == pytest.approx([ONE - ALPHA, ONE, ONE])
    assert ends(LINK, [0, 1, 2], made) == pytest.approx([TWO - ALPHA, TWO, ONE])


INTER = Link(gbps=1e6, inter=LINK)  # within a node no time passes


def crossing(made, nodes):
    """How many messages leave each node, of how many bytes."""
    left, nbytes = Counter(), Counter()
    for step in made:
        for sender, receiver, size in step:
            if nodes[sender] != nodes[receiver]:
                left[nodes[sender]] += 1
                nbytes[nodes[sender]] += size
    return dict(left), dict(nbytes)


def test_how_often_a_ring_crosses_the_cable():
    """In each of 2 (N - 1) steps one block leaves each node, whatever it has of ranks: but only if
    neighbours on the ring are neighbours on the node."""
    made, n = steps.ring(4, NBYTES, 2), NBYTES
    assert crossing(made, [0, 0, 1, 1]) == ({0: 6, 1: 6}, {0: 1.5 * n, 1: 1.5 * n})
    assert crossing(made, [0, 1, 0, 1]) == ({0: 12, 1: 12}, {0: 3 * n, 1: 3 * n})
    assert crossing(steps.ring(6, n, 2), [0, 0, 0, 1, 1, 1])[0] == {0: 10, 1: 10}
    assert crossing(steps.tree(4, n, 0), [0, 0, 1, 1]) == ({0: 1}, {0: n})


@pytest.mark.parametrize("latency_us", [0, 5_000, 100_000])
def test_a_ring_over_two_nodes_waits_for_its_cable_or_for_its_latency(latency_us):
    """Every other hop of a block crosses. Six blocks follow each other through the cable, unless
    they have to wait until one has come round."""
    link = Link(gbps=1e9, inter=Link(0.04, latency_us))
    alpha, t = 1e-6 * latency_us, NBYTES / 4 * SECONDS_A_BYTE
    found = max(ends(link, [0, 0, 1, 1], steps.ring(4, NBYTES, 2)))
    assert found == pytest.approx(max(6 * t + alpha, 4 * t + 3 * alpha), rel=1e-6)


def test_groups_at_once_share_the_cable_of_their_nodes():
    lines, t = Lines(), NBYTES / 2 * SECONDS_A_BYTE
    pairs = [Network(INTER, ranks, [0, 1], lines) for ranks in ([0, 2], [1, 3])]
    both = [pair.travel(steps.ring(2, NBYTES, 2), [0.0, 0.0]) for pair in pairs]
    assert both[0] == pytest.approx([2 * (t + ALPHA)] * 2)
    assert both[1] == pytest.approx([4 * t + 2 * ALPHA] * 2)
    within = Network(INTER, [0, 1], [0, 0], lines).travel(steps.ring(2, NBYTES, 2), [0.0, 0.0])
    assert max(within) < 1e-4


def test_a_rank_that_comes_late_holds_up_those_that_wait_for_it():
    """The root of a broadcast goes when its message has left; and waits for no leaf."""
    on = network(LINK, 0, 0, 0, 0)
    assert max(on.travel(steps.ring(4, NBYTES, 2), [0, 0, 9, 0])) == pytest.approx(
        9 + LINK.seconds(1.5 * NBYTES, 6)
    )
    on = network(LINK, 0, 0, 0, 0)
    found = on.travel(steps.tree(4, NBYTES, 0), [0, 0, 9, 0])
    n = NBYTES * SECONDS_A_BYTE
    assert found == pytest.approx([n, ALPHA + n, 9 + n, 9 + ALPHA + n])


def test_an_all_to_all_is_charged_by_what_each_sends():
    sizes = [[9, NBYTES], [0, 9]]
    assert ends(LINK, [0, 0], steps.pairwise(sizes)) == pytest.approx([ONE, ONE], abs=0.03)
    assert max(ends(LINK, [0, 0], steps.pairwise(sizes))) == pytest.approx(ONE)


def test_a_line_counts_what_it_carries():
    lines = Lines()
    on = Network(INTER, range(4), [0, 0, 1, 1], lines)
    on.travel(steps.ring(4, NBYTES, 2), [0.0] * 4)
    out, into = LIMIT * LIMIT, LIMIT * LIMIT + 1  # of node 0; then those of node 1
    assert [lines.carried(line) for line in (out, out + 2)] == [1.5 * NBYTES] * 2
    assert lines.carried(1) == 1.5 * NBYTES and lines.carried(into) == 0  # from rank 0 to rank 1
    lossy, lines = Link(1, loss=0.5, inter=Link(1, loss=0.5)), Lines()
    for _ in range(40):
        Network(lossy, [0, 1], [0, 1], lines).send(0, 1, 10, 0.0)
    assert lines.carried(out) > 400 and lines.carried(out) % 10 == 0  # what is sent again counts


# ---- by the clock -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks():
    with md.ranks(4, backend="shm", link=LINK) as pool:
        yield pool


@pytest.fixture(scope="module")
def nodes():
    """Two nodes of two ranks, and a link that counts only between them."""
    with md.ranks(4, backend="shm", nodes=2, link=Link(gbps=40, inter=LINK)) as pool:
        yield pool


alone = pytest.mark.alone


def takes(ranks, function, *args, seconds, tolerance=0.05, at_least=None):
    """`function(start, ...)` returns on every rank how long after `start`, a time that is soon to
    come, something was over: the longest is as predicted, and never less than `at_least` (what is
    predicted)."""
    least = 0.999 * (seconds if at_least is None else at_least)
    for _ in range(TRIES):
        longest = max(ranks(function, time.monotonic() + 0.15, *args))
        assert longest > least
        if 0.999 * seconds < longest < seconds * (1 + tolerance):
            return
    raise AssertionError(f"{longest:.4f} s, not {seconds:.4f} s")


def since(start, function):
    time.sleep(max(0, start - time.monotonic()))
    function()
    return time.monotonic() - start


def messages(start, n, *pairs):
    """Of n elements each, sent at once. How long it takes the receivers."""
    x, rank = torch.zeros(n), dist.get_rank()
    works = []

    def run():
        for sender, receiver in pairs:
            works.extend([dist.isend(x, receiver)] if rank == sender else [])
            works.extend([dist.irecv(x.clone(), sender)] if rank == receiver else [])
        for work in works:
            work.wait()

    return since(start, run)


@alone
@pytest.mark.parametrize("n", [N, N // 2 + 1, 5 * N])
def test_messages_take_their_time(ranks, n):
    takes(ranks, messages, n, (0, 1), seconds=LINK.seconds(4 * n), tolerance=0.08)


@alone
def test_five_messages_at_once_pay_one_latency():
    far = Link(gbps=0.4, latency_us=200_000)
    with md.ranks(2, backend="shm", link=far) as ranks:
        takes(ranks, messages, N, *[(0, 1)] * 5, seconds=far.seconds(5 * NBYTES))
        takes(ranks, messages, 0, *[(0, 1)] * 5, seconds=0.2)


@alone
def test_both_ways_and_to_several_at_once(ranks):
    takes(ranks, messages, 2 * N, (0, 1), (1, 0), (2, 3), (0, 3), seconds=TWO)


@alone
def test_the_cable_of_a_node_is_shared(nodes):
    takes(nodes, messages, 2 * N, (0, 2), (3, 1), seconds=TWO)
    takes(nodes, messages, N, (0, 2), (1, 3), seconds=TWO)
    takes(nodes, messages, N, (0, 2), (1, 3), (2, 0), (3, 1), (0, 1), seconds=TWO)


def in_turn(start, count):
    """One after another. The sender goes on when a message has left, not when it has arrived."""
    x, rank = torch.zeros(N // 2), dist.get_rank()

    def run():
        for _ in range(count if rank < 2 else 0):
            dist.recv(x, 0) if rank else dist.send(x, 1)

    return since(start, run)


@alone
def test_who_sends_does_not_wait_for_the_latency():
    far = Link(gbps=0.04, latency_us=100_000)
    with md.ranks(2, backend="shm", link=far) as ranks:
        takes(ranks, in_turn, 4, seconds=far.seconds(2 * NBYTES), tolerance=0.08)
        sender, receiver = ranks(in_turn, time.monotonic() + 0.1, 1)
    assert 0.05 <= sender < 0.15 <= receiver


def on_a_fast_link(start):
    """64 MiB, in pieces: the sender has always one on its way."""
    x, rank = torch.zeros(2**24), dist.get_rank()
    return since(start, lambda: dist.recv(x, 0) if rank else dist.send(x, 1))


@alone
def test_a_large_message_keeps_a_fast_link_busy():
    link = Link(gbps=2.5, latency_us=10)
    with md.ranks(2, backend="shm", link=link) as ranks:
        takes(ranks, on_a_fast_link, seconds=link.seconds(2**26), tolerance=0.15)


def collective(start, name):
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
        "barrier": lambda: [dist.barrier() for _ in range(5)],
    }
    return since(start, calls[name])


SINGLE = {"all_gather_single": "all_gather", "all_to_all_single": "all_to_all"}
WHICH = [*(operation for operation, _ in MADE), *SINGLE]


@alone
@pytest.mark.parametrize("name", [*WHICH, "barrier"])
def test_a_collective_takes_its_steps(ranks, name):
    if name == "barrier":
        return takes(ranks, collective, name, seconds=5 * 2 * ALPHA, tolerance=0.15)
    operation = SINGLE.get(name, name)
    algorithm = next(a for o, a in MADE if o == operation)
    expected = cost(operation, algorithm, 4, NBYTES).seconds(ALPHA, SECONDS_A_BYTE)
    if algorithm == "flat":  # all blocks at once, each on its own line
        expected = LINK.seconds(NBYTES / 4)
    takes(ranks, collective, name, seconds=expected, tolerance=max(0.05, 0.01 / expected))


def uneven(start):
    """An all_to_all in which rank 0 has much for rank 1, and all others have little."""
    rank, size = dist.get_rank(), dist.get_world_size()
    give = [N if (rank, other) == (0, 1) else 1 for other in range(size)]
    take = [N if (other, rank) == (0, 1) else 1 for other in range(size)]
    x, out = torch.zeros(sum(give)), torch.zeros(sum(take))
    return since(start, lambda: dist.all_to_all_single(out, x, take, give))


@alone
def test_an_uneven_all_to_all_takes_as_long_as_its_longest_way(ranks):
    takes(ranks, uneven, seconds=LINK.seconds(NBYTES, 3))


def by_hand(start, algorithm):
    x = torch.zeros(N)
    return since(start, lambda: md.collectives.all_reduce(x, algorithm=algorithm))


@alone
@pytest.mark.parametrize("algorithm", ["ring", "tree", "halving_doubling", "recursive_doubling"])
def test_algorithms_of_messages_take_what_their_formulas_say(ranks, algorithm):
    agreement = 4 * ALPHA  # before each call: up the tree, and down again
    expected = cost("all_reduce", algorithm, 4, NBYTES).seconds(ALPHA, SECONDS_A_BYTE)
    takes(ranks, by_hand, algorithm, seconds=agreement + expected)


def late(start):
    """From when the last one has come, on every rank."""

    def run():
        time.sleep(0.2 * (dist.get_rank() == 2))
        dist.all_reduce(torch.zeros(N))

    return since(start, run)


@alone
def test_a_collective_begins_when_the_last_rank_does(ranks):
    takes(ranks, late, seconds=0.2 + LINK.seconds(1.5 * NBYTES, 6))


def several(start, count):
    """An all_reduce of each of so many groups at once."""
    made = [dist.new_group() for _ in range(count)]

    def run():
        works = [dist.all_reduce(torch.zeros(N), group=group, async_op=True) for group in made]
        for work in works:
            work.wait()

    seconds = since(start + 0.5, run)
    for group in made:
        dist.destroy_process_group(group)
    return seconds


@alone
def test_groups_share_lines(ranks):
    """While the messages of one wait for their latency, the others' are on the line."""
    on = network(LINK, 0, 0, 0, 0)
    expected = max(max(on.travel(steps.ring(4, NBYTES, 2), [0.0] * 4)) for _ in range(3))
    carried = 3 * LINK.seconds(1.5 * NBYTES, 0) + ALPHA  # the lines are never idle
    assert carried < expected < 2.1 * LINK.seconds(1.5 * NBYTES, 6)
    # Where ranks begin 10 ms apart, other messages are first, and the last may come sooner.
    takes(ranks, several, 3, seconds=expected, at_least=carried)


def one_after_another(start, count):
    """So many all_reduces, all called at once."""

    def run():
        works = [dist.all_reduce(torch.zeros(N // 8), async_op=True) for _ in range(count)]
        for work in works:
            work.wait()

    return since(start, run)


@alone
def test_what_a_processor_needs_to_wake_up_does_not_add_up():
    link = Link(gbps=1, latency_us=1000)
    with md.ranks(2, "shm", link=link) as ranks:
        takes(ranks, one_after_another, 100, seconds=100 * link.seconds(N // 8 * 4, 2))


def along(start, dim):
    """An all_reduce along one side of a mesh of nodes and their ranks, in both groups at once."""
    x, group = torch.zeros(N), dist.init_device_mesh("cpu", (2, 2)).get_group(dim)
    return since(start + 0.5, lambda: dist.all_reduce(x, group=group))


@alone
def test_collectives_on_two_nodes(nodes):
    takes(nodes, messages, N, (1, 2), seconds=ONE, tolerance=0.08)
    ring = 6 * NBYTES / 4 * SECONDS_A_BYTE + ALPHA  # a block waits for the cable, not for latency
    takes(nodes, collective, "all_reduce", seconds=ring)
    takes(nodes, by_hand, "ring", seconds=ring + 2 * ALPHA, tolerance=0.12)
    takes(nodes, along, 0, seconds=LINK.seconds(2 * NBYTES, 2))  # two groups, one cable
    within = (max(nodes(along, time.monotonic(), 1)) for _ in range(TRIES))
    assert any(longest < ALPHA / 2 for longest in within)


def left_the_nodes(how):
    """What leaves both nodes in an all_reduce; and what this rank sends to the other node, if the
    messages can be seen."""
    x, before = torch.zeros(1200), [Link.sent_by_node(node) for node in (0, 1)]
    dist.barrier()
    with md.measure.TrafficCounter() as traffic:
        if how == "torch":
            dist.all_reduce(x)
        else:
            md.collectives.all_reduce(x, algorithm=how)
    dist.barrier()
    far = [n for other, n in enumerate(traffic.sent_to) if other // 2 != dist.get_rank() // 2]
    sent = sum(far) + traffic.control_bytes  # some of which stay on the node
    return [Link.sent_by_node(node) - n for node, n in enumerate(before)], sum(far), sent


@pytest.mark.parametrize("how", ["ring", "naive", "recursive_doubling"])
def test_nodes_count_what_leaves_them(nodes, how):
    """It is what the ranks say that they have sent, message by message."""
    counted, far, most = zip(*nodes(left_the_nodes, how), strict=True)
    assert counted == (counted[0],) * 4  # every rank sees the same
    for node, nbytes in enumerate(counted[0]):
        ranks = slice(2 * node, 2 * node + 2)
        assert 0 < sum(far[ranks]) <= nbytes <= sum(most[ranks])


def test_of_a_collective_of_torch_they_count_the_ring(nodes):
    ring = nodes(left_the_nodes, "ring")[1][1]  # rank 1 sends it all
    assert nodes(left_the_nodes, "torch")[0][0] == [ring, ring] == [1.5 * 4800] * 2


def test_without_a_link_nothing_leaves_a_node():
    assert md.launch(left_the_nodes, "torch", world_size=4, nodes=2)[0][0] == [0, 0]


def meanwhile(start, seconds, how):
    """An all_reduce while the main thread sleeps, or computes in C++."""
    x, y = torch.zeros(N), torch.randn(300, 300)

    def run():
        work = dist.all_reduce(x, async_op=True)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(seconds) if how == "sleeps" else y @ y
        work.wait()

    return since(start, run)


@alone
@pytest.mark.parametrize("how", ["sleeps", "computes"])
def test_computing_meanwhile_is_free(ranks, how):
    alone = LINK.seconds(1.5 * NBYTES, 6)
    takes(ranks, meanwhile, alone - 0.05, how, seconds=alone, tolerance=0.1)
    takes(ranks, meanwhile, alone + 0.1, how, seconds=alone + 0.1, tolerance=0.1)


def idle():
    """CPU seconds while a second's messages travel."""
    x, start = torch.zeros(10 * N), time.process_time()
    dist.all_reduce(x)
    other = dist.get_rank() ^ 1
    sending = dist.isend(x[: 5 * N], other)
    dist.recv(x[5 * N :], other)
    sending.wait()
    return time.process_time() - start


@alone
def test_waiting_for_a_link_costs_hardly_any_processor_time(ranks):
    assert max(ranks(idle)) < 0.5  # of the two seconds that it takes


@alone
def test_a_link_that_takes_longer_than_the_timeout_is_waited_for():
    """Nobody is missing."""
    slow = Link(gbps=0.004)
    with md.ranks(2, backend="shm", timeout=0.5, link=slow) as ranks:
        takes(ranks, messages, N, (0, 1), seconds=slow.seconds(NBYTES))
        takes(ranks, meanwhile, 0.0, "sleeps", seconds=slow.seconds(NBYTES))


def rank_0_dies():
    """After all have come, before it has booked their messages."""
    if dist.get_rank() == 0:
        Network.travel = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_reduce(torch.zeros(N))
    except RuntimeError as error:
        print(error)
        raise


def test_rank_0_which_books_for_all_dies(capfd, monkeypatch):
    monkeypatch.setattr("minidist.runtime.processes.GRACE", 10)  # the others notice it themselves
    start = time.monotonic()
    with pytest.raises(md.RankError, match="rank 0 .*SIGKILL"), md.ranks(3, "shm", link=LINK) as r:
        r(rank_0_dies)
    assert time.monotonic() - start < 20
    said = capfd.readouterr().out
    assert said.count("rank 0 has died") == said.count("waits for it in all_reduce") == 2


# ---- python -m minidist bench link --------------------------------------------------------


def test_the_bench_prints_a_row_for_each_case(monkeypatch, tmp_path, capsys):
    def measure(pool, number, rounds):
        case = table.cases()[number]
        return Row(case.what, [1.25 * case.formula] * rounds, "formula", (case.formula,) * rounds)

    monkeypatch.setattr(table, "measure", measure)
    bench.run(["link"], 1, tmp_path)
    out = capsys.readouterr().out
    assert out.count("0.8× (0.8–0.8)") == len(table.cases()) and "off by 25.0 % or less" in out
    assert (tmp_path / "bench_link.png").stat().st_size > 1000


def test_a_case_of_the_bench_is_timed_and_takes_no_less_than_its_formula():
    number = next(i for i, case in enumerate(table.cases()) if case.what == "shm: hierarchical")
    with md.ranks(4, "shm", 2, link=table.BETWEEN) as pool:
        row = table.measure(pool, number, 2)
    formula = table.cases()[number].formula
    assert row.theirs == (formula, formula) and row.what == "shm: hierarchical, 4 ranks, 2 nodes"
    assert len(row.seconds) == 2 and min(row.seconds) > 0.999 * formula
