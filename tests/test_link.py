"""The link that "shm" emulates. What its lines carry, and when, is computed and compared with
formulas; and then a clock shows that no message and no collective takes less.

Emulated times are so long that the machine's own do not count beside them. That nothing takes more
than 5 % more is seen in `make soak`: what does is tried again, for the machine is shared.
"""

import json
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
from minidist.collectives import cost
from minidist.collectives.cost import sent
from minidist.instruments.link import steps
from minidist.instruments.link.lines import LIMIT, Lines, occupy
from minidist.instruments.link.link import VARIABLE, Link, Network

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


def test_a_link_that_makes_no_sense_is_refused():
    for arguments in [(0,), (-1,), (float("nan"),), (1, -1)]:
        with pytest.raises(ValueError, match="more than 0 Gb/s, and 0 µs or more of latency"):
            Link(*arguments)
    with pytest.raises(ValueError, match="has no other link between nodes"):
        Link(1, inter=Link(1, inter=Link(1)))
    for backend in "gloo", "nccl":
        with pytest.raises(ValueError, match='only backend "shm" emulates a link'):
            md.ranks(2, backend=backend, link=LINK)


def test_ranks_are_told_the_link_by_their_environment(monkeypatch):
    for link in [
        None,
        Link(100, 5, inter=Link(10, 20.5)),
        Link(1, latency_us=2),
    ]:
        (told,) = Link.environ(link).items()
        monkeypatch.setenv(*told)
        assert Link.here() == link
        monkeypatch.delenv(VARIABLE)
        assert Link.here() is None
        assert json.loads(told[1]) is None or link is not None


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
    from minidist.machine.backend.group import LINES

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


def test_ranks_and_threads_book_one_after_another(ranks):
    assert ranks(booked, 10, 2) == [[0, 80]] * 4


def tokens():
    """What the lines of this rank are called, after each of several groups was made."""
    from minidist.machine.backend.group import LINES

    rank, found = dist.get_rank(), [LINES._token]
    for groups in [[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1, 2, 3]], [[1, 2], [0, 3]]:
        made = [dist.new_group(group, backend="shm") for group in groups]
        x = torch.ones(2)
        dist.all_reduce(x, group=next(g for g, m in zip(made, groups, strict=True) if rank in m))
        assert x[0] == len(groups[0])
        found.append(LINES._token)
    return found


def test_groups_of_the_same_ranks_share_their_lines(ranks):
    assert len({token for found in ranks(tokens) for token in found}) == 1


# ---- messages, computed -------------------------------------------------------------------


def network(link, *nodes):
    """As if of ranks 0, 1, ... on these nodes."""
    return Network(link, range(len(nodes)), nodes, Lines())


def arrivals(on, *messages, nbytes=NBYTES):
    return [on.send(*message, nbytes, 0.0).due for message in messages]


ONE, TWO = LINK.seconds(NBYTES), LINK.seconds(2 * NBYTES)


def test_five_messages_at_once_share_their_latency():
    far = Link(gbps=1, latency_us=30_000)
    for nodes in (0, 0), (0, 1):
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
    on = network(LINK, 0, 0)
    assert on.send(0, 1, NBYTES, 5.0).due == pytest.approx(5 + ONE)
    assert on.send(0, 1, NBYTES, 1.0).due == pytest.approx(1 + ONE)  # asked later, sent before


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


@pytest.mark.parametrize("p", [1, 2, 3, 4, 7])
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


@pytest.mark.parametrize("p", [1, 3, 4, 6])
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


def test_a_line_counts_what_it_carries():
    lines = Lines()
    on = Network(INTER, range(4), [0, 0, 1, 1], lines)
    on.travel(steps.ring(4, NBYTES, 2), [0.0] * 4)
    out, into = LIMIT * LIMIT, LIMIT * LIMIT + 1  # of node 0; then those of node 1
    assert [lines.carried(line) for line in (out, out + 2)] == [1.5 * NBYTES] * 2
    assert lines.carried(1) == 1.5 * NBYTES and lines.carried(into) == 0  # from rank 0 to rank 1


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


