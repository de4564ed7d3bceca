"""The lab's room "Collectives": its messages are those that the library's algorithms send."""

import json
from itertools import chain

import pytest
import torch

from minidist.collectives import algorithms, cost, sent
from minidist.collectives.peers import Peers
from minidist.collectives.reduce_op import Reduction
from minidist.instruments.link import Link
from web.lab.answers import collectives as room

BY_DAY = 2, 3, 4, 6  # powers of two, and such that have ranks beyond one
RANKS = [p if p in BY_DAY else pytest.param(p, marks=pytest.mark.soak) for p in range(2, 9)]
LINK = Link(100, 10)


def _value(p: int, piece: int, ranks: set[int]) -> int:
    """The sum of these ranks' values of a piece: a bit for each piece and rank, in 64 of them."""
    bits = sum(1 << (p * piece + rank) for rank in ranks)
    return bits - (1 << 64) if bits >= 1 << 63 else bits


class Recorded(Peers):
    """A rank that writes down its messages: with whom, how many elements, which values it sends."""

    def __init__(self):
        super().__init__()
        self.sent, self.received = [], []

    def _message(self, call, tensor, **peer):
        if "group_dst" in peer:
            values = tensor.unique_consecutive().tolist()
            self.sent.append((peer["group_dst"], len(tensor), values))
        else:
            self.received.append((peer["group_src"], len(tensor)))
        return super()._message(call, tensor, **peer)


def _send(operation, algorithm, values, numel):
    """Run an algorithm on this rank. `values`: by rank, those of its pieces."""
    peers, op = Recorded(), Reduction("SUM", torch.int64)
    values = values[peers.rank]
    pieces = torch.zeros(numel, dtype=torch.int64).tensor_split(len(values))
    whole = torch.cat([torch.full_like(x, i) for x, i in zip(pieces, values, strict=True)])
    block, empty = whole.tensor_split(peers.size), torch.zeros_like(whole).tensor_split(peers.size)
    own, to_fill = block[peers.rank], empty[peers.rank]
    given = {
        "broadcast": [whole, 0],
        "reduce": [whole, 0, op],
        "all_reduce": [whole, op],
        "all_gather": [own, empty],
        "reduce_scatter": [to_fill, block, op],
    }[operation]
    getattr(algorithms, f"{operation}_{algorithm}")(peers, *given)
    return peers.sent, peers.received


@pytest.mark.parametrize("p", RANKS)
def test_messages_are_those_that_the_algorithms_send(pools, p):
    numel = 8 * p + 3
    for name in room.COLLECTIVES:
        operation, algorithm = name.split()
        sizes = room.piece_sizes(algorithm, p, room.ITEM * numel)
        made = room.messages(operation, algorithm, p)
        expected = [([], []) for _ in range(p)]  # sent and received by each rank
        for at, step in enumerate(made):
            held = room.held(operation, made[:at], p, sizes)
            for message in step:
                values = [_value(p, i, held[message.sender][i]) for i in message.pieces]
                elements = room.size_of(message, sizes) // room.ITEM
                expected[message.sender][0].append((message.receiver, elements, values))
                expected[message.receiver][1].append((message.sender, elements))
        own = [[_value(p, i, {rank}) for i in range(len(sizes))] for rank in range(p)]
        assert pools(p)(_send, operation, algorithm, own, numel) == expected, name


def test_each_rank_sends_what_the_formula_says():
    for name in room.COLLECTIVES:
        operation, algorithm = name.split()
        for p in range(2, 9):
            numel = 1000 + p
            sizes = room.piece_sizes(algorithm, p, room.ITEM * numel)
            every = [*chain(*room.messages(operation, algorithm, p))]
            for rank in range(p):
                own = [room.size_of(m, sizes) for m in every if m.sender == rank]
                assert (len(own), sum(own)) == sent(operation, algorithm, p, rank, numel), name


def test_at_the_end_all_have_what_they_should():
    for name in room.COLLECTIVES:
        operation, algorithm = name.split()
        for p in range(2, 9):
            sizes = room.piece_sizes(algorithm, p, 4000)
            held = room.held(operation, room.messages(operation, algorithm, p), p, sizes)
            everyone = {*range(p)}
            for rank, own in enumerate(held):
                if operation == "broadcast":
                    assert own == [{0}], (name, p)
                elif operation == "all_gather":
                    assert own == [{piece} for piece in range(p)], (name, p)
                elif operation == "reduce_scatter":
                    assert own[rank] == everyone, (name, p)
                elif operation == "all_reduce" or rank == 0:
                    assert own == [everyone] * len(sizes), (name, p)


@pytest.mark.parametrize("p", [2, 4, 8])
def test_on_one_node_the_network_agrees_with_the_formula(p):
    """But where a rank receives from several, as rank 0 of the naive sum: the formula lets it do so
    one after another, the network at once."""
    cluster = room.Cluster([0] * p, LINK)
    for name in room.COLLECTIVES:
        operation, algorithm = name.split()
        if algorithm not in ("naive", "flat"):
            made = room.messages(operation, algorithm, p)
            ends = room.times(made, room.piece_sizes(algorithm, p, 2**20), cluster)
            path = cost(operation, algorithm, p, 2**20)
            assert ends[-1] == pytest.approx(path.seconds(10e-6, 8 / 100e9), rel=1e-12), name


def test_two_nodes_share_a_cable():
    asked = _asked(ranks=4, nodes=2, collective="all_reduce recursive_doubling", nbytes=10**6)
    answer = room.answer(asked)
    # 0 with 1 and 2 with 3, 8 Mb at 100 Gb/s; then two messages leave each node, at 10 Gb/s.
    assert answer["ends"] == pytest.approx([0, 90e-6, 90e-6 + 20e-6 + 2 * 800e-6], rel=1e-12)
    assert [m["crosses"] for m in answer["messages"]] == [True] * 4
    doubling = next(each for each in answer["rivals"] if each["name"] == "recursive_doubling")
    assert doubling["leave_node"] == 2 * 10**6
    assert doubling["formula"] == pytest.approx(2 * 20e-6 + 2 * 800e-6, rel=1e-12)


def test_what_is_asked_can_be_answered_or_is_refused_in_a_sentence():
    for name in room.choices()["collectives"]:
        for p in range(2, 9):
            answer = room.answer(_asked(ranks=p, collective=name, step=99))
            assert answer["set"]["step"] == answer["step"] == answer["steps"] <= 14
            json.dumps(answer)
    with pytest.raises(ValueError, match="^5 ranks cannot be spread evenly over 2 nodes$"):
        room.answer(_asked(ranks=5, nodes=2))
    with pytest.raises(ValueError, match="^there is no collective 'barrier' here$"):
        room.answer(_asked(collective="barrier"))


def _asked(**changed):
    asked = {"collective": "all_reduce ring", "ranks": 4, "nodes": 1, "nbytes": 10**6, "step": 99}
    network = {"gbps": 100, "latency_us": 10, "cable_gbps": 10, "cable_latency_us": 20}
    return asked | network | changed