def collective(start, name):
    size = dist.get_world_size()
    x, part = torch.zeros(N), torch.zeros(N // size)
    parts = [part.clone() for _ in range(size)]
    root = dist.get_rank() == 0
    calls = {
        "all_reduce": lambda: dist.all_reduce(x),
        "broadcast": lambda: dist.broadcast(x, 0),
        "reduce": lambda: dist.reduce(x, 0),
        "all_gather": lambda: dist.all_gather(parts, part),
        "reduce_scatter": lambda: dist.reduce_scatter(part, parts),
        "gather": lambda: dist.gather(part, parts if root else None, 0),
        "scatter": lambda: dist.scatter(part, parts if root else None, 0),
        "all_to_all": lambda: dist.all_to_all(parts, [part] * size),
        "barrier": lambda: [dist.barrier() for _ in range(5)],
    }
    return since(start, calls[name])


def predicted(operation):
    """The seconds of a collective of four ranks without nodes, and of five barriers."""
    algorithm = dict(list(MADE)).get(operation)
    if operation == "barrier":
        return 5 * 2 * ALPHA
    if algorithm == "flat":  # all blocks at once, each on its own line
        return LINK.seconds(NBYTES / 4)
    return cost(operation, algorithm, 4, NBYTES).seconds(ALPHA, SECONDS_A_BYTE)


OPERATIONS = [operation for operation, _ in MADE] + ["barrier"]


def by_hand(start, algorithm):
    x = torch.zeros(N)
    return since(start, lambda: md.collectives.all_reduce(x, algorithm=algorithm))


@pytest.mark.soak
def test_messages_and_collectives_take_what_their_formulas_say(ranks, nodes):
    takes(ranks, messages, N, (0, 1), seconds=ONE, tolerance=0.08)
    takes(ranks, messages, 2 * N, (0, 1), (1, 0), (2, 3), (0, 3), seconds=TWO)
    for name in OPERATIONS:
        expected = predicted(name)
        takes(ranks, collective, name, seconds=expected, tolerance=max(0.05, 0.015 / expected))
    agreement = 4 * ALPHA  # before each call: up the tree, and down again
    for algorithm in "ring", "tree", "halving_doubling", "recursive_doubling":
        expected = cost("all_reduce", algorithm, 4, NBYTES).seconds(ALPHA, SECONDS_A_BYTE)
        takes(ranks, by_hand, algorithm, seconds=agreement + expected)
    takes(nodes, messages, N, (0, 2), (1, 3), (2, 0), (3, 1), (0, 1), seconds=TWO)  # one cable
    ring = 6 * NBYTES / 4 * SECONDS_A_BYTE + ALPHA  # a block waits for the cable, not for latency
    takes(nodes, collective, "all_reduce", seconds=ring)
    takes(nodes, by_hand, "ring", seconds=ring + 2 * ALPHA, tolerance=0.12)


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


def test_nodes_count_what_leaves_them(nodes):
    """It is what the ranks say that they have sent, message by message; of a collective of torch,
    what a ring of messages sends."""
    ring = nodes(left_the_nodes, "ring")[1][1]  # rank 1 sends it all
    assert nodes(left_the_nodes, "torch")[0][0] == [ring, ring] == [1.5 * 4800] * 2
    for how in "ring", "recursive_doubling":
        counted, far, most = zip(*nodes(left_the_nodes, how), strict=True)
        assert counted == (counted[0],) * 4  # every rank sees the same
        for node, nbytes in enumerate(counted[0]):
            ranks = slice(2 * node, 2 * node + 2)
            assert 0 < sum(far[ranks]) <= nbytes <= sum(most[ranks])


def test_without_a_link_nothing_leaves_a_node(pools):
    assert pools(2)(Link.sent_by_node, 0) == [0, 0]


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


@pytest.mark.soak
@pytest.mark.parametrize("how", ["sleeps", "computes"])
def test_computing_meanwhile_is_free(ranks, how):
    alone = LINK.seconds(1.5 * NBYTES, 6)
    takes(ranks, meanwhile, alone - 0.05, how, seconds=alone, tolerance=0.1)


def test_no_message_and_no_collective_takes_less_than_is_predicted(ranks, nodes):
    """However busy this machine is."""
    for on, function, *arguments, seconds in [
        (ranks, messages, N, (0, 1), ONE),
        (ranks, messages, 2 * N, (0, 1), (1, 0), (2, 3), (0, 3), TWO),
        *((ranks, collective, name, predicted(name)) for name in OPERATIONS),
        (ranks, by_hand, "ring", predicted("all_reduce")),
        (nodes, messages, N, (0, 2), (1, 3), TWO),  # they share a cable
        (nodes, collective, "all_reduce", 6 * NBYTES / 4 * SECONDS_A_BYTE + ALPHA),
    ]:
        longest = max(on(function, time.monotonic() + 0.02, *arguments))
        assert longest > 0.999 * seconds, (function.__name__, arguments)


def test_a_link_that_takes_longer_than_the_timeout_is_waited_for():
    """Nobody is missing."""
    slow = Link(gbps=0.004)
    with md.ranks(2, backend="shm", timeout=0.5, link=slow) as ranks:
        for function, *arguments in (messages, N, (0, 1)), (meanwhile, 0.0, "sleeps"):
            assert max(ranks(function, time.monotonic(), *arguments)) > slow.seconds(NBYTES)
